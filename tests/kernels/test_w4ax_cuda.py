"""The s4 kernels against the CPU reference, on a GPU. ``benchmarks/kernels/check.py`` does the same
at length.
"""

import pytest
import torch
from torch import Tensor

from qtool import layouts
from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
from qtool.kernels.activation.quantize_packed_groups import quantize_packed_groups
from qtool.kernels.hopper.w4ax import w4ax_gemm
from qtool.kernels.mma.w4ax import w4ax_mma_gemm
from qtool.kernels.order import groups_in_order
from tests.conftest import on_hopper
from tests.kernels.test_w4ax import CASES, arguments

pytestmark = [pytest.mark.cuda, on_hopper]


@pytest.mark.parametrize(("layout", "group"), CASES)
@pytest.mark.parametrize("m", [1, 33, 300])
def test_equals_the_cpu_reference(layout: str, group: int | None, m: int) -> None:
    given, want = arguments(layout, group, m=m, n=192)
    there = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in given.items()}
    sums = w4ax_gemm(**there | {"out_dtype": torch.int32}).cpu()
    assert torch.equal(sums, w4ax_gemm(**given | {"out_dtype": torch.int32}))
    got = w4ax_gemm(**there).cpu()
    assert (got - want).norm() <= 1e-6 * want.norm()
    assert (
        w4ax_gemm(**there | {"out_dtype": torch.bfloat16}).cpu() - want
    ).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "group"), CASES)
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (33, 4096), (300, 1024)])
def test_in_order_groups_equal_the_cpu_to_the_bit(
    layout: str, group: int | None, m: int, k: int, dtype: torch.dtype
) -> None:
    given, want = arguments(layout, group, m=m, n=192, k=k, bias=torch.randn(192))
    there = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in given.items()} | {
        "out_dtype": dtype
    }
    with groups_in_order():
        assert torch.equal(w4ax_gemm(**there).cpu(), want.to(dtype))
    assert (
        group is None
        or m > 33
        or not torch.equal(w4ax_gemm(**there | {"out_dtype": torch.float32}).cpu(), want)
    )


@pytest.mark.parametrize(
    ("layout", "group", "mixed"), [("apex4", 128, False), ("w4ax-interleaved", 128, True)]
)
@pytest.mark.parametrize("m", [1, 300])
def test_so_do_those_of_ampere_and_ada(layout: str, group: int | None, mixed: bool, m: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(m, 1024)
    weight = torch.randint(-8, 8, (192, 1024), dtype=torch.int8)
    bias = torch.randn(192)
    blocks = (torch.arange(8) % 2).to(torch.uint8) if mixed else None
    codes, sx = quantize_packed_groups(x, None, None, blocks, "none", 0.0, group, layout)
    scale, qweight = torch.rand(8, 192), layouts.get(layout).pack(weight)["qweight"]
    given = (codes, sx, qweight, scale, blocks, bias, layout, group, torch.float32)
    with groups_in_order():
        got = w4ax_mma_gemm(*(v.cuda() if isinstance(v, Tensor) else v for v in given))  # type: ignore[arg-type]
    assert torch.equal(got.cpu(), w4ax_mma_gemm(*given))


@pytest.mark.parametrize(("layout", "group"), CASES)
def test_opcheck_and_compile(layout: str, group: int | None) -> None:
    given, _ = arguments(layout, group)
    there = tuple(v.cuda() if isinstance(v, Tensor) else v for v in given.values())
    torch.library.opcheck(w4ax_gemm, there)
    x = torch.randn(5, 1024, device="cuda")
    quantization = (x, None, None, None, "none", 0.0, group, layout)
    torch.library.opcheck(quantize_activation_groups, quantization)

    def forward(x: Tensor) -> Tensor:
        codes, scale = quantize_activation_groups(x, *quantization[1:])  # type: ignore[arg-type]
        return w4ax_gemm(codes, scale, *there[2:]) * 2  # type: ignore[arg-type]

    torch.testing.assert_close(torch.compile(forward, fullgraph=True)(x), forward(x))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("group", [32, 512, None])
@pytest.mark.parametrize("k", [1024, 3072, 14336])
def test_activation_quantization_equals_the_cpu(group: int | None, k: int, rotated: bool) -> None:
    x, order = torch.randn(5, k).bfloat16(), torch.randperm(k).int()
    how = (None, None, "none", 0.0, group, "w4ax-interleaved", rotated)
    for quantize in (quantize_activation_groups, quantize_packed_groups):
        want, got = quantize(x, order, *how), quantize(x.cuda(), order.cuda(), *how)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
