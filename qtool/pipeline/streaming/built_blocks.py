"""Blocks that are built as modules, transformed, rounded and run.

Transforms rewrite each block, and the rounding rounds it. Its *packed* tensors are then unpacked
into the block that computes the next block's inputs. A resumed run reads the packed tensors of the
written blocks and computes the same numbers to the bit. If the rounding compares with the float
model, its inputs of each block are kept too (:mod:`qtool.calibration.reference`).

On CUDA forwards are in the model's 16-bit dtype; the weights that methods change are also kept in
float32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.batch import HIDDEN, Batch, Batches, BlockArguments, first_inputs
from qtool.calibration.block import Block
from qtool.calibration.expert_tokens import add_tokens
from qtool.calibration.forwards import propagate
from qtool.calibration.kv.cache import kv_constants, quantized_kv
from qtool.calibration.method import Transform
from qtool.calibration.reference import Reference
from qtool.calibration.rounding.rounded import Rounded, SimulatedLinear, weight_errors
from qtool.calibration.timing import PhaseTimer, phase
from qtool.distributed import ranks
from qtool.format import LinearFormat
from qtool.io.finite import require_all_finite
from qtool.io.read_ahead import ReadAhead
from qtool.io.safetensors import Entry, read
from qtool.io.source import Checkpoint
from qtool.models.auto import float_config
from qtool.models.skeleton import fill, move, release, skeleton, stays_float32
from qtool.pipeline.free_memory import gpu_memory
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import DEVICE_SHARE, compute_dtype
from qtool.pipeline.streaming.activations import Activations
from qtool.pipeline.streaming.embedding_and_head import as_stored, embedded, table_rows
from qtool.pipeline.streaming.method_checks import (
    apply,
    naming_too_large,
    require_finite_parameters,
    require_no_new_bias,
    require_packable,
    require_same_on_ranks,
    require_stored,
    running_method,
)
from qtool.pipeline.streaming.packing import install_packed, packed
from qtool.pipeline.streaming.snapshots import Snapshots
from qtool.plugins import require_json
from qtool.runtime.fused_norms import fuse_norms


class BuiltBlocks:
    """Blocks that are modules on a device, with the calibration batches flowing through them.

    Args:
        tokens: calibration token batches ``[B, S]`` of all ranks; empty if no method looks at
            activations.
        activations: the place in which the batches are kept.
        snapshots: writes the batches to disk block by block.
        start: the first block that is computed.
        kept: this rank's inputs of block ``start`` on disk, by path and number of the batch
            (:mod:`~qtool.pipeline.streaming.snapshots`); without them ``start`` is 0.
        phases: timer that records the time of each phase.
        sensitivity: gives :attr:`Block.sensitivity` in the source's channels, if the run has it.
        announcing: the transforms that announce what they will do, by default those of ``job``.
    """

    def __init__(
        self,
        source: Checkpoint,
        job: Job,
        tokens: Sequence[Tensor],
        device: torch.device,
        activations: Activations,
        snapshots: Snapshots,
        phases: PhaseTimer,
        start: int = 0,
        kept: Mapping[str, Entry] | None = None,
        sensitivity: Callable[[int], Tensor | None] = lambda index: None,
        announcing: Sequence[Transform] | None = None,
    ) -> None:
        self.sensitivity = sensitivity
        self.announcing = job.transforms if announcing is None else announcing
        self.source, self.job, self.device = source, job, device
        self.snapshots, self.kept = snapshots, kept
        self.budget = inf
        if device.type == "cuda":
            self.budget = DEVICE_SHARE * (
                gpu_memory(device)[1] + torch.cuda.memory_reserved(device)
            )
        self.compute = compute_dtype(job, device)
        self.model = skeleton(float_config(source.directory), self.compute)
        move(self.model, device)  # not every model moves its frequencies or positions to its input
        if self.compute != torch.float32:
            fuse_norms(self.model)
        self.read_ahead = ReadAhead(
            source, job, pinned=device.type == "cuda", timed=lambda: phases.thread("read")
        )
        own = ranks.local_items(tokens)
        shapes = [(len(ids), ids.shape[1]) for ids in tokens]
        self.batches = Batches(self._first_inputs(own, activations) if own else [], shapes)
        #: the same batches in the float model, as inputs of block ``self.reached``
        self.references = [
            activations.batch(self._reference_inputs(i, b), b.kwargs, b.axis)
            for i, b in enumerate(self.batches)
            if job.rounding.compares
        ]
        self.reached = start
        #: whether the run has references; all of them may belong to other ranks
        self.compares = job.needs_data and job.rounding.compares
        #: whether the float model's outputs take the room of its inputs, in part at least
        self.overwrites = activations.place != "device" or activations.room < sum(
            tensor.nbytes for batch in self.references for tensor in batch.tensors.values()
        )

    def _reference_inputs(self, number: int, batch: Batch) -> dict[str, Tensor]:
        """The tensors that enter the first block in the float model, for ``batch``."""
        if self.kept:
            return self._kept("float", number)
        # by way of the GPU, which may still be filling the pinned memory that they are in
        return {name: t.to(self.device, non_blocking=True) for name, t in batch.tensors.items()}

    def _first_inputs(self, tokens: Sequence[Tensor], activations: Activations) -> list[Batch]:
        """The inputs of the first block that is computed, and the other arguments of all blocks.

        The inputs are read from disk or else computed by the embedding, which is filled with the
        rows of the tokens that occur. The arguments may need these rows too (Gemma 3n).
        """
        job, tables = self.job, self.job.family.tables
        occurring = torch.cat([ids.flatten() for ids in tokens]).unique()
        for name in tables:
            every = torch.arange(self.source.entry(f"{name}.weight").shape[0])
            some = name == job.family.embedding and not job.family.whole_embedding
            wanted = (occurring if some else every).to(self.device)
            rows = table_rows(self.source, job, name, wanted)
            module = self.model.get_submodule(name)
            module.padding_idx = None  # type: ignore[assignment]
            module.weight = torch.nn.Parameter(
                rows.to(self.device, self.compute), requires_grad=False
            )
        self._fill_outside()
        whole = job.family.whole_embedding
        places = [
            (ids if whole else torch.searchsorted(occurring, ids)).to(self.device) for ids in tokens
        ]
        numbers = count()

        def batch(hidden: Tensor, kwargs: BlockArguments) -> Batch:
            stored = self._kept("quantized", next(numbers)) if self.kept else {HIDDEN: hidden}
            return activations.batch(stored, kwargs)

        batches = first_inputs(self.model, job.family, places, batch)
        for name in tables:
            release(self.model.get_submodule(name))
        for name in job.family.read_of_text:
            release(self.model.get_submodule(name.rpartition(".")[0]))
        return batches

    def _fill_outside(self) -> None:
        """Load the tensors outside tables and blocks that a text forward reads (norms, ...)."""
        for name in self.job.family.read_of_text:
            owner, _, part = name.rpartition(".")
            tensor = as_computed(self.source.read(name).to(self.device), self.compute)
            module = self.model.get_submodule(owner)
            if part in module._parameters:
                module._parameters[part] = torch.nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[part] = tensor

    def _kept(self, path: str, number: int) -> dict[str, Tensor]:
        """The tensors on disk of this rank's batch ``number`` on one of the two paths, by name."""
        assert self.kept is not None
        own = f"{path}.{number}."
        return {
            name.removeprefix(own): read(entry).to(self.device)
            for name, entry in self.kept.items()
            if name.startswith(own)
        }

    def tensors(
        self, index: int, following: int | None, spec: Mapping[str, Tensor], notes: dict[str, Any]
    ) -> Iterable[tuple[str, Tensor]]:
        """Transform and round block ``index``; returns its tensors in the order of ``spec``.

        Args:
            following: the block whose weights are read meanwhile.
            notes: the block's notes, which are added to.
        """
        job, prefix = self.job, self.job.full(index, "")
        factor = self.sensitivity(index)  # read while a GPU still runs the block before
        block, formats = self._transformed(index, following, notes)
        if factor is not None:
            block.sensitivity = embedded(factor.to(self.device).float(), job)
        constants = kv_constants(block, job.format.kv, self.batches)
        with quantized_kv(block, job.format.kv, constants):
            rounded = self._rounded(block, formats)
        if errors := weight_errors(rounded):
            notes.setdefault(job.rounding.name, errors)
        for method, noted in notes.items():
            require_json({method: noted}, f"{method}: its notes of a block")
        stored = {
            prefix + n: as_stored(prefix + n, p, job)
            for n, p in block.parameters().items()
            if prefix + n in spec
        }
        require_finite_parameters(stored)
        self._advance(block)
        stored |= {prefix + name: constant for name, constant in constants.items()}
        with phase("pack"):
            stored |= dict(packed(block, job, rounded, self.device))
        _empty(block.module)
        return [(name, stored[name]) for name in spec]

    def _transformed(
        self, index: int, following: int | None, notes: dict[str, Any]
    ) -> tuple[Block, dict[str, LinearFormat]]:
        """Block ``index`` after all transforms, and the formats of its linears.

        The block has a ``reference``, the float model's block, if the rounding compares with it.
        """
        job = self.job
        block, formats = self._built(index, following, notes)
        # the batches are in the channels that the transforms before these rewrite the block to
        transforms = job.transforms
        looks = next((i for i, t in enumerate(transforms) if t.needs_data), len(transforms))
        self._apply(transforms[:looks], block)
        if job.needs_data and job.balances_experts:
            with phase("search"):
                inputs = self.references if self.compares else self.batches
                add_tokens(block, self.batches, inputs, job.recipe.min_expert_tokens)
        self._apply(transforms[looks:], block)
        require_stored(block, job)
        if self.compares:
            pairs = zip(self.batches, self.references, strict=True)
            block.reference = Reference.of(
                block,
                {id(batch): reference for batch, reference in pairs},
                self._before_inputs_change if self._leads_on(block) else None,
            )
        return block, formats

    def _apply(self, transforms: Iterable[Transform], block: Block) -> None:
        """Let ``transforms`` rewrite ``block`` in turn."""
        for transform in transforms:
            with phase("search"), naming_too_large(block, self.job):
                apply(transform, block, self.batches, self.job)

    def _rounded(self, block: Block, formats: Mapping[str, LinearFormat]) -> dict[str, Rounded]:
        """What the rounding makes of the linears of ``block``, checked before it is packed."""
        job, rounding = self.job, self.job.rounding
        with (
            phase("rounding"),
            naming_too_large(block, job),
            running_method(rounding, "round", block.index),
        ):
            rounded = rounding.round(block, self.batches)
        require_packable(rounding, rounded, formats, job.linears(block.index))
        require_no_new_bias(rounding, block, job)
        decided = (
            (f"the {part} of {name}", tensor)
            for name, one in rounded.items()
            for part, tensor in {"codes": one.codes, **one.params}.items()
        )
        require_same_on_ranks(rounding, "round", block.index, decided)
        return rounded

    def blocks(self, *, backwards: bool = False) -> Iterator[Block]:
        """Each block after the job's transforms, from the first or from the last."""
        order = list(range(self.job.blocks))[:: -1 if backwards else 1]
        for index, following in zip(order, [*order[1:], None], strict=True):
            block, _ = self._built(index, following, {})
            self._apply(self.job.transforms, block)
            yield block
            _empty(block.module)

    def _built(
        self, index: int, following: int | None, notes: dict[str, Any]
    ) -> tuple[Block, dict[str, LinearFormat]]:
        """Block ``index`` with the weights of the source, and the formats of its linears."""
        job = self.job
        with phase("read"):
            weights = {
                n: w.to(self.device, non_blocking=True)
                for n, w in self.read_ahead.block(index, following).items()
            }
            module = self._module(index, weights)
            # if the source has some tensors in float32 (a router's bias), the module rounds them
            floats = weights.items() if self.compute != torch.float32 else ()
            exact = {n: w.float() for n, w in floats if w.is_floating_point()}
        formats = job.formats(index)
        schemes = {name: linear_format.scheme_object for name, linear_format in formats.items()}
        block = Block(
            index,
            module,
            job.block_family(index),
            job.namespace,
            schemes,
            notes=notes,
            exact=exact,
            budget=self.budget,
        )
        for transform in self.announcing:
            with running_method(transform, "announce", index):
                transform.announce(block)
        return block, formats

    def _advance(self, block: Block) -> None:
        """Run the float model's ``block`` on its batches, which become the next block's inputs.

        Most of them may already be: :mod:`qtool.calibration.reference` tells how.
        """
        self.snapshots.settle()
        if block.reference and self._leads_on(block):
            block.reference.propagate()
            block.reference, self.reached = None, block.index + 1

    def _before_inputs_change(self) -> None:
        """Let no snapshot read the float batches if outputs overwrite them."""
        if any(ranks.all_gather(self.overwrites)):  # all ranks must call settle
            self.snapshots.settle()

    def _leads_on(self, block: Block) -> bool:
        """Whether another block reads the outputs of ``block``."""
        return block.index < self.job.blocks - 1

    def propagate(self, index: int, stored: Mapping[str, Tensor]) -> None:
        """Run block ``index`` with the weights ``stored`` (by full name) on all batches.

        Its outputs are the next block's inputs, which are then written to disk. The last block,
        which no other follows, is not run.
        """
        self.snapshots.settle()
        if self.compares and self.reached <= index:  # the block was written by an earlier run
            block, _ = self._transformed(index, None, {})
            self._advance(block)
            _empty(block.module)
        if self.batches:
            self._run(index, stored)
        if self.job.needs_data:
            self.snapshots.take(index + 1, quantized=self.batches, float=self.references)

    def _run(self, index: int, stored: Mapping[str, Tensor]) -> None:
        """The quantized path of :meth:`propagate`."""
        job, prefix = self.job, self.job.full(index, "")
        parts = {
            name.removeprefix(prefix): tensor.to(self.device) for name, tensor in stored.items()
        }
        with phase("pack"):
            weights = {  # packed linears stay on meta until they are installed
                n: parts[n] if n in parts else torch.empty(s, dtype=self.compute, device="meta")
                for n, s in job.block_shapes(index).items()
            }
            module = self._module(index, weights)
            block = Block(index, module, job.block_family(index), job.namespace, {})
            install_packed(block, job, parts, self.device)
        if self.device.type == "cuda":
            self.read_ahead.move(self.device)
        with quantized_kv(block, job.format.kv, parts):
            propagate(block, self.batches)
        _empty(block.module)

    def close(self) -> None:
        """Stop reading ahead."""
        self.read_ahead.close()

    def _module(self, index: int, weights: Mapping[str, Tensor]) -> torch.nn.Module:
        """Block ``index`` of the skeleton with ``weights``, by their names within the block.

        They are in the dtype of forwards, except those that transformers keeps in float32; some may
        be on ``meta``.
        """
        modules = self.model.get_submodule(self.job.family.blocks)
        module: torch.nn.Module = modules[index]  # type: ignore[index]
        prefix = self.job.full(index, "")
        require_all_finite(
            {prefix + n: weight for n, weight in weights.items() if not weight.is_meta}
        )
        kept = {n for n in weights if stays_float32(self.model, prefix + n, self.compute)}
        computed = {
            n: as_computed(w, torch.float32 if n in kept else self.compute)
            for n, w in weights.items()
        }
        fill(module, computed, self.device)
        return module


def as_computed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in the dtype of a forward; integers and ``meta`` tensors stay unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() and not tensor.is_meta else tensor


def _empty(module: torch.nn.Module) -> None:
    """Free the block's memory: parameters go to ``meta``, linears become plain ones again."""
    for name, child in list(module.named_modules()):
        if isinstance(child, SimulatedLinear):
            n, k = child.weight.shape
            module.set_submodule(
                name, torch.nn.Linear(k, n, bias=child.bias is not None, device="meta")
            )
    release(module)
