"""The two ways through a block.

Streamed: without transforms and data each weight is read, rounded, packed, written and forgotten by
itself. Built: the block is a module, rewritten by the transforms and rounded; what was *written* is
then read back as the block that computes the next one's inputs - so a resumed run, which starts
from the written blocks, sees the same numbers to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.block import Batch, Block, Rounded, SimulatedLinear, first_inputs
from qtool.calibration.kv import kv_scales, quantized_kv
from qtool.calibration.rtn import round_to_nearest
from qtool.checkpoint.safetensors import read, read_header
from qtool.checkpoint.source import Checkpoint
from qtool.pipeline.edges import finite, table
from qtool.pipeline.job import Job


class StreamedBlocks:
    """Blocks whose weights are rounded one by one."""

    def __init__(self, source: Checkpoint, job: Job) -> None:
        self.source, self.job = source, job

    def tensors(self, index: int, spec: Mapping[str, Tensor], notes: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """``(full name, tensor)`` of everything block ``index`` stores, in the order of ``spec``."""
        job = self.job
        for name in job.linears(index):
            full = job.full(index, name)
            if linear_format := job.format.of(full):
                weight = finite(f"{full}.weight", self.source.read(f"{full}.weight"))
                rounded = round_to_nearest(linear_format.scheme_object, weight)
                notes.setdefault("rtn", {})[name] = {"weight_error": rounded.weight_error}
                for part, tensor in linear_format.pack(rounded.codes, rounded.params).items():
                    yield f"{full}.{part}", tensor
        for full in spec:
            if full in self.source:
                yield full, finite(full, self.source.read(full)).to(job.dtype)

    def written(self, index: int, path: Path) -> None:
        """Nothing depends on what was written."""


class BuiltBlocks:
    """Blocks that are modules on a device, with the calibration batches flowing through them.

    Args:
        tokens: calibration token batches ``[B, S]``; empty if no method looks at activations.
    """

    def __init__(self, source: Checkpoint, job: Job, tokens: Sequence[Tensor], device: torch.device) -> None:
        from transformers import AutoConfig

        from qtool.models.skeleton import fill, release, skeleton

        self.source, self.job, self.device = source, job, device
        self.model = skeleton(AutoConfig.from_pretrained(source.directory))
        self.batches: list[Batch] = []
        if tokens and job.needs_data:
            for name in job.family.tables:
                rows = torch.cat([rows.float() for _, rows in table(source, job, name)])
                fill(self.model.get_submodule(name), {"weight": rows}, torch.device("cpu"))
            self.batches = first_inputs(self.model, job.family, tokens)
            for name in job.family.tables:
                release(self.model.get_submodule(name))

    def tensors(self, index: int, spec: Mapping[str, Tensor], notes: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Transform and round block ``index``; yields what it stores and fills ``notes``."""
        job, prefix = self.job, self.job.full(index, "")
        names = job.block_shapes(index)
        module = self._module(index, {n: finite(prefix + n, self.source.read(prefix + n)) for n in names})
        formats = {n: f for n in job.linears(index) if (f := job.format.of(prefix + n))}
        schemes = {name: linear_format.scheme_object for name, linear_format in formats.items()}
        block = Block(index, module, job.block_family(index), self.model.config, schemes, notes=notes)
        for transform in job.transforms:
            transform.apply(block, self.batches)
        rest = {prefix + n: p.detach().to(job.dtype) for n, p in module.named_parameters() if prefix + n in spec}
        scales = kv_scales(block, job.format.kv, self.batches)
        with quantized_kv(block, job.format.kv, scales):
            rounded = job.rounding.round(block, self.batches)
        for name, linear_format in formats.items():
            linear_format.scheme_object.check(rounded[name].codes, rounded[name].params)
            for part, tensor in linear_format.pack(rounded[name].codes, rounded[name].params).items():
                yield f"{prefix}{name}.{part}", tensor
            if job.format.is_permuted(prefix + name):
                order = block.permutations.get(name, torch.arange(block.weight(name).shape[1]))
                yield f"{prefix}{name}.permutation", order.to(torch.int32)
        yield from ((full, rest[full]) for full in spec if full in rest)
        yield from ((prefix + name, scale) for name, scale in scales.items())
        _empty(module)

    def written(self, index: int, path: Path) -> None:
        """Run the block in ``path`` on every batch: its outputs are the next block's inputs."""
        if not self.batches or index == self.job.blocks - 1:
            return
        job, prefix = self.job, self.job.full(index, "")
        stored = {name.removeprefix(prefix): read(entry) for name, entry in read_header(path).items()}
        shapes = job.block_shapes(index)
        module = self._module(index, {n: stored[n] if n in stored else torch.zeros(s) for n, s in shapes.items()})
        block = Block(index, module, job.block_family(index), self.model.config, {})
        for name, (n, k) in job.linears(index).items():
            if linear_format := job.format.of(prefix + name):
                parts = {p.removeprefix(f"{name}."): t for p, t in stored.items() if p.startswith(f"{name}.")}
                on_device = {part: tensor.to(self.device) for part, tensor in parts.items()}
                block.schemes[name] = linear_format.scheme_object
                if "permutation" in parts:
                    block.permutations[name] = on_device["permutation"].long()
                block.install(name, Rounded(*linear_format.unpack(on_device, n, k)))
        with quantized_kv(block, job.format.kv, stored):
            block.propagate(self.batches)
        _empty(module)

    def _module(self, index: int, weights: Mapping[str, Tensor]) -> torch.nn.Module:
        """Block ``index`` of the skeleton with float32 ``weights`` (names within the block)."""
        from qtool.models.skeleton import fill

        module: torch.nn.Module = self.model.get_submodule(self.job.family.blocks)[index]  # type: ignore[index]
        fill(module, {name: weight.float() for name, weight in weights.items()}, self.device)
        return module


def _empty(module: torch.nn.Module) -> None:
    """Give the block's memory back: plain linears where it simulated quantized ones, all on ``meta``."""
    for name, child in list(module.named_modules()):
        if isinstance(child, SimulatedLinear):
            parent, _, attribute = name.rpartition(".")
            n, k = child.weight.shape
            plain = torch.nn.Linear(k, n, bias=child.bias is not None, device="meta")
            setattr(module.get_submodule(parent), attribute, plain)
    module.to("meta")
