"""A function that a CUDA graph replays.

A GPU runs a small operation in less time than the host takes to launch it. A graph launches all
operations of a call at once.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from qtool.kernels.recording import recording


class Recorded:
    """A ``function`` that changes tensors in place and returns nothing, recorded and replayed.

    Its arguments are tensors on one CUDA device, and tuples, lists and dicts of them. A first call
    runs the function, so that what it makes only once (kernels, an optimizer's state) is there. If
    the next call has the same shapes, it is recorded as a CUDA graph, which it and all later calls
    replay. Calls with other shapes, or other arguments that are no tensors, run the function. So do
    all calls if no graph can record the function, for example because it waits for the GPU.

    Args:
        may_wait: the first call looks whether the function waits for the GPU. A warning of another
            thread that waits meanwhile may then be seen.
    """

    def __init__(self, function: Callable[..., None], *, may_wait: bool = True) -> None:
        self.function, self.may_wait = function, may_wait
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kind: Any = None
        self.leaves: list[Any] = []
        self.refused = False

    def __call__(self, *arguments: Any) -> None:
        leaves, structure = tree_flatten(arguments)
        kind = structure, [_kind(leaf) for leaf in leaves]
        known = kind == self.kind
        if known and self.graph is None and not self.refused:
            self._record(leaves, structure)
        if known and self.graph is not None:
            for own, leaf in zip(self.leaves, leaves, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(leaf, non_blocking=True)
            self.graph.replay()
        elif self.graph is not None or self.refused:
            self.function(*arguments)
        else:
            self.kind = kind
            with _waits() if self.may_wait else nullcontext() as waits:
                self.function(*arguments)
            self.refused = bool(waits)

    def _record(self, leaves: list[Any], structure: Any) -> None:
        """Record the function on copies of ``leaves``, unless it cannot be recorded.

        A recording only notes the operations: nothing is computed.
        """
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, torch.cuda.Stream(device)):
                self.function(*tree_unflatten(self.leaves, structure))
        except RuntimeError:
            self.refused = True
        else:
            self.graph = graph


@contextmanager
def _waits() -> Iterator[list[str]]:
    """torch's warnings that this thread waits for the GPU within.

    They are heard before anything is recorded, since a recording that fails leaves torch's
    allocator and its generator of random numbers as if it went on.
    """
    waits: list[str] = []
    thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def hear(message: Warning | str, *rest: Any, **more: Any) -> None:
            if "called a synchronizing CUDA operation" not in str(message):
                show(message, *rest, **more)
            elif threading.get_ident() == thread:
                waits.append(str(message))

        warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _kind(leaf: Any) -> Any:
    """What two calls must have in common for one graph to serve both."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
