"""Linears that write to the residual stream, whose targets also make up for the stream's error.

Legend: M tokens, K input channels, H hidden size.
"""

import torch
from torch import Tensor

from qtool.models.family import Family


def norms_of_writers(family: Family, name: str) -> list[str]:
    """The norms before each linear that writes to the residual stream, up to linear ``name``.

    The input of such a norm is the stream before the linear writes to it. The list is empty unless
    ``name`` writes to the stream, and its output is added as it is or times one number. Routed
    experts are left out: they do not make up for the error of the stream, so a shared expert behind
    them does.
    """
    norms: list[str] = []
    norm = ""
    for group in family.groups:
        norm = group.source if group.reads_residual else norm
        norms += [norm] * (group.writes_residual and not group.routed)
        if group.linears == (name,) and group.writes_residual and norm and not family.why_fixed:
            return norms
    return []


def share_of_tokens(stream: Tensor, x: Tensor, columns: Tensor, largest: float) -> Tensor:
    """The factor ``[M, 1]`` of each token in the moments of a linear that writes to the stream.

    The norms that read the residual stream divide a token by its size in the stream, and its error
    with it. Counted as it is, a token with a massive activation (Sun et al., 2024, arXiv
    2402.17762) would outweigh all others.

    Args:
        stream: ``[M, H]``, before the linear writes to it.
        x: the linear's inputs ``[M, K]``.
        columns: norms ``[K]`` of the columns of its weight. They give the size of what is written,
            as if the inputs were uncorrelated.
        largest: a token up to so many times as large as the median has factor 1; a larger one is
            scaled to the median.
    """
    parts = (stream, x * columns.to(x.dtype))
    sizes = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
    size = torch.hypot(*sizes)
    median = size.sort().values[len(size) // 2]
    return torch.where(size > largest * median, median / size, 1.0)[:, None]
