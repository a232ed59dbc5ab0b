"""GPT-2's ``Conv1D``: a linear whose weight holds inputs before outputs, in the file too.

Here it is a linear like any other; its weight is turned as it is read.
"""

from torch import nn

from qtool.models.experts import linear_of


class FromConv1D(nn.Linear):
    """A linear in the place of a ``Conv1D``."""


def replace_conv1d(model: nn.Module) -> None:
    """Put a linear with the weight turned in the place of each ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            turned = module.weight.T.contiguous()
            model.set_submodule(name, linear_of(turned, module.bias, FromConv1D))
