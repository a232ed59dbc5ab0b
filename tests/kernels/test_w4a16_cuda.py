"""The W4A16 kernels against the CPU reference, on a GPU. ``benchmarks/kernels/check.py`` does the
same at length.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.format import LinearFormat
from qtool.kernels.build import ARCHITECTURES
from qtool.kernels.hopper.w4a16 import EXACT_TOKENS
from qtool.kernels.mma.w4a16 import HOPPER, W4A16Gemm, W4A16SparseGemm
from tests.kernels.test_w4a16 import multiply

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() not in ARCHITECTURES,
        reason="needs sm_80, 86, 89 or 90",
    ),
]


def on_hopper() -> bool:
    return torch.cuda.get_device_capability() == HOPPER


def stored(
    scheme: str, group: int | None, scale_dtype: str = "float16", n: int = 256
) -> dict[str, Tensor]:
    """The packed tensors of a random weight ``[n, 640]``."""
    layout = "marlin" if scheme == "w4a16" else "marlin-24"
    linear_format = LinearFormat(scheme, group, layout, scale_dtype)
    s, weight = linear_format.scheme_object, torch.randn(n, 640)
    params = s.fit(weight)
    return linear_format.pack(s.quantize(weight, params), params)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-24"])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("m", [1, 16, 33, 300])
def test_equals_the_cpu_reference(scheme: str, group: int | None, m: int) -> None:
    tensors, x = stored(scheme, group), torch.randn(m, 640).half()
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    want = multiply(tensors, x, None, torch.float32)
    got = multiply(there, x.cuda(), None, torch.float32).cpu()
    rounded = group is not None and m > EXACT_TOKENS and on_hopper()
    assert (got - want).norm() <= (5e-4 if rounded else 5e-6) * want.norm()
    half = multiply(there, x.cuda(), None, torch.bfloat16).cpu()
    assert (half - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("scheme", "n"), [("w4a16", 64), ("w4a16", 320), ("w4a16-24", 128), ("w4a16-24", 384)]
)
def test_one_hot_tokens_spell_out_the_weight(
    group: int | None, x_dtype: torch.dtype, scale_dtype: str, scheme: str, n: int
) -> None:
    """Every weight, to the bit; on Hopper the kernel of many tokens rounds those of groups."""
    tensors = stored(scheme, group, scale_dtype, n)
    eye = torch.eye(640, dtype=x_dtype)
    want = multiply(tensors, eye, None, torch.float32)
    if group is not None and tensors["scale"].dtype == x_dtype and on_hopper():
        want = want.to(x_dtype).float()
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert torch.equal(multiply(there, eye.cuda(), None, torch.float32).cpu(), want)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-24"])
@pytest.mark.parametrize("m", [1, 15, 17, 31, 33, 63, 65, 127, 129, 257, 299])
@pytest.mark.parametrize("group", [128, None])
def test_every_output_is_written(scheme: str, group: int | None, m: int) -> None:
    """Over memory that held NaN, and nothing beyond."""
    there = {name: tensor.cuda() for name, tensor in stored(scheme, group, "bfloat16").items()}
    x, out = torch.ones(m, 640, device="cuda").bfloat16(), torch.full((m + 1, 256), torch.nan)
    out = out.cuda()
    how: Any = {"x": x, "bias": None, "out_dtype": torch.float32} | there
    call = W4A16Gemm(**how) if scheme == "w4a16" else W4A16SparseGemm(**how)
    call.plan()(call, out[:-1])
    assert not out[:-1].isnan().any() and out[-1].isnan().all()


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-24"])
def test_compiles_and_repeats_to_the_bit(scheme: str) -> None:
    there = {name: tensor.cuda() for name, tensor in stored(scheme, 128).items()}
    x = torch.randn(5, 640, device="cuda").half()
    first = multiply(there, x, None, torch.float32)
    compiled = torch.compile(lambda x: multiply(there, x, None, torch.float32), fullgraph=True)
    assert torch.equal(compiled(x), first) and torch.equal(
        multiply(there, x, None, torch.float32), first
    )
