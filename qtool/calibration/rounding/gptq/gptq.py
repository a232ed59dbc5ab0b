"""GPTQ: second-order rounding, column by column, of every linear of a block.

Frantar et al. 2022 (arXiv 2210.17323), with MARLIN's changes (section 3.5: clipping search by
group, calibration sequences of any length) and three that won when measured. The demo model's KL
divergence on its held-out text in 1/1000 nats, calibrated on 128 x 512 tokens of Wikipedia: w4a16
22.9 to nearest, 16.7 plain GPTQ, 14.1 with 3 and the clipping search, 13.1 with 2, 12.7 with ten
times the damping (w4a8-lqq 15.2 to 9.5):

1. H is taken of the inputs as the quantized linear sees them, after its own activation quantizer.
2. The target is not W but what best makes up for the error already in the input (after GPTAQ,
   arXiv 2504.02692): X_fp is the float model's input to the linear, X the quantized path's,
       min_V ||X V^T - X_fp W^T||  =>  T = W + residual * W (X_fp - X)^T X H^-1
3. After the GPTQ pass, rounds of: float scales by least squares, then coordinate descent over the
   codes.

The parameters of the groups are the scheme's own, fitted before the first column ("static groups"),
so columns may be visited in the order of falling H_kk. Linears that share an input share H and are
one problem: their rows are stacked. Experts of one shape are solved together, each as if it were
alone. Groups follow the data flow: each sees the inputs that the quantized linears before it
produce. Of several ranks each solves whole problems where there are enough (experts), else its
share of the rows of each: rows do not depend on each other.

Legend: M tokens, N output channels, K input channels, G groups, g channels of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.forwards import Reference, inputs_of, observe
from qtool.calibration.method import Rounding
from qtool.calibration.rounding.gptq.columns import descent_feedback, sweep
from qtool.calibration.rounding.gptq.hessian import Factor, Hessian, panels, relative_error
from qtool.calibration.rounding.gptq.problem import (
    GptqState,
    Problem,
    Rows,
    Solution,
    alike,
    others_bytes,
    row_ranges,
    solved_together,
    stages,
)
from qtool.calibration.rounding.gptq.row_products import ROWS, by_rows, product, together
from qtool.calibration.rounding.gptq.sparsegpt import prune
from qtool.calibration.rounding.group_fit import fit_groups
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.rounding.scales import refit
from qtool.calibration.statistics import batch_shapes, count_tokens, saw_enough
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.schemes.base import Grid, Params, Scheme


@dataclass(kw_only=True)
class Gptq(Rounding):
    """Options, all of them recipe keys.

    Args:
        damping: share of the mean of ``diag H`` added to it; raised x10 until Cholesky succeeds.
            The paper's 0.01 follows the calibration text more closely than other texts like it.
        act_order: visit columns in the order of falling ``H_kk``.
        block: columns rounded before the rest of the weight hears of it; changes speed only.
        clip_steps: candidates of the clipping search by group, down to ``clip_least``; 1: no
            search.
        negative_scales: try them with scales below 0 too, where the scheme takes those: 9 % less
            squared error in groups of 128 normal weights, w4a16's divergence on the demo 8.4 in
            place of 9.0.
        residual: share of the input's error that the target makes up for; 0: the target is W. All
            of it (1) wins with 16-bit activations and 64 k calibration tokens (w4a16: 8.5 against
            9.1), is no better with fewer tokens or 8-bit activations and worse with 4-bit ones.
        rounds: of least-squares scales and coordinate descent after the GPTQ pass.
    """

    damping: float = 0.1
    act_order: bool = True
    block: int = 128
    clip_steps: int = 20
    clip_least: float = 0.6
    negative_scales: bool = False
    residual: float = 0.5
    rounds: int = 2

    name = "gptq"
    needs_data = True
    positive = ("block", "clip_steps")

    @property
    def compares(self) -> bool:
        return self.residual > 0

    @torch.no_grad()
    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        reference = block.reference or Reference.of(block) if self.residual else None
        rounded: dict[str, Rounded] = {}
        tokens, turns = (
            count_tokens(batches),
            list(ranks.lockstep(batches, len(batch_shapes(batches)))),
        )
        for stage in stages(block.family.groups):
            found: dict[str, Rounded] = {}
            problems: list[Problem] = []
            inputs = [names for group in stage for names in alike(block, group.linears)]
            experts = self.moments_of_experts(block, turns, inputs) if stage[0].routed else {}
            for names in inputs:
                hessian = experts.pop(names[0], None) or self.moments(
                    block, reference, turns, names[0]
                )
                if saw_enough(block, names, hessian.tokens, tokens):
                    problems.append(Problem(names, hessian))
                else:
                    found |= RoundToNearest().round(
                        replace(block, schemes={n: block.schemes[n] for n in names}), []
                    )
            try:
                found |= self.round_problems(block, problems)
            except QtoolError as error:
                raise QtoolError(f"block {block.index}: {error}") from error
            for name, result in found.items():
                block.install(name, result)
                block.forget(name)
            rounded |= found
        for note in block.notes.get(self.name, {}).values():  # a GPU is waited for at the end
            note["error"] = float(note["error"])
        return rounded

    def moments(
        self, block: Block, reference: Reference | None, turns: Sequence[Batch | None], name: str
    ) -> Hessian:
        """The moments of linear ``name``'s input, as it will see it; ``turns``: the batches by
        ``ranks.lockstep``.
        """
        scheme, params = block.schemes[name], block.fit(name)
        hessian = Hessian(block.weight(name).shape[1], block.device, drift=reference is not None)
        for batch in turns:
            if batch is not None and (x := inputs_of(block, batch, name)) is not None:
                float_x = None if reference is None else reference.inputs(batch, name)
                hessian.add(scheme.fake_activation(x, params), float_x)
            hessian.step()
        return hessian.complete()

    def moments_of_experts(
        self, block: Block, turns: Sequence[Batch | None], inputs: Sequence[Sequence[str]]
    ) -> dict[str, Hessian]:
        """The moments of every expert's input in one pass, by the first of the linears that read
        it.

        The float block's router may send other tokens, so that its inputs say nothing about these.
        """
        hessians = {
            names[0]: Hessian(block.weight(names[0]).shape[1], block.device) for names in inputs
        }

        def observer(name: str) -> Callable[[Tensor], None]:
            scheme, params = block.schemes[name], block.fit(name)
            return lambda x: hessians[name].add(scheme.fake_activation(x, params))

        observers = {name: observer(name) for name in hessians}
        for batch in turns:
            if batch is not None:
                observe(block, [batch], observers)
            for hessian in hessians.values():
                hessian.step()
        return {name: hessian.complete() for name, hessian in hessians.items()}

    def work(self, block: BlockShape) -> Work:
        """A group's inputs come from forwards that end there, the float block's too; those of all
        experts from one.
        """
        work, before = Work(), 0.0
        for number, stage in enumerate(stages(block.family.groups)):
            routed, problems = stage[0].routed, block.stacked(stage)
            drift = bool(self.residual) and not routed
            if problems:
                work += Work(forward_flops=block.forward() if routed else (1 + drift) * before)
            for n, k in problems:
                moments = sum(
                    rows.stop * (columns.stop - columns.start) for rows, columns in panels(k)
                )
                work += Work(
                    hessian_flops=2
                    * block.tokens
                    * block.share(stage[0].linears[0])
                    * (moments + drift * k * k),
                    rounding_flops=k**3 / 3 + n * k * k * (5 + 6 * self.rounds),
                    rounding_weights=n * k * (self.clip_steps * (1 + self.negative_scales) + 4),
                    rounding_steps=-(-k // self.block) * (1 + self.rounds),
                )
            before += (
                0 if routed else block.multiplied(stage[0].linears)
            )  # shared experts come before
            before += block.attention() if number == 0 else 0
        return work

    def held_bytes(self, block: BlockShape) -> int:
        """Of the worst stage: exact weights, codes of those rounded before, its Hessians, and what
        solves it.

        First Hessian, damped one and factor; then Hessian and feedback beside the stacked weight,
        its target, errors and codes. Several experts are solved together.
        """
        left, total, worst = block.weights, block.weights, 0
        for stage in stages(block.family.groups):
            drift = bool(self.residual) and not stage[0].routed
            problems = block.stacked(stage)
            for n, k in problems[:1]:  # experts are alike
                factoring, sweeping = (
                    (3 + drift) * 4 * k * k,
                    (2 + drift + bool(self.rounds)) * 4 * k * k + 20 * n * k,
                )
                solving = max(factoring, sweeping) + others_bytes(len(problems), n, k)
                worst = max(worst, 4 * left + (total - left) + solving)
            left -= sum(n * k for n, k in problems)
        return worst + (2 * total if self.residual else 0)

    def round_problems(self, block: Block, problems: Sequence[Problem]) -> dict[str, Rounded]:
        """Round the linears of all ``problems``."""

        def work(problem: Problem) -> float:
            return sum(block.weight(name).numel() for name in problem.names)

        if len(problems) >= ranks.size():
            solutions = ranks.map_groups(
                lambda own: self.solve_problems(block, own), problems, work
            )
        else:
            solutions = [
                Solution.stacked(
                    ranks.all_gather(self.solve_rows(block, p)), block.schemes[p.names[0]]
                )
                for p in problems
            ]
        rounded = {}
        for problem, solution in zip(problems, solutions, strict=True):
            scheme, params = block.schemes[problem.names[0]], solution.params
            weights = [block.weight(name) for name in problem.names]
            for name, part in zip(problem.names, row_ranges(weights), strict=True):
                own = {
                    key: t if key in scheme.shared_params else t[part] for key, t in params.items()
                }
                rounded[name] = Rounded(solution.codes[part], own)
                error = relative_error(solution.lost[part], solution.power[part])
                note = {
                    "error": error,
                    "damping": solution.damping,
                    "tokens": problem.hessian.tokens,
                }
                block.notes.setdefault(self.name, {})[name] = note
        return rounded

    def solve_problems(self, block: Block, problems: Sequence[Problem]) -> list[Solution]:
        """Solve problems whole, those of one shape and scheme together as far as memory goes."""
        found: dict[int, Solution] = {}
        for numbers in solved_together(block, problems):
            solved = self.solve_all([Rows.of(block, problems[i]) for i in numbers])
            found |= dict(zip(numbers, solved, strict=True))
        return [found[i] for i in range(len(problems))]

    def solve_rows(self, block: Block, problem: Problem) -> Solution:
        """Solve this rank's share of the rows of a problem."""
        part = ranks.local_rows(sum(len(block.weight(name)) for name in problem.names), ROWS)
        return self.solve_all([Rows.of(block, problem, part)])[0]

    def solve_all(self, problems: Sequence[Rows]) -> list[Solution]:
        """Solve problems of one scheme and shape, each as if it were alone."""
        scheme, begun = problems[0].scheme, [self.begin(problem) for problem in problems]
        wanted = together([b.target[:, b.order] for b in begun])
        feedback = together([b.feedback for b in begun])
        keep = together([b.keep for b in begun if b.keep is not None]) if scheme.sparsity else None
        group = together([b.order // scheme.groups(b.target).shape[2] for b in begun])
        error = torch.zeros_like(wanted)
        for b in begun:
            b.feedback = b.feedback.new_empty(0)
        for turn in range(1 + self.rounds):
            grids = [scheme.grid(b.params) for b in begun]
            grid = Grid(*(together([getattr(g, f.name) for g in grids]) for f in fields(Grid)))
            codes = sweep(
                wanted, error, feedback, grid, group, causal=turn == 0, keep=keep, block=self.block
            )
            for b, found in zip(begun, codes, strict=True):
                b.codes = found[:, b.back].to(scheme.code_dtype)
            if turn < self.rounds:
                del feedback
                for e, b in enumerate(begun):
                    b.params = refit(scheme, b.params, b.codes, b.target, b.hessian.h)
                    error[e] = (b.target - scheme.dequantize(b.codes, b.params))[:, b.order]
                feedback = together(
                    [descent_feedback(b.damped) for b in begun if b.damped is not None]
                )
        del wanted, feedback, error
        return [b.solution(problem) for b, problem in zip(begun, problems, strict=True)]

    def begin(self, problem: Rows) -> GptqState:
        """What comes before the columns: their order, the target, the grid and the feedback."""
        scheme, weight, hessian = problem.scheme, problem.weight, problem.hessian
        order = self.visit(hessian.h.diagonal(), scheme)
        back = torch.argsort(order)

        def fit(kept: Tensor) -> Params:
            clips = {"clip": problem.clip, "group_clip": problem.group_clip}
            return fit_groups(scheme, kept, hessian.h.diagonal(), self.ratios_of(scheme), **clips)

        # where it needs no factor, it is queued while a GPU still sums the Hessian: the factor
        # waits for that
        plain = hessian.d is None and not scheme.sparsity
        params = fit(weight) if plain else {}
        factor = Factor(hessian.h, self.damping, order)
        damped = factor.h if self.rounds else None
        target = weight
        if hessian.d is not None:
            target = (
                weight
                + self.residual
                * by_rows(factor.solve, product(weight, hessian.d)[:, order])[:, back]
            )
        keep = None
        if scheme.sparsity:
            keep = prune(
                target[:, order], factor.feedback, factor.cost, scheme.sparsity, self.block
            )
        if not plain:
            params = fit(target if keep is None else target * keep[:, back])
        factor.forget()
        return GptqState(
            hessian, order, back, target, keep, params, factor.damping, damped, factor.feedback
        )

    def visit(self, importance: Tensor, scheme: Scheme) -> Tensor:
        """The order ``[K]`` of the columns; those that are pruned together stay together."""
        together = scheme.sparsity[1] if scheme.sparsity else 1
        columns = torch.arange(len(importance), device=importance.device).view(-1, together)
        if self.act_order:
            columns = columns[
                importance.view(-1, together).sum(1).argsort(descending=True, stable=True)
            ]
        return columns.flatten()

    def ratios_of(self, scheme: Scheme) -> list[float]:
        """The candidates of the clipping search, from 1 down; below 0 for a scale below 0."""
        ratios = [
            1 - (1 - self.clip_least) * i / max(1, self.clip_steps - 1)
            for i in range(self.clip_steps)
        ]
        return (
            [*ratios, *(-ratio for ratio in ratios)]
            if self.negative_scales and scheme.negative_scales
            else ratios
        )
