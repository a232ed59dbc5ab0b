"""Checks a family's declaration, and that a config.json holds the sizes that it is declared in."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import get_type_hints

from qtool import plugins
from qtool.errors import QtoolError, suggest
from qtool.models.family import MOST_BLOCKS, SIZES, Family, is_size, size_of
from qtool.models.parts import Fold
from qtool.units import whole_number

#: more than any size of a model: beyond it a config.json is damaged
LARGEST_SIZE = 1 << 22


def require_sizes(family: Family, settings: SimpleNamespace) -> None:
    """Check that ``settings`` have all sizes in which the family's shapes are declared.

    Raises:
        QtoolError: one is missing, no positive whole number, or larger than any model's; the
            families of single blocks are none, or contradict themselves; or the parts of a fused
            linear do not add up to its rows.
    """
    if family.derived:
        return  # transformers built a model of them
    try:
        dims = family.dimensions(settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise QtoolError(
            f"config.json does not hold the sizes of {family.name}: "
            + (f"it has no {error.name}" if isinstance(error, AttributeError) else str(error))
        ) from error
    if settings.num_hidden_layers > MOST_BLOCKS:
        raise QtoolError(
            f"config.json: num_hidden_layers is {settings.num_hidden_layers}; at most "
            f"{MOST_BLOCKS} are expected"
        )
    kinds = {family}
    if family.choose:
        kinds |= {family.choose(settings, block) for block in range(settings.num_hidden_layers)}
        for own in kinds:
            plugins.require_returned(family, "choose", own, Family)
            require_consistent(own)
    shapes = {shape for own in kinds for shape in own.tensors.values()}
    words = {word for shape in shapes for word in shape.replace("+", " ").split()}
    for word in ("vocab", *sorted(words & dims.keys())):
        if not is_size(dims[word]) or dims[word] > LARGEST_SIZE:
            most = f"; at most {LARGEST_SIZE} are expected" if is_size(dims[word]) else ""
            raise QtoolError(
                f"config.json: the size {word!r} of this {family.name} model is {dims[word]!r} "
                f"there{most}"
            )
    for linear, parts in family.fused.items():
        rows = size_of(family.tensors[f"{linear}.weight"].split()[0], dims)
        together = sum(size_of(words, dims) for words in parts.values())
        if together != rows:
            raise QtoolError(
                f"family {family.name}: the parts of the fused linear {linear} have {together} "
                f"rows together, and {linear}.weight has {rows}"
            )


def require_consistent(family: Family) -> None:
    """Check that what the declaration names is declared in it, all of the types that are expected.

    Raises:
        QtoolError: naming the part and what is not there, or of another type.
    """
    plugins.require_kinds(family, f"family {family.name}", get_type_hints(Family))
    for part in filter(None, (*family.groups, family.attention, family.kv_cache, family.experts)):
        kind = type(part)
        plugins.require_kinds(part, f"family {family.name}: {kind.__name__}", get_type_hints(kind))
    for linear, count in Counter(family.linears()).items():
        if count > 1:
            raise QtoolError(f"family {family.name}: {linear} is in two groups")
    sources = [group.source for group in family.groups if group.reads_residual]
    for bias in (f"{norm}.bias" for norm in sources):
        if bias in family.tensors and not family.layer_norm:
            raise QtoolError(
                f"family {family.name}: tensors has {bias} of a norm, and layer_norm is False"
            )
    for size, part in {"positions": family.positions, "experts": family.experts}.items():
        if part and size not in family.sizes:
            raise QtoolError(
                f"family {family.name}: {size} is declared, and sizes has no function {size!r} that"
                " gives their number"
            )
    for norm in family.readers:
        if norm not in sources:
            raise QtoolError(f"family {family.name}: readers names {norm!r}, which no group reads")
    rows = {part: words for parts in family.fused.values() for part, words in parts.items()}
    for name, where in _named(family).items():
        if name not in rows and f"{name}.weight" not in family.tensors:
            raise QtoolError(
                f"family {family.name}: {where} names {name!r}, and tensors has no {name}.weight"
            )
    cache = family.kv_cache
    if cache and not any(name.startswith(cache.tensor("")) for name in family.tensors):
        raise QtoolError(
            f"family {family.name}: kv_cache names {cache.module!r}, and tensors has none of it"
        )
    known = {*SIZES, *family.sizes}
    for name, shape in {**family.tensors, **rows}.items():
        for word in shape.replace("+", " ").split():
            if whole_number(word) is None and word not in known:
                raise QtoolError(
                    f"family {family.name}: the size {word!r} of {name}: {suggest(word, known)}"
                )
    attention = family.attention
    norms = list(filter(None, (attention.q_norm, attention.k_norm))) if attention else []
    if len(norms) == 1 and "smooth-attention" not in family.refuses:
        raise QtoolError(
            f"family {family.name}: attention has {norms[0]} on queries or keys alone, which "
            "smooth-attention cannot scale: give refuses a reason for smooth-attention"
        )


def _named(family: Family) -> dict[str, str]:
    """The modules that the declaration names, each with the field that does so."""
    named = dict.fromkeys(family.biased, "biased") | dict.fromkeys(family.linears(), "groups")
    for group in family.groups:
        if group.fold is not Fold.NONE:
            named[group.source] = "source"
        if group.gate:
            named[group.gate] = "gate"
    if a := family.attention:
        linears_and_norms = filter(None, (a.q, a.k, a.v, a.o, a.q_norm, a.k_norm))
        named |= dict.fromkeys(linears_and_norms, "attention")
    named |= dict.fromkeys(family.post_norms, "post_norms") | dict.fromkeys(family.fused, "fused")
    return named | dict.fromkeys(chain.from_iterable(family.readers.values()), "readers")
