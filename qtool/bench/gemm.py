"""The table of ``qtool bench gemm``: our GEMMs beside torch's own matmuls.

Every time is in microseconds, the median over graph replays; a graph holds one launch per weight
copy, and the copies together exceed the L2 cache, as a model's layers do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from qtool.bench.cuda_graphs import copies, floor_us, graph_us
from qtool.bench.gemm_columns import COLUMNS, quantize_call
from qtool.table import markdown

#: output and input channels of a layer's linears, by model
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
REFERENCES = ("bf16", "fp8", "int8")


def reference_calls(kind: str, m: int, n: int, k: int) -> list[Callable[[], object]]:
    """Calls of torch's own matmul of the shape in ``bf16``, ``fp8`` or ``int8``.

    fp8 has one scale for a tensor; int8 returns sums without scales.
    """
    calls: list[Callable[[], object]] = []
    rows = max(m, 32) if kind == "int8" else m  # _int_mm refuses fewer than 17 rows
    for _ in range(copies(n * k * (2 if kind == "bf16" else 1))):
        if kind == "bf16":
            a = torch.randn(rows, k, device="cuda").bfloat16()
            b = torch.randn(n, k, device="cuda").bfloat16()
            calls.append(partial(torch.mm, a, b.t()))
        elif kind == "fp8":
            fp8 = torch.float8_e4m3fn
            a = torch.randn(rows, k, device="cuda").to(fp8)
            b = torch.randn(n, k, device="cuda").to(fp8)
            one = torch.ones((), device="cuda")
            calls.append(partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16))
        else:
            a = torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda")
            b = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
            calls.append(partial(torch._int_mm, a, b.t()))
    return calls


def gemm_rows(
    models: Iterable[str], tokens: Sequence[int], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Measure ``columns``: sums over the layers of each of ``models`` (names in :data:`MODELS`).

    There is a row of plain data for each model and number of tokens ``m``. ``us`` and ``floor_us``
    are microseconds by column, and ``quantize_us`` those of quantizing the first column's inputs.
    """
    found = []
    for model in models:
        rows: list[dict[str, Any]] = [
            {"model": model, "m": m, "us": defaultdict(float), "floor_us": defaultdict(float)}
            | {"quantize_us": 0.0}
            for m in tokens
        ]
        for n, k in MODELS[model].values():
            made: dict[str, Any] = {name: COLUMNS[name].weights(n, k) for name in columns}
            for row in rows:
                m, us, floor = row["m"], row["us"], row["floor_us"]
                for name, weights in made.items():
                    column = COLUMNS[name]
                    us[name] += graph_us(column.calls(weights, m, n, k))
                    floor[name] += floor_us(m, n, k, column.bits, column.operations)
                for kind in REFERENCES:
                    us[f"torch {kind}"] += graph_us(reference_calls(kind, m, n, k))
                if quantize := quantize_call(COLUMNS[columns[0]], m, k):
                    row["quantize_us"] += graph_us([quantize] * 16)
        found += rows
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The ``rows`` of :func:`gemm_rows` in Markdown.

    "vs" is the ratio to the first column.
    """
    names = list(rows[0]["floor_us"])
    head = ["model", "M", "floor"]
    for name in names:
        head += [name, "x floor"]
    head += [*(f"torch {kind}" for kind in REFERENCES), "vs fp8", "vs int8", "quantize x"]
    lines = []
    for row in rows:
        us, floors = row["us"], row["floor_us"]
        cells = [row["model"], str(row["m"]), f"{floors[names[0]]:.0f}"]
        for name in names:
            cells += [f"{us[name]:.1f}", f"{us[name] / floors[name]:.2f}"]
        cells += [f"{us[f'torch {kind}']:.1f}" for kind in REFERENCES]
        cells += [f"{us[f'torch {kind}'] / us[names[0]]:.2f}" for kind in ("fp8", "int8")]
        lines.append([*cells, f"{row['quantize_us']:.1f}"])
    return markdown(head, lines)
