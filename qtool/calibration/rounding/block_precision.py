"""Chooses the channel blocks whose inputs get 8 bits: those that save most error for their work.

COMET 3.2 gives 8 bits to blocks that hold an outlier. Where that leaves more work in W4A4 than is
aimed at, more blocks get them, those first that save most error per unit of work:

    cost[g, b] = E_g * || (X_b - Q4(X_b)) W_b^T ||^2 / sum_b' (...)

E_g is the error of the decoder block's output when only group g's input has 4 bits: it weighs
down_proj against q_proj, which errors of the linears' own outputs cannot. The work of a block is
its weights.

Legend: X_b, W_b the channels of block b of the input and the weight; T tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import run
from qtool.distributed import ranks
from qtool.schemes.base import Scheme


def allocate(
    block: Block,
    batches: Sequence[Batch],
    samples: Mapping[tuple[str, ...], Tensor],
    maps: Mapping[tuple[str, ...], Tensor],
    caps: Mapping[tuple[str, ...], int],
    w4a4_share: float,
) -> None:
    """Turn more blocks of ``maps`` to 8 bits, in place.

    Args:
        batches: what the block's output error is measured on.
        samples: inputs ``[T, K]`` of each set of linears that share one, in the order the weights'
            columns have.
        maps: the 8-bit map ``[K/128]`` u8 of each set; what it holds already stays.
        caps: how many blocks of each set may have 8 bits.
        w4a4_share: blocks are turned as long as this share of the work of these linears keeps 4-bit
            activations.
    """
    exact = [run(block, batch) for batch in batches]
    costs: list[
        tuple[float, int, tuple[str, ...], int]
    ] = []  # error saved per work, work, linears, block
    total, eight = 0, 0

    def judged(linears: tuple[str, ...]) -> tuple[Tensor, float]:
        return block_shares(block, linears, samples[linears]), output_error(
            block, batches, exact, linears
        )

    for linears, (share, error) in zip(
        samples, ranks.map_items(judged, list(samples)), strict=True
    ):
        work = sum(block.weight(name).numel() for name in linears) // len(share)
        costs += [(error * float(part) / work, work, linears, b) for b, part in enumerate(share)]
        total += work * len(share)
        eight += work * int(maps[linears].sum())
    left = (1 - w4a4_share) * total - eight + 0.5
    for _, work, linears, b in sorted(costs, key=lambda cost: -cost[0]):
        eight_bit = maps[linears]
        if work <= left and not eight_bit[b] and int(eight_bit.sum()) < caps[linears]:
            eight_bit[b] = 1
            left -= work


def block_shares(block: Block, linears: Sequence[str], x: Tensor) -> Tensor:
    """Share ``[K/128]`` of each channel block in the output error of 4-bit inputs ``x [T, K]``."""
    total = None
    for name in linears:
        scheme, weight = block.schemes[name], block.weight(name).float()
        size = scheme.group_size or x.shape[1]
        error = (
            (x - four_bit(scheme, weight, x)).unflatten(1, (-1, size)).transpose(0, 1)
        )  # [G, T, g]
        outputs = error @ weight.unflatten(1, (-1, size)).permute(1, 2, 0)  # [G, T, N]
        squares = outputs.square().sum((1, 2))
        total = squares if total is None else total + squares
    assert total is not None
    return total / total.sum().clamp_min(torch.finfo(total.dtype).tiny)


def output_error(
    block: Block, batches: Sequence[Batch], exact: Sequence[Tensor], linears: Sequence[str]
) -> float:
    """Squared error of the decoder block's output with 4-bit inputs to ``linears`` alone."""
    with rounded_inputs(block, linears):
        return sum(
            float((run(block, b) - e).double().square().sum())
            for b, e in zip(batches, exact, strict=True)
        )


@contextmanager
def rounded_inputs(block: Block, linears: Sequence[str]) -> Iterator[None]:
    """Quantize and dequantize the inputs of ``linears``, but not their weights, while open."""

    def hook(scheme: Scheme) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        def round_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (four_bit(scheme, module.weight, inputs[0]),)  # type: ignore[arg-type]

        return round_input

    hooks = ((block.get(name), hook(block.schemes[name])) for name in linears)
    handles = [module.register_forward_pre_hook(round_input) for module, round_input in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def four_bit(scheme: Scheme, weight: Tensor, x: Tensor) -> Tensor:
    """``x`` as ``scheme`` quantizes it where no block has 8 bits yet."""
    return scheme.fake_activation(x, scheme.fit(weight))
