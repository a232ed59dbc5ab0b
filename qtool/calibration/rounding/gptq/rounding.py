"""GPTQ as a recipe's rounding: all linears of a decoder block by :func:`.gptq.solve`.

Linears that share an input share H and are one problem: their rows are stacked. Groups of linears
follow the data flow: each sees the inputs that the quantized ones before it produce. The experts of
a block do not see each other's outputs, so they are solved together, as many at once as memory
holds. Ranks share out whole problems if there are at least as many as ranks (experts), and
otherwise the rows of each problem, which do not depend on each other. Where GPTQ compares with the
float model, it looks at that model's inputs as :mod:`qtool.calibration.reference` tells.

Legend: N output channels, K input channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Shapes, Work
from qtool.calibration.forwards import Observer, by_place, inputs_of, observe
from qtool.calibration.kept_outputs import KeptOutputs, Room
from qtool.calibration.method import Rounding
from qtool.calibration.outliers import to_median
from qtool.calibration.precision import ROWS
from qtool.calibration.reference import Reference
from qtool.calibration.rounding.gptq import cost
from qtool.calibration.rounding.gptq.gptq import GptqOptions, Problem, Solution, solve
from qtool.calibration.rounding.gptq.hessian import Hessian, relative_error
from qtool.calibration.rounding.gptq.memory import (
    MOST_INPUT_BYTES,
    hessians_in_turn,
    kept_input_bytes,
    problems_at_once,
)
from qtool.calibration.rounding.gptq.output_hessian import output_hessians
from qtool.calibration.rounding.gptq.residual_stream import norms_of_writers, size_of_tokens
from qtool.calibration.rounding.gptq.rows import MOST_ROWS
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.rounding.scales import require_float_scale
from qtool.calibration.stacking import clips_of, in_turn
from qtool.calibration.statistics import batch_shapes, count_tokens, saw_enough
from qtool.calibration.timing import phase
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.models.experts import expert_place, is_routed
from qtool.models.grouped import segments
from qtool.models.parts import LinearGroup
from qtool.schemes import Scheme


@dataclass
class Stack:
    """Linears of one scheme and one input, rounded as one weight ``[N, K]``, and that input's H.

    ``outputs`` is G ``[N, N]``, if the rounding weighs outputs.
    """

    names: list[str]
    hessian: Hessian
    outputs: Tensor | None = None

    def rows(self, block: Block) -> Iterator[slice]:
        """The rows of each linear in the stack."""
        start = 0
        for name in self.names:
            stop = start + len(block.weight(name))
            yield slice(start, stop)
            start = stop

    def problem(self, block: Block, part: slice = slice(None)) -> Problem:
        """The problem of all rows, or of a part of them."""
        scheme = block.schemes[self.names[0]]
        weights = [block.weight(name).float() for name in self.names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        both = clips_of(block, self.names)
        clip, group_clip = (c[part] if isinstance(c, Tensor) else c for c in both)
        lacking = None if self.hessian.s is None else self.hessian.s[part]
        return Problem(scheme, weight[part], self.hessian, clip, group_clip, lacking, self.outputs)


@dataclass(kw_only=True)
class Gptq(GptqOptions, Rounding):
    """GPTQ of a block; its options are those of :class:`.gptq.GptqOptions`."""

    name = "gptq"
    needs_data = True
    positive = ("clip_steps",)
    most: ClassVar[dict[str, float]] = {"clip_least": 1, "residual": 1, "stream": 1}

    @property
    def compares(self) -> bool:
        return self.residual > 0

    @property
    def weighs_outputs(self) -> bool:
        return self.output_hessian

    def require_scheme(self, scheme: Scheme) -> None:
        require_float_scale(scheme)

    @torch.no_grad()
    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        reference = block.reference or Reference.of(block) if self.residual else None
        rounded: dict[str, Rounded] = {}
        tokens = count_tokens(batches)
        outputs = self.outputs(block, reference, batches)
        shapes = {name: block.shape(name) for name in block.family.linears()}
        quantized = {name: shapes[name] for name in block.schemes}
        room = Room(self.room_for_outputs(block, batches, quantized))
        kept = KeptOutputs.of(block.family, batches, room)
        if reference and kept_input_bytes(block.family, shapes, tokens):
            reference.look_once(compared(block))
        elif reference:
            own = [reference.batches.get(id(batch), batch) for batch in batches]
            reference.block.kept_outputs = KeptOutputs.of(block.family, own, room)
        turns = list(ranks.lockstep(batches, len(batch_shapes(batches))))
        for groups in hessians_in_turn(block.family.groups, lambda g: shapes[g.linears[0]][1]):
            left = block.schemes.keys() - rounded.keys()
            if kept and not any(map(kept.is_inside, left - {kept.last})):
                block.kept_outputs, kept.last_changes = kept, kept.last in left
            found = self.round_groups(block, reference, turns, groups, tokens, outputs)
            block.install(found)
            for name in found:
                block.exact.pop(f"{name}.weight", None)  # freed
            rounded |= found
        notes = block.notes.get(self.name, {}).values()
        errors = torch.stack([note["error"] for note in notes]) if notes else torch.empty(0)
        for note, error in zip(notes, errors.tolist(), strict=True):  # a GPU is waited for once
            note["error"] = error
        return rounded

    def room_for_outputs(self, block: Block, batches: Sequence[Batch], quantized: Shapes) -> float:
        """Bytes in which outputs of the attention may be kept.

        On a GPU it is what is free now beyond what is still to come.
        """
        if block.device.type != "cuda" or not quantized:
            return MOST_INPUT_BYTES
        tokens = max((prod(batch.shape) for batch in batches), default=0)
        itemsize = next(block.module.parameters()).itemsize
        to_come = cost.bytes_to_come(self, block.family, quantized, tokens * itemsize)
        return block.budget - torch.cuda.memory_allocated(block.device) - to_come

    def outputs(
        self, block: Block, reference: Reference | None, batches: Sequence[Batch]
    ) -> dict[tuple[str, ...], Tensor]:
        """G by the modules of :func:`output_modules`, if the rounding weighs outputs.

        Stacks of more than :data:`.rows.MOST_ROWS` rows are left out.
        """
        if not self.output_hessian or block.sensitivity is None:
            return {}
        floats = reference.batches if reference else {}
        inputs = [floats.get(id(batch), batch) for batch in batches]
        stacks = {
            modules: rows
            for group in block.family.groups
            for names in by_format(block, group.linears)
            if (modules := output_modules(block, names))
            and (rows := sum(len(block.weight(name)) for name in names)) <= MOST_ROWS
        }
        return output_hessians(block, inputs, stacks) if stacks else {}

    def round_groups(
        self,
        block: Block,
        reference: Reference | None,
        turns: Sequence[Batch | None],
        groups: Sequence[LinearGroup],
        tokens: int,
        outputs: Mapping[tuple[str, ...], Tensor],
    ) -> dict[str, Rounded]:
        """Round the linears of ``groups``; their Hessians are freed at the end.

        Args:
            tokens: the number of tokens in all batches.
            outputs: G by :func:`output_modules`.
        """
        found: dict[str, Rounded] = {}
        stacks: list[Stack] = []
        inputs = [names for group in groups for names in by_format(block, group.linears)]
        experts = self.moments_of_experts(block, turns, inputs) if groups[0].routed else {}
        for names in inputs:
            hessian = experts.pop(names[0], None) or self.moments(block, reference, turns, names[0])
            if saw_enough(block, names, hessian.tokens, tokens):
                stacks.append(Stack(names, hessian, outputs.get(output_modules(block, names))))
            else:
                own = replace(block, schemes={n: block.schemes[n] for n in names})
                found |= RoundToNearest().round(own, [])
        if groups[-1] is block.family.groups[-1]:  # no look follows
            block.kept_outputs = None
            if reference:
                reference.block.kept_outputs = None
        try:
            return found | self.round_stacks(block, stacks)
        except QtoolError as error:
            raise QtoolError(f"block {block.index}: {error}") from error

    def moments(
        self, block: Block, reference: Reference | None, turns: Sequence[Batch | None], name: str
    ) -> Hessian:
        """The moments of linear ``name``'s input, as it will see it.

        ``turns`` are the batches as ``ranks.lockstep`` gives them, None where this rank has none.
        """
        scheme, params, weight = block.schemes[name], block.fit(name), block.weight(name)
        n, k = weight.shape
        norms = norms_of_writers(block.family, name)
        compared_norms = norms if reference and self.stream else []
        multiplier = block.family.group_of(name).multiplier
        columns = multiplier * weight.norm(dim=0)
        drift = reference is not None and not compared_norms
        hessian = Hessian(k, block.device, drift, n if compared_norms else 0)
        if reference and name == compared(block)[-1]:
            reference.last_look()
        for batch in turns:
            if batch is not None and (seen := inputs_of(block, batch, name, *norms)):
                x, *streams = seen
                seen.clear()  # x is as large as all else here
                floats = reference.inputs(batch, name, *compared_norms) if reference else []
                share = lacking = None
                if norms and self.largest_token:
                    sizes = size_of_tokens(streams[-1], x, columns)
                    share = to_median(sizes, self.largest_token)[:, None]
                x = scheme.fake_activation(x, params)
                if compared_norms:
                    with phase("Hessian"):
                        lacking = (floats[0].to(x.dtype) - x) @ weight.to(x.dtype).T
                        lacking *= self.residual
                    # parallel branches read one stream: only the first makes up for its error
                    if not any(map(streams[-1].equal, streams[:-1])):
                        lacking += self.stream / multiplier * (floats[-1] - streams[-1])
                hessian.add(x, floats[0] if drift else None, lacking, share)
            hessian.step()
        return hessian.complete()

    def moments_of_experts(
        self, block: Block, turns: Sequence[Batch | None], inputs: Sequence[Sequence[str]]
    ) -> dict[str, Hessian]:
        """The moments of all experts' inputs, by the first linear that reads each input.

        One pass over the batches gives them all. They have no D: the float block's router may send
        other tokens to an expert.
        """
        hessians = {
            names[0]: Hessian(block.weight(names[0]).shape[1], block.device) for names in inputs
        }
        adders = {
            place: moments_adder(block, names, hessians)
            for place, names in by_place(block, hessians).items()
        }
        for batch in turns:
            if batch is not None:
                # added after the forward: if the memory runs out in it, it is run again in halves
                seen: dict[str, list[tuple[Any, ...]]] = {place: [] for place in adders}
                observe(block, [batch], {place: keeper(parts) for place, parts in seen.items()})
                for place, add in adders.items():
                    while seen[place]:
                        add(*seen[place].pop(0))
            for hessian in hessians.values():
                hessian.step()
        return {name: hessian.complete() for name, hessian in hessians.items()}

    def round_stacks(self, block: Block, stacks: Sequence[Stack]) -> dict[str, Rounded]:
        """Round the linears of all ``stacks``."""

        def work(stack: Stack) -> float:
            return sum(block.weight(name).numel() for name in stack.names)

        if len(stacks) >= ranks.size():
            solutions = ranks.map_groups(lambda own: self.solve_whole(block, own), stacks, work)
        else:
            solutions = [self.solve_shared(block, stack) for stack in stacks]
        rounded = {}
        for stack, solution in zip(stacks, solutions, strict=True):
            scheme = block.schemes[stack.names[0]]
            for name, rows in zip(stack.names, stack.rows(block), strict=True):
                own = scheme.rows_of(solution.params, rows)
                rounded[name] = Rounded(solution.codes[rows], own)
                block.notes.setdefault(self.name, {})[name] = {
                    "error": relative_error(solution.lost[rows], solution.power[rows]),
                    "damping": solution.damping,
                    "tokens": stack.hessian.tokens,
                }
        return rounded

    def solve_whole(self, block: Block, stacks: Sequence[Stack]) -> list[Solution]:
        """The solutions of whole problems; those of one shape and scheme are solved together."""
        found: dict[int, Solution] = {}
        for numbers in problems_in_turn(block, stacks):
            solved = solve([stacks[i].problem(block) for i in numbers], self)
            found |= dict(zip(numbers, solved, strict=True))
        return [found[i] for i in range(len(stacks))]

    def solve_shared(self, block: Block, stack: Stack) -> Solution:
        """The solution of one problem, of which each rank solves its share of the rows."""
        if stack.outputs is not None:  # the rows depend on each other
            (whole,) = solve([stack.problem(block)], self, shared=True)
            return whole
        part = ranks.local_rows(sum(len(block.weight(name)) for name in stack.names), ROWS)
        (own,) = solve([stack.problem(block, part)], self)
        return Solution.stacked(ranks.all_gather(own), block.schemes[stack.names[0]])

    def work(self, block: BlockShape) -> Work:
        return cost.work(self, block)

    def held_bytes(self, block: BlockShape) -> int:
        return cost.held_bytes(self, block)

    def spare_bytes(self, block: BlockShape) -> int:
        return cost.outputs_bytes(self, block)


def compared(block: Block) -> list[str]:
    """Modules whose inputs are compared with the float model's: norms, then linears in turn."""
    dense = [group.linears for group in block.family.groups if not group.routed]
    linears = [names[0] for linears in dense for names in by_format(block, linears)]
    norms = (norm for name in linears for norm in norms_of_writers(block.family, name))
    return [*dict.fromkeys(norms), *linears]


