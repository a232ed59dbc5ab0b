"""Measures GEMMs by CUDA graphs over rotated weights, beside torch's own matmuls.

Every time is in microseconds, the median over graph replays; a graph holds one launch per weight
copy, and the copies together exceed the L2 cache, as a model's layers do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
from qtool.kernels.hopper import gemm, w4a8, w4ax, w8a8
from qtool.kernels.hopper.gemm import Operand, Weight, run
from qtool.kernels.hopper.tiles import Tile, choose, choose_s4
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma import half_gemm
from qtool.kernels.mma import w4a8 as w4a8_mma
from qtool.kernels.mma.gemm import MmaWeight
from qtool.kernels.mma.half_gemm import HalfWeight, Variant
from qtool.kernels.mma.half_tiles import choose as choose_half

#: output channels and input channels of a layer's linears
MODELS = {
    "llama-2-7b": {
        "qkv": (12288, 4096),
        "o": (4096, 4096),
        "gate_up": (22016, 4096),
        "down": (4096, 11008),
    },
    "llama-3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "llama-2-70b": {
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "gate_up": (57344, 8192),
        "down": (8192, 28672),
    },
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

BANDWIDTH = 4.8e12  # bytes per second, H200 datasheet
OPERATIONS = 1979e12  # dense int8 operations per second, H200 datasheet
HALF_OPERATIONS = 989e12  # dense bf16
ROTATED_BYTES = 240e6  # four times the L2 cache


def floor_us(m: int, n: int, k: int, bits: float, operations: float = OPERATIONS) -> float:
    """The least time for ``[m, k] x [n, k]``: weight bytes once, or the arithmetic."""
    return 1e6 * max(n * k * bits / 8 / BANDWIDTH, 2 * m * n * k / operations)


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
    """The number of weights to rotate: at least four, and more than the L2 cache in all."""
    return max(4, min(64, int(ROTATED_BYTES / bytes_each) + 1))


def random_weights(scheme: str, group_size: int | None, n: int, k: int) -> list[Weight]:
    """Random weights ``[n, k]`` of a scheme, as many as are rotated; level 2 is legal."""

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, shape, dtype=dtype, device="cuda")

    weights = []
    for _ in range(copies(n * k / (1 if scheme == "w8a8" else 2))):
        scale = torch.rand(n, device="cuda") * 1e-3
        if scheme == "w8a8":
            weights.append(Weight(scale, boxed=draw(-127, 128, n, k, dtype=torch.int8)))
            continue
        if scheme in S4_LAYOUTS:
            scale = (torch.rand(k // (group_size or k), n, device="cuda") * 1e-3).bfloat16()
            shape = (k // 32, n, 16) if scheme == "w4a4" else (n, k // 2)
            weights.append(w4ax.packed_weight(S4_LAYOUTS[scheme], draw(0, 256, *shape), scale))
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
    operand: Operand,
    weights: Sequence[Weight],
    m: int,
    n: int,
    k: int,
    tile: Tile,
    overlap: bool = True,
) -> list[Callable[[], object]]:
    """One launch per weight, for ``m`` random tokens, bf16 out."""
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    sx = torch.rand(
        max(1, weights[0].scale1.numel() // n), (m + 3) // 4 * 4, device="cuda"
    )  # [G, M4]
    token_sum = x.sum(1, dtype=torch.int32)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

    def call(weight: Weight) -> Callable[[], object]:
        return lambda: run(operand, tile, x, sx, weight, out, token_sum=token_sum, overlap=overlap)

    return [call(weight) for weight in weights]


def reference_calls(kind: str, m: int, n: int, k: int) -> list[Callable[[], object]]:
    """torch's own matmul of the shape as ``bf16``, ``fp8`` or ``int8``.

    fp8 has one scale a tensor, int8 gives bare sums.
    """
    calls: list[Callable[[], object]] = []
    rows = max(m, 32) if kind == "int8" else m  # _int_mm refuses fewer than 17 rows
    for _ in range(copies(n * k * (2 if kind == "bf16" else 1))):
        if kind == "bf16":
            a, b = (
                torch.randn(rows, k, device="cuda").bfloat16(),
                torch.randn(n, k, device="cuda").bfloat16(),
            )
            calls.append(lambda a=a, b=b: torch.mm(a, b.t()))  # type: ignore[misc]
        elif kind == "fp8":
            fp8 = torch.float8_e4m3fn
            a, b = (
                torch.randn(rows, k, device="cuda").to(fp8),
                torch.randn(n, k, device="cuda").to(fp8),
            )
            one = torch.ones((), device="cuda")
            calls.append(
                lambda a=a, b=b, one=one: torch._scaled_mm(
                    a, b.t(), one, one, out_dtype=torch.bfloat16
                )  # type: ignore[misc]
            )
        else:
            a = torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda")
            b = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
            calls.append(lambda a=a, b=b: torch._int_mm(a, b.t()))  # type: ignore[misc]
    return calls


#: the stored layout of schemes with s4 weights and s4 tokens
S4_LAYOUTS = {"w4a4": "apex4", "w4ax-fmpq": "w4ax-interleaved"}


#: source name, prologue and macros of a kernel
Source = tuple[str, str, dict[str, int]]


@dataclass(frozen=True)
class Column:
    """A kernel in the table: scheme, group size, and stored bits of a weight, scales included."""

    scheme: str
    group_size: int | None
    bits: float

    def operand(self) -> Operand:
        """The operand that the kernel is compiled for."""
        if self.scheme in S4_LAYOUTS:
            return w4ax.operand(S4_LAYOUTS[self.scheme], self.group_size, torch.bfloat16)
        return w8a8.OPERAND if self.scheme == "w8a8" else w4a8.operand(self.scheme, self.group_size)

    def tile(self, m: int, n: int, k: int) -> Tile:
        """The tile that the op would choose."""
        return choose_s4(m, n, k, self.group_size) if self.scheme in S4_LAYOUTS else choose(m, n, k)

    def source(self, m: int, n: int, k: int) -> Source:
        """The arguments of :func:`qtool.kernels.build.cubin` for a shape, on Hopper."""
        return gemm.definition(self.operand(), self.tile(m, n, k), torch.bfloat16)

    def weights(self, n: int, k: int) -> list[Weight]:
        """Random weights to rotate."""
        return random_weights(self.scheme, self.group_size, n, k)

    def calls(
        self, weights: Sequence[Weight], m: int, n: int, k: int
    ) -> list[Callable[[], object]]:
        """One launch per weight."""
        return kernel_calls(self.operand(), weights, m, n, k, self.tile(m, n, k))


@dataclass(frozen=True)
class HalfColumn:
    """The same for bf16 tokens and scales: W4A16, dense or 2:4 sparse."""

    sparse: bool
    group_size: int | None
    bits: float

    def source(self, m: int, n: int, k: int) -> Source:
        bf16 = torch.bfloat16
        variant = Variant(self.sparse, self.group_size or 0, bf16, bf16, bf16)
        return half_gemm.definition(variant, choose_half(m, n), (9, 0), hopper=True)

    def weights(self, n: int, k: int) -> list[HalfWeight]:
        inputs = 32 if self.sparse else 16

        def random_weight() -> HalfWeight:
            qweight = torch.randint(
                -(2**31), 2**31, (k // inputs, 2 * n), dtype=torch.int32, device="cuda"
            )
            scale = (torch.rand(k // (self.group_size or k), n, device="cuda") * 1e-2).bfloat16()
            positions = torch.full(
                (k // 32, 2 * n), -0x1112, dtype=torch.int16, device="cuda"
            )  # 2 and 3 of each four
            return HalfWeight(qweight, scale, positions if self.sparse else None)

        return [random_weight() for _ in range(copies(n * k * self.bits / 8))]

    def calls(
        self, weights: Sequence[HalfWeight], m: int, n: int, k: int
    ) -> list[Callable[[], object]]:
        x = torch.randn(m, k, device="cuda").bfloat16()
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

        def call(weight: HalfWeight) -> Callable[[], object]:
            return lambda: half_gemm.run(choose_half(m, n), x, weight, out, None)

        return [call(weight) for weight in weights]


@dataclass(frozen=True)
class MmaColumn:
    """The same for W4A8 in the compute-aware layout, by mma.sync."""

    scheme: str
    group_size: int | None
    bits: float

    def source(self, m: int, n: int, k: int) -> Source:
        tile = mma.choose(
            mma.TILES, m, n, torch.cuda.get_device_properties(0).multi_processor_count
        )
        return mma.definition(
            w4a8_mma.operand(self.scheme, self.group_size), tile, torch.bfloat16, (9, 0)
        )

    def weights(self, n: int, k: int) -> list[MmaWeight]:
        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

        def random_weight() -> MmaWeight:
            qweight, scale = (
                draw(0, 256, n, k // 2).view(torch.int8),
                torch.rand(n, device="cuda") * 1e-3,
            )
            if self.group_size is None:
                return MmaWeight(qweight, scale, zero1=draw(0, 16, n))
            level2 = (k // self.group_size, n)
            return MmaWeight(
                qweight, scale, scale2=draw(1, 9, *level2), offset2=draw(0, 16, *level2)
            )

        return [random_weight() for _ in range(copies(n * k / 2))]

    def calls(
        self, weights: Sequence[MmaWeight], m: int, n: int, k: int
    ) -> list[Callable[[], object]]:
        x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
        sx, token_sum = torch.rand(m, device="cuda"), x.sum(1, dtype=torch.int32)
        out, operand = (
            torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
            w4a8_mma.operand(self.scheme, self.group_size),
        )

        def call(weight: MmaWeight) -> Callable[[], object]:
            return lambda: mma.run(operand, x, sx, weight, out, k, token_sum=token_sum)

        return [call(weight) for weight in weights]


COLUMNS: dict[str, Column | HalfColumn | MmaColumn] = {
    "w4a8-lqq-g64": Column("w4a8-lqq", 64, 4.25),
    "w4a8-qoq-g128": Column("w4a8-qoq-g128", 128, 4.125),
    "w4a8-qoq": Column("w4a8-qoq", None, 4.0),
    "w8a8": Column("w8a8", None, 8.0),
    "w4a4-g128": Column("w4a4", 128, 4.125),
    "w4a4-g32": Column("w4a4", 32, 4.5),
    "w4a4": Column("w4a4", None, 4.0),
    "w4ax-fmpq": Column("w4ax-fmpq", 128, 4.125),
    "w4a8-qoq-g128-mma": MmaColumn("w4a8-qoq-g128", 128, 4.125),
    "w4a8-qoq-mma": MmaColumn("w4a8-qoq", None, 4.0),
    "w4a16-g128": HalfColumn(False, 128, 4.125),
    "w4a16": HalfColumn(False, None, 4.0),
    "w4a16-24-g128": HalfColumn(True, 128, 3.125),
}
DEFAULT_COLUMNS = ("w4a8-lqq-g64", "w4a8-qoq-g128", "w4a8-qoq", "w8a8")
REFERENCES = ("bf16", "fp8", "int8")


@dataclass(frozen=True)
class Measurement:
    """One linear at one number of tokens: microseconds by column.

    ``quantize_us``: of quantizing its input for the first column.
    """

    model: str
    layer: str
    m: int
    n: int
    k: int
    us: dict[str, float]
    quantize_us: float

    def floor(self, column: str) -> float:
        """Least microseconds of a column of :data:`COLUMNS`."""
        operations = HALF_OPERATIONS if isinstance(COLUMNS[column], HalfColumn) else OPERATIONS
        return floor_us(self.m, self.n, self.k, COLUMNS[column].bits, operations)


def quantize_call(column: Column | MmaColumn, m: int, k: int) -> Callable[[], object]:
    """The quantization of a random input for a column."""
    x = torch.randn(m, k, device="cuda").bfloat16()
    if column.scheme not in S4_LAYOUTS:
        return lambda: quantize_activation(x, None, None, "none", 0.0)
    layout = S4_LAYOUTS[column.scheme]
    blocks = (
        (torch.arange(k // 128, device="cuda") % 8 == 0).to(torch.uint8)
        if column.scheme == "w4ax-fmpq"
        else None
    )
    return lambda: quantize_activation_groups(
        x, None, None, blocks, "none", 0.0, column.group_size, layout
    )


def gemm_table(
    models: Iterable[str] = MODELS,
    tokens: Iterable[int] = TOKENS,
    columns: Sequence[str] = DEFAULT_COLUMNS,
) -> list[Measurement]:
    """Measure ``columns`` on the layers of ``models`` at each number of tokens.

    ``models`` are names in :data:`MODELS`.
    """
    results = []
    for model in models:
        for layer, (n, k) in MODELS[model].items():
            made: dict[str, Any] = {name: COLUMNS[name].weights(n, k) for name in columns}
            for m in tokens:
                us = {
                    name: graph_us(COLUMNS[name].calls(weights, m, n, k))
                    for name, weights in made.items()
                }
                for kind in REFERENCES:
                    us[f"torch {kind}"] = graph_us(reference_calls(kind, m, n, k))
                first = COLUMNS[columns[0]]
                quantize_us = (
                    graph_us([quantize_call(first, m, k)] * 16)
                    if not isinstance(first, HalfColumn)
                    else 0.0
                )
                results.append(Measurement(model, layer, m, n, k, us, quantize_us))
    return results


def markdown(results: Sequence[Measurement]) -> str:
    """A table of sums over each model's layers, one row a number of tokens, in microseconds.

    "vs" divides by the first column.
    """
    names = [name for name in results[0].us if name in COLUMNS]
    head = ["model", "M", "floor"]
    for name in names:
        head += [name, "x floor"]
    head += [*(f"torch {kind}" for kind in REFERENCES), "vs fp8", "vs int8", "quantize x"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for model, m in dict.fromkeys((r.model, r.m) for r in results):
        rows = [r for r in results if (r.model, r.m) == (model, m)]
        us = {column: sum(r.us[column] for r in rows) for column in rows[0].us}
        floors = {name: sum(r.floor(name) for r in rows) for name in names}
        cells = [f"{floors[names[0]]:.0f}"]
        for name in names:
            cells += [f"{us[name]:.1f}", f"{us[name] / floors[name]:.2f}"]
        cells += [f"{us[f'torch {kind}']:.1f}" for kind in REFERENCES]
        cells += [f"{us[f'torch {kind}'] / us[names[0]]:.2f}" for kind in ("fp8", "int8")]
        lines.append(
            f"| {model} | {m} | {' | '.join(cells)} | {sum(r.quantize_us for r in rows):.1f} |"
        )
    return "\n".join(lines)
