"""Running a quantized model: packed linears inside a transformers model, and ``load``."""

from qtool.runtime.format import CheckpointFormat, LinearFormat, Rule

__all__ = ["CheckpointFormat", "LinearFormat", "Rule"]