def keeper(parts: list[tuple[Any, ...]]) -> Observer:
    """Appends what it observes to ``parts``."""
    return lambda *inputs: parts.append(inputs)


def moments_adder(
    block: Block, names: Mapping[int, str], hessians: Mapping[str, Hessian]
) -> Observer:
    """Adds inputs to ``hessians``; ``names`` has the linear of each expert's number."""
    schemes = [block.schemes[name] for name in names.values()]
    activations = {scheme.input_quantizer for scheme in schemes}
    together = activations.pop() if len(activations) == 1 else None
    alone = {} if together else {name: block.fit(name) for name in names.values()}

    def add(x: Tensor, counts: Sequence[int] = ()) -> None:
        x = together.fake(x) if together else x
        for number, part in enumerate(segments(x, counts or [len(x)])):
            if len(part) and (name := names.get(number)):
                if not together:
                    part = block.schemes[name].fake_activation(part, alone[name])
                hessians[name].add(part)

    return add


def output_modules(block: Block, names: Sequence[str]) -> tuple[str, ...]:
    """The modules whose outputs' gradients say how much those of the linears ``names`` count.

    They are the linears themselves; for the last linear of an expert the module that adds up all
    experts. There are none for an expert's other linears, nor where the module returns the outputs
    of each expert for all tokens (Llama 4), whose gradients would take as much memory.
    """
    group = block.family.group_of(names[0])
    if not group.routed:
        return tuple(names)
    place = expert_place(block.module, names[0]) if group.writes_residual else None
    stack = place[0].partition(".*.")[0] if place else ""
    return (stack,) if stack and is_routed(block.get(stack).stacked) else ()


def by_format(block: Block, names: Sequence[str]) -> Iterator[list[str]]:
    """The quantized linears of ``names``, in lists of one scheme and one form of the input."""
    together: dict[object, list[str]] = {}
    for name in names:
        if scheme := block.schemes.get(name):
            order = block.permutations.get(name)
            permutation = order is not None and tuple(order.tolist())
            key = scheme.kind, permutation, name in block.rotated
            together.setdefault(key, []).append(name)
    yield from together.values()


def problems_in_turn(block: Block, stacks: Sequence[Stack]) -> Iterator[Sequence[int]]:
    """The numbers of ``stacks``, in lists of one shape, scheme and G that memory holds at once."""
    kinds: dict[object, list[int]] = {}
    for i, stack in enumerate(stacks):
        shapes = tuple(block.weight(name).shape for name in stack.names)
        moments = stack.hessian.d is None, stack.hessian.s is None
        key = block.schemes[stack.names[0]].kind, moments, shapes, id(stack.outputs)
        kinds.setdefault(key, []).append(i)
    for numbers in kinds.values():
        first = stacks[numbers[0]]
        rows = sum(len(block.weight(name)) for name in first.names)
        size = problems_at_once(rows, len(first.hessian.h))
        yield from in_turn(numbers, size)
