"""Linears that write to the residual stream: the norms before them, and the sizes of their tokens.

Their targets also make up for the stream's error, S in :mod:`.gptq`. :mod:`.rounding` gets the
stream at the norms, and sums tokens that are far larger than others as if they were of median size.

Legend: M tokens, K input channels, H hidden size.
"""

import torch
from torch import Tensor

from qtool.models.family import Family


def norms_of_writers(family: Family, name: str) -> list[str]:
    """The norms before each linear that writes to the residual stream, up to linear ``name``.

    The input of such a norm is the stream before the linear writes to it. The list is empty unless
    ``name`` writes to the stream, and its output is added as it is or times one number; a gate for
    each token, as of Qwen2-MoE's shared expert, counts as 1. Routed experts are left out: they do
    not make up for the error of the stream, so a shared expert after them does.
    """
    norms: list[str] = []
    norm = ""
    for group in family.groups:
        norm = group.source if group.reads_residual else norm
        norms += [norm] * (group.writes_residual and not group.routed)
        if group.linears == (name,) and group.writes_residual and norm and not family.why_fixed:
            return norms
    return []


def size_of_tokens(stream: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """The size ``[M]`` float32 of each token in the stream after a linear wrote to it, estimated.

    Args:
        stream: ``[M, H]``, before the linear writes to it.
        x: the linear's inputs ``[M, K]``.
        columns: norms ``[K]`` of the columns of its weight. They give the size of what is written,
            as if the inputs were uncorrelated.
    """
    parts = (stream, x * columns.to(x.dtype))
    return torch.hypot(*(torch.linalg.vector_norm(t, dim=1, dtype=torch.float32) for t in parts))
