"""Reordering of input channels: a quantization group holds channels of similar salience.

QServe B.2.3: channels are sorted by max|X|. If the weights are pruned, the order is one in which
pruning leaves out little (:mod:`.pruning_order`), except inside heads. With P an order of the input
channels, ``X W^T = X[:, P] W[:, P]^T``. The order of X folds into the rows of up and gate (-> down)
and, inside a head, into the rows of v (-> o; all query heads of a kv head share it). The order of a
norm's output cannot fold, since each layer needs its own order of the one residual stream. It is
stored with the linears, and their input is gathered at run time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.method import Transform
from qtool.calibration.statistics import collect
from qtool.calibration.transforms.folding import per_kv_head, require_groups
from qtool.calibration.transforms.pruning_order import ROUNDS, ROWS, pruning_order
from qtool.models.family import Family
from qtool.models.parts import Fold, LinearGroup
from qtool.schemes.fmpq_blocks import by_magnitude

#: methods that must run before a method that orders channels, each with the reason
BEFORE_ORDER = {
    "norm-fusion": "a norm's weight folds into columns that are in the norm's order",
    "rotate": "a rotation mixes the channels that were put in order",
    "smooth": "smoothing changes which channels are salient and folds in the original order",
    "value-basis": "a new basis has other channels",
}

#: tokens of all batches for the mean squares of the channels, which pruned weights need
TOKENS = 2048


@dataclass(kw_only=True)
class Reorder(Transform):
    """Sort input channels by salience, or arrange them for pruning.

    Args:
        groups: the groups to reorder: ``heads`` (o) and ``product`` (down), which fold, and
            ``norm`` (qkv, gate and up), which costs a gather at run time.
    """

    groups: Sequence[str] = ("heads", "product")

    name = "reorder"
    needs_data = True
    after: ClassVar[dict[str, str]] = BEFORE_ORDER

    def __post_init__(self) -> None:
        require_groups(self.name, self.groups)

    def permutes(self, family: Family) -> tuple[str, ...]:
        return tuple(
            name
            for g in family.groups
            if g.fold is Fold.NORM and "norm" in self.groups
            for name in g.linears
        )

    def work(self, block: BlockShape) -> Work:
        pruned = [g for g in self._ordered(block.family) if not block.pruned.isdisjoint(g.linears)]
        looked = sum(min(n, ROWS) * k for n, k in block.stacked(pruned))
        searched = Work(search_weights=ROUNDS * looked, search_tries=ROUNDS * len(pruned))
        return super().work(block) + searched

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        chosen = self._ordered(block.family)
        pruned = any(sparsity_of(block, group) for group in chosen)
        tokens = TOKENS if pruned else 0
        inputs = collect(block, batches, [group.linears[0] for group in chosen], tokens)
        for group in chosen:
            if (seen := inputs.get(group.linears[0])) is None:
                order = torch.arange(block.weight(group.linears[0]).shape[1], device=block.device)
            elif group.fold is Fold.HEADS:
                order = order_in_heads(block, seen.amax)
            elif sparsity := sparsity_of(block, group):
                weights = torch.cat([block.weight(name).float() for name in group.linears])
                some = weights[:: -(-len(weights) // ROWS)]
                order = pruning_order(some.square() * seen.sample.square().mean(0), sparsity)
            else:
                order = by_magnitude(seen.amax)
            permute(block, group, order)

    def _ordered(self, family: Family) -> list[LinearGroup]:
        return [g for g in family.groups if recipe_group(g) in self.groups and g.ordered]


def sparsity_of(block: Block, group: LinearGroup) -> tuple[int, int] | None:
    """The common sparsity of the linears of ``group``; None if they differ or are dense."""
    schemes = [block.schemes.get(name) for name in group.linears]
    found = {None if scheme is None else scheme.sparsity for scheme in schemes}
    return found.pop() if len(found) == 1 else None


def order_in_heads(block: Block, amax: Tensor) -> Tensor:
    """An order ``[Hq D]`` of o's input that sorts inside each head.

    The query heads of one kv head get the same order.
    """
    dim = block.heads.dim
    by_head = per_kv_head(amax, block.heads).view(-1, dim)  # [Hq, D]
    order = by_head.argsort(stable=True, dim=1, descending=True)
    return (order + dim * torch.arange(len(order), device=order.device)[:, None]).flatten()


def permute(block: Block, group: LinearGroup, order: Tensor, inside_heads: bool = True) -> None:
    """Put the input channels of ``group`` in ``order [K]``.

    The order folds into the producer of the input if that is possible.
    """
    if recipe_group(group) == "product" and group.ordered:
        for name in filter(None, (group.source, group.gate)):
            permute_outputs(block, name, order)
        permute_inputs(block, group, order)
    elif group.fold is Fold.HEADS and inside_heads:
        heads = block.heads
        by_head = order.view(heads.kv, -1, heads.dim)[:, 0] % heads.dim  # [Hkv, D]
        rows = by_head + heads.dim * torch.arange(heads.kv, device=order.device)[:, None]
        permute_outputs(block, group.source, rows.flatten())
        permute_inputs(block, group, order)
    else:
        for name in group.linears:  # linears in 16 bits store no order
            if name in block.schemes:
                block.permute(name, order)


def recipe_group(group: LinearGroup) -> str:
    """The name of the group in a recipe.

    An order folds through any activation function, with a product or without.
    """
    return "product" if group.fold is Fold.ACTIVATION else group.fold.value


def permute_inputs(block: Block, group: LinearGroup, order: Tensor) -> None:
    """Put the columns of the group's linears in ``order [K]``, in place."""
    for name in group.linears:
        weight = block.weight(name)
        weight.copy_(weight[:, order])


def permute_outputs(block: Block, name: str, order: Tensor) -> None:
    """Put the rows and the bias of linear ``name`` in ``order [N]``, in place."""
    block.change_rows(name, lambda rows: rows[order])
