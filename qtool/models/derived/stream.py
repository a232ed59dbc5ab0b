"""Whether a block lets the residual stream be rotated: all that reads and writes it is known."""

from collections.abc import Sequence

from qtool.models.derived.facts import STREAM, Kind, in_order
from qtool.models.derived.recorded_block import RecordedBlock
from qtool.models.parts import Fold, LinearGroup


def why_fixed(block: RecordedBlock, groups: Sequence[LinearGroup]) -> str:
    """Why the residual stream cannot be rotated; empty if the block allows it."""
    return _unknown_reader(block, groups) or _unknown_writer(block, groups)


def _unknown_reader(block: RecordedBlock, groups: Sequence[LinearGroup]) -> str:
    """What reads the stream other than through a norm whose weight can be folded."""
    folded = {group.source for group in groups if group.fold is Fold.NORM}
    for read in (*block.reads, *block.experts.values()):
        if STREAM in read.facts:
            return f"{block.short(read.weight)} reads it without a norm between"
    for call in block.norms:
        if STREAM in call.facts and block.short(call.name) not in folded:
            return f"{block.short(call.name)} is read by more than linears"
    for escape in block.model.trace.escapes.get(STREAM, ()):
        if f"{escape.module}.".startswith(block.prefix):
            where = block.short(escape.module) or "the block itself"
            return f"{escape.operation} in {where} reads it"
    if block.prefix[:-1] in block.model.trace.changing:
        return "the block changes its channels at the end"
    return ""


def _unknown_writer(block: RecordedBlock, groups: Sequence[LinearGroup]) -> str:
    """What is added to the stream other than the unchanged output of a linear or a post-norm."""
    writing = [group.linears for group in groups if group.writes_residual]
    own = {name for linears in writing for name in linears}
    written = {block.short(producer) for producer in block.written}
    for linears in writing:
        if "*" not in linears[0] and (others := [n for n in linears if n not in written]):
            return f"{others[0]} does not write to it, and shares its input with one that does"
    for module, facts in block.model.trace.writers:
        if not f"{module}.".startswith(block.prefix):
            continue
        norms = {n.name for n in block.norms} & facts.keys()
        if norms:  # a post-norm and its input
            facts = {p: f for p, f in facts.items() if p in norms}
        known = {p: f for p, f in facts.items() if p.startswith(block.prefix)}
        if not facts or len(known) < len(facts):
            return "something is added to it that no linear of the block makes"
        for producer, fact in known.items():
            name = block.short(producer)
            if producer not in norms and name not in own and producer not in block.experts:
                return f"{name} writes to it, and is not quantized"
            if fact.kind > Kind.SUM or (producer not in norms and not in_order(fact)):
                return f"what {name} writes to it is changed on the way"
    return ""


def post_norms(block: RecordedBlock) -> tuple[str, ...]:
    """The norms of the outputs that the block adds to the residual stream."""
    return tuple(block.short(n.name) for n in block.norms if n.name in block.written)


def readers(block: RecordedBlock, groups: Sequence[LinearGroup]) -> dict[str, tuple[str, ...]]:
    """Modules in 16 bits that read a norm which a factor may be folded into."""
    quantized = {name for group in groups for name in group.linears}
    found: dict[str, tuple[str, ...]] = {}
    for group in groups:
        if group.fold is Fold.NORM:
            names = (
                block.short(r.weight)
                for r in block.reads
                if f"{block.prefix}{group.source}" in r.facts
            )
            if others := tuple(dict.fromkeys(n for n in names if n not in quantized)):
                found[group.source] = others
    return found
