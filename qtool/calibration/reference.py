"""The float model beside the quantized path, with which a rounding compares.

A rounding such as GPTQ looks at two inputs of each linear: that on the quantized path, which comes
of the blocks rounded so far, and that in the float model. So a run has two sets of calibration
batches, which begin as the same embeddings. For each block:

1. The transformed block is copied before it is rounded: the copy and the float batches, which are
   its inputs in the float model, are the block's :class:`Reference`.
2. The rounding asks for the float inputs of one linear after the other, batch by batch. Each such
   *look* at a batch (:meth:`Reference.inputs`) is a forward of the copy, which ends at the last
   module that was asked for.
3. :meth:`Reference.propagate` runs the copy on all float batches; the outputs replace them.

To save the forward of step 3, the last look at a batch runs to the end of the block, and its output
replaces the batch at once: the batch *moves on*. The rounding says which look is the last. It calls
:meth:`Reference.last_look` before the looks at its last linear. Or, if memory holds the inputs of
all linears, it calls :meth:`Reference.look_once` before the first look, which then keeps them all
and is the last. Step 3 runs only the batches that did not move on.

Meanwhile a thread may still be writing the float batches to disk, so that a killed run resumes at
this block (:mod:`qtool.pipeline.streaming.snapshots`). If outputs would overwrite what it writes,
on any rank (``BuiltBlocks.overwrites``), this write is finished or given up before the first batch
moves on: that is what ``before_change`` is for. All ranks do it together, also those without
batches. If outputs have memory of their own, the thread goes on writing the old tensors until step
3 begins.

No batch moves on where no later block reads the outputs: in the last block, and if a rounding is
called for a block alone, where the batches of the quantized path are also the float ones. Then
``before_change`` is None.

A resumed run does not round the blocks that are written, so that their float batches stay where
they are: ``BuiltBlocks.reached`` is the block that they enter. ``BuiltBlocks.propagate`` transforms
such a block again and does steps 1 and 3.

Legend: K input channels.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import Observer, joined, move_on, observe, require_finite


@dataclass
class Reference:
    """The float model's block, and its inputs.

    Attributes:
        block: the float block, transformed like the one to be rounded.
        batches: float inputs by the ``id`` of the batch on the quantized path; a batch that is
            absent is its own float input.
        before_change: called before the batches change; None if they never do.
        moves_on: whether a look at a batch runs to the block's end and replaces the batch.
        moved: finiteness and dtype of the outputs of batches that were replaced, by key in
            ``batches``.
        watched: submodules whose inputs are kept from the first look at a batch.
        seen: the inputs that were kept, by key in ``batches``.
    """

    block: Block
    batches: dict[int, Batch]
    before_change: Callable[[], None] | None
    moves_on: bool = field(default=False, init=False)
    moved: dict[int, tuple[Tensor, torch.dtype]] = field(default_factory=dict, init=False)
    watched: Sequence[str] = field(default=(), init=False)
    seen: dict[int, dict[str, list[Tensor]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        block: Block,
        batches: dict[int, Batch] | None = None,
        before_change: Callable[[], None] | None = None,
    ) -> "Reference":
        """A copy of ``block`` as it is now."""
        block.update_module()
        own = replace(block, module=copy.deepcopy(block.module), exact={}, reference=None)
        return cls(own, batches or {}, before_change)

    def look_once(self, names: Sequence[str]) -> None:
        """As :meth:`last_look`, and that look keeps the inputs of all ``names``.

        From here on only these inputs may be asked for. All ranks must call it, or none.
        """
        self.last_look()
        self.watched = names

    def last_look(self) -> None:
        """Let the next look at each batch be the last: it also makes the next block's inputs.

        All ranks must call it, or none.
        """
        if self.before_change and not self.moves_on:
            self.before_change()
            self.moves_on = True

    @torch.no_grad()
    def inputs(self, batch: Batch, *names: str) -> list[Tensor]:
        """The float inputs ``[tokens, K]`` of submodules for the tokens of ``batch``."""
        key, own = id(batch), self.batches.get(id(batch), batch)
        if key in self.seen:
            return joined(self.seen[key], names)
        seen: dict[str, list[Tensor]] = {name: [] for name in self.watched or names}
        observers = {name: self._keeper(parts, own) for name, parts in seen.items()}
        if self.moves_on:
            self.moved[key] = move_on(self.block, own, observers, **self.block.full_kv)
        else:
            observe(self.block, [own], observers, **self.block.full_kv)
        if self.watched:
            self.seen[key] = seen
        return joined(seen, names)

    def _keeper(self, parts: list[Tensor], own: Batch) -> Observer:
        """Appends what it observes to ``parts``: a copy if it is kept, or is the batch's memory.

        A batch that moves on may overwrite its memory. On a CPU that is what the first norm reads.
        """
        memory = [tensor.untyped_storage().data_ptr() for tensor in own.tensors.values()]

        def keep(x: Tensor) -> None:
            changes = self.moves_on and x.untyped_storage().data_ptr() in memory
            parts.append(x.clone() if self.watched or changes else x)

        return keep

    def propagate(self) -> None:
        """Replace the float inputs of all batches by those of the next block.

        Raises:
            QtoolError: as :func:`.forwards.propagate` does.
        """
        for key, batch in self.batches.items():
            if key not in self.moved:
                self.moved[key] = move_on(self.block, batch)
        require_finite(self.block, list(self.moved.values()))
