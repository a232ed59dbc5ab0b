"""The main job: read a checkpoint block by block, transform, round, pack, write; resumable at any moment.

Two ways through a block. Without transforms and data each weight is streamed alone: read, rounded,
packed, written, forgotten. Otherwise the block is built, rewritten by the transforms, rounded, and
what was *written* is read back as the block that computes the next one's inputs - so that a resumed
run, which starts from the written blocks, sees the same numbers to the bit.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qtool
from qtool.calibration.block import Batch, Block, Rounded, SimulatedLinear, first_inputs
from qtool.calibration.rtn import round_to_nearest
from qtool.checkpoint.safetensors import read, read_header
from qtool.checkpoint.source import Checkpoint
from qtool.errors import QtoolError
from qtool.pipeline.job import Job
from qtool.pipeline.output import Output
from qtool.recipes import Recipe

#: rows of embedding and head that are in memory at a time
EMBEDDING_BYTES = 64 << 20

Progress = Callable[[int, int, Mapping[str, Any]], None]


@dataclass
class Calibration:
    """Token batches ``[B, S]`` to calibrate on and where they came from (provenance)."""

    tokens: Sequence[Tensor] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def quantize(
    source: Checkpoint,
    recipe: Recipe,
    out: Path,
    *,
    calibration: Calibration | None = None,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Quantize ``source`` by ``recipe`` into the directory ``out``.

    Args:
        calibration: token batches; needed if the recipe has a method that looks at activations.
        resume: continue an unfinished run of the same job.
        progress: called after each shard with (done, total, notes).

    Raises:
        QtoolError: anything wrong with the input; nothing that looks whole is left behind.
    """
    job = Job.of(source.config, recipe, source_dtype(source))
    check_source(source, job)
    calibration = calibration or Calibration()
    if job.needs_data and not calibration.tokens:
        raise QtoolError(f"recipe {recipe.scheme}/{recipe.variant} needs calibration data: pass --calib")
    run = _Run(source, job, out, calibration, torch.device(device), resume)
    if not run.output.finished:
        run.carry_out(progress or (lambda *_: None))
    return out


def source_dtype(source: Checkpoint) -> torch.dtype:
    """The dtype of the stored weights: the embedding's."""
    dtype = next(iter(source.entries.values())).dtype
    embeddings = [e.dtype for name, e in source.entries.items() if "embed" in name]
    return embeddings[0] if embeddings else dtype


def check_source(source: Checkpoint, job: Job) -> None:
    """Every tensor of the model is there with the declared shape and a float dtype, and no unknown one.

    Raises:
        QtoolError: naming the first tensor that is not as it must be.
    """
    expected = job.source_shapes()
    embedding, head = f"{job.family.embedding}.weight", f"{job.family.head}.weight"
    if job.tied and embedding not in source and head in source:
        source.entries[embedding] = source.entries.pop(head)  # one tensor, saved under its other name
    for name, shape in expected.items():
        entry = source.entry(name)
        if entry.shape != shape:
            raise QtoolError(f"{name}: shape {list(entry.shape)} found, {list(shape)} expected from config.json")
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise QtoolError(f"{name}: dtype {entry.dtype} found; a float16, bfloat16 or float32 weight is expected")
    for name in source.entries:
        ignored = name.endswith("rotary_emb.inv_freq") or (job.tied and name == f"{job.family.head}.weight")
        if name not in expected and not ignored:
            raise QtoolError(f"{name}: not a tensor of a {job.family.name} model; refusing to lose it")


