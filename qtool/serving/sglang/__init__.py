"""The SGLang plugin: native checkpoints run on qtool's kernels, chosen by ``config.json``.

Written for SGLang 0.5.23; its parameter classes are tested, a whole engine has not run yet.
"""

from qtool.serving.sglang.plugin import register

__all__ = ["register"]
