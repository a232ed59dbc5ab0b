"""Running a quantized model: packed linears inside a transformers model, and ``load``."""
