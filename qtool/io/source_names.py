"""Gives the tensors of a source the names that its family declares.

These other names and forms occur; none of them costs a copy:

- the head alone if embedding and head are tied: it is the embedding;
- names without ``model.`` (``transformer.``), as the bare decoder's own ``save_pretrained`` writes
  them;
- ``experts.gate_up_proj [E, 2 I, H]`` and ``experts.down_proj [E, H, I]``, transformers 5's own
  form of a mixture: each expert's gate, up and down are rows of the stacks, or columns if these
  are transposed, gate and up one after the other or in turn; biases have the same form;
- ``mlp.gate`` of a Mixtral beside such stacks: ``block_sparse_moe.gate``;
- weights with inputs before outputs, as GPT-2's;
- rows of other tensors, such as the convolutions of q, k and v that transformers joins along
  dimension 0 when it loads them, or a tower's q, k and v, which are one tensor in the file;
- names that transformers loads and no longer writes, as most published multimodal models have them
  (``vision_tower.vision_model.``).
"""

from collections.abc import Set
from dataclasses import replace
from math import prod

from qtool.errors import QtoolError
from qtool.io.adapter import INSTEAD, Cast, Merged
from qtool.io.safetensors import Entry
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.architecture import Architecture
from qtool.models.parts import Experts, RowsOf
from qtool.models.renaming import by_module, renamed


def adopt(source: Checkpoint, model: Architecture) -> None:
    """Give the entries of ``source`` the names that the family of ``model`` declares, in place.

    Then the adapter of ``source``, if it has one, is merged into them. Names of towers that
    transformers would not write are noted in ``source.tower_names``.

    Raises:
        QtoolError: stacked experts have another shape than config.json says, or the adapter belongs
            to another model or changes an embedding that is also the head.
    """
    other_names = _rename(source, model)
    if source.adapter is None:
        return
    entries, family = source.entries, model.family
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    ends = {name: entries.get(name) for name in (embedding, head)}
    source.adapter.merge(entries, lambda name: renamed(name, other_names))
    if model.tied and any(entries.get(name) is not entry for name, entry in ends.items()):
        raise QtoolError(
            f"{source.adapter.directory}: it changes {embedding} or {head}, which are one "
            f"tensor in this model; {INSTEAD}"
        )


def _rename(source: Checkpoint, model: Architecture) -> dict[str, str]:
    """:func:`adopt` without the adapter; returns the model's names by those in files.

    The names of modules are among them, for packed linears, which have no weight.
    """
    family = model.family
    own_names = {d: o for o, d in family.disk_names.items()}
    modules = {d.removesuffix(".weight"): o.removesuffix(".weight") for d, o in own_names.items()}
    own_names = modules | own_names
    made = _made(source.entries, model) if family.rows_on_disk else {}
    if own_names:
        source.entries = {renamed(name, own_names): e for name, e in source.entries.items()}
    source.entries |= made
    entries = source.entries
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    prefix, _, bare = embedding.partition(".")
    if embedding not in entries and bare in entries:
        source.entries = entries = {
            n if n == head else f"{prefix}.{n}": entry for n, entry in entries.items()
        }
    old = old_names(entries.keys(), model)
    for own, name in old.items():
        entries[own] = entries.pop(name)
    source.tower_names |= by_module({o: n for o, n in old.items() if o in family.outside}, entries)
    if model.tied and embedding not in entries and head in entries:
        entries[embedding] = entries.pop(head)
    for name in family.transposed & entries.keys():
        stored = entries[name]
        if not (stored.within or isinstance(stored.computed, Merged | Cast)):  # not adopted yet
            entries[name] = stored.transposed()
    if names := family.experts:
        for block in range(model.blocks):
            places = (model.full(block, of) for of in (names.attribute, names.moe))
            attribute, moe = (place.removesuffix(".") for place in places)  # maybe the block itself
            _adopt_experts(entries, attribute, moe, names)
    return own_names | {name: own for own, name in old.items()}


def as_on_disk(source: Checkpoint) -> Checkpoint:
    """``source`` by the names in its files, which transformers loads, with its adapter merged."""
    found = Checkpoint(source.directory, source.adapter)
    if found.adapter:
        entries, family = found.entries, family_of(found.config)
        prefix = family.embedding.partition(".")[0]
        names = {
            **family.disk_names,
            **old_names(entries.keys(), Architecture(found.config, family)),
        }

        def stored_name(name: str) -> str:
            for stored in (name, name.removeprefix(f"{prefix}.")):  # or the bare decoder's name
                if stored in entries:
                    return stored
            return renamed(name, names)

        found.adapter.merge(entries, stored_name, set(map(stored_name, family.transposed)))
    return found


def old_names(entries: Set[str], model: Architecture) -> dict[str, str]:
    """The ``entries`` whose names are not the model's, by the names that their loader gives them.

    transformers' loader is asked, and only if a tensor of the model has another name.
    """
    family = model.family
    if not family.derived:
        return {}
    shapes, experts = model.source_shapes(), family.experts
    stacks = tuple(f".{of}.experts." for of in (experts.attribute, experts.moe)) if experts else ()
    absent = shapes.keys() - entries - family.rows_on_disk.keys()
    if all(any(stack in name for stack in stacks) for name in absent):  # these may be stacked
        return {}
    from qtool.models.derived import built  # imports transformers
    from qtool.models.derived.on_disk import loading

    loaded = loading(built(model.config), convert=False)
    modules = {name.rpartition(".")[0] for name in absent}  # of packed linears, without a weight
    found = {}
    for name in sorted(entries - shapes.keys()):
        own, _ = loaded(name)
        known = own.rpartition(".")[0] in modules or any(stack in own for stack in stacks)
        packed = name.rpartition(".")[0] in modules  # of a linear that has the model's name
        if own not in entries and (own in absent or (known and not packed)):
            found[own] = name
    return found


