"""Names in published checkpoints that differ from those in transformers' model.

They come from transformers' own list of conversions; a conversion that does more than move rows is
refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.models.experts import Form, is_experts
from qtool.models.parts import RowsOf

#: names of an expert's linears if a checkpoint stacks them
LEAVES = "gate_proj", "up_proj", "down_proj"
#: columns of the matrices by which rows are followed
COLUMNS = 2
#: dimensions of a stack of matrices
STACK = 3
#: a weight of the first expert, if experts are stored one by one
FIRST = re.compile(r"(.+)\.0\.\w+\.weight")


def leaf_names(model: Any) -> dict[str, tuple[str | None, str, str, bool]]:
    """Names of gate, up and down of each stack of experts, as checkpoints have them.

    After the names comes whether checkpoints have the stack itself. transformers' own list of
    conversions says from which names a stack is made.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    stacks = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not stacks:
        return {}
    converters = [c for c in get_model_conversion_mapping(model) if hasattr(c, "operations")]

    def leaves(name: str, part: str) -> list[str]:
        for converter in converters:
            made = any(_matches(t, f"{name}.{part}") for t in converter.target_patterns)
            names = [str(s).split(".") for s in converter.source_patterns]
            if made and all("*" in parts and parts[-1] == "weight" for parts in names):
                return [parts[-2] for parts in names]
        return []

    found: dict[str, tuple[str | None, str, str, bool]] = {}
    for name, stack in stacks.items():
        gate: str | None
        gate, up, down = LEAVES
        if not Form.of(stack).gate:
            gate, up = None, next(iter(leaves(name, "up_proj")), up)
        elif len(pair := leaves(name, "gate_up_proj")) == 2:
            gate, up = pair
        single = leaves(name, "down_proj")
        found[name] = gate, up, next(iter(single), down), not single
    return found


def disk_names(
    model: Any, numbers: set[int], blocks: str
) -> tuple[dict[str, str], dict[str, tuple[RowsOf, ...]]]:
    """Names on disk of tensors and stacks of experts that have other names in ``model``.

    The second result are the rows on disk of tensors that are made of rows of other tensors. Only
    the blocks ``numbers`` are looked at.

    Raises:
        QtoolError: a tensor is made of others in another way.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        return {}, {}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(f"{blocks}.")
        or int(name[len(blocks) + 1 :].partition(".")[0]) in numbers
    }
    owners = {id(tensor): name for name, tensor in state.items()}
    found = {}
    for disk, tensor in revert_weight_conversion(model, dict(state)).items():
        if (own := owners.get(id(tensor))) is not None:
            found[own] = disk
    _require_loaded(model, found)
    made = [name for name in state if name not in found]
    for name, module in model.named_modules():
        own = [n for n in made if n.rpartition(".")[0] == name and state[n].dim() == STACK]
        _require_one_count(name, {n.rpartition(".")[2]: len(state[n]) for n in sorted(own)})
        if not is_experts(module) or not name.startswith(f"{blocks}."):
            continue
        if stacks := {n: state[n] for n in made if n.startswith(f"{name}.")}:
            if disk := _name_of_experts(model, stacks):
                found[name] = disk
                made = [n for n in made if n not in stacks]
            elif Form.of(module).transposed:
                raise QtoolError(f"{name}: transformers computes its stacks when it loads them")
    rows = _rows(model, state, made)
    for name in {own.rpartition(".")[0] for own in rows if own.startswith(f"{blocks}.")}:
        # the first of more experts than this stack's: its names need no rows
        stacks = {n: rows[n][0].name for n in rows if n.rpartition(".")[0] == name}
        firsts = {first[1] for disk in stacks.values() if (first := FIRST.fullmatch(disk))}
        if is_experts(model.get_submodule(name)) and len(firsts) == 1:
            found[name] = firsts.pop()
            rows = {n: parts for n, parts in rows.items() if n not in stacks}
    return {own: disk for own, disk in found.items() if own != disk}, rows


def _require_one_count(module: str, counts: Mapping[str, int]) -> None:
    """Refuse stacks of ``module`` that do not hold equally many experts, ``counts`` by name."""
    if len(set(counts.values())) > 1:
        listed = " and ".join(f"{count} in {name}" for name, count in counts.items())
        raise QtoolError(
            f"{module} has {listed}: transformers loads no such stack of experts that are "
            "stored one by one"
        )


def _name_of_experts(model: Any, stacks: Mapping[str, Tensor]) -> str:
    """The name on disk of the module whose experts lie one by one there and in ``stacks`` here.

    It is empty if they do not, or if transformers makes more than these stacks of them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        disks = revert_weight_conversion(model, dict(stacks))
    except ValueError:
        return ""
    firsts = [first[1] for disk in disks if (first := FIRST.fullmatch(disk))]
    return firsts[-1] if firsts else ""


