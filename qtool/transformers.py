"""Make transformers know native checkpoints: ``import qtool.transformers`` is all it takes.

After it ``AutoModelForCausalLM.from_pretrained(directory)`` gives a model whose linears run packed
weights. :func:`qtool.load` does the same by itself; this module is for code that loads models
without asking qtool.

Example::

    import qtool.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("demo-lqq")
"""

from qtool.runtime.huggingface import QtoolConfig, QtoolQuantizer

__all__ = ["QtoolConfig", "QtoolQuantizer"]
