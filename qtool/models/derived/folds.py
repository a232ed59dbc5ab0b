"""The modules into which a factor on the input of a group of linears may be folded."""

from collections.abc import Sequence
from dataclasses import replace

from qtool.models.derived.attention import BlockAttention
from qtool.models.derived.facts import (
    PART,
    Facts,
    Kind,
    channelwise,
    in_order,
    in_order_of_rows,
    is_stream,
)
from qtool.models.derived.fused import FusedLinears
from qtool.models.derived.recorded_block import RecordedBlock
from qtool.models.derived.trace import Read
from qtool.models.parts import Fold, LinearGroup


class Folds:
    """The folds of one block."""

    def __init__(
        self, block: RecordedBlock, fused: FusedLinears, attention: BlockAttention
    ) -> None:
        self.block, self.fused, self.attention = block, fused, attention

    def of(self, linears: tuple[str, ...], read: Read) -> LinearGroup:
        """The group of ``linears`` with the fold that is proved for its input."""
        if "*" in linears[0] and (inner := self.block.expert_names(read.weight))["down"] in linears:
            group = LinearGroup(linears, "", self.block.model.expert_fold(read.weight))
            if group.fold is not Fold.NONE:
                group = replace(group, source=inner["up"], gate=inner.get("gate"))
            return self._writing(group, (read.weight,))
        own = tuple(f"{self.block.prefix}{name}.weight" for name in linears)
        none = self._writing(LinearGroup(linears, "", Fold.NONE), own)
        facts = channelwise(read.facts)
        if len(read.facts) == 1 and self._reads_norm(read):
            return replace(none, source=self.block.short(next(iter(facts))), fold=Fold.NORM)
        if (
            not facts
            or not all(self.block.linear(p.partition(PART)[0]) for p in facts)
            or not self.block.only(facts, linears)
        ):
            return none
        if {Kind.SUM, Kind.TURNED, Kind.MIXED} & {f.kind for f in facts.values()}:
            return none
        direct = [p for p, f in facts.items() if f.kind <= Kind.SCALED]
        others = [p for p, f in facts.items() if f.kind == Kind.ORDERED]
        if len(direct) == 1 and self.attention.is_output(direct[0], facts[direct[0]]):
            names = self.attention.heads_of(direct[0])
            if names is None:
                return none
            ordered = facts[direct[0]].kind == Kind.HEADS and not others
            return replace(none, source=names["v_proj"], fold=Fold.HEADS, ordered=ordered)
        if any(p in self.block.attended for p in direct) or len(facts) < len(read.facts):
            return none
        return self._product(none, facts, direct, others)

    def _writing(self, group: LinearGroup, weights: Sequence[str]) -> LinearGroup:
        """``group`` of ``weights`` with the facts of its addition to the residual stream."""
        for weight in weights:
            if weight in self.block.written:
                return replace(group, writes_residual=True, multiplier=self.block.written[weight])
        return group

    def _product(
        self, none: LinearGroup, facts: Facts, direct: list[str], others: list[str]
    ) -> LinearGroup:
        """The group if its input is ``act(gate) * up``, or a function of one linear alone."""
        if len(direct) > 1 or len(others) > 2 or len(facts) > 2:
            return none
        if direct and facts[direct[0]].kind < Kind.SCALED:
            return none
        up, gate = ([*direct, *others, ""])[:2]
        if not direct and gate:  # both in some function: the same order passes in both
            up, gate = gate, up
        names = self.fused.names_of(
            {"up_proj": (up, facts[up])} | ({"gate_proj": (gate, facts[gate])} if gate else {})
        )
        if names is None or not all(in_order_of_rows(fact) for fact in facts.values()):
            return none
        fold = Fold.PRODUCT if direct else Fold.ACTIVATION
        ordered = not any(p.partition(PART)[0] in self.block.model.trace.unordered for p in facts)
        gate_name = names.get("gate_proj")
        return replace(none, source=names["up_proj"], fold=fold, gate=gate_name, ordered=ordered)

    def _reads_norm(self, read: Read) -> bool:
        """Whether the input is a norm of the residual stream that only linears read."""
        (name, fact), *_ = read.facts.items()
        call = self.block.norm(name)
        if call is None or not is_stream(call.facts) or (form := self.block.form(name)) is None:
            return False
        if name in self.block.model.trace.escapes or not in_order(fact) or fact.kind > Kind.LINEAR:
            return False
        if any(name in used for used in self.block.used_unread):
            return False
        readers = [r for r in self.block.reads if name in r.facts]
        experts = [r for r in self.block.experts.values() if name in r.facts]
        if form.biased and any(r.value_id != call.value_id for r in (*readers, *experts)):
            return False  # a multiple of the output has another multiple of the bias
        stacks = [r.facts for r in experts]
        if any(len(found) > 1 or found[name].kind > Kind.LINEAR for found in stacks):
            return False
        modules = self.block.model.modules
        return all(
            r.weight.endswith(".weight")
            and r.weight.removesuffix(".weight") in modules
            and r.transposed
            and len(r.facts) == 1
            and r.facts[name].kind == Kind.LINEAR
            for r in readers
        )
