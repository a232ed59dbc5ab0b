"""Measuring the GEMMs: shapes, floors, CUDA graphs over rotated weights, the matmuls of the installed torch.

Every time is in microseconds, the median over graph replays; a graph holds one launch per weight copy,
and the copies together exceed the L2 cache, as a model's layers do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from qtool.kernels import w4a8, w8a8
from qtool.kernels.gemm import Operand, Weight, run
from qtool.kernels.quantize_activation import quantize_activation
from qtool.kernels.tiles import Tile, choose

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


def random_weights(scheme: str, group_size: int | None, n: int, k: int) -> list[Weight]:
    """Random weights ``[n, k]``, as many as are rotated; ``w8a8`` or a W4A8 scheme, whose level 2 is legal."""

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, shape, dtype=dtype, device="cuda")

    weights = []
    for _ in range(copies(n * k / (1 if scheme == "w8a8" else 2))):
        scale = torch.rand(n, device="cuda") * 1e-3
        if scheme == "w8a8":
            weights.append(Weight(scale, boxed=draw(-127, 128, n, k, dtype=torch.int8)))
            continue
        qweight = draw(0, 256, n // 64, k // 64, 2048)
        if group_size is None:
            weights.append(Weight(scale, qweight=qweight, zero1=draw(0, 16, n)))
            continue
        level2 = (n // 64, k // group_size, 64)
        offset = draw(9, 130, *level2) if scheme == "w4a8-lqq" else draw(0, 16, *level2)
        weights.append(Weight(scale, qweight=qweight, scale2=draw(1, 9, *level2), offset2=offset))
    return weights


def kernel_calls(
    operand: Operand, weights: Sequence[Weight], m: int, n: int, k: int, tile: Tile | None = None, overlap: bool = True
) -> list[Callable[[], object]]:
    """One launch per weight, for ``m`` random tokens, bf16 out."""
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    sx = torch.rand(m, device="cuda")
    token_sum = x.sum(1, dtype=torch.int32)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    chosen = tile or choose(m, n, k)

    def call(weight: Weight) -> Callable[[], object]:
        return lambda: run(operand, chosen, x, sx, weight, out, token_sum=token_sum, overlap=overlap)

    return [call(weight) for weight in weights]


def reference_calls(kind: str, m: int, n: int, k: int) -> list[Callable[[], object]]:
    """torch's own matmul of the shape: ``bf16``, ``fp8`` (one scale a tensor) or ``int8`` (sums only)."""
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


#: the columns of the table, and the weight bits of their floor
COLUMNS = {
    "w4a8-lqq g64": 4.25,
    "w4a8-qoq-g128": 4.125,
    "w4a8-qoq": 4.0,
    "w8a8": 8.0,
    "torch bf16": 16.0,
    "torch fp8": 8.0,
    "torch int8": 8.0,
}


#: scheme and group size of this project's columns
KERNELS: dict[str, tuple[str, int | None]] = {
    "w4a8-lqq g64": ("w4a8-lqq", 64),
    "w4a8-qoq-g128": ("w4a8-qoq-g128", 128),
    "w4a8-qoq": ("w4a8-qoq", None),
    "w8a8": ("w8a8", None),
}


def operand_of(scheme: str, group_size: int | None) -> Operand:
    """What the kernel of a column is compiled with."""
    return w8a8.OPERAND if scheme == "w8a8" else w4a8.operand(scheme, group_size)


@dataclass(frozen=True)
class Measurement:
    """One linear at one number of tokens: microseconds by column of :data:`COLUMNS`, and of quantizing its input."""

    model: str
    layer: str
    m: int
    n: int
    k: int
    us: dict[str, float]
    quantize_us: float

    @property
    def floor(self) -> float:
        """Least microseconds for LiquidQuant at group size 64."""
        return floor_us(self.m, self.n, self.k, COLUMNS["w4a8-lqq g64"])


def gemm_table(models: Iterable[str] = MODELS, tokens: Iterable[int] = TOKENS) -> list[Measurement]:
    """Measure every column on every layer of ``models`` (names in :data:`MODELS`) and every number of tokens."""
    results = []
    for model in models:
        for layer, (n, k) in MODELS[model].items():
            weights = {column: random_weights(*scheme, n, k) for column, scheme in KERNELS.items()}
            for m in tokens:
                us = {
                    column: graph_us(kernel_calls(operand_of(*KERNELS[column]), made, m, n, k))
                    for column, made in weights.items()
                }
                for kind in ("bf16", "fp8", "int8"):
                    us[f"torch {kind}"] = graph_us(reference_calls(kind, m, n, k))
                x = torch.randn(m, k, device="cuda").bfloat16()
                quantize_us = graph_us([lambda x=x: quantize_activation(x, None, None, "none", 0.0)] * 16)  # type: ignore[misc]
                results.append(Measurement(model, layer, m, n, k, us, quantize_us))
    return results


def markdown(results: Sequence[Measurement]) -> str:
    """Sums over each model's layers, one row per number of tokens: microseconds, and ratios of LiquidQuant's time."""
    head = ["model", "M", "floor", *COLUMNS, "x floor", "vs fp8", "vs int8", "quantize x"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for model, m in dict.fromkeys((r.model, r.m) for r in results):
        rows = [r for r in results if (r.model, r.m) == (model, m)]
        us = {column: sum(r.us[column] for r in rows) for column in COLUMNS}
        ours, floor = us["w4a8-lqq g64"], sum(r.floor for r in rows)
        cells = [f"{floor:.0f}", *(f"{us[column]:.1f}" for column in COLUMNS), f"{ours / floor:.2f}"]
        cells += [
            f"{us['torch fp8'] / ours:.2f}",
            f"{us['torch int8'] / ours:.2f}",
            f"{sum(r.quantize_us for r in rows):.1f}",
        ]
        lines.append(f"| {model} | {m} | {' | '.join(cells)} |")
    return "\n".join(lines)
