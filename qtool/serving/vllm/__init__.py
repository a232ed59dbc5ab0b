"""The vLLM plugin: native checkpoints run on qtool's kernels, chosen by ``config.json``."""

from qtool.serving.vllm.plugin import register

__all__ = ["register"]
