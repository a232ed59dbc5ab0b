"""Operators that are stated once: schema, reference, fake and kernel come from one class."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels import compiled  # noqa: F401  (registers the operators)
from qtool.kernels.attention import (  # noqa: F401  (register their own)
    kv_append_paged,
    kv_attention,
    kv_attention_paged,
)
from qtool.kernels.op import OPERATORS, operator
from tests.kernels.launched import launched


class Scaled(NamedTuple):
    """``x`` times ``factor``."""

    x: Tensor
    factor: float
    shift: Tensor | None

    def require(self) -> None:
        if self.x.dim() != 1:
            raise QtoolError(f"scaled: x is {self.x.dim()}-D; expected [M]")

    def empty(self) -> Tensor:
        return torch.empty_like(self.x)

    def reference(self) -> Tensor:
        return self.x * self.factor + (0 if self.shift is None else self.shift)

    def launch(self, out: Tensor) -> None:
        out.copy_(self.reference())


scaled = operator("scaled_for_tests", Scaled)


def test_an_operator_from_one_class() -> None:
    x = torch.randn(4)
    schema = "qtool::scaled_for_tests(Tensor x, float factor, Tensor? shift) -> Tensor"
    assert str(scaled._schema) == schema  # type: ignore[attr-defined]
    assert torch.equal(scaled(x, 2.0, None), 2 * x)
    assert torch.equal(scaled(x=x, factor=2.0, shift=x), 3 * x)
    assert torch.equal(launched(scaled, x, 2.0, x), 3 * x)
    torch.library.opcheck(scaled, (x, 2.0, x))
    assert scaled.__doc__ == Scaled.__doc__
    added = torch.compile(lambda x: scaled(x, 2.0, None) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(added(x), 2 * x + 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_implementation_refuses(device: str) -> None:
    with pytest.raises(QtoolError, match="2-D"):
        scaled(torch.zeros(2, 2, device=device), 1.0, None)
    with pytest.raises(QtoolError, match="2-D"):
        launched(scaled, torch.zeros(2, 2), 1.0, None)


def test_every_kernel_is_an_operator_on_each_device() -> None:
    names = {op._schema.name.removeprefix("qtool::") for op in OPERATORS}
    assert names - {"scaled_for_tests"} == {
        "combine_experts",
        "gather_expert_rows",
        "kv_append",
        "kv_append_paged",
        "kv_attention",
        "kv_attention_paged",
        "kv_gather",
        "quantize_activation",
        "quantize_activation_groups",
        "quantize_expert_rows",
        "quantize_packed_groups",
        "quantize_residual_norm",
        "route_experts",
        "w4a16_24_gemm",
        "w4a16_experts_gemm",
        "w4a16_gemm",
        "w4a8_experts_gemm",
        "w4a8_gemm",
        "w4a8_mma_gemm",
        "w4ax_gemm",
        "w4ax_mma_gemm",
        "w8a8_experts_gemm",
        "w8a8_gemm",
    }
    for op in OPERATORS:
        for key in ("CPU", "CUDA", "Meta"):
            assert op.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)), (op, key)
