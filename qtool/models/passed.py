"""What blocks hand on beside the hidden states, as a flat dict of tensors.

A block returns it behind the hidden states, for an argument of the next one (an indexer's choice, a
router's states), or it writes it to a mapping that all blocks are given (keys and values that later
blocks share). :attr:`~qtool.models.family.Family.passes` says which. A tensor is called like the
argument that takes it; one of a mapping ``argument.key.number``, of the tuple that is under a key.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtool.units import whole_number


def as_arguments(passed: Mapping[str, Tensor], passes: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of a block that ``passed`` are: new mappings, which the block may write to."""
    found: dict[str, Any] = {name: None if place else {} for name, place in passes.items()}
    for path in sorted(passed, key=lambda path: (len(path), path)):  # 2 before 10
        name, *rest = path.split(".")
        if rest:
            number = whole_number(rest[0])  # of a block
            key = rest[0] if number is None else number
            found[name][key] = (*found[name].get(key, ()), passed[path])
        else:
            found[name] = passed[path]
    return found


def handed_on(
    returned: tuple[Any, ...], arguments: Mapping[str, Any], passes: Mapping[str, int]
) -> dict[str, Tensor]:
    """What a block hands on that was given ``arguments`` and returned ``returned``.

    It is laid out as on disk, so that the next block computes the same of it after a restart.
    """
    found: dict[str, Tensor] = {}
    for name, place in passes.items():
        if not place:
            for key, tensors in arguments[name].items():
                found |= {f"{name}.{key}.{number}": t for number, t in enumerate(tensors)}
        elif returned[place] is not None:
            found[name] = returned[place]
    return {path: tensor.contiguous() for path, tensor in found.items()}