class _Run:
    """One run: the state that blocks share."""

    def __init__(
        self, source: Checkpoint, job: Job, out: Path, calibration: Calibration, device: torch.device, resume: bool
    ) -> None:
        self.source, self.job, self.calibration, self.device = source, job, calibration, device
        self.specs = job.shards()
        self.output = Output(out, self._identity(), len(self.specs), resume=resume)
        if not self.output.finished:
            self._require_space()
        self.model: Any = None
        self.batches: list[Batch] = []
        self.started = time.time()

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed."""
        return {
            "source model": self.source.fingerprint(),
            "recipe": self.job.format.to_dict() | _methods(self.job.recipe),
            "calibration data": dict(self.calibration.facts),
            "qtool version": qtool.__version__,
        }

    def _require_space(self) -> None:
        need = sum(
            t.numel() * t.dtype.itemsize
            for shard, spec in enumerate(self.specs, 1)
            if shard not in self.output.records
            for t in spec.values()
        )
        free = shutil.disk_usage(self.output.partial).free
        if need > free:
            raise QtoolError(
                f"no space left: {self.output.partial} needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB free"
            )

    def carry_out(self, progress: Progress) -> None:
        if not self.job.is_plain:
            self._build_model()
        for shard, spec in enumerate(self.specs, 1):
            if shard not in self.output.records:
                self._make(shard, spec)
            if 1 < shard < len(self.specs) - 1 and self.batches:
                self._propagate(shard)
            progress(shard, len(self.specs), self.output.records[shard]["notes"])
        job = self.job
        config = job.config | {"quantization_config": job.format.to_dict()}
        if job.unties:
            config["tie_word_embeddings"] = False
        self.output.finish(config, self._provenance(), self.source.side_files())

    def _make(self, shard: int, spec: Mapping[str, Tensor]) -> None:
        notes: dict[str, Any] = {}
        if shard == 1:
            tensors = self._embedding()
        elif shard == len(self.specs):
            tensors = self._head(spec)
        elif self.job.is_plain:
            tensors = self._stream(shard - 2, spec)
        else:
            tensors = self._block(shard - 2, spec, notes)
        self.output.put(shard, spec, tensors, notes)

    # --- embedding and head -------------------------------------------------------------------

    def _rows(self, name: str) -> Iterator[Tensor]:
        """A matrix in pieces of rows."""
        shape = self.source.entry(name).shape
        step = max(1, EMBEDDING_BYTES // (shape[1] * self.job.dtype.itemsize))
        for start in range(0, shape[0], step):
            yield _finite(name, self.source.read(name, slice(start, start + step)))

    def _embedding(self) -> Iterator[tuple[str, Tensor]]:
        name = f"{self.job.family.embedding}.weight"
        for rows in self._rows(name):
            changed = rows
            for transform in self.job.transforms:
                changed = transform.embedding(changed)
            yield name, changed.to(self.job.dtype)

    def _head(self, spec: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        family, job = self.job.family, self.job
        norm_name, head_name = f"{family.final_norm}.weight", f"{family.head}.weight"
        norms = [_finite(norm_name, self.source.read(norm_name))]
        for transform in job.transforms:
            norms.append(transform.final_norm(norms[-1]))
        yield norm_name, norms[-1].to(job.dtype)
        if head_name not in spec:
            return
        for rows in self._rows(f"{family.embedding}.weight" if job.tied else head_name):
            changed = rows
            for transform, norm in zip(job.transforms, norms, strict=False):
                changed = transform.head(changed, norm)
            yield head_name, changed.to(job.dtype)

    # --- blocks, streamed weight by weight ----------------------------------------------------

    def _stream(self, block: int, spec: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        job = self.job
        formats = {name: job.format.of(job.full(block, name)) for name in job.linears(block)}
        for name, linear_format in formats.items():
            if linear_format:
                full = f"{job.full(block, name)}.weight"
                rounded = round_to_nearest(linear_format.scheme_object, _finite(full, self.source.read(full)))
                stored = linear_format.pack(rounded.codes, rounded.params)
                for part, tensor in stored.items():
                    yield f"{job.full(block, name)}.{part}", tensor
        for full in spec:
            if full in self.source:
                yield full, _finite(full, self.source.read(full)).to(job.dtype)

    # --- blocks, built and calibrated ---------------------------------------------------------

    def _build_model(self) -> None:
        """A skeleton of the model; with data, the inputs of block 0 (through the rewritten embedding)."""
        from transformers import AutoConfig

        from qtool.models.skeleton import fill, release, skeleton

        config = AutoConfig.from_pretrained(self.source.directory)
        self.model = skeleton(config)
        if self.calibration.tokens and self.job.needs_data:
            weight = torch.cat([rows.float() for _, rows in self._embedding()])
            embedding = self.model.get_submodule(self.job.family.embedding)
            fill(embedding, {"weight": weight}, torch.device("cpu"))
            self.batches = first_inputs(self.model, self.job.family, self.calibration.tokens)
            release(embedding)

    def _module(self, block: int, weights: Mapping[str, Tensor]) -> torch.nn.Module:
        """Block ``block`` of the skeleton with float32 ``weights`` (names within the block)."""
        from qtool.models.skeleton import fill

        module = self.model.get_submodule(self.job.family.blocks)[block]
        fill(module, {name: weight.float() for name, weight in weights.items()}, self.device)
        return module  # type: ignore[no-any-return]

    def _block(self, index: int, spec: Mapping[str, Tensor], notes: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        job = self.job
        names = list(job.family.block_shapes(job.namespace))
        weights = {n: _finite(job.full(index, n), self.source.read(job.full(index, n))) for n in names}
        formats = {n: f for n in job.linears(index) if (f := job.format.of(job.full(index, n)))}
        module = self._module(index, weights)
        schemes = {name: f.scheme_object for name, f in formats.items()}
        block = Block(index, module, job.family, self.model.config, schemes, notes=notes)
        for transform in job.transforms:
            transform.apply(block, self.batches)
        kept = {full: full.removeprefix(job.full(index, "")) for full in spec}
        parameters = dict(module.named_parameters())
        rest = {full: parameters[name].detach().to(job.dtype) for full, name in kept.items() if name in parameters}
        rounded = job.rounding.round(block, self.batches)
        for name, linear_format in formats.items():
            for part, tensor in self._packed(block, name, linear_format, rounded[name]).items():
                yield f"{job.full(index, name)}.{part}", tensor
        yield from rest.items()
        _empty(module)

    def _packed(self, block: Block, name: str, linear_format: Any, rounded: Rounded) -> dict[str, Tensor]:
        linear_format.scheme_object.check(rounded.codes, rounded.params)
        stored: dict[str, Tensor] = linear_format.pack(rounded.codes, rounded.params)
        if self.job.format.is_permuted(self.job.full(block.index, name)):
            stored["permutation"] = block.permutations[name].to(torch.int32)
        return stored

    def _propagate(self, shard: int) -> None:
        """Run the written block on every batch: its outputs are the next block's inputs."""
        index, job = shard - 2, self.job
        stored = {
            name.removeprefix(job.full(index, "")): read(entry)
            for name, entry in read_header(self.output.path(shard)).items()
        }
        shapes = job.family.block_shapes(job.namespace)
        weights = {n: stored[n] if n in stored else torch.zeros(shape) for n, shape in shapes.items()}
        module = self._module(index, weights)
        block = Block(index, module, job.family, self.model.config, {})
        for name, (n, k) in job.linears(index).items():
            if linear_format := job.format.of(job.full(index, name)):
                parts = {
                    p.removeprefix(f"{name}."): t.to(self.device) for p, t in stored.items() if p.startswith(f"{name}.")
                }
                rounded = Rounded(*linear_format.unpack(parts, n, k))
                block.schemes[name] = linear_format.scheme_object
                if "permutation" in parts:
                    block.permutations[name] = parts["permutation"].long()
                block.install(name, rounded)
        block.propagate(self.batches)
        _empty(module)

    # --- provenance ---------------------------------------------------------------------------

    def _provenance(self) -> dict[str, Any]:
        import transformers

        return {
            "format_version": self.job.format.version,
            "source": {"directory": self.source.directory.name, "fingerprint": self.source.fingerprint()},
            "recipe": _methods(self.job.recipe),
            "scheme": self.job.format.scheme,
            "calibration": dict(self.calibration.facts),
            "versions": {
                "qtool": qtool.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }


def _empty(module: torch.nn.Module) -> None:
    """Give the block's memory back: plain linears where it simulated quantized ones, all on ``meta``."""
    for name, child in list(module.named_modules()):
        if isinstance(child, SimulatedLinear):
            parent, _, attribute = name.rpartition(".")
            n, k = child.weight.shape
            plain = torch.nn.Linear(k, n, bias=child.bias is not None, device="meta")
            setattr(module.get_submodule(parent), attribute, plain)
    module.to("meta")


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise QtoolError(
            f"{name}: holds {int((~torch.isfinite(tensor)).sum())} NaN or Inf values; the checkpoint is damaged"
        )
    return tensor


def _methods(recipe: Recipe) -> dict[str, Any]:
    steps = (*recipe.transforms, recipe.rounding)
    return {"variant": recipe.variant, "methods": [{step.name: dict(step.options)} for step in steps]}


def fingerprint(tokens: Sequence[Tensor]) -> str:
    """sha256 of token ids, for provenance."""
    digest = hashlib.sha256(json.dumps([list(t.shape) for t in tokens]).encode())
    for ids in tokens:
        digest.update(ids.numpy().tobytes())
    return digest.hexdigest()
