"""Block distillation: a block learns until it answers as the float block does."""
