"""Outputs of a block's attention, kept between several looks at the same batches.

A rounding looks at each batch several times, and each look is a forward from the block's start to
the observed linear (:func:`.forwards.observe`). Once the linears of the attention are rounded, it
returns the same for a batch in every look, and in the float model from the first look on. So the
first look that runs it keeps its outputs, and later looks take them instead of running it again.
While all but its last linear are rounded, that linear's inputs are kept, and the next look applies
the rounded one to them.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from qtool.calibration.batch import Batch
from qtool.models.family import Family

#: stands for the last linear's output in what a module returned
_OF_LAST = object()


@dataclass
class Room:
    """Bytes that are left for outputs, on both paths together."""

    left: float


@dataclass
class KeptOutputs:
    """What module ``name`` of a block returned for ``batches``, for as many as ``room`` holds.

    Attributes:
        last: the last linear of the module.
        last_changes: whether that linear is to be rounded still.
        outputs: those that are kept, by the ``id`` of their batch. Beside each is None, or the last
            linear's input, if that linear's output is to be made of it.
        filling: the module runs for an output to keep, and a forward does not end inside it.
    """

    name: str
    last: str
    batches: Collection[Batch]
    room: Room
    last_changes: bool = field(default=False, init=False)
    outputs: dict[int, tuple[Any, Tensor | None]] = field(default_factory=dict, init=False)
    filling: bool = field(default=False, init=False)

    @classmethod
    def of(cls, family: Family, batches: Collection[Batch], room: Room) -> "KeptOutputs | None":
        """For the first module of a block that ends with a linear which writes to the stream.

        It is the attention in most families, and may be a recurrent layer. None if no linears come
        after it.
        """
        for number, group in enumerate(family.groups[:-1], 1):
            if group.writes_residual and not group.routed and not family.passes:
                last = group.linears[0]
                later = [name for own in family.groups[number:] for name in own.linears]
                # the outermost module that holds no later linear
                for name in accumulate(last.split(".")[:-1], "{}.{}".format):
                    if not any(linear.startswith(f"{name}.") for linear in later):
                        return cls(name, last, batches, room)
        return None

    def is_inside(self, linear: str) -> bool:
        return linear.startswith(f"{self.name}.")

    @contextmanager
    def instead(
        self, module: Any, batch: Batch, observed: Collection[str], *, to_end: bool
    ) -> Iterator[None]:
        """While open, the first call of ``module`` for ``batch`` returns the kept output.

        If there is none, it is kept, unless the forward runs ``to_end``, which no look follows. A
        module runs as ever for a look at linears ``observed`` inside it, but for the last one.
        """
        inside = [*filter(self.is_inside, observed)]
        kept = self.outputs.pop(id(batch), None) if to_end else self.outputs.get(id(batch))
        taken = None if inside else kept
        keeps = kept is None and not to_end and (not inside or self.last in inside)
        if taken is None and not (keeps and any(batch is own for own in self.batches)):
            yield
            return
        own, forward = vars(module).get("forward"), module.forward
        last = module.get_submodule(self.last.removeprefix(f"{self.name}."))

        def call(*args: Any, **kwargs: Any) -> Any:
            module.forward = forward  # another call in the same forward runs
            if taken is not None:
                output, x = taken
                if x is not None:
                    output = tree_map(lambda leaf: last(x) if leaf is _OF_LAST else leaf, output)
                    if not to_end and not self.last_changes:
                        self.outputs[id(batch)] = output, None
                return _copy(output)
            self.filling = True
            try:
                with _calls_of(last) as calls:
                    found = forward(*args, **kwargs)
            finally:
                self.filling = False
            self._keep(batch, found, calls)
            return found

        module.forward = call
        try:
            yield
        finally:
            vars(module).pop("forward")
            if own is not None:
                module.forward = own

    def _keep(self, batch: Batch, output: Any, calls: Sequence["_Call"]) -> None:
        """Keep what the module returned, if there is room; ``calls`` are of its last linear.

        If that linear changes, its input is kept, unless its output is not returned as it is.
        """
        x = None
        if self.last_changes:
            if len(calls) != 1:
                return
            x, of_last, versions = calls[0]
            returned = any(leaf is of_last for leaf in tree_leaves(output))
            if not returned or versions != (x._version, of_last._version):  # changed in place
                return
            output = tree_map(lambda leaf: _OF_LAST if leaf is of_last else leaf, output)
        leaves = tree_leaves((output, x))
        nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if nbytes <= self.room.left:
            self.room.left -= nbytes
            try:
                self.outputs[id(batch)] = _copy((output, x))
            except torch.OutOfMemoryError:
                self.room.left = 0


#: a call's input and output, and torch's counts of changes to both
_Call = tuple[Tensor, Tensor, tuple[int, int]]


@contextmanager
def _calls_of(linear: Any) -> Iterator[list[_Call]]:
    """While open, list the calls of ``linear``: its input, before hooks change it, and output."""
    inputs, calls = list[Tensor](), list[_Call]()
    before = linear.register_forward_pre_hook(
        lambda _, given: inputs.append(given[0]), prepend=True
    )

    def add(_: Any, __: Any, y: Tensor) -> None:
        x = inputs.pop()
        calls.append((x, y, (x._version, y._version)))

    after = linear.register_forward_hook(add)
    try:
        yield calls
    finally:
        before.remove()
        after.remove()


def _copy(output: Any) -> Any:
    """``output`` with copies of its tensors, which a block may change in place."""
    return tree_map_only(Tensor, Tensor.clone, output)
