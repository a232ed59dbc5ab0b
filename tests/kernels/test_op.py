"""Operators that are stated once: schema, reference, fake and kernel come from one class."""

from collections.abc import Callable
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
from qtool.kernels.op import OPERATORS, Launch, Plans, operator
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


class Shifted(NamedTuple):
    """Two tensors with a row for each token, a weight and a number."""

    x: Tensor
    y: Tensor
    weight: Tensor
    shift: float

    def require(self) -> None:
        alike = self.x.shape == self.y.shape and self.x.dtype == self.y.dtype
        if not (alike and self.x.is_contiguous() and self.y.is_contiguous()):
            raise QtoolError("shifted: x and y differ, or have strides")
        if self.weight.shape != self.x.shape[1:] or self.weight.dtype != self.x.dtype:
            raise QtoolError("shifted: the weight does not fit")

    def plan(self) -> Launch:
        made.append(self.weight.data_ptr())
        return lambda call, out: None


#: addresses of the weights that a plan was made for
made: list[int] = []


def test_a_plan_serves_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    plans, weight = Plans([True, True, False, False]), torch.ones(8)
    first = plans.of(Shifted(torch.ones(4, 8), torch.ones(4, 8), weight, 0.5))
    for m in (1, 3, 0, 200):
        assert plans.of(Shifted(torch.ones(m, 8), torch.ones(m, 8), weight, 0.5)) is first
    assert made == [weight.data_ptr()]
    x, other = torch.ones(4, 8), torch.ones(8)
    assert plans.of(Shifted(x, x, other, 0.5)) is not first
    assert plans.of(Shifted(x, x, weight, 0.25)) is not first
    halves = x.half(), x.half(), weight.half(), 0.5
    plans.of(Shifted(*halves))
    assert made == [t.data_ptr() for t in (weight, other, weight, halves[2])]
    monkeypatch.setattr("qtool.kernels.op.MOST_PLANS", 4)
    plans.of(Shifted(x, x, weight, 8.0))
    assert len(plans.plans) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, weight: (x[:, :4], x[:, :4], weight),  # another width
        lambda x, weight: (x.T.contiguous().T, x, weight),  # strides
        lambda x, weight: (x, x[:2], weight),  # fewer tokens
        lambda x, weight: (x, x.half(), weight),
        lambda x, weight: (x, x, weight[:4]),  # the same address
        lambda x, weight: (x, x, weight.view(torch.int32)),
        lambda x, weight: (x, x, weight.view(2, 4)),
    ],
)
def test_a_call_unlike_the_planned_one_is_checked(
    wrong: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
) -> None:
    plans, x, weight = Plans([True, True, False, False]), torch.ones(4, 8), torch.ones(8)
    plans.of(Shifted(x, x, weight, 0.5))
    with pytest.raises(QtoolError, match="shifted"):
        plans.of(Shifted(*wrong(x, weight), 0.5))


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
