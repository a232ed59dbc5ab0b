"""Norm fusion: the weight (and bias) of each norm moves into the linears that read it.

QuaRot (Ashkboos et al., 2024) section 4.1, QServe B.2.1: for ``y = (n * w + b) W^T + c`` with n the
normalized input, ``W <- W diag(w)`` and ``c <- c + W b``; afterwards ``w`` is ones and ``b`` zeros.
The norm without them commutes with a rotation. If a reader has no c that can take the bias, the
bias stays in the norm, as ``b / w``: ``y = (n + b / w) diag(w) W^T``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Norm, Transform
from qtool.errors import QtoolError
from qtool.models.family import Family

#: largest RMS of ``b / w``, where that of the normalized input is 1: a rotation spreads both over
#: all channels, and an error of bfloat16, up to 2^-8 of them, is then as large as the input
MOST_BIAS = 256.0


@dataclass(kw_only=True)
class NormFusion(Transform):
    """Fuses all norms of the residual stream, the final norm too (into the head).

    Args:
        final: fuse the final norm. If the residual stream cannot be rotated (Gemma 2 and 3), the
            final norm is never fused, so that embedding and head can share one table.
    """

    final: bool = True

    name = "norm-fusion"
    needs_data = False

    @property
    def rewrites_embedding(self) -> bool:
        return self.final

    def prepare(self, family: Family, config: Any) -> None:
        super().prepare(family, config)
        self.final = self.final and not family.why_fixed

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        for group in block.family.folds():
            if group.reads_residual:
                fuse(block, group.source, group.linears)

    def head(self, rows: Tensor, final_norm: Tensor) -> Tensor:
        return (rows.double() * final_norm.double()).to(rows.dtype) if self.final else rows

    def final_norm(self, norm: Norm) -> Norm:
        if not self.final:
            return norm
        bias = None if norm.bias is None else kept_bias(norm.gain, norm.bias, "the final norm")
        return replace(norm, gain=torch.ones_like(norm.gain), bias=bias)


def fuse(block: Block, norm: str, readers: Sequence[str]) -> None:
    """Fold the weight ``[H]`` and bias of ``norm`` into ``readers`` (weights ``[N, H]``), in place.

    Raises:
        QtoolError: as in :func:`kept_bias`.
    """
    stored, shift, offset = block.weight(norm), block.bias(norm), block.family.norm_offset
    gain = stored.double() + offset
    moves = shift is not None and all(block.bias(reader) is not None for reader in readers)
    for reader in readers:
        weight, bias = block.weight(reader), block.bias(reader)
        if moves and bias is not None and shift is not None:
            bias.add_((weight.double() @ shift.double()).to(bias.dtype))
        weight.copy_(weight.double() * gain)
    stored.fill_(1.0 - offset)
    if shift is not None:
        place = f"{norm} of block {block.index}"
        shift.copy_(torch.zeros_like(shift) if moves else kept_bias(gain, shift, place))


def kept_bias(gain: Tensor, bias: Tensor, name: str) -> Tensor:
    """The bias ``b / w [H]`` of a norm whose gain went into the linears but whose bias could not.

    Raises:
        QtoolError: channels have a bias and next to no gain, so that ``b / w`` is too large.
    """
    kept = torch.where(bias == 0, 0.0, bias.double() / gain.double())
    if (size := float(kept.square().mean().sqrt())) > MOST_BIAS:
        raise QtoolError(
            f"norm-fusion: {name} has channels with a bias and hardly any weight: the bias divided "
            f"by the weight has an RMS of {size:.3g} (at most {MOST_BIAS:g} is accepted), beside "
            "which 16 bits do not hold the norm's input; use a recipe without norm-fusion, as fast"
        )
    return kept
