"""Make transformers know native checkpoints: ``import qtool.transformers`` is all it takes.

After it ``AutoModelForCausalLM.from_pretrained(directory)`` gives a model whose linears run packed
weights, also one of an architecture that a plugin registers. :func:`qtool.load` does the same by
itself; this module is for code that loads models without asking qtool.

Example::

    import qtool.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("demo-lqq")
"""

from qtool import plugins
from qtool.runtime.huggingface import QtoolConfig, QtoolQuantizer

__all__ = ["QtoolConfig", "QtoolQuantizer"]

plugins.load()  # transformers looks a model's class up before it asks a quantizer anything
