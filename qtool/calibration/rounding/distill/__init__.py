"""Block distillation: a quantized block learns to compute what the float block computes."""
