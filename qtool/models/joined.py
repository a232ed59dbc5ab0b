"""The linears that engines run as one: q, k and v; gate and up; and the like."""

from collections.abc import Iterable

from qtool.models.family import Family

#: by SGLang's name of it: of attention and MLPs, of Gated DeltaNet, of latent attention
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def joined(linears: Iterable[str]) -> dict[str, list[str]]:
    """The modules that engines make of ``linears`` besides experts, and which each is made of."""
    there = dict.fromkeys(linears)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in there if ".experts." not in name)
    found = {
        f"{parent}.{module}": [f"{parent}.{part}" for part in parts]
        for parent in parents
        for module, parts in JOINED.items()
    }
    return {module: parts for module, parts in found.items() if there.keys() >= set(parts)}


def joined_in_block(family: Family) -> dict[str, list[str]]:
    """:func:`joined` for a block, also where its linears have other names; names within the block.

    Engines run a mixture's experts as two stacks instead.
    """
    linears = [name for group in family.groups if not group.routed for name in group.linears]
    attention = family.attention
    together = [("qkv_proj", [attention.q, attention.k, attention.v])] if attention else []
    together += [("gate_up_proj", [g.gate, g.source]) for g in family.groups if g.gate]
    found = {f"{parts[0].rpartition('.')[0]}.{module}": parts for module, parts in together}
    own = {module: parts for module, parts in found.items() if set(linears).issuperset(parts)}
    return joined(linears) | own
