"""Recording of CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record as ``graph`` what this thread queues while open; nothing is computed.

    If it fails, torch leaves the thread on ``stream``, where its kernels run beside those of other
    threads and may read memory that these have used again. The thread's own stream is set again.

    Raises:
        RuntimeError: a graph cannot hold what was queued.
    """
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        yield
