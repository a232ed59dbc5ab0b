"""Norm fusion: the weight (and bias) of each norm moves into the linears that read it.

QuaRot (Ashkboos et al., 2024) section 4.1, QServe B.2.1: for ``y = (n * w + b) W^T + c`` with n the
normalized input, ``W <- W diag(w)`` and ``c <- c + W b``; afterwards ``w`` is ones and ``b`` zeros.
What is left of the norm commutes with a rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.block import Batch, Block
from qtool.calibration.method import Transform
from qtool.errors import QtoolError


@dataclass(kw_only=True)
class NormFusion(Transform):
    """Every norm of the residual stream becomes a plain one, the final norm too (into the head)."""

    name = "norm-fusion"
    needs_data = False
    rewrites_embedding = True
    after: ClassVar[dict[str, str]] = {}

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        for group in block.family.groups:
            if group.reads_residual:
                fuse(block, group.source, group.linears)

    def head(self, rows: Tensor, final_norm: Tensor) -> Tensor:
        return (rows.double() * final_norm.double()).to(rows.dtype)

    def final_norm(self, weight: Tensor) -> Tensor:
        return torch.ones_like(weight)


def fuse(block: Block, norm: str, readers: Sequence[str]) -> None:
    """Fold the weight ``[H]`` and bias of ``norm`` into ``readers`` (weights ``[N, H]``), in place.

    Raises:
        QtoolError: if the norm has a bias and a reader has none to take it.
    """
    gain, shift = block.weight(norm), block.bias(norm)
    for reader in readers:
        weight, bias = block.weight(reader), block.bias(reader)
        if shift is not None:
            if bias is None:
                raise QtoolError(f"norm-fusion: {norm} has a bias but {reader}, which reads it, has none to take it")
            bias.add_((weight.double() @ shift.double()).to(bias.dtype))
        weight.copy_(weight.double() * gain.double())
    gain.fill_(1.0)
    if shift is not None:
        shift.fill_(0.0)
