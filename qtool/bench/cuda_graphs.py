"""Times kernels by CUDA graphs over rotated weights, beside the floor of an H200."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

BANDWIDTH = 4.8e12  # bytes per second, H200 datasheet
OPERATIONS = 1979e12  # dense int8 operations per second, H200 datasheet
HALF_OPERATIONS = 989e12  # dense bf16
ROTATED_BYTES = 240e6  # four times the L2 cache


def floor_us(m: int, n: int, k: int, bits: float, operations: float = OPERATIONS) -> float:
    """The least microseconds for ``[m, k] x [n, k]``: weights read once, or the arithmetic."""
    return 1e6 * max(n * k * bits / 8 / BANDWIDTH, 2 * m * n * k / operations)


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one call; the calls are replayed back to back from a CUDA graph."""
    calls[0]()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return median(times)


def copies(bytes_each: float) -> int:
    """The number of weights to rotate, 4 to 64: together larger than the L2 cache, if 64 are."""
    return max(4, min(64, int(ROTATED_BYTES / bytes_each) + 1))
