"""Write a native checkpoint in another loader's format, shard by shard; nothing is quantized anew
in silence.

Everything that can be refused is refused from config.json alone, before any work. Then each linear
is converted and read back as its loader would: the relative distance of the two weights is
recorded, 0 where they are equal. A killed export continues where it was when it is run again.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckFailed, NoSpace, QtoolError
from qtool.exchange import targets
from qtool.exchange.exportable import exported_formats
from qtool.exchange.target import Target, as_dtype, native_activations
from qtool.format import LinearFormat
from qtool.io.output import Output
from qtool.io.safetensors import write_json
from qtool.io.source import Checkpoint
from qtool.models import Heads, family_of
from qtool.pipeline.job import native_format
from qtool.pipeline.verify import linear_shape, load_linear
from qtool.runtime.packed_kv import NEUTRAL, attention_name

#: what the record of a shard calls the distances
ERRORS = "relative weight errors"
KV_SCALES = ("k_scale", "v_scale")


@dataclass
class Exported:
    """What an export wrote, and what it changed.

    Attributes:
        errors: relative Frobenius distance between the weight in the new file and ours, by linear.
        notes: what else differs from the native model, a sentence each.
        nbytes: of the native checkpoint's tensors, and of the new one's.
    """

    directory: Path
    format: str
    errors: dict[str, float]
    notes: list[str]
    nbytes: tuple[int, int]

    def __str__(self) -> str:
        exact = [name for name, error in self.errors.items() if error == 0]
        lines = [
            str(self.directory),
            f"{self.format}: {len(exact)} of {len(self.errors)} linears exact",
        ]
        if len(exact) < len(self.errors):
            worst = max(self.errors, key=self.errors.__getitem__)
            lines[-1] += f"; largest relative error of a weight {self.errors[worst]:.2e} ({worst})"
        before, after = (size / 1e6 for size in self.nbytes)
        lines[-1] += f"; {after:.1f} MB, {after / before:.2f} times the native checkpoint"
        return "\n".join([*lines, *self.notes])


def export(directory: Path, name: str, out: Path, *, tensor_parallel: int = 1) -> Exported:
    """Export the native checkpoint in ``directory`` to ``out`` in format ``name``.

    Args:
        tensor_parallel: GPUs that every linear will be split over; what cannot be split is refused.

    Raises:
        QtoolError: an unknown format, or a linear the format cannot express (before any work).
        CheckFailed: a scale that the format's dtype cannot hold.
    """
    target, checkpoint = targets.get(name), Checkpoint(directory)
    kv = native_format(checkpoint.config).kv
    formats = exported_formats(
        target, native_format(checkpoint.config), checkpoint.config, tensor_parallel
    )
    # vLLM finds a cache's scales by this name alone; its Falcon stops at any other
    keeps_kv = attention_name(family_of(checkpoint.config["model_type"])) == "self_attn"
    work = _Export(checkpoint, target, formats, keeps_kv)
    notes = _notes(target, work.formats, kv, checkpoint.config, keeps_kv)
    shards = work.shards()
    output = Output(
        out, {"source model": checkpoint.fingerprint(), "format": name}, len(shards), resume=True
    )
    if not output.finished:
        facts = {"exported from": directory.name, "format": name, "notes": notes}
        try:
            with closing(output):
                _write(output, work, shards, kv if keeps_kv else None, facts)
        except NoSpace:
            raise
        except QtoolError:
            shutil.rmtree(output.partial)  # refused for its content: nothing to continue
            raise
    done = json.loads((out / "qtool.json").read_text())
    errors = {linear: error for shard in done["blocks"] for linear, error in shard[ERRORS].items()}
    nbytes = tuple(
        sum(entry.nbytes for entry in c.entries.values()) for c in (checkpoint, Checkpoint(out))
    )
    return Exported(out, name, errors, notes, (nbytes[0], nbytes[1]))


def _write(
    output: Output, work: "_Export", shards: list[list[str]], kv: str | None, facts: dict[str, Any]
) -> None:
    target, config = work.target, work.checkpoint.config
    for number, names in enumerate(shards, 1):
        if number not in output.records:
            work.errors = {}
            output.put(number, dict(work.specs(names)), work.tensors(names), {ERRORS: work.errors})
    quantization = target.quantization_config(work.every, kv)
    for file, content in target.config_files(quantization).items():
        write_json(output.partial / file, content)
    config = config | {"quantization_config": quantization}
    if quantization.get(
        "kv_cache_scheme"
    ):  # its loader asks for a number that OPT's configuration does not have
        config.setdefault(
            "num_key_value_heads", Heads.of(family_of(config["model_type"]).settings(config)).kv
        )
    facts = facts | {"blocks": [record["notes"] for _, record in sorted(output.records.items())]}
    if target.dtype is not None:
        config |= {"dtype": "float16"}
        config.pop("torch_dtype", None)
    output.finish(config, facts, work.checkpoint.side_files())


def _notes(
    target: Target,
    formats: Mapping[str, LinearFormat],
    kv: str | None,
    config: Mapping[str, Any],
    keeps_kv: bool,
) -> list[str]:
    """How the loader's arithmetic will differ from ours beyond the weights."""
    notes = []
    for kind in dict.fromkeys((f.scheme, native_activations(f)) for f in formats.values()):
        scheme, ours = kind
        if ours != (theirs := target.activations(scheme)):
            notes.append(f"activations of {scheme}: {ours} here, {theirs} there")
    if kv is not None:
        scales = torch.ones(1, 1, device="meta")
        kept = keeps_kv and kv == "kv8" and target.kv_tensors(scales, scales)
        notes.append(
            "KV cache: the calibrated kv8 maxima became one scale for all keys and one for all values of a block"
            if kept
            else f"KV cache: {kv} left out, the format has no place for it; set the cache's precision when serving"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    other = {f.scale_dtype for f in formats.values()} - {
        dtype,
        "float32",
    }  # an import keeps those it finds
    if target.dtype is None and dtype in ("float16", "bfloat16") and other:
        notes.append(
            f"scales: {', '.join(other)} in the file, which loaders round to the model's {dtype}"
        )
    if target.dtype is not None and dtype != "float16":
        notes.append(
            f"embedding, norms, biases and head: {dtype} here, float16 there, as the kernels want"
        )
    return notes


@dataclass
class _Export:
    """The conversion of one shard after the other; ``errors`` are those of the current one."""

    checkpoint: Checkpoint
    target: Target
    every: Mapping[str, LinearFormat | None]
    keeps_kv: bool
    errors: dict[str, float] = field(default_factory=dict)

    @cached_property
    def formats(self) -> dict[str, LinearFormat]:
        return {name: found for name, found in self.every.items() if found is not None}

    def shards(self) -> list[list[str]]:
        """Modules whose tensors the source keeps together: names of linears and of other tensors."""
        shards: dict[Path, dict[str, None]] = {}
        for name, entry in self.checkpoint.entries.items():
            module, _, part = name.rpartition(".")
            owner = module if module in self.formats and part != "bias" else name
            if part in NEUTRAL:
                continue  # kv4's: every target makes its own 4-bit cache
            if part in KV_SCALES:
                owner = f"{module}.{KV_SCALES[0]}"
            shards.setdefault(entry.path, {})[owner] = None
        return [list(names) for _, names in sorted(shards.items())]

    def specs(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a shard, on ``meta``."""
        for name in names:
            if name in self.formats:
                n, k = linear_shape(self.checkpoint, name)
                codes = torch.empty(
                    n, k, dtype=self.formats[name].scheme_object.code_dtype, device="meta"
                )
                yield from self._converted(name, codes, self.formats[name].parameters(n, k))
            elif name.endswith(KV_SCALES):
                yield from self._kv(name, "meta")
            else:
                entry = self.checkpoint.entry(name)
                yield (
                    name,
                    torch.empty(entry.shape, dtype=self.target.dtype or entry.dtype, device="meta"),
                )

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a shard, in the order of :meth:`specs`; notes each linear's error."""
        for name in names:
            if name in self.formats:
                yield from self._linear(name)
            elif name.endswith(KV_SCALES):
                yield from self._kv(name, "cpu")
            else:
                tensor = self.checkpoint.read(name)
                yield (
                    name,
                    as_dtype(tensor, self.target.dtype, name) if self.target.dtype else tensor,
                )

    @torch.no_grad()
    def _linear(self, name: str) -> Iterator[tuple[str, Tensor]]:
        linear_format = self.formats[name]
        linear = load_linear(self.checkpoint, name, linear_format, torch.device("cpu"))
        codes, params = linear.unpack()
        if linear.permutation is not None:
            params = params | {"permutation": linear.permutation}
        try:
            stored = dict(self._converted(name, codes, params))
        except CheckFailed as error:
            raise CheckFailed(f"{name}: {error}") from error
        parts = {part.removeprefix(name + "."): tensor for part, tensor in stored.items()}
        ours = linear.dequantize()
        theirs = self.target.weight(linear_format, parts, *codes.shape)
        norm = float(ours.norm().clamp(min=1e-30))
        self.errors[name] = float(theirs.sub_(ours).norm()) / norm
        yield from stored.items()

    def _converted(
        self, name: str, codes: Tensor, params: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for part, tensor in self.target.tensors(self.formats[name], codes, params).items():
            yield f"{name}.{part}", tensor

    def _kv(self, name: str, device: str) -> Iterator[tuple[str, Tensor]]:
        if not self.keeps_kv:
            return
        attention = name.rpartition(".")[0]
        names = [f"{attention}.{scale}" for scale in KV_SCALES]
        if device == "meta":
            scales = [torch.empty(self.checkpoint.entry(n).shape, device=device) for n in names]
        else:
            scales = [self.checkpoint.read(n) for n in names]
        for part, tensor in self.target.kv_tensors(*scales).items():
            yield f"{attention}.{part}", tensor
