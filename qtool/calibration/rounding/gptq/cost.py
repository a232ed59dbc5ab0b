"""The work of GPTQ on a block and the memory that it takes, from the block's shape.

Legend: N output channels, K input channels.
"""

from collections.abc import Sequence
from math import prod

from qtool.calibration.cost import GRADIENTS, BlockShape, Shapes, Work, stacked
from qtool.calibration.kept_outputs import KeptOutputs, Room
from qtool.calibration.rounding.gptq.columns import PANEL
from qtool.calibration.rounding.gptq.gptq import REFITTED_ROWS, GptqOptions
from qtool.calibration.rounding.gptq.hessian import summed_elements
from qtool.calibration.rounding.gptq.memory import (
    hessians_at_once,
    hessians_in_turn,
    kept_input_bytes,
    others_bytes,
    problems_at_once,
)
from qtool.calibration.rounding.gptq.output_hessian import sequences_of
from qtool.calibration.rounding.gptq.residual_stream import norms_of_writers
from qtool.calibration.rounding.gptq.rows import CHUNKS, MOST_ROWS
from qtool.calibration.stacking import by_role
from qtool.models.family import Family
from qtool.models.parts import LinearGroup

#: panels of a chunk of rows that take as long as one of all rows (an 8B on an H200)
CHUNK_PANELS = 8
#: tensors of the size of a batch's widest inputs that a look and its sums hold at once
LOOK_TENSORS = 7


def work(options: GptqOptions, block: BlockShape) -> Work:
    """The work on one block."""
    turns = list(
        hessians_in_turn(block.family.groups, lambda group: block.linears[group.linears[0]][1])
    )
    found = Work(forward_flops=_forward_flops(options, block, turns))
    for groups in turns:
        found += _solving(options, block, groups)
    if options.output_hessian and block.differentiated:
        found += _outputs(options, block)
    ratios = {name: len(options.clip_ratios(scheme)) for name, scheme in block.schemes.items()}
    searched = sum(n * k * (ratios[name] + 4) for name, (n, k) in block.quantized.items())
    return found + Work(rounding_weights=searched)


def _forward_flops(
    options: GptqOptions, block: BlockShape, turns: Sequence[Sequence[LinearGroup]]
) -> float:
    """Operations of the forwards that give the inputs of the groups in ``turns``.

    The inputs of a group come from a forward that ends at the group, and from a forward of the
    float block. The inputs of all experts come from one forward, in which shared experts run first.
    The float block's last forward (its only one, if its inputs are kept) goes on to the block's
    output, and is counted there instead of here.
    """
    keeps = kept_input_bytes(block.family, block.linears, block.tokens) > 0
    routed = [group for group in block.family.groups if group.routed]
    to_experts = block.forward_flops() - sum(block.linear_flops(g.linears) for g in routed)
    total = to_dense = last = 0.0
    spared = _spared_flops(options, block, turns, keeps)
    for number, groups in enumerate(turns):
        flops = sum(block.linear_flops(group.linears) for group in groups)
        quantized = bool(block.stacked(groups))
        if groups[0].routed:
            total += quantized * to_experts
            to_experts += flops
        else:
            total += quantized * to_dense
            if quantized and options.residual and not keeps:
                total, last = total + to_dense, to_dense
            to_dense += flops
        to_dense += block.attention_flops() if number == 0 else 0
    return total - last - spared


def _spared_flops(
    options: GptqOptions, block: BlockShape, turns: Sequence[Sequence[LinearGroup]], keeps: bool
) -> float:
    """Operations of the attention in looks that take its kept outputs, if all are kept.

    On each path the look at its last linear, if that is quantized, goes on to the attention's end
    and keeps them. The first look after it on the path of the quantized block applies the rounded
    linear to the inputs that were kept.
    """
    kept = KeptOutputs.of(block.family, (), Room(0))
    if kept is None:
        return 0.0
    at = next(i for i, groups in enumerate(turns) if kept.last in groups[0].linears)
    inside = [name for name in block.linears if kept.is_inside(name)]
    attention = block.family.attention
    attends = attention is None or kept.is_inside(attention.o)
    each = block.linear_flops(inside) + attends * block.attention_flops()
    looks = [groups[0] for groups in turns[at + 1 :] if block.stacked(groups)]
    own = bool(block.stacked(turns[at]))
    extra = own * block.linear_flops([kept.last])
    spared = each * (len(looks) - 1 + own) - 2 * extra if looks else 0.0
    dense = sum(not group.routed for group in looks)
    if options.residual and not keeps and dense:
        spared += each * (dense - 1 + own) - extra
    return spared


