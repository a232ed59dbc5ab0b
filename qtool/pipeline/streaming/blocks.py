"""The two ways through a block.

Streamed: without transforms and data each weight is read, rounded, packed, written and forgotten by
itself. Built: the block is a module, rewritten by the transforms and rounded; its *packed* tensors
are then unpacked as the block that computes the next one's inputs - so a resumed run, which reads
them from the written blocks, sees the same numbers to the bit.

On CUDA forwards are in the model's 16-bit dtype; the weights that methods change lie beside them in
float32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.batch import Batch, Batches, first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import Reference, propagate
from qtool.calibration.kv.cache import kv_constants, quantized_kv
from qtool.calibration.rounding.rounded import Rounded, SimulatedLinear
from qtool.calibration.rounding.rtn import round_to_nearest
from qtool.calibration.timing import Stages, stage
from qtool.distributed import ranks
from qtool.format import LinearFormat
from qtool.io.read_ahead import Prefetch
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.streaming.activations import Activations, compute_dtype
from qtool.pipeline.streaming.embedding_and_head import all_finite, finite, table_rows
from qtool.runtime.packed_kv import NEUTRAL


class StreamedBlocks:
    """Blocks whose weights are rounded one by one."""

    def __init__(self, source: Checkpoint, job: Job) -> None:
        self.source, self.job = source, job

    def tensors(
        self, index: int, following: int | None, spec: Mapping[str, Tensor], notes: dict[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
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
        for full, tensor in spec.items():
            if full in self.source:
                yield full, finite(full, self.source.read(full)).to(job.dtype)
            elif (neutral := NEUTRAL.get(full.rpartition(".")[2])) is not None:
                yield full, torch.full(tensor.shape, neutral)  # nothing was calibrated

    def propagate(self, index: int, stored: Mapping[str, Tensor]) -> None:
        """Nothing depends on what was stored."""

    def close(self) -> None:
        """Nothing is open."""


class BuiltBlocks:
    """Blocks that are modules on a device, with the calibration batches flowing through them.

    Args:
        tokens: calibration token batches ``[B, S]`` of all ranks; empty if no method looks at
            activations.
        activations: where the batches are kept. stages: where time is recorded.
    """

    def __init__(
        self,
        source: Checkpoint,
        job: Job,
        tokens: Sequence[Tensor],
        device: torch.device,
        activations: Activations,
        stages: Stages,
    ) -> None:
        from transformers import AutoConfig

        from qtool.models.skeleton import fuse_norms, skeleton

        self.source, self.job, self.device = source, job, device
        self.compute = compute_dtype(job, device)
        self.model = skeleton(AutoConfig.from_pretrained(source.directory))
        if self.compute:
            fuse_norms(self.model)
        self.prefetch = Prefetch(
            source, job, pinned=device.type == "cuda", timed=lambda: stages.thread("read")
        )
        tokens = tokens if job.needs_data else []
        own = ranks.local_items(tokens)
        shapes = [(len(ids), ids.shape[1]) for ids in tokens]
        self.batches = Batches(self._first_inputs(own, activations) if own else [], shapes)
        #: the same in the float model, up to block ``self.reached``
        self.references = [
            activations.batch(b.hidden, b.kwargs) for b in self.batches if job.rounding.compares
        ]
        self.reached = 0
        #: whether there are references: they may all be other ranks'
        self.compares = job.needs_data and job.rounding.compares

    def _first_inputs(self, tokens: Sequence[Tensor], activations: Activations) -> list[Batch]:
        """The inputs of block 0, from the embedding's rows of the tokens that occur."""
        from qtool.models.skeleton import release

        job, tables = self.job, self.job.family.tables
        occurring = torch.cat([ids.flatten() for ids in tokens]).unique()
        for name in tables:
            every = torch.arange(self.source.entry(f"{name}.weight").shape[0])
            wanted = (occurring if name == job.family.embedding else every).to(self.device)
            rows = table_rows(self.source, job, name, wanted)
            module = self.model.get_submodule(name)
            module.padding_idx = None  # type: ignore[assignment]
            module.weight = torch.nn.Parameter(
                rows.to(self.device, self.compute or torch.float32), requires_grad=False
            )
        places = [torch.searchsorted(occurring, ids).to(self.device) for ids in tokens]
        batches = first_inputs(self.model, job.family, places, activations.batch)
        for name in tables:
            release(self.model.get_submodule(name))
        return batches

    def tensors(
        self, index: int, following: int | None, spec: Mapping[str, Tensor], notes: dict[str, Any]
    ) -> Iterable[tuple[str, Tensor]]:
        """Transform and round block ``index``: what it stores, in the order of ``spec``; fills
        ``notes``.

        Args:
            following: the block whose weights are read meanwhile.
        """
        job, prefix = self.job, self.job.full(index, "")
        block, formats = self._transformed(index, following, notes)
        stored = {
            prefix + n: p.to(job.dtype) for n, p in block.parameters().items() if prefix + n in spec
        }
        constants = kv_constants(block, job.format.kv, self.batches)
        with quantized_kv(block, job.format.kv, constants), stage("rounding"):
            rounded = job.rounding.round(block, self.batches)
        self._advance(block)
        stored |= {prefix + name: constant for name, constant in constants.items()}
        with stage("pack"):
            for name in ranks.local_items(list(formats)):
                formats[name].scheme_object.check(rounded[name].codes, rounded[name].params)
            for name, linear_format in formats.items():
                for part, tensor in linear_format.pack(
                    rounded[name].codes, rounded[name].params
                ).items():
                    stored[f"{prefix}{name}.{part}"] = tensor
                if job.format.is_permuted(prefix + name):
                    order = block.permutations.get(name, torch.arange(block.weight(name).shape[1]))
                    stored[f"{prefix}{name}.permutation"] = order.to(torch.int32)
                del rounded[name]
        _empty(block.module)
        return [(name, stored[name]) for name in spec]

    def _transformed(
        self, index: int, following: int | None, notes: dict[str, Any]
    ) -> tuple[Block, dict[str, LinearFormat]]:
        """Block ``index`` after all transforms, beside the float model if the rounding looks at it;
        its formats.
        """
        job = self.job
        with stage("read"):
            module = self._module(
                index, self.prefetch.block(index, following), self.compute or torch.float32
            )
            exact = (
                {n: p.detach().float() for n, p in module.named_parameters()}
                if self.compute
                else {}
            )
        formats = {n: f for n in job.linears(index) if (f := job.format.of(job.full(index, n)))}
        schemes = {name: linear_format.scheme_object for name, linear_format in formats.items()}
        block = Block(
            index,
            module,
            job.block_family(index),
            self.model.config,
            schemes,
            notes=notes,
            exact=exact,
        )
        for transform in job.transforms:
            with stage("search"):
                transform.apply(block, self.batches)
        if self.compares:
            pairs = zip(self.batches, self.references, strict=True)
            block.reference = Reference.of(
                block, {id(batch): reference for batch, reference in pairs}
            )
        return block, formats

    def _advance(self, block: Block) -> None:
        """The float model's batches pass ``block``."""
        if block.reference and block.index < self.job.blocks - 1:
            propagate(block.reference.block, self.references)
            block.reference, self.reached = None, block.index + 1

    def propagate(self, index: int, stored: Mapping[str, Tensor]) -> None:
        """Run block ``index`` as ``stored`` (by full name) on every batch: its outputs are the next
        block's inputs.
        """
        if index == self.job.blocks - 1:
            return
        if self.compares and self.reached <= index:  # the block was written by an earlier run
            block, _ = self._transformed(index, None, {})
            self._advance(block)
            _empty(block.module)
        if not self.batches:
            return
        job, prefix = self.job, self.job.full(index, "")
        parts = {
            name.removeprefix(prefix): tensor.to(self.device) for name, tensor in stored.items()
        }
        shapes, dtype = job.block_shapes(index), self.compute or torch.float32
        with stage("pack"):
            weights = {
                n: parts[n] if n in parts else torch.empty(s, dtype=dtype, device="meta")
                for n, s in shapes.items()
            }
            module = self._module(index, weights, dtype)
            block = Block(index, module, job.block_family(index), self.model.config, {})
            for name, (n, k) in job.linears(index).items():
                if linear_format := job.format.of(prefix + name):
                    own = {
                        p.removeprefix(f"{name}."): t
                        for p, t in parts.items()
                        if p.startswith(f"{name}.")
                    }
                    block.schemes[name] = linear_format.scheme_object
                    if "permutation" in own:
                        block.permutations[name] = own["permutation"].long()
                    block.install(name, Rounded(*linear_format.unpack(own, n, k)))
        if self.device.type == "cuda":
            self.prefetch.move(self.device)
        with quantized_kv(block, job.format.kv, parts):
            propagate(block, self.batches)
        _empty(module)

    def close(self) -> None:
        """Stop reading ahead."""
        self.prefetch.close()

    def _module(
        self, index: int, weights: Mapping[str, Tensor], dtype: torch.dtype
    ) -> torch.nn.Module:
        """Block ``index`` of the skeleton with ``weights`` (names within the block; some on
        ``meta``) in ``dtype``.
        """
        from qtool.models.skeleton import fill

        module: torch.nn.Module = self.model.get_submodule(self.job.family.blocks)[index]  # type: ignore[index]
        prefix = self.job.full(index, "")
        there = {
            n: w if w.is_meta else w.to(self.device, non_blocking=True) for n, w in weights.items()
        }
        all_finite({prefix + name: weight for name, weight in there.items() if not weight.is_meta})
        fill(module, {n: w if w.is_meta else w.to(dtype) for n, w in there.items()}, self.device)
        return module


def _empty(module: torch.nn.Module) -> None:
    """Give the block's memory back: plain linears where it simulated quantized ones, all on
    ``meta``.
    """
    for name, child in list(module.named_modules()):
        if isinstance(child, SimulatedLinear):
            n, k = child.weight.shape
            module.set_submodule(
                name, torch.nn.Linear(k, n, bias=child.bias is not None, device="meta")
            )
    module.to("meta")
