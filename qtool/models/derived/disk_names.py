"""The names in published checkpoints of a recorded model's tensors, in all its blocks."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from qtool.models.derived.on_disk import disk_names
from qtool.models.derived.recorded_model import RecordedModel
from qtool.models.family import Family
from qtool.models.parts import RowsOf
from qtool.models.renaming import renamed


class DiskNames:
    """The names on disk of the tensors of all blocks.

    Attributes:
        names: names on disk by names in the model, if they differ.
        rows: for tensors that loaders make of rows of other tensors, those rows.
    """

    def __init__(self, model: RecordedModel) -> None:
        self.model, self.recorded = model, model.recorded
        names, rows = disk_names(model.model, set(self.recorded.like), self.recorded.blocks)
        self.names = {
            own: disk
            for first, disk_name in names.items()
            for own, disk in self._in_all_blocks(first, disk_name)
        }
        self.rows: dict[str, tuple[RowsOf, ...]] = {}
        for first, parts in rows.items():
            for part in parts:
                for own, disk in self._in_all_blocks(first, part.name):
                    before = self.rows.get(own, ())
                    self.rows[own] = (*before, replace(part, name=disk))

    def with_mixture(self, family: Family, block: int) -> Family:
        """``family`` of block ``block`` with its mixture under the name that it has on disk.

        It is renamed only if nothing but the prefix differs; :attr:`names` then lacks it.
        """
        if family.experts is None:
            return family
        prefix = f"{self.recorded.blocks}.{block}."
        own = family.experts.attribute
        module, stack = f"{prefix}{own}.", f"{prefix}{own}.experts"
        if not self.names.get(stack, "").endswith(".experts"):
            return family
        disk = self.names[stack].removeprefix(prefix).removesuffix(".experts")
        others = (
            tensor.removeprefix(module)
            for tensor in self.model.state
            if tensor.startswith(module) and not tensor.startswith(f"{stack}.")
        )
        if any(self.names.get(module + name) != f"{prefix}{disk}.{name}" for name in others):
            return family
        alike = (n for n, like in enumerate(self.recorded.like) if like == block)
        prefixes = tuple(f"{self.recorded.blocks}.{n}.{own}." for n in alike)
        self.names = {n: d for n, d in self.names.items() if not n.startswith(prefixes)}
        return _renamed(family, own, disk)

    def _in_all_blocks(self, own: str, disk: str) -> Iterator[tuple[str, str]]:
        """A name and the name on disk, for all blocks like the one that they belong to.

        The first number on disk counts blocks too, maybe from another one on (Inkling 2's queries).
        """
        prefix = f"{self.recorded.blocks}."
        if not own.startswith(prefix):
            yield own, disk
            return
        first = int(own[len(prefix) :].partition(".")[0])
        for number, like in enumerate(self.recorded.like):
            if like == first:
                yield _shifted(own, number - first), _shifted(disk, number - first)


def _shifted(name: str, blocks: int) -> str:
    """``name`` with its first number raised by ``blocks``."""
    return re.sub(r"(?<=\.)\d+(?![^.])", lambda n: str(int(n[0]) + blocks), name, count=1)


def _renamed(family: Family, own: str, disk: str) -> Family:
    """``family`` with the module ``own`` of a block called ``disk``."""
    named = partial(renamed, names={own: disk})
    return replace(
        family,
        groups=tuple(group.renamed(named) for group in family.groups),
        experts=family.experts and replace(family.experts, moe=disk),
        tensors={named(n): shape for n, shape in family.tensors.items()},
        biased=tuple(map(named, family.biased)),
        fused={
            named(n): {named(p): rows for p, rows in parts.items()}
            for n, parts in family.fused.items()
        },
        readers={n: tuple(map(named, names)) for n, names in family.readers.items()},
        unquantized={named(n): reason for n, reason in family.unquantized.items()},
    )
