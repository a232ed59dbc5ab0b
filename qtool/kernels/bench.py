"""Measuring the GEMMs: shapes, floors, CUDA graphs over rotated weights, the matmuls of the installed torch.

Every time is in microseconds, the median over graph replays; a graph holds one launch per weight copy,
and the copies together exceed the L2 cache, as a model's layers do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from qtool.kernels.tiles import Tile, choose
from qtool.kernels.w4a8 import launch_into

#: output channels and input channels of a layer's linears
MODELS = {
    "llama-2-7b": {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)},
    "llama-3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "llama-2-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

BANDWIDTH = 4.8e12  # bytes per second, H200 datasheet
OPERATIONS = 1979e12  # dense int8 operations per second, H200 datasheet
ROTATED_BYTES = 240e6  # four times the L2 cache


def floor_us(m: int, n: int, k: int, bits: float) -> float:
    """The least time for ``[m, k] x [n, k]``: weight bytes once, or the arithmetic."""
    return 1e6 * max(n * k * bits / 8 / BANDWIDTH, 2 * m * n * k / OPERATIONS)


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median time of one call, the calls replayed back to back from a CUDA graph."""
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
    """How many weights to rotate: at least four, and more than the L2 cache in all."""
    return max(4, min(64, int(ROTATED_BYTES / bytes_each) + 1))


@dataclass
class W4A8Weights:
    """Random packed weights of one shape, as many as are rotated. Values are legal for LiquidQuant and QoQ."""

    scheme: str
    group_size: int | None
    arguments: list[tuple[Tensor | None, ...]]  # qweight, s1, s2, offset, zero
    n: int
    k: int

    @classmethod
    def random(cls, scheme: str, group_size: int | None, n: int, k: int) -> "W4A8Weights":
        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

        arguments: list[tuple[Tensor | None, ...]] = []
        for _ in range(copies(n * k / 2)):
            qweight = draw(0, 256, n // 64, k // 64, 2048)
            s1 = torch.rand(n, device="cuda") * 1e-3
            s2 = offset = zero = None
            if group_size is None:
                zero = draw(0, 16, n)
            else:
                s2 = draw(1, 9, n // 64, k // group_size, 64)
                if scheme == "w4a8-lqq":
                    offset = draw(9, 130, n // 64, k // group_size, 64)
                else:
                    zero = draw(0, 16, n // 64, k // group_size, 64)
            arguments.append((qweight, s1, s2, offset, zero))
        return cls(scheme, group_size, arguments, n, k)

    def calls(self, m: int, tile: Tile | None = None, overlap: bool = True) -> list[Callable[[], object]]:
        """One launch per copy, for ``m`` random tokens, bf16 out."""
        x = torch.randint(-127, 128, (m, self.k), dtype=torch.int8, device="cuda")
        sx = torch.rand(m, device="cuda")
        token_sum = x.sum(1, dtype=torch.int32) if self.scheme == "w4a8-qoq" else None
        out = torch.empty(m, self.n, dtype=torch.bfloat16, device="cuda")
        tile = tile or choose(m, self.n, self.k)

        def call(arguments: tuple[Tensor | None, ...]) -> Callable[[], object]:
            return lambda: launch_into(
                out, tile, x, sx, *arguments, token_sum, None, self.scheme, self.group_size, overlap=overlap  # type: ignore[arg-type]
            )

        return [call(arguments) for arguments in self.arguments]


def reference_calls(kind: str, m: int, n: int, k: int) -> list[Callable[[], object]]:
    """torch's own matmul of the shape: ``bf16``, ``fp8`` (row-wise scaled) or ``int8`` (sums only)."""
    calls: list[Callable[[], object]] = []
    rows = max(m, 32) if kind == "int8" else m  # _int_mm refuses fewer than 17 rows
    for _ in range(copies(n * k * (2 if kind == "bf16" else 1))):
        if kind == "bf16":
            a, b = torch.randn(rows, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
            calls.append(lambda a=a, b=b: torch.mm(a, b.t()))  # type: ignore[misc]
        elif kind == "fp8":
            fp8 = torch.float8_e4m3fn
            a, b = torch.randn(rows, k, device="cuda").to(fp8), torch.randn(n, k, device="cuda").to(fp8)
            one = torch.ones((), device="cuda")
            calls.append(
                lambda a=a, b=b, one=one: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # type: ignore[misc]
            )
        else:
            a = torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda")
            b = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
            calls.append(lambda a=a, b=b: torch._int_mm(a, b.t()))  # type: ignore[misc]
    return calls
