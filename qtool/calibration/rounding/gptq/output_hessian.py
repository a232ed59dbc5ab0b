"""The output side of the Hessian: how the model's answer depends on each output of a linear.

To second order, a small error E of a weight ``W [N, K]`` makes the model diverge in proportion to

    tr(G E H E^T)      H = 2 sum_t x_t x_t^T [K, K],   G = 2 sum_t g_t g_t^T [N, N]

(YAQA, arXiv 2505.22988; K-FAC, arXiv 1503.05671). ``x_t`` is the linear's input for token t, and
``g_t`` the gradient of a random direction of the logits with respect to its output. GPTQ alone
takes the identity for G: all outputs count alike, and each by itself.

The outputs of an expert's last linear are weighted and added to those of other experts. An expert
sees too few tokens for a G of its own, so all experts have that of the sum; their other linears
have none.

For each token a gradient at the block's output is drawn from the second moments that
:mod:`qtool.pipeline.streaming.stream_gradients` finds for the residual stream. A backward pass of
the block, after all transforms, takes it to the outputs of the linears. Every ``g_t`` is scaled to
length 1, because the gradient of a massive activation may be 10^8 times as long as the others.

Legend: N output channels, K input channels, H hidden size, T tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import keeping_outputs, with_gradients
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.statistics import batch_shapes, own_subset
from qtool.calibration.timing import phase
from qtool.distributed import ranks

#: most calibration sequences whose tokens are counted, and most tokens of several
SEQUENCES, TOKENS = 16, 1 << 14


def sequences_of(samples: int, seqlen: int) -> int:
    """How many of ``samples`` sequences of up to ``seqlen`` tokens are counted."""
    return min(samples, SEQUENCES, max(1, TOKENS // seqlen))


def output_hessians(
    block: Block, batches: Sequence[Batch], stacks: Mapping[tuple[str, ...], int]
) -> dict[tuple[str, ...], Tensor]:
    """G ``[N, N]`` of each of ``stacks``.

    Args:
        block: before any of its linears is rounded; it has a :attr:`~.Block.sensitivity`.
        batches: this rank's inputs of the float block.
        stacks: names of modules whose outputs are joined, and the number N of their channels.
    """
    sums = {names: Hessian(n, block.device) for names, n in stacks.items()}
    sizes, lengths = zip(*batch_shapes(batches), strict=True)
    counted = sequences_of(sum(sizes), max(lengths))
    for turn, own in enumerate(ranks.lockstep(own_subset(batches, counted))):
        if own is not None:
            number = turn * ranks.size() + ranks.rank()
            random = torch.Generator(block.device).manual_seed(number << 16 | block.index)
            count = min(sizes[number], counted - sum(sizes[:number]))
            sequences = [own.part(slice(i, i + 1)) for i in range(count)]
            found = [_gradients(block, sequence, random, [*stacks]) for sequence in sequences]
            for names, total in sums.items():  # added at once, as on any number of ranks
                if gradients := [one[names] for one in found if names in one]:
                    total.add(torch.cat(gradients))
        for total in sums.values():
            total.step()
    return {names: total.complete().h for names, total in sums.items()}


def _gradients(
    block: Block, sequence: Batch, random: torch.Generator, stacks: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], Tensor]:
    """``g_t [T, N]`` of length 1 at the outputs of each stack.

    A stack that the block does not run, or on which its output does not depend, is left out.
    """
    assert block.sensitivity is not None
    names = [name for stack in stacks for name in stack]
    with phase("forward"), keeping_outputs(block, names) as outputs:
        _, leaving = with_gradients(block, sequence)
        drawn = torch.randn(leaving.shape, generator=random, device=leaving.device)
        at_end = (drawn @ block.sensitivity).to(leaving.dtype)
        reached = {n: output for n, output in outputs.items() if output.requires_grad}
        found = torch.autograd.grad(leaving, [*reached.values()], at_end, allow_unused=True)
    by_name = {n: g.flatten(0, -2) for n, g in zip(reached, found, strict=True) if g is not None}
    gradients = {}
    for stack in stacks:
        if all(name in by_name for name in stack):
            joined = torch.cat([by_name[name] for name in stack], 1).float()
            unit = normalize(joined, eps=1e-30).nan_to_num(0.0)  # a gradient beyond float16
            gradients[stack] = unit.to(leaving.dtype)
    return gradients
