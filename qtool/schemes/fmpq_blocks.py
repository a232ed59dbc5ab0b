"""The outlier channels of a layer, and the blocks that hold them.

COMET section 3.1: outliers sit in a few fixed channels, with magnitudes ten times as large as in
the others. Section 3.2, figure 4: calibration gives ``amax [K]``, the largest magnitude of each
input channel; one permutation of the input channels (of the weight's columns too) puts the outliers
into as few blocks of 128 as possible, and only those blocks get 8-bit activations.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.schemes.fmpq import BLOCK

#: "magnitudes that can exceed typical hidden state values by tenfold" (section 3.1)
OUTLIER_RATIO = 10.0


@dataclass(frozen=True)
class BlockPlan:
    """``permutation [K]`` int64 and ``eight_bit [K/128]`` u8 of a layer.

    Place j of the permuted input takes channel ``permutation[j]``; ``most`` blocks may have 8 bits.
    """

    permutation: Tensor
    eight_bit: Tensor
    most: int


def plan_blocks(
    amax: Tensor,
    *,
    ratio: float = OUTLIER_RATIO,
    max_8bit_blocks: int | None = None,
    min_w4a4_share: float = 0.0,
) -> BlockPlan:
    """Permutation and block map of a layer from the channel maxima ``amax [K]`` of its input.

    Args:
        ratio: a channel is an outlier above ``ratio`` times the median maximum; 0 makes all
            channels outliers but those that are always 0, so that the caps alone decide.
        max_8bit_blocks: at most so many blocks get 8 bits, those with the largest outliers.
        min_w4a4_share: at least this share (0..1) of the blocks stays 4-bit.

    Raises:
        QtoolError: if K is not a multiple of 128, a statistic is not finite or a cap is out of
            range.
    """
    outliers = outlier_channels(amax, ratio)
    most = block_cap(len(amax), max_8bit_blocks, min_w4a4_share)
    if most and outliers.any():
        # a sort, which puts the others of similar size into one 4-bit block too (QServe B.2.3)
        permutation = by_magnitude(amax)
    else:
        permutation = torch.arange(len(amax), device=amax.device)
    eight_bit = eight_bit_blocks(amax[permutation], outliers[permutation], most)
    return BlockPlan(permutation, eight_bit, most)


def outlier_channels(amax: Tensor, ratio: float = OUTLIER_RATIO) -> Tensor:
    """Mask ``[K]`` of the channels whose maximum exceeds ``ratio`` times the median maximum.

    Channels that are always 0 do not count in the median.
    """
    if len(amax) % BLOCK or not len(amax):
        raise QtoolError(f"w4ax-fmpq: {len(amax)} input channels are not divisible by {BLOCK}")
    if not torch.isfinite(amax).all():
        raise QtoolError("w4ax-fmpq: the activation statistics hold NaN or Inf")
    return amax > ratio * amax[amax > 0].float().median()


def by_magnitude(amax: Tensor) -> Tensor:
    """Permutation ``[K]`` that puts the largest of ``amax [K]`` first."""
    return torch.argsort(amax, descending=True, stable=True)


def eight_bit_blocks(amax: Tensor, outliers: Tensor, cap: int) -> Tensor:
    """Map ``[K/128]`` u8 of the blocks that hold an outlier, at most ``cap`` of them.

    If there are more than ``cap``, the blocks with the largest maxima are chosen. ``amax [K]`` and
    the mask ``outliers [K]`` have the channels in the order of the blocks, that is, permuted.
    """
    peak = torch.where(outliers, amax, -1.0).unflatten(0, (-1, BLOCK)).amax(1)  # [K/128]
    first = torch.argsort(peak, descending=True, stable=True)[:cap]
    chosen = torch.zeros(len(peak), dtype=torch.uint8, device=amax.device)
    chosen[first] = (peak[first] >= 0).to(torch.uint8)
    return chosen


def block_cap(channels: int, max_8bit_blocks: int | None, min_w4a4_share: float) -> int:
    """The number of blocks, of ``channels / 128``, that may have 8 bits."""
    if max_8bit_blocks is not None and max_8bit_blocks < 0:
        raise QtoolError(f"w4ax-fmpq: at most {max_8bit_blocks} 8-bit blocks; expected 0 or more")
    if not 0 <= min_w4a4_share <= 1:
        raise QtoolError(f"w4ax-fmpq: a W4A4 share of {min_w4a4_share}; expected 0 to 1")
    blocks = channels // BLOCK
    allowed = int(blocks * (1 - min_w4a4_share) + 1e-9)
    return allowed if max_8bit_blocks is None else min(allowed, max_8bit_blocks)


def w4a4_share(layers: Iterable[tuple[Tensor, int]]) -> float:
    """Share of GEMM work in W4A4 over layers, each ``(eight_bit [K/128], N)``.

    The work of a block is 128 * N.
    """
    total, four_bit = 0, 0
    for eight_bit, out_features in layers:
        total += len(eight_bit) * out_features
        four_bit += (len(eight_bit) - int(eight_bit.sum())) * out_features
    return four_bit / total if total else 1.0
