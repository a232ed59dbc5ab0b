"""Shifts the outputs of norms to zero mean, channel by channel.

This is the channel-wise shift of Outlier Suppression+ (Wei et al., 2023, section 4.1): for linears
that read ``X [M, K]``, the outputs of a norm with a bias,

    X <- X - z,  b <- b + W z

so that the model computes the same, but what is constant in X is not rounded for each token. z is
the mean of each channel, by which the energy of X is least; Outlier Suppression+ takes the middle
of the channel's range.

It needs a bias in the norm and in all linears that read it, as in OPT, BLOOM, GPT-NeoX, StarCoder 2
and Phi-2. Models with RMSNorm stay as they are.
"""

from collections.abc import Container, Sequence

import torch

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.statistics import collect
from qtool.models.family import Family
from qtool.models.parts import Fold, LinearGroup

#: size of the random sample of inputs whose mean is taken
SAMPLE = 4096


@torch.no_grad()
def shift_norms(block: Block, batches: Sequence[Batch], seed: int) -> None:
    """Shift the outputs of all norms of ``block`` that :func:`shifted` names, in place."""
    groups = shifted(block.family, block.parameters())
    firsts = [group.linears[0] for group in groups]
    inputs = collect(block, batches, firsts, SAMPLE, seed) if groups else {}
    for group in groups:
        mean = inputs[group.linears[0]].sample.mean(0).bfloat16().double()  # as it may be stored
        changes = {name: block.weight(name).double() @ mean for name in group.linears}
        for name, change in {group.source: -mean, **changes}.items():
            bias = block.bias(name)
            assert bias is not None
            bias.copy_(bias + change)


def shifted(family: Family, tensors: Container[str]) -> list[LinearGroup]:
    """The groups of ``family`` whose input can be shifted in a block with ``tensors``, by name."""
    return [
        group
        for group in family.folds()
        if group.fold is Fold.NORM
        and all(f"{name}.bias" in tensors for name in (group.source, *group.linears))
    ]
