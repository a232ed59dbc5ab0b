"""Chooses the channel blocks whose inputs get 8 bits: the ones that save most error for their work.

COMET 3.2 gives 8 bits to blocks that hold an outlier. If more work is left in W4A4 than the target,
further blocks of the whole model get 8 bits, in the order of the error that they save per unit of
work:

    cost[g, b] = E_g / ||Y||^2 * || (X_b - Q4(X_b)) W_b^T ||^2 / sum_b' (...)

E_g is the error of the output Y of the decoder block when only group g's input has 4 bits. It
compares down_proj with q_proj, which errors of the linears' own outputs cannot; relative to Y it
compares decoder blocks. The work of a channel block is its number of weights.

Legend: X_b, W_b the channels of block b of the input and the weight; T tokens.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import run

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class BlockCosts:
    """The costs of 4-bit inputs to linears that share an input, by channel block.

    Attributes:
        cost: ``[K/128]``, the cost of each block of 128 channels, by falling magnitude of the
            channels.
        work: work of one block.
        least: number of blocks that must have 8 bits.
        most: number of blocks that may have 8 bits.
    """

    cost: Tensor
    work: int
    least: int
    most: int


def allocate(groups: Mapping[T, BlockCosts], w4a4_share: float) -> dict[T, int]:
    """The number of 8-bit blocks of each group; ``w4a4_share`` of all work keeps 4 bits."""
    counts = {key: group.least for key, group in groups.items()}
    total = sum(group.work * len(group.cost) for group in groups.values())
    left = (1 - w4a4_share) * total + 0.5
    left -= sum(group.work * group.least for group in groups.values())
    costs = [(c / g.work, key) for key, g in groups.items() for c in g.cost[g.least :].tolist()]
    for _, key in sorted(costs, key=lambda cost: -cost[0]):
        if groups[key].work <= left and counts[key] < groups[key].most:
            counts[key] += 1
            left -= groups[key].work
    return counts


def block_shares(block: Block, linears: Sequence[str], x: Tensor, order: Tensor) -> Tensor:
    """Share ``[K/128]`` of each channel block in the output error of 4-bit inputs ``x [T, K]``.

    The channels of ``x`` are in ``order [K]``; the columns of the weights are not.
    """
    total = None
    for name in linears:
        scheme, weight = block.schemes[name], block.weight(name).float()[:, order]
        size = scheme.group_size or x.shape[1]
        rounded = scheme.fake_activation(x, block.fit(name))
        error = (x - rounded).unflatten(1, (-1, size)).transpose(0, 1)  # [G, T, g]
        outputs = error @ weight.unflatten(1, (-1, size)).permute(1, 2, 0)  # [G, T, N]
        squares = outputs.square().sum((1, 2))
        total = squares if total is None else total + squares
    assert total is not None
    return total / total.sum().clamp_min(torch.finfo(total.dtype).tiny)


def output_errors(
    block: Block, batches: Sequence[Batch], groups: Iterable[Sequence[str]]
) -> list[float]:
    """The squared error of the decoder block's output, relative to the squared output.

    Each number is for 4-bit inputs to one of ``groups`` alone.
    """
    exact = [run(block, batch) for batch in batches]
    power = sum(float(e.double().square().sum()) for e in exact)
    errors = []
    for linears in groups:
        with rounded_inputs(block, linears):
            lost = [
                (run(block, b) - e).double().square().sum()
                for b, e in zip(batches, exact, strict=True)
            ]
        errors.append(float(sum(lost)) / max(power, torch.finfo(torch.float32).tiny))
    return errors


@contextmanager
def rounded_inputs(block: Block, linears: Sequence[str]) -> Iterator[None]:
    """Quantize and dequantize the inputs of ``linears``, but not their weights, while open."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        scheme, params = block.schemes[name], block.fit(name)
        return lambda _, inputs: (scheme.fake_activation(inputs[0], params),)

    handles = [block.get(name).register_forward_pre_hook(hook(name)) for name in linears]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
