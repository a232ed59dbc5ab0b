"""Gathers outlier channels into few blocks; only these blocks get 8-bit activations.

This is FMPQ (COMET 3.2, figure 4, :mod:`qtool.schemes.fmpq_blocks`). The order of the channels is
folded or stored as in :mod:`.reorder`. :mod:`.block_precision` chooses further 8-bit blocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.forwards import propagate
from qtool.calibration.method import LEARNING_SEQUENCES, Transform
from qtool.calibration.statistics import MOST_TOKENS, collect, own_subset
from qtool.calibration.transforms.block_precision import (
    BlockCosts,
    allocate,
    block_shares,
    output_errors,
)
from qtool.calibration.transforms.reorder import BEFORE_ORDER, permute, recipe_group
from qtool.models.family import Family
from qtool.models.parts import LinearGroup
from qtool.schemes.fmpq import BLOCK, Fmpq
from qtool.schemes.fmpq_blocks import OUTLIER_RATIO, BlockPlan, by_magnitude, plan_blocks


@dataclass(kw_only=True)
class GatherOutliers(Transform):
    """Gather outlier channels into few blocks, and give those 8-bit activations.

    A channel is judged by its largest input among the first 65,536 tokens.

    Args:
        ratio: a channel is an outlier above ``ratio`` times the median channel.
        max_8bit_blocks: at most so many blocks of a linear get 8 bits.
        min_w4a4_share: at least this share of a linear's blocks stays in 4 bits.
        w4a4_share: blocks without an outlier get 8 bits too, the ones that save most output error
            first, until only this share of the model's work is left in W4A4 or one of the limits
            above is reached (:mod:`.block_precision`). They are chosen before the first block is
            rewritten.
        tokens: size of the sample of inputs on which this error is measured.
    """

    ratio: float = OUTLIER_RATIO
    max_8bit_blocks: int | None = None
    min_w4a4_share: float = 0.0
    w4a4_share: float | None = None
    tokens: int = 512

    name = "gather-outliers"
    needs_data = True
    _learned = None
    positive = ("tokens",)
    most: ClassVar[dict[str, float]] = {"min_w4a4_share": 1, "w4a4_share": 1}
    after: ClassVar[dict[str, str]] = BEFORE_ORDER | {
        "reorder": "sorting again would scatter the gathered outliers"
    }

    def permutes(self, family: Family) -> tuple[str, ...]:
        return tuple(
            name
            for group in family.groups
            if recipe_group(group) != "product" or not group.ordered
            for name in group.linears
        )

    @property
    def learns(self) -> bool:
        return self.w4a4_share is not None

    @torch.no_grad()
    def learn(self, blocks: Iterable[Block], batches: Sequence[Batch]) -> dict[str, Tensor]:
        assert self.w4a4_share is not None
        costs: dict[tuple[int, int], BlockCosts] = {}
        groups: dict[int, int] = {}
        for block in blocks:
            groups[block.index] = len(block.family.groups)
            costs |= {(block.index, g): found for g, found in self._costs(block, batches)}
            propagate(block, batches)
        counts = {index: torch.zeros(number, dtype=torch.int64) for index, number in groups.items()}
        for (index, group), count in allocate(costs, self.w4a4_share).items():
            counts[index][group] = count
        return {str(index): of_block for index, of_block in counts.items()}

    def load(self, learned: Mapping[str, Tensor]) -> None:
        self._learned = {index: counts.cpu() for index, counts in learned.items()}

    def announce(self, block: Block) -> None:
        """Set linears to 8-bit inputs if all of their blocks get them; smoothing reads this."""
        for number, group in enumerate(block.family.groups):
            for name in _mixed(block, group):
                blocks = block.weight(name).shape[1] // BLOCK
                if self._count(block, number) == blocks:
                    _set_blocks(block, name, torch.ones(blocks, dtype=torch.uint8))

    def work(self, block: BlockShape) -> Work:
        work = super().work(block) * min(1.0, MOST_TOKENS / max(1, block.tokens))
        if self.learns:
            groups = {group.linears for group in block.family.groups}
            runs = (2 + len(groups)) * min(1.0, LEARNING_SEQUENCES / max(1, block.samples))
            work += Work(
                read_bytes=block.weights * block.itemsize,
                forward_flops=runs * block.forward_flops(),
            )
        return work

    def _costs(self, block: Block, batches: Sequence[Batch]) -> list[tuple[int, BlockCosts]]:
        """The costs of 4-bit inputs for each group of ``block`` with enough tokens, by number."""
        mixed = {
            n: names
            for n, group in enumerate(block.family.groups)
            if (names := _mixed(block, group))
        }
        inputs = collect(block, batches, [names[0] for names in mixed.values()], self.tokens)
        mixed = {n: names for n, names in mixed.items() if names[0] in inputs}
        orders = [by_magnitude(inputs[names[0]].amax) for names in mixed.values()]
        found = []
        errors = output_errors(block, batches, zip(mixed.values(), orders, strict=True))
        for (n, names), order, error in zip(mixed.items(), orders, errors, strict=True):
            seen = inputs[names[0]]
            plan = self._plan(seen.amax)
            cost = error * block_shares(block, names, seen.sample, order)
            work = sum(block.weight(name).numel() for name in names) // len(cost)
            found.append((n, BlockCosts(cost, work, int(plan.eight_bit.sum()), plan.most)))
        return found

    def _plan(self, amax: Tensor) -> BlockPlan:
        """The plan for blocks with outliers."""
        most, share = self.max_8bit_blocks, self.min_w4a4_share
        return plan_blocks(amax, ratio=self.ratio, max_8bit_blocks=most, min_w4a4_share=share)

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        firsts = [group.linears[0] for group in block.family.groups]
        inputs = collect(block, own_subset(batches, tokens=MOST_TOKENS), firsts, tokens=0)
        for number, group in enumerate(block.family.groups):
            mixed = _mixed(block, group)
            if not mixed or (seen := inputs.get(group.linears[0])) is None:
                continue
            plan = self._plan(seen.amax)
            order, eight_bit = plan.permutation, plan.eight_bit
            if count := self._count(block, number):
                # a plan with outliers already has this order
                order = by_magnitude(seen.amax)
                eight_bit[: min(count, plan.most)] = 1
            permute(block, group, order, inside_heads=False)
            note = {"eight_bit_blocks": int(eight_bit.sum()), "blocks": len(eight_bit)}
            block.notes.setdefault(self.name, {})[mixed[0]] = note
            for name in mixed:
                _set_blocks(block, name, eight_bit)

    def _count(self, block: Block, number: int) -> int:
        """The learned number of 8-bit blocks of the group; 0 if nothing was learned."""
        counts = (self._learned or {}).get(str(block.index))
        return 0 if counts is None else int(counts[number])


def _mixed(block: Block, group: LinearGroup) -> tuple[str, ...]:
    """The linears of ``group`` whose input channels may have 4 or 8 bits."""
    return tuple(name for name in group.linears if isinstance(block.schemes.get(name), Fmpq))


def _set_blocks(block: Block, name: str, eight_bit: Tensor) -> None:
    scheme = block.schemes[name]
    assert isinstance(scheme, Fmpq)
    block.schemes[name] = scheme.with_blocks(eight_bit)
