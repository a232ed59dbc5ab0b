"""Import: a GPTQ, AWQ, AutoRound or compressed-tensors W4A16 checkpoint becomes a native one, code
for code.

Nothing is quantized: codes and scales are moved into one of our layouts. That needs our grid, ``(c
- 8) * s`` in groups of consecutive inputs; anything else is refused, before any work, with the
reason. The result is a native w4a16 checkpoint: it verifies, runs, and can be exported to every
format that takes w4a16. A killed import continues where it was when it is run again.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import qtool
from qtool import recipes
from qtool.errors import CheckFailed, NoSpace, QtoolError
from qtool.exchange.foreign import SourceFormat, describe, is_quantized, require_consecutive
from qtool.exchange.target import ANY, size_text
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.io.output import Output
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.pipeline.job import Job
from qtool.pipeline.quantize import check_source
from qtool.pipeline.run_record import RunRecord
from qtool.pipeline.streaming.embedding_and_head import finite
from qtool.pipeline.tile_fit import ROW_MAJOR

SCHEME = "w4a16"


def repack(source: Checkpoint, out: Path, layout: str | None = None) -> Path:
    """Repack ``source`` into the native directory ``out``.

    Args:
        layout: of every linear; by default the one that quantizing chooses, row-major where its
            tile does not fit.

    Raises:
        QtoolError: not a format that can be read, not our grid, or not the layout's tile (before
            any work).
        CheckFailed: a scale that is not finite or is zero.
    """
    foreign = describe(source.config)
    linears = _linears(source, foreign)
    plain = _plain(source, foreign, linears)
    formats = {
        name: _format(source, foreign, name, shape, layout) for name, shape in linears.items()
    }
    work = _Import(source, foreign, linears, formats, plain)
    checkpoint_format = CheckpointFormat(SCHEME, _rules(source, work.formats))
    shards = work.shards()
    identity = {
        "source model": source.fingerprint(),
        "import": {
            "format": foreign.name,
            "layouts": dict(Counter(made.layout for made in formats.values())),
        },
        "qtool version": qtool.__version__,
    }
    output = Output(out, identity, len(shards), resume=True)
    if output.finished:
        return out
    with closing(output):
        record = RunRecord(out, output.identity, torch.device("cpu"), continued=output.continued)
        try:
            for number, names in enumerate(shards, 1):
                if number not in output.records:
                    output.put(number, dict(work.specs(names)), work.tensors(names), {})
                    record.shard_written()
        except NoSpace:
            raise
        except QtoolError:
            shutil.rmtree(output.partial)  # refused for its content: nothing to continue
            record.path.unlink()
            raise
        _finish(output, source, foreign, checkpoint_format)
    return out


def _finish(
    output: Output, source: Checkpoint, foreign: SourceFormat, checkpoint_format: CheckpointFormat
) -> None:
    config = source.config | {"quantization_config": checkpoint_format.to_dict()}
    provenance = {
        "format_version": checkpoint_format.version,
        "source": {"directory": source.directory.name, "fingerprint": source.fingerprint()},
        "scheme": SCHEME,
        "imported from": {"format": foreign.name, "config": source.config["quantization_config"]},
        "versions": {"qtool": qtool.__version__},
    }
    output.finish(config, provenance, source.side_files())


def _linears(source: Checkpoint, foreign: SourceFormat) -> dict[str, tuple[int, int]]:
    """Every quantized linear and its ``(N, K)``."""
    model = family_of(source.config["model_type"])
    namespace, linears = model.settings(source.config), {}
    model.require_sizes(namespace)
    quantized = {name for tensor in source.entries if (name := is_quantized(foreign, tensor))}
    for block in range(int(source.config["num_hidden_layers"])):
        family = model.at(namespace, block)
        known = set(family.linears())
        for part, shape in family.block_shapes(namespace).items():
            full = f"{family.blocks}.{block}.{part}"
            name = full.removesuffix(".weight")
            if name in quantized and part.removesuffix(".weight") in known:
                linears[name] = (shape[0], shape[1])
    if strange := sorted(quantized - linears.keys()):
        raise QtoolError(
            f"{strange[0]} is quantized, but is not a linear of a {model.name} block; qtool keeps it plain"
        )
    if not linears:
        raise QtoolError(
            f"{source.directory}: says it is {foreign.name}, but holds no {foreign.weight}"
        )
    return linears


def _plain(
    source: Checkpoint, foreign: SourceFormat, linears: Mapping[str, tuple[int, int]]
) -> set[str]:
    """The names of all tensors but the quantized linears'; all of them are there, and nothing else
    that matters.

    GPTQ's tools wrote biases of zeros for linears that have none: those are left out.

    Raises:
        QtoolError: naming a tensor that is missing, of another shape or dtype, or unknown.
    """
    model = {key: value for key, value in source.config.items() if key != "quantization_config"}
    job = Job.of(model, recipes.parse({"layers": [{"match": ".*", "scheme": None}]}, SCHEME))
    shapes, parts = check_source(source, job, linears), {part.rstrip("?") for part in foreign.parts}
    for name in source.entries:
        linear, _, part = name.rpartition(".")
        strange = linear in linears and part not in parts and name not in shapes
        if strange and (part != "bias" or source.read(name).any()):
            raise QtoolError(
                f"{name}: not a tensor of a {job.family.name} model; refusing to lose it"
            )
    return set(shapes)


def _format(
    source: Checkpoint, foreign: SourceFormat, name: str, shape: tuple[int, int], layout: str | None
) -> LinearFormat:
    """The native format of a linear, from its scales, zero points and group index.

    Raises:
        QtoolError: a grid that is not ours, or a shape that ``layout`` cannot hold.
    """
    n, k = shape
    codes = source.entry(f"{name}.{foreign.weight}")
    if codes.dtype != torch.int32 or codes.nbytes * 2 != n * k:
        raise QtoolError(
            f"{name}.{foreign.weight}: {codes.dtype} {list(codes.shape)} found; int32 words of {n} x {k} codes expected"
        )
    scales = source.entry(f"{name}.{foreign.scales}")
    rows, columns = scales.shape if len(scales.shape) == 2 else (0, 0)
    groups, outputs = (rows, columns) if foreign.transposed else (columns, rows)
    if outputs != n or not groups or k % groups:
        raise QtoolError(
            f"{name}.{foreign.scales}: shape {list(scales.shape)} is not that of a weight [{n}, {k}]"
        )
    size = None if groups == 1 else k // groups
    if size not in ANY:
        raise QtoolError(
            f"{name}: group size {size} is not one of w4a16's: {', '.join(map(size_text, ANY))}"
        )
    if (
        index := next((i for i in ("g_idx", "weight_g_idx") if f"{name}.{i}" in source), None)
    ) is not None:
        require_consecutive(name, source.read(f"{name}.{index}"), groups)
    if f"{name}.{foreign.zeros}" in source:
        zero = foreign.read_zeros(source.read(f"{name}.{foreign.zeros}"), n, groups)
        if bad := int((zero != 8).sum()):
            raise QtoolError(
                f"{name}: {bad} of {zero.numel()} zero points are not 8; {SCHEME} is symmetric, and no scheme of "
                "qtool has zero points under 16-bit activations: quantize the original model"
            )
    dtype = str(scales.dtype).removeprefix("torch.")
    if layout is not None:
        return _in_layout(name, size, layout, dtype, n, k)
    try:
        return _in_layout(name, size, recipes.load(SCHEME).layers[0].layout, dtype, n, k)
    except QtoolError:
        return _in_layout(name, size, ROW_MAJOR[4], dtype, n, k)


def _in_layout(
    name: str, size: int | None, layout: str | None, dtype: str, n: int, k: int
) -> LinearFormat:
    made = LinearFormat(SCHEME, size, layout or ROW_MAJOR[4], dtype)
    made.require(name, n, k)
    return made


def _rules(source: Checkpoint, formats: Mapping[str, LinearFormat]) -> tuple[Rule, ...]:
    """One rule if all linears are alike; else the plain ones and each format by name."""
    family = family_of(source.config["model_type"])
    settings, blocks = (
        family.settings(source.config),
        range(int(source.config["num_hidden_layers"])),
    )
    every = [
        f"{family.blocks}.{block}.{x}"
        for block in blocks
        for x in family.at(settings, block).linears()
    ]
    kinds: dict[LinearFormat | None, list[str]] = {}
    for name in every:
        kinds.setdefault(formats.get(name), []).append(name)
    most = max(kinds, key=lambda kind: len(kinds[kind]))
    named = [
        Rule(f"^({'|'.join(map(re.escape, names))})$", kind)
        for kind, names in kinds.items()
        if kind != most
    ]
    return (*named, Rule(".*", most))


@dataclass
class _Import:
    source: Checkpoint
    foreign: SourceFormat
    linears: Mapping[str, tuple[int, int]]
    formats: Mapping[str, LinearFormat]
    plain: set[str]

    def shards(self) -> list[list[str]]:
        """Names of linears and of other tensors, by the source's files."""
        shards: dict[Path, dict[str, None]] = {}
        placed: set[str] = set()
        parts = {part.rstrip("?") for part in self.foreign.parts}
        for name, entry in self.source.entries.items():
            module, _, part = name.rpartition(".")
            owner = module if module in self.formats and part in parts else name
            if owner not in placed and (owner in self.formats or owner in self.plain):
                placed.add(owner)
                shards.setdefault(entry.path, {})[owner] = None
        return [list(names) for _, names in sorted(shards.items())]

    def specs(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a shard, on ``meta``."""
        for name in names:
            if name in self.formats:
                for part, tensor in self.formats[name].tensors(*self.linears[name]).items():
                    yield f"{name}.{part}", tensor
            else:
                entry = self.source.entry(name)
                yield name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a shard, in the order of :meth:`specs`."""
        for name in names:
            if name not in self.formats:
                yield name, finite(name, self.source.read(name))
                continue
            (n, k), linear_format = self.linears[name], self.formats[name]
            stored = {}
            for part in self.foreign.parts:
                full = f"{name}.{part.rstrip('?')}"
                if not part.endswith("?") or full in self.source:
                    stored[part.rstrip("?")] = self.source.read(full)
            affine = self.foreign.read(stored, n, k)
            params = {"scale": affine.scale.contiguous()}
            try:
                linear_format.scheme_object.check(affine.codes, params)
            except CheckFailed as error:
                raise CheckFailed(f"{name}: {error}") from error
            for part, tensor in linear_format.pack(affine.codes, params).items():
                yield f"{name}.{part}", tensor
