"""Chooses the channel blocks whose inputs get 8 bits: the ones that save most error for their work.

COMET 3.2 gives 8 bits to blocks that hold an outlier. If more work is left in W4A4 than the target,
further blocks of the whole model get 8 bits, in the order of the error that they save per unit of
work:

    cost[g, b] = E_g / ||Y||^2 * || (X_b - Q4(X_b)) W_b^T ||^2 / sum_b' (...)

E_g is the error of the output Y of the decoder block when only group g's input has 4 bits. It
compares down_proj with q_proj, which errors of the linears' own outputs cannot; relative to Y it
compares decoder blocks. The work of a channel block is its number of weights. X and W are in the
order in which the channels will be, and rotated if the recipe rotates them at run time.

Legend: X_b, W_b the channels of block b of the input and the weight; T tokens.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import run
from qtool.calibration.rounding.rounded import arranged

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

    ``order [K]`` is the one in which channels are cut into blocks.
    """
    total = x.new_zeros(())
    for name in linears:
        scheme, rotated = block.schemes[name], name in block.to_rotate
        size = scheme.group_size or x.shape[1]
        seen, weight = (arranged(t, order, rotated) for t in (x, block.weight(name).float()))
        rounded = scheme.fake_activation(seen, block.fit(name))
        error = (seen - rounded).unflatten(1, (-1, size)).transpose(0, 1)  # [G, T, g]
        outputs = error @ weight.unflatten(1, (-1, size)).permute(1, 2, 0)  # [G, T, N]
        total = total + outputs.square().sum((1, 2))
    return total / total.sum().clamp_min(torch.finfo(total.dtype).tiny)


def output_errors(
    block: Block, batches: Sequence[Batch], groups: Iterable[tuple[Sequence[str], Tensor]]
) -> list[float]:
    """The squared error of the decoder block's output, relative to the squared output.

    Each number is for 4-bit inputs to one of ``groups`` alone: its linears, and the order ``[K]``
    in which their input channels are cut into blocks.
    """
    exact = [run(block, batch) for batch in batches]
    power = sum(float(e.double().square().sum()) for e in exact)
    errors = []
    for linears, order in groups:
        with rounded_inputs(block, linears, order):
            lost = [
                (run(block, b) - e).double().square().sum()
                for b, e in zip(batches, exact, strict=True)
            ]
        errors.append(float(sum(lost)) / max(power, torch.finfo(torch.float32).tiny))
    return errors


@contextmanager
def rounded_inputs(
    block: Block, linears: Sequence[str], order: Tensor | None = None
) -> Iterator[None]:
    """Quantize and dequantize the inputs of ``linears``, but not their weights, while open.

    They are quantized in ``order [K]``, if given, and rotated where the recipe will rotate them.
    """
    back = None if order is None else order.argsort()

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        scheme, params, rotated = block.schemes[name], block.fit(name), name in block.to_rotate

        def rounded(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            x = scheme.fake_activation(arranged(inputs[0], order, rotated), params)
            return (arranged(arranged(x, None, rotated), back, False),)

        return rounded

    with ExitStack() as opened:
        for name in linears:
            opened.callback(block.get(name).register_forward_pre_hook(hook(name)).remove)
        yield
