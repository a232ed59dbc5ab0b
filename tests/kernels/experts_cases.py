"""Random stacks of experts, and how their tokens may be distributed."""

from typing import Any

import torch
from torch import Tensor

from qtool.kernels.experts.w4a8 import w4a8_experts_gemm
from qtool.kernels.experts.w4a16 import w4a16_experts_gemm
from qtool.kernels.experts.w8a8 import w8a8_experts_gemm
from qtool.kernels.hopper.w4a8 import w4a8_gemm
from qtool.kernels.hopper.w8a8 import w8a8_gemm
from qtool.kernels.mma.w4a16 import w4a16_gemm
from qtool.layouts.marlin import MARLIN
from tests.kernels.conftest import arguments

W8A8 = ("w8a8", None)
SCHEMES = [
    ("w4a8-lqq", 64),
    ("w4a8-lqq", 32),
    ("w4a8-qoq-g128", 128),
    ("w4a8-qoq", None),
    W8A8,
    ("w4a16", 32),
    ("w4a16", 128),
    ("w4a16", None),
]
#: rows of each expert
COUNTS = {
    "ragged": [3, 0, 17, 1, 9, 0],
    "one takes all": [0, 0, 30, 0, 0, 0],
    "none is here": [0] * 6,
    "many": [70, 3, 131, 0, 64, 8],
}


def grouped(
    scheme: str,
    group: int | None,
    counts: list[int],
    beyond: int = 2,
    n: int = 192,
    k: int = 256,
    scale: torch.dtype = torch.bfloat16,
) -> tuple[Any, dict[str, Any]]:
    """The op and its arguments, with ``beyond`` rows that no expert has.

    The sums of its products are exact. ``scale``: the dtype of W4A16's.
    """
    experts, rows = len(counts), sum(counts) + beyond
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    generator = torch.Generator().manual_seed(2)

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, dtype=dtype, generator=generator)

    if scheme == "w8a8":
        return w8a8_experts_gemm, {
            "x": draw(-127, 128, rows, k),
            "sx": torch.rand(rows, generator=generator),
            "expert_offsets": offsets,
            "weight": draw(-127, 128, experts, n, k),
            "scale": torch.rand(experts, n, generator=generator),
            "out_dtype": torch.float32,
        }
    if scheme == "w4a16":  # integers times powers of two: exact in float32 in any order
        parts = next(parts for parts in (3, 2, 1) if n % (64 * parts) == 0)

        def stacked(packed: Tensor) -> Tensor:
            return packed.unflatten(1, (experts, parts, -1)).permute(1, 2, 0, 3).contiguous()

        codes = draw(0, 16, experts * n, k, dtype=torch.uint8)
        scales = 0.5 ** draw(0, 8, experts * n, k // (group or k)).float()
        return w4a16_experts_gemm, {
            "x": draw(-8, 9, rows, k).bfloat16(),
            "expert_offsets": offsets,
            "qweight": stacked(MARLIN.pack(codes)["qweight"]),
            "scale": stacked(MARLIN.pack_group(scales)).to(scale),
            "out_dtype": torch.float32,
        }
    given, _ = arguments(scheme, group, rows, experts * n, k)
    del given["bias"]
    for name in ("qweight", "s1", "s2", "offset", "zero"):
        if isinstance(stack := given[name], Tensor):
            given[name] = stack.unflatten(0, (experts, -1))
    return w4a8_experts_gemm, given | {"expert_offsets": offsets}


def exact(scheme: str) -> torch.dtype:
    """The output that holds the sums as they are."""
    return torch.float32 if scheme == "w4a16" else torch.int32


def by_experts(scheme: str, given: dict[str, Any], counts: list[int]) -> Tensor:
    """The same by the dense op, expert by expert."""
    dense: Any = {"w4a16": w4a16_gemm, "w8a8": w8a8_gemm}.get(scheme, w4a8_gemm)
    parts, first = [], 0
    for expert, count in enumerate(counts):
        own = {
            name: value
            if not isinstance(value, Tensor)
            else value[first : first + count].clone()
            if name in ("x", "sx", "token_sum")
            else torch.cat(value[expert].unbind(), 1)
            if scheme == "w4a16"
            else value[expert]
            for name, value in given.items()
            if name != "expert_offsets"
        }
        parts.append(dense(**own | {"bias": None}))
        first += count
    return torch.cat(parts)


def poisoned(op: Any, given: dict[str, Any]) -> Tensor:
    """What the kernel writes on the GPU into an output that was full of ones' bits."""
    from qtool.kernels.op import OPERATORS

    call = OPERATORS[op](**given)
    call.require()
    out = call.empty()
    out.view(torch.uint8).fill_(0xA5)
    call.launch(out)
    return out
