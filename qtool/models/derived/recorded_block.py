"""One block of a recorded model: what it read, normed, attended to and wrote.

Names in the trace are full; names in a family are short, within the block.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from qtool.models.derived.facts import PART, Facts, Kind, channelwise, rows_of
from qtool.models.derived.module_kinds import acts_linear
from qtool.models.derived.norms import NormForm
from qtool.models.derived.recorded_model import RecordedModel
from qtool.models.derived.trace import NormCall, Read


@dataclass
class RecordedBlock:
    """One block of a recorded model; ``prefix`` ends with a dot."""

    model: RecordedModel
    prefix: str

    def signature(self) -> Any:
        """A value that is the same for equal blocks."""
        names = tuple(
            (name.removeprefix(self.prefix), shape)
            for name, shape in self.model.state.items()
            if name.startswith(self.prefix)
        )
        reads = tuple(
            (self.short(read.weight), tuple(sorted(self._facts_of(read.facts))))
            for read in self.reads
        )
        calls = tuple((self.short(n.name), tuple(self._facts_of(n.facts))) for n in self.norms)
        turned = tuple(self.short(p) for p in self.model.trace.pairs if p.startswith(self.prefix))
        return names, reads, calls, turned, tuple(self.written.values())

    def _facts_of(self, facts: Facts) -> list[tuple[str, Kind]]:
        return [(self.short(p), f.kind) for p, f in facts.items()]

    def short(self, name: str) -> str:
        """The name within the block of a module or a weight."""
        return name.removeprefix(self.prefix).removesuffix(".weight")

    @cached_property
    def reads(self) -> list[Read]:
        """The linear maps by its weights."""
        return [r for r in self.model.trace.reads if r.weight.startswith(self.prefix)]

    @cached_property
    def norms(self) -> list[NormCall]:
        """The calls of its norms."""
        return [n for n in self.model.trace.norms if n.name.startswith(self.prefix)]

    def norm(self, name: str) -> NormCall | None:
        """The call of the norm with the full name ``name``; None if it is none of the block's."""
        return next((n for n in self.norms if n.name == name), None)

    @cached_property
    def experts(self) -> dict[str, Read]:
        """The inputs of its stacks of experts, by module."""
        found = self.model.trace.experts
        return {name: read for name, read in found.items() if name.startswith(self.prefix)}

    def linear(self, name: str) -> nn.Linear | None:
        """The module of the weight ``name`` if it is a plain linear."""
        module = self.model.modules.get(name.removesuffix(".weight"))
        return module if module is not None and acts_linear(module) else None

    def form(self, norm: str) -> NormForm | None:
        """How the block's norm ``norm`` uses its weight, None if that cannot be told."""
        full = norm if norm.startswith(self.prefix) else self.prefix + norm
        return self.model.form(full)

    @cached_property
    def attended(self) -> set[str]:
        """The producers that queries, keys and values of the block depend on."""
        calls = self.model.trace.attentions
        sides = (side for call in calls for side in (call.q, call.k, call.v))
        return {p for side in sides for p in side if p.startswith(self.prefix)}

    @cached_property
    def written(self) -> dict[str, float]:
        """The producers that this block adds to the residual stream, directly or through a norm.

        The number is the factor of each.
        """
        found: dict[str, float] = {}
        for _, facts in self.model.trace.writers:
            for producer, fact in facts.items():
                if not producer.startswith(self.prefix) or fact.channels is None:
                    continue
                found[producer] = fact.factor
                if call := self.norm(producer):
                    found |= {p: f.factor for p, f in channelwise(call.facts).items()}
        return found

    @cached_property
    def used_unread(self) -> list[Facts]:
        """Facts of the inputs of norms, and of values that are added to the residual stream."""
        used = [call.facts for call in self.norms] + [f for _, f in self.model.trace.writers]
        return list(map(channelwise, used))

    def only(self, facts: Facts, linears: tuple[str, ...], operation: str = "") -> bool:
        """Whether the producers of ``facts`` go into ``linears`` or ``operation`` alone."""
        for producer, fact in facts.items():
            rows, owner = rows_of(fact), producer.partition(PART)[0]
            for escape in self.model.trace.escapes.get(owner, ()):
                taken = escape.channels[rows[rows < len(escape.channels)]].any()
                if bool(taken) and escape.operation != operation:
                    return False
            others = [r for r in self.model.trace.reads if self.short(r.weight) not in linears]
            reads = [r.facts for r in (*others, *self.experts.values())]
            for used in [*reads, *self.used_unread]:
                for name, other in used.items():
                    known = name.partition(PART)[0] == owner and other.channels is not None
                    if known and bool(torch.isin(rows_of(other), rows).any()):
                        return False
        return True

    def expert_names(self, module: str) -> dict[str, str]:
        """Names within the block of the linears of the stack ``module``, by role."""
        gate, up, down, _ = self.model.leaves[module]
        leaves = {"gate": gate, "up": up, "down": down}
        return {role: f"{self.short(module)}.*.{leaf}" for role, leaf in leaves.items() if leaf}
