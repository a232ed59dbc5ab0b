"""The SGLang plugin: native checkpoints run on qtool's kernels, chosen by ``config.json``.

It is written for SGLang 0.5.23; its parameter classes are tested, a whole engine has not run it.
"""

from qtool.serving.sglang.plugin import register

__all__ = ["register"]