def loading(model: Any, *, convert: bool = True) -> Callable[[str], tuple[str, str | None]]:
    """A function of a tensor's name on disk: its name in ``model``, and the conversion for it.

    The conversion is a pattern of transformers' list, or None for a tensor that is loaded as it is.
    Without ``convert`` a part of which a tensor is made keeps its own name, in the same module.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if convert and isinstance(c, WeightConverter)]
    state = model.state_dict()

    def loaded(disk: str) -> tuple[str, str | None]:
        own: tuple[str, str | None] = rename_source_key(
            disk, renamings, converters, model.base_model_prefix, state
        )
        return (disk, None) if own[0] not in state and disk in state else own

    return loaded


def _require_loaded(model: Any, found: Mapping[str, str]) -> None:
    """Refuse a model that transformers saves under names that it does not load again.

    Args:
        found: names on disk, by names in the model.
    """
    loaded = loading(model)
    for own, disk in found.items():
        if loaded(disk)[0] != own:
            raise QtoolError(
                f"transformers saves {own} of {type(model).__name__} as {disk}, and finds no place "
                "for that when it loads it"
            )


def _rows(
    model: Any, state: Mapping[str, Tensor], made: Sequence[str]
) -> dict[str, tuple[RowsOf, ...]]:
    """For each tensor of ``made``, the rows of tensors on disk that it is made of.

    transformers writes a checkpoint by its conversions in reverse. Here the tensors hold the
    numbers of their own rows and columns, which tell where each row goes.

    Raises:
        QtoolError: a tensor on disk holds anything but whole rows, each once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    numbered, first = {}, dict[str, int]()
    total = 0
    for name in made:
        shape = state[name].shape
        leading = _leading(shape)
        columns = torch.arange(COLUMNS if len(shape) > 1 else 1)
        rows = torch.arange(total, total + prod(leading))[:, None]
        form = (*leading, len(columns), *(1,) * len(shape))[: len(shape)]
        numbered[name] = (rows * COLUMNS + columns).reshape(form)
        first[name], total = total, total + prod(leading)
    try:
        stored = revert_weight_conversion(model, numbered)
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        raise QtoolError(f"{min(made)}: transformers computes it when it loads it") from error
    owner, place = torch.full((total,), -1), torch.empty(total, dtype=torch.long)
    turned = set()
    for number, (disk, tensor) in enumerate(stored.items()):
        held = _whole_rows(tensor)
        if held is None and tensor.dim() == 2:
            held = _whole_rows(tensor.T)
            turned.add(disk)
        if held is None:
            row = int(tensor.flatten()[0]) // COLUMNS
            name = max((n for n in made if first[n] <= row), key=first.__getitem__)
            raise QtoolError(f"{name}: transformers computes it from {disk} when it loads it")
        owner[held], place[held] = number, torch.arange(len(held))
    disks, found = list(stored), {}
    for name in made:
        own = slice(first[name], first[name] + prod(_leading(state[name].shape)))
        if int(owner[own].min()) < 0:
            raise QtoolError(f"{name}: transformers computes a part of it when it loads it")
        numbers, lengths = owner[own].unique_consecutive(return_counts=True)
        parts = zip(numbers.tolist(), place[own].split(lengths.tolist()), strict=True)
        found[name] = tuple(
            _part(disks[n], stored[disks[n]].shape, rows, disks[n] in turned) for n, rows in parts
        )
    return found


def _whole_rows(tensor: Tensor) -> Tensor | None:
    """The numbers of the rows that ``tensor`` holds; None if it does not hold whole rows."""
    table = tensor.reshape(prod(_leading(tensor.shape)), -1)
    rows = table[:, :1] // COLUMNS
    whole = torch.equal(table, rows * COLUMNS + torch.arange(table.shape[1]))
    return rows[:, 0] if whole else None


def _leading(shape: Sequence[int]) -> Sequence[int]:
    """The dimensions of a tensor that count its rows: two of a stack of matrices."""
    return shape[:2] if len(shape) == STACK else shape[:1]


def _part(disk: str, shape: Sequence[int], rows: Tensor, turned: bool) -> RowsOf:
    """The ``rows`` of the tensor ``disk``, which has this ``shape``, or its columns."""
    whole = torch.equal(rows, torch.arange(shape[1] if turned else prod(_leading(shape))))
    matrices = shape[0] if len(shape) == STACK else 0
    return RowsOf(disk, len(rows), None if whole else tuple(rows.tolist()), matrices, turned)


def _matches(target: str, name: str) -> bool:
    """Whether a conversion's ``target``, which may repeat groups of its source, makes ``name``."""
    return re.search(re.sub(r"\\\d", ".*", target), name) is not None
