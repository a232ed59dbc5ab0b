"""A function that a CUDA graph replays.

A GPU runs a small operation in less time than the host takes to launch it. A graph launches all
operations of a call at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from qtool.errors import QtoolError


class Recorded:
    """A ``function`` that changes tensors in place and returns nothing, recorded and replayed.

    Its arguments are tensors on one CUDA device, and tuples, lists and dicts of them. A first call
    runs the function, so that what it makes only once (kernels, an optimizer's state) is there. If
    the next call has the same shapes, it is recorded as a CUDA graph, which it and all later calls
    replay. Calls with other shapes, or other arguments that are no tensors, run the function. So do
    all calls if a graph cannot hold it, as one that waits for the GPU.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kind: Any = None
        self.leaves: list[Any] = []
        self.refused = False

    def __call__(self, *arguments: Any) -> None:
        leaves, structure = tree_flatten(arguments)
        kind = structure, [_kind(leaf) for leaf in leaves]
        if kind == self.kind and (self.graph or self._record(leaves, structure)):
            assert self.graph is not None
            for own, leaf in zip(self.leaves, leaves, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(leaf, non_blocking=True)
            self.graph.replay()
            return
        if self.graph is None:
            self.kind = kind
        self.function(*arguments)

    def _record(self, leaves: list[Any], structure: Any) -> bool:
        """Record the function with copies of ``leaves``; False if a graph cannot hold it."""
        if self.refused:
            return False
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        torch.cuda.empty_cache()  # memory for a graph is not taken from other free memory
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.function(*tree_unflatten(self.leaves, structure))
        except (RuntimeError, QtoolError):  # nothing was computed while it was recorded
            self.refused = True
            return False
        self.graph = graph
        return True


def _kind(leaf: Any) -> Any:
    """What two calls must have in common for one graph to serve both."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
