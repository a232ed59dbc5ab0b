"""Kernels as engines call them: chosen before loading, traced for any number of tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.runtime.dispatch import Call
from qtool.schemes import get
from qtool.serving.kernel import serving_kernel
from tests.serving.conftest import FORMATS


@pytest.mark.parametrize("scheme, layout", FORMATS)
@torch.no_grad()
def test_traced_once_for_every_number_of_tokens(scheme: str, layout: str) -> None:
    """An operator's fake that reads a size as a Python int would make a graph for each."""
    found = LinearFormat(scheme, get(scheme).group_size, layout)
    weight = found.scheme_object.prune(torch.randn(128, 256))
    params = found.scheme_object.fit(weight)
    stored = found.pack(found.scheme_object.quantize(weight, params), params)
    kernel = serving_kernel("linear", found, 128, 256, torch.bfloat16)
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def multiply(x: Tensor) -> Tensor:
        return kernel.multiply(Call(x, None, stored, None, found, x.dtype))

    torch._dynamo.reset()
    compiled = torch.compile(multiply, fullgraph=True, backend=record)
    for tokens in (5, 3, 17):
        x = torch.randn(tokens, 256).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), multiply(x))
    assert len(graphs) == 1


def test_what_no_kernel_takes_is_refused() -> None:
    lqq = LinearFormat("w4a8-lqq", 64, "dual-mma")
    assert serving_kernel("qkv", lqq, 64, 64, torch.bfloat16).name == "w4a8_gemm"
    with pytest.raises(QtoolError, match=r"^qkv: w4a8-lqq in layout dual-mma, 64 x 32: .*64 x 64"):
        serving_kernel("qkv", lqq, 64, 32, torch.bfloat16)
    with pytest.raises(QtoolError, match=r"layout row-major, .*it has no kernel"):
        row_major = LinearFormat("w4a8-lqq", 64, "row-major")
        serving_kernel("qkv", row_major, 64, 64, torch.bfloat16)
    w4a16 = LinearFormat("w4a16", 128, "marlin")
    with pytest.raises(QtoolError, match=r"64 x 64: no .*; multiples of 64 x 128 are expected$"):
        serving_kernel("qkv", w4a16, 64, 64, torch.bfloat16)
    with pytest.raises(
        QtoolError,
        match=r"64 x 128: no kernel takes activations in torch\.float32; "
        r"torch\.float16 or torch\.bfloat16 is expected$",
    ):
        serving_kernel("qkv", w4a16, 64, 128, torch.float32)
