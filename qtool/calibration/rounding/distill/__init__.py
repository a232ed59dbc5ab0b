"""Block distillation: weights and scales learned until the block answers as the float block does."""