def _made(entries: dict[str, Entry], model: Architecture) -> dict[str, Entry]:
    """The tensors that are made of rows of ``entries``; those entries are removed."""
    rows, shapes = model.family.rows_on_disk, model.source_shapes()
    experts = model.family.sizes.get("experts", lambda _: 1)(model.namespace)
    made = {
        own: _joined(
            [_rows_of(entries[part.name], part) for part in parts], shapes.get(own), experts
        )
        for own, parts in rows.items()
        if own not in entries and all(part.name in entries for part in parts)
    }
    for own in made:
        for part in rows[own]:
            entries.pop(part.name, None)
    return made


def _rows_of(stored: Entry, part: RowsOf) -> Entry:
    """The rows ``part`` of a tensor; the rows of a stack's matrices follow one another."""
    if len(stored.shape) == 3:
        stored = stored.flat()
    if part.transposed:
        stored = stored.transposed()
    if part.rows is None:
        return stored
    if max(part.rows) >= stored.shape[0]:
        raise QtoolError(f"{part.name} has {stored.shape[0]} rows, of which {part.count} are read")
    return stored.rows(part.rows)


def _joined(parts: list[Entry], shape: tuple[int, ...] | None, experts: int) -> Entry:
    """All rows of ``parts``, in ``shape`` if that is a stack with as many rows.

    Without a ``shape`` they form a stack of ``experts``, whose parts have shapes.
    """
    rows = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    shape = shape or (experts, rows[0] // experts, *rows[1:])
    stacked = len(shape) == 3 and rows == (prod(shape[:2]), shape[2])
    if len(parts) == 1 and not stacked:
        return parts[0]
    shape = shape if stacked else rows
    return replace(parts[0], shape=shape, parts=tuple(parts), within=None, computed=None)


def _adopt_experts(entries: dict[str, Entry], attribute: str, moe: str, names: Experts) -> None:
    """Give one block's stacked experts, if it has them, an entry for each linear.

    Tensors beside the stacks get their names on disk.
    """
    first = "gate_up_proj" if names.gate else "up_proj"
    if not all(f"{attribute}.experts.{part}" in entries for part in (first, "down_proj")):
        return
    for part, suffix in (("weight", ""), ("bias", "_bias")):
        stacks = [f"{attribute}.experts.{stack}{suffix}" for stack in (first, "down_proj")]
        if not all(stack in entries for stack in stacks):
            continue
        both, down = (entries.pop(name) for name in stacks)
        if part == "weight":
            _require_stacks(attribute, both, down, names)
        elif len(both.shape) != 2 or len(down.shape) != 2 or both.shape[0] != down.shape[0]:
            raise QtoolError(
                f"{attribute}.experts: stacked biases {list(both.shape)} and {list(down.shape)} "
                "found; [experts, outputs] of both are expected"
            )
        for number, (one, back) in enumerate(zip(_parts(both), _parts(down), strict=True)):
            parts = _roles(one, names) | {"down": _rows(back, names, slice(None))}
            for role, entry in parts.items():
                entries[f"{moe}.experts.{number}.{names.roles[role]}.{part}"] = entry
    if moe != attribute:
        for name in [name for name in entries if name.startswith(f"{attribute}.")]:
            entries[moe + name.removeprefix(attribute)] = entries.pop(name)


def _require_stacks(attribute: str, both: Entry, down: Entry, names: Experts) -> None:
    """Check that two stacks belong to one mixture of experts."""
    turned = slice(None, None, -1) if names.transposed else slice(None)
    if len(both.shape) == len(down.shape) == 3:
        rows, hidden = tuple(both.shape[1:])[turned]
        out, width = tuple(down.shape[1:])[turned]
        halves = 2 if names.gate else 1
        if both.shape[0] == down.shape[0] and hidden == out and rows == halves * width:
            return
    form = "[experts, 2 * width, hidden] and [experts, hidden, width]"
    if names.transposed:
        form = "[experts, hidden, 2 * width] and [experts, width, hidden]"
    raise QtoolError(
        f"{attribute}.experts: stacked weights {list(both.shape)} and {list(down.shape)} "
        f"found; {form} are expected"
    )


def _parts(stack: Entry) -> list[Entry]:
    """The matrices of a stack ``[E, N, K]``, or the vectors of ``[E, N]``."""
    return [stack.matrix(number) for number in range(stack.shape[0])]


def _roles(one: Entry, names: Experts) -> dict[str, Entry]:
    """Gate and up of an expert's first matrix (or bias), or up alone."""
    if not names.gate:
        return {"up": _rows(one, names, slice(None))}
    half = (one.shape[-1] if names.transposed else one.shape[0]) // 2
    gate, up = slice(half), slice(half, None)
    if names.interleaved:
        gate, up = slice(0, None, 2), slice(1, None, 2)
    return {"gate": _rows(one, names, gate), "up": _rows(one, names, up)}


def _rows(one: Entry, names: Experts, rows: slice) -> Entry:
    """These ``rows`` of an expert's matrix or bias, in checkpoints' form: outputs before inputs."""
    one = one.transposed() if names.transposed else one
    return one.rows(range(one.shape[0])[rows])
