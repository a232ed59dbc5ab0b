"""Random stacks of experts, and how their tokens may be distributed."""

from typing import Any

import torch
from torch import Tensor

from qtool.kernels.experts.w4a8 import w4a8_experts_gemm
from qtool.kernels.experts.w8a8 import w8a8_experts_gemm
from tests.kernels.conftest import arguments

W8A8 = ("w8a8", None)
SCHEMES = [
    ("w4a8-lqq", 64),
    ("w4a8-lqq", 32),
    ("w4a8-qoq-g128", 128),
    ("w4a8-qoq", None),
    W8A8,
]
#: rows of each expert
COUNTS = {
    "ragged": [3, 0, 17, 1, 9, 0],
    "one takes all": [0, 0, 30, 0, 0, 0],
    "none is here": [0] * 6,
    "many": [70, 3, 131, 0, 64, 8],
}


def grouped(
    scheme: str, group: int | None, counts: list[int], beyond: int = 2, n: int = 192, k: int = 256
) -> tuple[Any, dict[str, Any]]:
    """The op and its arguments, with ``beyond`` rows that no expert has."""
    experts, rows = len(counts), sum(counts) + beyond
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    if scheme == "w8a8":
        generator = torch.Generator().manual_seed(2)

        def codes(*shape: int) -> Tensor:
            return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)

        return w8a8_experts_gemm, {
            "x": codes(rows, k),
            "sx": torch.rand(rows, generator=generator),
            "expert_offsets": offsets,
            "weight": codes(experts, n, k),
            "scale": torch.rand(experts, n, generator=generator),
            "out_dtype": torch.float32,
        }
    given, _ = arguments(scheme, group, rows, experts * n, k)
    del given["bias"]
    for name in ("qweight", "s1", "s2", "offset", "zero"):
        if isinstance(stack := given[name], Tensor):
            given[name] = stack.unflatten(0, (experts, -1))
    return w4a8_experts_gemm, given | {"expert_offsets": offsets}


def poisoned(op: Any, given: dict[str, Any]) -> Tensor:
    """What the kernel writes on the GPU into an output that was full of ones' bits."""
    from qtool.kernels.op import OPERATORS

    call = OPERATORS[op](**given)
    call.require()
    out = call.empty()
    out.view(torch.uint8).fill_(0xA5)
    call.launch(out)
    return out
