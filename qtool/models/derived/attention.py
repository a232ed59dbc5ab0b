"""The attention of a block, if it is proved to be the common one."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from qtool.models.derived.facts import ATTENTION, Fact, Facts, Kind, channelwise, rows_of
from qtool.models.derived.fused import FusedLinears
from qtool.models.derived.recorded_block import RecordedBlock
from qtool.models.derived.trace import AttentionCall
from qtool.models.parts import Attention, Fold, KVCache, LinearGroup

#: the transforms that put a cache of their own into a block, and all methods that do
TRANSFORMS = ("smooth-attention", "value-basis")
LOOK_INTO_CACHE = (*TRANSFORMS, "kv")


class BlockAttention:
    """Queries, keys and values of one block."""

    def __init__(self, block: RecordedBlock, fused: FusedLinears) -> None:
        self.block, self.fused = block, fused
        #: the call of the attention that is :meth:`declared`
        self.call: AttentionCall | None = None

    def is_output(self, producer: str, fact: Fact) -> bool:
        """Whether an input is attention's output, with the heads of config.json in their order."""
        heads = self.block.model.heads
        if heads is None or fact.kind < Kind.HEADS or heads.query % heads.kv:
            return False
        if [producer] not in [[*channelwise(c.v)] for c in self.block.model.trace.attentions]:
            return False
        rows = rows_of(fact)
        values = fact.channels[(0,) * (fact.channels.dim() - 1)]  # type: ignore[union-attr, index]
        if len(rows) != heads.kv * heads.dim or len(values) != heads.query * heads.dim:
            return False
        place = torch.arange(heads.kv).repeat_interleave(heads.query // heads.kv)
        expected = (place[:, None] * heads.dim + torch.arange(heads.dim)).flatten()
        return bool((values.long() == rows[expected]).all())

    def heads_of(self, producer: str) -> dict[str, str] | None:
        """Names of q, k and v (or of v alone) if ``producer`` makes the values."""
        call = self._call_of(producer)
        if call is None:
            return None
        roles = {"v_proj": (producer, call.v[producer])}
        for role, side in (("q_proj", call.q), ("k_proj", call.k)):
            if (found := self._projection(side)) is not None:
                roles[role] = found[0]
        return self.fused.names_of(roles)

    def declared(self, groups: list[LinearGroup]) -> Attention | None:
        """The attention of the block if it is proved to be the common one."""
        for group in groups:
            if group.fold is not Fold.HEADS:
                continue
            owner = next(
                (o for o, parts in self.fused.parts.items() if group.source in parts), group.source
            )
            producer = f"{self.block.prefix}{owner}.weight"
            call = self._call_of(producer)
            read = next(
                r for r in self.block.reads if self.block.short(r.weight) == group.linears[0]
            )
            if call is None or read.facts[producer].kind != Kind.HEADS:
                continue
            names = self.heads_of(producer)
            q, k = self._projection(call.q), self._projection(call.k)
            if names is None or q is None or k is None:
                continue
            self.call = call
            facts = [fact for side in (call.q, call.k) for fact in channelwise(side).values()]
            return Attention(
                q=names["q_proj"],
                k=names["k_proj"],
                v=names["v_proj"],
                o=group.linears[0],
                q_norm=q[1],
                k_norm=k[1],
                rotary=any(fact.kind == Kind.TURNED for fact in facts),
                neighbours=all(map(_are_neighbours, self._pairs(call))),
                turned=self._turned(call),
            )
        return None

    def normed(self, cache: KVCache, offset: float) -> KVCache:
        """``cache`` with the norms of queries and keys, where factors can be folded into them.

        It is for attention that is not :meth:`declared`.
        """
        dim = cache.heads(self.block.model.config)[1]
        for call in self.block.model.trace.attentions:
            q, k = self._projection(call.q), self._projection(call.k)
            norms = [found[1] for found in (q, k) if found and found[1]]
            shapes = [self.block.model.state[f"{self.block.prefix}{n}.weight"] for n in norms]
            if len(norms) != 2 or any(tuple(shape) != (dim,) for shape in shapes):
                continue
            pairs = [found for found in self._pairs(call) if found is not None]
            rotary = int(pairs[0].max()) + 1 if pairs else 0
            attention = Attention(q_norm=norms[0], k_norm=norms[1], rotary=bool(pairs))
            if not self._why_not_smoothed(call, attention, rotary, offset):
                return replace(cache, q_norm=norms[0], k_norm=norms[1], rotary=rotary)
        return cache

    def refused(
        self,
        attention: Attention | None,
        cache: KVCache | str | None,
        offset: float,
        unquantized: Mapping[str, str],
    ) -> dict[str, str]:
        """Methods that this block does not allow, and why.

        Args:
            cache: the block's KV cache, or why it cannot be replaced.
            unquantized: why linears stay in 16 bits.
        """
        if isinstance(cache, str):
            return dict.fromkeys(LOOK_INTO_CACHE, cache)
        if attention is None:
            # without a cache of its own it may read keys that an earlier block hands on
            attends = cache is not None or self.block.model.recorded.passes
            reasons = dict.fromkeys(TRANSFORMS if attends else (), self._why_unknown(unquantized))
            if cache and cache.k_norm:
                del reasons["smooth-attention"]
            return reasons
        if cache is None:
            return dict.fromkeys(TRANSFORMS, "its attention takes no KV cache")
        assert self.call is not None
        reason = self._why_not_smoothed(self.call, attention, attention.turned or 0, offset)
        return {"smooth-attention": reason} if reason else {}

    def _why_not_smoothed(
        self, call: AttentionCall, attention: Attention, rotary: int, offset: float
    ) -> str:
        """Why no factor can be folded into queries and keys; empty if one can.

        Args:
            attention: its norms, and whether it has RoPE, are used.
            rotary: the number of channels of a head that RoPE turns, if they are the first ones.
        """
        sides = call.q, call.k
        if not all(self.block.only(channelwise(side), (), ATTENTION) for side in sides):
            return "its queries or keys go into something else than attention too"
        if bool(attention.q_norm) != bool(attention.k_norm):
            return "a norm follows its queries or its keys alone"
        made = [found for side in sides if (found := self._projection(side))]
        if any(norm and fact.kind == Kind.TURNED for (_, fact), norm in made):
            return "its queries and keys are normed after RoPE"
        if attention.rotary and self._makes_angles():
            return "its attention makes the angles of RoPE itself"
        turns = self._turns_neighbours if attention.neighbours else _turns_halves
        if attention.rotary and not all(turns(pairs, rotary) for pairs in self._pairs(call)):
            return "RoPE turns other pairs of channels than neighbours or those half a head apart"
        forms = [f for n in (attention.q_norm, attention.k_norm) if n and (f := self.block.form(n))]
        if any(form.biased or form.offset != offset for form in forms):
            return "its norms on queries and keys are not those of the block"
        return ""

    def _why_unknown(self, unquantized: Mapping[str, str]) -> str:
        """Why the attention is not declared."""
        for read in self.block.reads:
            name, known = self.block.short(read.weight), channelwise(read.facts)
            if name in unquantized and any(self.is_output(*own) for own in known.items()):
                return f"{name}, which reads its heads, stays in 16 bits: {unquantized[name]}"
        return "no queries, keys and values of one head size were recognized in its attention"

    def _makes_angles(self) -> bool:
        """Whether the block computes the angles of RoPE itself, as in Moshi."""
        block = self.block.model.modules[self.block.prefix[:-1]]
        return any(name.endswith("rotary_emb") for name, _ in block.named_modules())

    def _call_of(self, values: str) -> AttentionCall | None:
        calls = [c for c in self.block.model.trace.attentions if list(channelwise(c.v)) == [values]]
        return calls[0] if len(calls) == 1 else None

    def _projection(self, side: Facts) -> tuple[tuple[str, Fact], str | None] | None:
        """The linear that makes queries or keys, and the norm behind it."""
        names = list(channelwise(side))
        if len(names) != 1:
            return None
        name = names[0]
        call = self.block.norm(name)
        if call is None:
            return ((name, side[name]), None) if self.block.linear(name) else None
        inner = list(channelwise(call.facts))
        if len(inner) != 1 or not self.block.linear(inner[0]) or self.block.form(name) is None:
            return None
        return (inner[0], call.facts[inner[0]]), self.block.short(name)

    def _pairs(self, call: AttentionCall) -> list[torch.Tensor | None]:
        """The channels that RoPE turns together of queries and of keys, ``[C, 2]`` each."""
        pairs = self.block.model.trace.pairs
        return [pairs.get(p) for side in (call.q, call.k) for p in channelwise(side)]

    def _turns_neighbours(self, pairs: torch.Tensor | None, rotary: int) -> bool:
        """Whether RoPE pairs channels 2i and 2i + 1 of the first R of each head."""
        heads = self.block.model.heads
        if pairs is None or heads is None or not _are_neighbours(pairs):
            return False
        return int((pairs % heads.dim).max()) + 1 == rotary

    def _turned(self, call: AttentionCall) -> int:
        """The number of channels of a head that RoPE turns, if they are the first ones."""
        heads, pairs = self.block.model.heads, [p for p in self._pairs(call) if p is not None]
        return max(int((p % heads.dim).max()) + 1 for p in pairs) if heads and pairs else 0


def _are_neighbours(pairs: torch.Tensor | None) -> bool:
    """Whether each pair consists of channels 2i and 2i + 1."""
    return pairs is not None and bool((pairs[:, 0] // 2 == pairs[:, 1] // 2).all())


def _turns_halves(pairs: torch.Tensor | None, rotary: int) -> bool:
    """Whether RoPE pairs channels i and i + R / 2 of the R that it turns in a head."""
    if pairs is None:
        return False
    return (pairs[:, 0] - pairs[:, 1]).abs().unique().tolist() == [rotary // 2]
