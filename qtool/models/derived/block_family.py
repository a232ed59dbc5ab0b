"""The family of one recorded block: everything that is not common to all blocks."""

from dataclasses import replace
from typing import Any

from torch import nn

from qtool.models.derived import stream
from qtool.models.derived.attention import BlockAttention
from qtool.models.derived.folds import Folds
from qtool.models.derived.fused import FusedLinears
from qtool.models.derived.linears import groups_of
from qtool.models.derived.recorded_block import RecordedBlock
from qtool.models.experts import Form, expert_shapes
from qtool.models.family import Family
from qtool.models.parts import Experts, Fold, KVCache


def block_family(block: RecordedBlock, cache: KVCache | str | None) -> Family:
    """The block's family, without what is common to all blocks.

    ``cache``: the block's KV cache, or why it cannot be replaced.
    """
    unquantized: dict[str, str] = {}
    fused = FusedLinears(block)
    attention = BlockAttention(block, fused)
    folds = Folds(block, fused, attention)
    groups = [folds.of(linears, read) for linears, read in groups_of(block, unquantized)]
    norms = [f for g in groups if g.fold is Fold.NORM and (f := block.form(g.source))]
    fixed = ""
    if len({form.offset for form in norms}) > 1:
        fixed = "its norms do not multiply by their weights in one way"
        groups = [
            replace(g, source="", fold=Fold.NONE, gate=None) if g.fold is Fold.NORM else g
            for g in groups
        ]
    offset = norms[0].offset if norms else 0.0
    linears = {linear for group in groups for linear in group.linears}
    tensors, biased = _tensors(block, linears, unquantized)
    declared = attention.declared(groups)
    if declared and block.model.heads and isinstance(cache, KVCache):
        # as config.json says, also where kv heads come repeated for their query heads
        cache = replace(cache, shape=(block.model.heads.kv, block.model.heads.dim))
    elif not declared and isinstance(cache, KVCache):
        cache = attention.normed(cache, offset)
    experts = next(iter(block.experts), None)
    return Family(
        name="",
        model_types=(),
        groups=tuple(groups),
        attention=declared,
        tensors=tensors,
        kv_cache=cache if isinstance(cache, KVCache) else None,
        biased=biased,
        fused=fused.parts,
        fused_by_head=fused.by_head,
        readers=stream.readers(block, groups),
        post_norms=stream.post_norms(block),
        norm_offset=offset,
        layer_norm=any(form.centred for form in norms),
        experts=_experts(block, experts) if experts else None,
        refuses=attention.refused(declared, cache, offset, unquantized),
        fixed_stream=fixed or stream.why_fixed(block, groups),
        unquantized=unquantized,
    )


def _tensors(
    block: RecordedBlock, linears: set[str], unquantized: dict[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Shapes in words of all tensors of the block, and the linears with a bias."""
    order = {name: i for i, name in enumerate(block.model.trace.called)}
    names = [n for n in block.model.state if n.startswith(block.prefix)]
    names.sort(key=lambda n: order.get(n.rpartition(".")[0], len(order)))
    tensors: dict[str, str] = {}
    biased: list[str] = []
    for name in names:
        full, _, part = name.rpartition(".")
        if full in block.experts:
            continue
        owner, module, shape = block.short(full), block.model.modules[full], block.model.state[name]
        if part == "bias" and owner in linears:
            biased.append(owner)
            continue
        tensors[name.removeprefix(block.prefix)] = " ".join(map(str, shape))
        known = owner in linears or owner in unquantized or isinstance(module, nn.Linear)
        if len(shape) > 1 and not known:
            unquantized[block.short(name)] = f"{type(module).__name__} is no linear"
    for name in block.experts:
        linears_of, stack = block.expert_names(name), block.model.modules[name]
        for role, shape in expert_shapes(stack).items():
            tensors[f"{linears_of[role]}.weight"] = " ".join(map(str, shape))
        if Form.of(stack).bias:
            biased += linears_of.values()
    return tensors, tuple(biased)


def _experts(block: RecordedBlock, module: str) -> Experts:
    name = block.short(module)
    moe = "" if name == "experts" else name.removesuffix(".experts")
    gate, up, down, stacked = block.model.leaves[module]
    stack: Any = block.model.modules[module]
    form = Form.of(stack)
    return Experts(moe, moe, gate, up, down, form.transposed, form.interleaved, stacked)