def _solving(options: GptqOptions, block: BlockShape, groups: Sequence[LinearGroup]) -> Work:
    """The work of the Hessians of ``groups`` and of rounding their linears."""
    found, problems = Work(), block.stacked(groups)
    compares, writes = _corrections(options, block.family, groups)
    tokens = block.tokens * block.share(groups[0].linears[0])
    together = 1
    if groups[0].routed and problems:
        together = problems_at_once(*problems[0])  # experts are alike
    for n, k in problems:
        corrections = 2 * n * k if writes else compares * k * k
        found += Work(
            hessian_flops=2 * tokens * (summed_elements(k) + corrections),
            rounding_flops=(1 / 3 + 2 * compares) * k**3 + n * k * k * (5 + 6 * options.rounds),
            # a panel's scales take about as long as two sweeps over it
            rounding_panels=-(-k // PANEL) * (1 + 3 * options.rounds) / together,
        )
    return found


def _outputs(options: GptqOptions, block: BlockShape) -> Work:
    """The work of the output side of the Hessian, in addition to that of rounding without it.

    It is a forward and a backward pass of some sequences; G, its factor and feedback; and sweeps of
    a chunk's rows in place of all.
    """
    share = sequences_of(block.samples, block.seqlen) / block.samples
    found = Work(forward_flops=GRADIENTS * share * block.forward_flops())
    for n, k, problems in _sharing(block):
        panels_more = (CHUNKS - 1) * -(-k // PANEL) * (1 + 3 * options.rounds)
        turns = -(-problems // problems_at_once(n, k))
        found += Work(
            hessian_flops=2 * share * block.tokens * summed_elements(n),
            # half of a product of all rows with all others, less what is inside a chunk
            rounding_flops=n**3 / 3 + problems * (1 - 1 / CHUNKS) * n * n * k,
            rounding_panels=turns * panels_more / CHUNK_PANELS,
        )
    return found


def _sharing(block: BlockShape) -> list[tuple[int, int, int]]:
    """N, K and the number of the problems of each G.

    All experts have one G for their last linears, and none for the others.
    """
    found = []
    for groups in by_role(block.family.groups):
        weighed = not groups[0].routed or groups[0].writes_residual
        if weighed and (problems := block.stacked(groups)) and problems[0][0] <= MOST_ROWS:
            found.append((*problems[0], len(problems)))
    return found


def held_bytes(options: GptqOptions, block: BlockShape) -> int:
    """Bytes at the worst moment, when the linears that share an input are solved.

    Outputs of the attention are kept beside, where the device has room for them
    (:mod:`qtool.calibration.kept_outputs`).
    """
    held = _moments_and_solving(options, block.family, block.quantized)
    worst = max((solving for _, solving in held), default=0)
    if options.output_hessian and block.differentiated:
        # every G; its factors are smaller than what is swept
        worst += sum(4 * n**2 for n, _, _ in _sharing(block))
    if not options.residual:
        return worst
    floats = kept_input_bytes(block.family, block.linears, block.tokens)
    return worst + block.itemsize * block.weights + floats


def outputs_bytes(options: GptqOptions, block: BlockShape) -> int:
    """Bytes beyond :func:`held_bytes` with all outputs of the attention that may be kept."""
    kept = KeptOutputs.of(block.family, (), Room(0))
    if kept is None or not block.quantized:
        return 0
    before, last = _before_last(options, block.family, block.quantized)
    keeps = kept_input_bytes(block.family, block.linears, block.tokens) > 0
    paths = 1 + (options.residual > 0 and not keeps)
    # or the last linear's inputs
    outputs = paths * block.itemsize * block.tokens * max(block.linears[kept.last])
    return max(0, before + outputs - max(before, last))


def bytes_to_come(options: GptqOptions, family: Family, quantized: Shapes, column: int) -> int:
    """Bytes to allocate until the last linears are solved, while outputs of the attention are kept.

    Before, only the exact weights are allocated.

    Args:
        column: bytes of the tokens of the largest batch in one channel.
    """
    inputs = LOOK_TENSORS * column * max(k for _, k in quantized.values())
    before, _ = _before_last(options, family, quantized, inputs)
    return before - 4 * sum(map(prod, quantized.values()))


def _before_last(
    options: GptqOptions, family: Family, quantized: Shapes, inputs: int = 0
) -> tuple[int, int]:
    """Most bytes at once until the last linears are solved, and while they are solved.

    ``inputs`` are bytes of a batch beside the moments that it is added to.
    """
    *earlier, (moments, last) = _moments_and_solving(options, family, quantized)
    return max([moments + inputs, *(solving for _, solving in earlier)]), last


def _moments_and_solving(
    options: GptqOptions, family: Family, quantized: Shapes
) -> list[tuple[int, int]]:
    """Bytes for each group of linears: while its inputs are looked at, and while it is solved.

    The device then holds the exact weights of linears that are not rounded yet, the codes of the
    others, and the moments or what solving takes. At first that is H, the damped H (twice for
    coordinate descent), its factor, and the inverse of the factor if float inputs are compared;
    later it is H and the feedback, with the stacked weight, its target, errors and codes, and as
    much again for rows whose scales are refitted. Several experts are solved together.
    """
    total = left = sum(map(prod, quantized.values()))
    found = []
    for groups in by_role(family.groups):
        problems = stacked(quantized, groups)
        compares, writes = _corrections(options, family, groups)
        for n, k in problems[:1]:  # experts are alike
            weights, hessian, lacking = total + 3 * left, 4 * k * k, 4 * n * k * writes
            drift = compares and not writes
            more = drift + bool(options.rounds)
            factoring = (3 + compares + more) * hessian
            refitted = bool(options.rounds) * min(n, REFITTED_ROWS)
            sweeping = (2 + more) * hessian + 24 * (n + refitted) * k
            solving = max(factoring, sweeping) + others_bytes(len(problems), n, k)
            summed = min(len(problems), hessians_at_once(k)) * (1 + drift) * hessian
            found.append((weights + lacking + summed, weights + lacking + solving))
        left -= sum(n * k for n, k in problems)
    return found


def _corrections(
    options: GptqOptions, family: Family, groups: Sequence[LinearGroup]
) -> tuple[bool, bool]:
    """Whether the targets of ``groups`` make up for the error of the input, and of the stream."""
    compares = options.residual > 0 and not groups[0].routed
    writers = norms_of_writers(family, groups[0].linears[0])
    return compares, compares and options.stream > 0 and bool(writers)
