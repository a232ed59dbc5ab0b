"""Which modules are plain linears and which are norms, whatever their classes are called."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qtool.models.derived.norms import form_of


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a norm, by its name or what it computes; its weights are vectors."""
    named = dict(module.named_parameters())
    if list(module.children()) or not named.keys() <= {"weight", "bias"}:
        return False
    if any(p.dim() != 1 for p in named.values()):
        return False
    return "norm" in type(module).__name__.lower() or form_of(module) is not None


@cache
def _computes_linear(kind: Any) -> bool:
    """Whether a class of linears computes ``x W^T + b`` and nothing else."""
    if kind.forward is nn.Linear.forward:
        return True
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 5), (3, 5), (3,)))
    module.in_features, module.out_features = 5, 3
    for own in (None, bias):
        module.weight = nn.Parameter(weight)
        module.bias = None if own is None else nn.Parameter(own)
        try:
            out = module(x)
        except (AttributeError, TypeError, RuntimeError):
            return False
        expected = nn.functional.linear(x, weight, own)
        if not isinstance(out, Tensor) or not torch.allclose(out, expected, atol=1e-5):
            return False
    return True


def acts_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear, and does nothing else."""
    kind: Any = type(module)
    return isinstance(module, nn.Linear) and _computes_linear(kind)
