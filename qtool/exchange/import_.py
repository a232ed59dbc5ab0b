"""Makes a native checkpoint from a 4-bit GPTQ, AWQ, AutoRound or compressed-tensors checkpoint.

Nothing is quantized: codes, scales and zero points are moved into one of qtool's layouts. A grid
that no scheme holds is refused, before any work, with the reason:

    w = (c - 8) * s, groups of input channels or the channel   w4a16
    w = (c - z) * s, one group a channel                       w4a8-qoq, so 8-bit activations
    groups of channels that are not neighbours (act order)     the same, its input permuted

QoQ in groups cannot hold the zero points of other tools, because its group scales are integer
multiples (up to 16) of the channel's scale. The result verifies, runs, and can be exported to each
format of its scheme, unless it permutes inputs in groups.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import qtool
from qtool import recipes
from qtool.errors import CheckFailed, QtoolError
from qtool.exchange.convert import Conversion, Json, Metadata, Tensors, convert
from qtool.exchange.import_format import (
    INSTEAD,
    SYMMETRIC,
    ZERO_POINTS,
    Grid,
    ImportFormat,
    grid_of,
)
from qtool.exchange.import_formats import import_format_of
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.io.check_source import check_source, is_left_out, require_tied
from qtool.io.integrity import recorded_hashes
from qtool.io.source import Checkpoint
from qtool.io.source_names import adopt
from qtool.layouts.row_major import ROW_MAJOR
from qtool.models import family_of
from qtool.models.architecture import Architecture
from qtool.models.family_checks import require_sizes
from qtool.models.torch_defaults import torch_defaults
from qtool.progress import Progress
from qtool.runtime.dispatch import not_served, serving_notes
from qtool.runtime.packed_linears import PackedLinears
from qtool.schemes import Params


@dataclass(frozen=True)
class Imported:
    """A native checkpoint made from a foreign one, and a sentence for each difference."""

    directory: Path
    notes: list[str]


@torch_defaults()
def import_checkpoint(
    source: Checkpoint, out: Path, layout: str | None = None, *, progress: Progress | None = None
) -> Imported:
    """Make the native checkpoint ``out`` from the quantized ``source``, with its codes unchanged.

    Args:
        layout: the layout of every linear; by default the one that quantizing chooses, or row-major
            if its tile does not fit.
        progress: called after each shard with (done, total, notes).

    Raises:
        QtoolError: the format cannot be read, no scheme has the grid, or the layout's tile does not
            fit (before any work).
        CheckFailed: a damaged file, or a scale that no scheme allows.
    """
    if source.published:
        raise QtoolError(f"{source.notes[0]}: nothing to import, pass the model to qtool quantize")
    work = Import(source, layout)
    convert(work, out, progress)
    return Imported(out, work.notes + serving_notes(PackedLinears(source.config, work.native)))


class Import(Conversion):
    """A foreign checkpoint on its way into the native format.

    It is made from headers, zero points and group indices alone; the conversion reads the codes.

    Args:
        source: the foreign checkpoint.
        layout: as in :func:`import_checkpoint`.

    Attributes:
        foreign: the format of the foreign checkpoint.
        native: the format of the native checkpoint.
        notes: a sentence for each difference.

    Raises:
        QtoolError: as :func:`import_checkpoint` does before any work.
    """

    def __init__(self, source: Checkpoint, layout: str | None) -> None:
        self.source, self.foreign = source, import_format_of(source.config)
        model = Architecture(source.config, family_of(source.config))
        require_sizes(model.family, model.namespace)
        _name_experts(source, model)
        adopt(source, model)
        shapes = _linears(source, self.foreign, model)
        self.plain = _plain(source, self.foreign, model, shapes)
        self.grids = _as_others(
            {name: grid_of(source, self.foreign, name, shape) for name, shape in shapes.items()}
        )
        zero_points = any(grid.zero_points for grid in self.grids.values())
        self.formats = {
            name: _format(name, grid, zero_points, layout) for name, grid in self.grids.items()
        }
        schemes = Counter(made.scheme for made in self.formats.values())
        self.native = CheckpointFormat(
            schemes.most_common(1)[0][0],
            _rules(model, self.formats),
            permuted=_permuted(model, self.grids),
            tower_names=tuple(source.tower_names.items()),
        )
        self.notes: list[str] = []
        if ZERO_POINTS in schemes:
            self.notes.append(
                f"{self.foreign.name} has zero points, which {ZERO_POINTS} holds: weights are the "
                "same, activations have 16 bits there and 8 here"
            )
        self.identity = {
            "source model": source.fingerprint(recorded_hashes(source.directory)),
            # a damaged file's zero points and group index decide how others' linears are stored
            "import": {"format": self.foreign.name, "native": self.native.to_dict()},
            "qtool version": qtool.__version__,
        }

    def owner(self, name: str) -> str | None:
        module, _, part = name.rpartition(".")
        if module in self.formats and part in self.foreign.parts:
            return module
        return name if name in self.plain else None

    def specs(self, owner: str) -> Tensors:
        if owner not in self.formats:
            yield from super().specs(owner)
            return
        grid = self.grids[owner]
        for part, tensor in self.formats[owner].tensors(grid.n, grid.k).items():
            yield f"{owner}.{part}", tensor
        if self.native.is_permuted(owner):
            order = torch.empty(grid.k, dtype=torch.int32, device="meta")
            yield f"{owner}.permutation", order

    def tensors(self, owner: str, notes: Json) -> Tensors:
        if owner not in self.formats:
            yield from super().tensors(owner, notes)
            return
        grid, made = self.grids[owner], self.formats[owner]
        codes, params = self._read(owner)
        if grid.order is not None:
            codes = codes[:, grid.order]
        try:
            made.scheme_object.check(codes, params)
        except CheckFailed as error:
            raise CheckFailed(f"{owner}: {error}; {INSTEAD}") from error
        for part, tensor in made.pack(codes, params).items():
            yield f"{owner}.{part}", tensor
        if self.native.is_permuted(owner):
            order = torch.arange(grid.k) if grid.order is None else grid.order
            yield f"{owner}.permutation", order.to(torch.int32)

    def _read(self, name: str) -> tuple[Tensor, Params]:
        """The codes ``[N, K]`` of a linear, in the model's order, and its scheme's parameters."""
        grid, foreign = self.grids[name], self.foreign
        stored = {
            part: self.source.read(f"{name}.{part}")
            for part in (foreign.weight, foreign.scales, foreign.zeros)
            if f"{name}.{part}" in self.source
        }
        affine = foreign.read(stored, grid.n, grid.k)
        if self.formats[name].scheme == SYMMETRIC:
            return affine.codes, {"scale": affine.scale.contiguous()}
        zero = torch.full((grid.n, 1), 8, dtype=torch.uint8) if affine.zero is None else affine.zero
        return affine.codes, {
            "s1": affine.scale[:, 0].contiguous(),
            "zero": zero[:, 0].contiguous(),
        }

    def metadata(self) -> Metadata:
        config = self.native.in_config(self.source.config)
        foreign = self.source.config["quantization_config"]
        provenance = {
            "format_version": self.native.version,
            "source": self.source.identity(),
            "scheme": self.native.scheme,
            **not_served(PackedLinears(self.source.config, self.native)),
            "imported from": {"format": self.foreign.name, "config": foreign},
            "versions": {"qtool": qtool.__version__},
        }
        return Metadata(config, provenance, {})


def _name_experts(source: Checkpoint, model: Architecture) -> None:
    """Give experts their names on disk where tools that use transformers 5 wrote its own names.

    A Mixtral of GPTQModel has ``mlp.experts.0.gate_proj`` for ``block_sparse_moe.experts.0.w1``;
    those of AutoRound and llm-compressor have ``block_sparse_moe.experts.0.gate_proj``.
    """
    if (names := model.family.experts) is None:
        return
    linears = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}
    found = re.compile(rf"(.*\.)(?:{names.attribute}|{names.moe})\.experts\.(\d+)\.(\w+)\.(\w+)")
    for match in filter(None, map(found.fullmatch, list(source.entries))):
        block, expert, linear, part = match.groups()
        if linears.get(linear):
            name = f"{block}{names.moe}.experts.{expert}.{linears[linear]}.{part}"
            source.entries[name] = source.entries.pop(match.string)
            if (router := f"{block}{names.attribute}.gate.weight") in source.entries:
                source.entries[f"{block}{names.moe}.gate.weight"] = source.entries.pop(router)


def _linears(
    source: Checkpoint, foreign: ImportFormat, model: Architecture
) -> dict[str, tuple[int, int]]:
    """The quantized linears and their ``(N, K)``."""
    linears = {}
    ending = f".{foreign.weight}"
    quantized = {name.removesuffix(ending) for name in source.entries if name.endswith(ending)}
    for block in range(model.blocks):
        known = set(model.block_family(block).linears())
        for tensor, shape in model.block_shapes(block).items():
            linear = tensor.removesuffix(".weight")
            if linear in known and (name := model.full(block, linear)) in quantized:
                linears[name] = (shape[0], shape[1])
    if strange := sorted(quantized - linears.keys()):
        raise QtoolError(
            f"{strange[0]} is quantized, but is not a linear of {model.family.name} blocks; "
            f"qtool keeps it plain; {INSTEAD}"
        )
    if not linears:
        raise QtoolError(
            f"{source.directory}: config.json says that it is {foreign.name}, and the files hold no"
            f" {foreign.weight}: where its weights are in 16 bits take quantization_config out of"
            " config.json and use qtool quantize"
        )
    return linears


def _plain(
    source: Checkpoint,
    foreign: ImportFormat,
    model: Architecture,
    linears: Mapping[str, tuple[int, int]],
) -> set[str]:
    """The names of all tensors outside quantized linears, after a check that none is lost.

    GPTQ's tools wrote biases of zeros for linears that have none; such biases are left out. What
    transformers' class leaves out is among the names.

    Raises:
        QtoolError: names a tensor that is missing, unknown, or of another shape or dtype.
    """
    instead = f"refusing to lose it; {INSTEAD}"
    shapes = check_source(source, model, linears, instead=instead)
    require_tied(source, model)
    for name in source.entries:
        linear, _, part = name.rpartition(".")
        strange = linear in linears and part not in foreign.parts and name not in shapes
        if strange and (part != "bias" or source.read(name).any()):
            raise QtoolError(f"{name}: not a tensor of {model.family.name} models; {instead}")
    return shapes.keys() | {name for name in source.entries if is_left_out(name, model)}


def _as_others(grids: Mapping[str, Grid]) -> dict[str, Grid]:
    """The ``grids``, where a linear of one group of K channels has group size K if others have it.

    A file has one scale a channel there, as for the whole channel, and an export to a format with
    one group size for the whole model needs the size. Zero points are those of whole channels.
    """
    sizes = {grid.group_size for grid in grids.values()}
    zero_points = any(grid.zero_points for grid in grids.values())

    def one_group(grid: Grid) -> bool:
        return grid.group_size is None and grid.k in sizes and not zero_points

    return {n: replace(g, group_size=g.k) if one_group(g) else g for n, g in grids.items()}


def _permuted(model: Architecture, grids: Mapping[str, Grid]) -> tuple[str, ...]:
    """Names within a block of the linears that store an input permutation.

    They are the linears whose groups are scattered in some block, and all linears that read the
    same input, because serving stacks run these as one linear.
    """
    permuted: dict[str, None] = {}
    for name in (name for name, grid in grids.items() if grid.order is not None):
        block, linear = model.family.place(name)
        assert block is not None
        permuted |= dict.fromkeys(model.block_family(block).group_of(linear).linears)
    return tuple(permuted)


def _format(name: str, grid: Grid, zero_points: bool, layout: str | None) -> LinearFormat:
    """The native format of a linear.

    A linear with one scale a channel becomes QoQ if ``zero_points``: if any linear has them.

    Raises:
        QtoolError: ``layout`` cannot hold its shape.
    """
    scheme = ZERO_POINTS if zero_points and grid.group_size is None else SYMMETRIC
    made = LinearFormat(scheme, grid.group_size, layout or _default_layout(scheme), grid.scales)
    try:
        made.require(name, grid.n, grid.k)
    except QtoolError:
        if layout is not None:
            raise
        made = LinearFormat(scheme, grid.group_size, ROW_MAJOR.name, grid.scales)
        made.require(name, grid.n, grid.k)
    return made


@cache
def _default_layout(scheme: str) -> str:
    """The layout that quantizing to ``scheme`` chooses; its recipe is read once."""
    return recipes.load(scheme).layers[0].layout or ROW_MAJOR.name


def _rules(model: Architecture, formats: Mapping[str, LinearFormat]) -> tuple[Rule, ...]:
    """One rule if all linears have one format; else rules by name for the rarer formats."""
    kinds: dict[LinearFormat | None, list[str]] = {}
    for name in model.family.all_linears(model.namespace):
        kinds.setdefault(formats.get(name), []).append(name)
    most = max(kinds, key=lambda kind: len(kinds[kind]))
    named = [
        Rule(f"^({'|'.join(map(re.escape, names))})$", kind)
        for kind, names in kinds.items()
        if kind != most
    ]
    return (*named, Rule(".*", most))
