"""Fused linears: which of their rows are queries, keys, gates, ..."""

from collections.abc import Mapping

import torch

from qtool.models.derived.facts import PART, Fact, contiguous, rows_of
from qtool.models.derived.recorded_block import RecordedBlock


class FusedLinears:
    """The fused linears of a block whose parts a fold or the attention needs.

    Attributes:
        parts: for each linear, by its name, the parts and their rows in words.
        by_head: whether rows are ordered by kv head.
    """

    def __init__(self, block: RecordedBlock) -> None:
        self.block = block
        self.parts: dict[str, dict[str, str]] = {}
        self.by_head = False

    def names_of(self, roles: Mapping[str, tuple[str, Fact]]) -> dict[str, str] | None:
        """Names by role of linears or of parts of a fused one; None if they are neither.

        ``roles`` maps each role to a producer and the fact that says which of its rows have the
        role.
        """
        names: dict[str, str] = {}
        owners: dict[str, dict[str, torch.Tensor]] = {}
        for role, (producer, fact) in roles.items():
            owner, rows = producer.partition(PART)[0], rows_of(fact)
            if len(rows) == self.block.model.state[owner][0]:
                names[role] = self.block.short(owner)
            else:
                name = self.block.short(owner)
                parent = name.rpartition(".")[0]
                names[role] = f"{parent}.{role}" if parent else role
                owners.setdefault(owner, {})[names[role]] = rows
        for owner, parts in owners.items():
            parts = dict(sorted(parts.items(), key=lambda item: int(item[1][0])))
            if sum(map(len, parts.values())) != self.block.model.state[owner][0]:
                return None
            by_head = not all(contiguous(rows) for rows in parts.values())
            if by_head and not self._goes_by_head(parts):
                return None
            self.parts[self.block.short(owner)] = {
                name: str(len(rows)) for name, rows in parts.items()
            }
            self.by_head = self.by_head or by_head
        return names

    def _goes_by_head(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Whether a fused linear's rows are ordered by kv head, with each part's share in it."""
        heads = self.block.model.heads
        if heads is None or any(len(rows) % heads.kv for rows in parts.values()):
            return False
        start, whole = 0, sum(map(len, parts.values())) // heads.kv
        for rows in parts.values():
            size = len(rows) // heads.kv
            turns = torch.arange(heads.kv)[:, None] * whole + start
            if not torch.equal(rows, (turns + torch.arange(size)).flatten()):
                return False
            start += size
        return True
