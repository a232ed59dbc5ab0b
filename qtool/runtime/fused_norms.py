"""RMSNorms as one kernel of torch."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def is_rms_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a plain RMSNorm of transformers: ``x / rms(x) * weight``.

    Norms of other formulas (Gemma's multiplies by 1 + weight) call their epsilon ``eps`` there.
    """
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def fuse_norms(model: nn.Module) -> None:
    """Let the plain RMSNorms of ``model`` run as torch's one kernel instead of eight.

    It rounds once, at the end. While operators are intercepted (deterministic evaluation), the
    model's own arithmetic runs.
    """
    for norm in model.modules():
        if is_rms_norm(norm):
            norm.forward = partial(_rms_norm, norm)


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and is_in_torch_dispatch_mode():
        return type(norm).forward(norm, hidden)
    return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
