"""Folds a factor of a group's input into its linears, and the inverse into the input's producer."""

from collections.abc import Iterable

from torch import Tensor

from qtool.calibration.block import Block
from qtool.errors import QtoolError, suggest
from qtool.models.parts import Fold, Heads, LinearGroup

#: groups of linears that a recipe may name: each is named after what a factor of its input folds to
GROUPS = tuple(fold.value for fold in (Fold.NORM, Fold.HEADS, Fold.PRODUCT))


def require_groups(method: str, groups: Iterable[str]) -> None:
    """Refuse names in ``groups`` that are not in :data:`GROUPS`."""
    for group in groups:
        if group not in GROUPS:
            raise QtoolError(f"{method}: unknown group {group!r}; {suggest(group, GROUPS)}")


def per_kv_head(amax: Tensor, heads: Heads) -> Tensor:
    """``amax [Hq D]`` with each channel's maximum over the query heads of its kv head."""
    by_head = amax.view(heads.kv, -1, heads.dim)  # [Hkv, queries of it, D]
    return by_head.amax(1, keepdim=True).expand_as(by_head).flatten()


def fold_factor(block: Block, group: LinearGroup, factor: Tensor) -> None:
    """Fold ``X / lambda`` into the producer of the group's input, ``W lambda`` into its linears."""
    for name in group.linears:
        block.weight(name).mul_(factor.double())  # float64 in between
    if group.fold is Fold.HEADS:
        heads = block.heads
        factor = factor.view(heads.kv, -1, heads.dim)[:, 0].flatten()  # [Hkv D]
    inverse = 1 / factor.double()
    if group.fold is Fold.NORM:
        block.scale_norm(group.source, inverse)
    else:
        block.change_rows(
            group.source, lambda rows: rows.double() * inverse.view(-1, *[1] * (rows.dim() - 1))
        )
