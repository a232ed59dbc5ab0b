"""The W4A16 kernels against the CPU reference, on a GPU. ``benchmarks/kernels/check.py`` does the
same at length.
"""

import pytest
import torch
from torch import Tensor

from qtool.format import LinearFormat
from qtool.kernels.build import ARCHITECTURES
from tests.kernels.test_w4a16 import multiply

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() not in ARCHITECTURES,
        reason="needs sm_80, 86, 89 or 90",
    ),
]


def stored(scheme: str, group: int | None) -> dict[str, Tensor]:
    """The packed tensors of a random weight ``[256, 640]``."""
    linear_format = LinearFormat(
        scheme, group, "marlin" if scheme == "w4a16" else "marlin-24", "float16"
    )
    s, weight = linear_format.scheme_object, torch.randn(256, 640)
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
    assert (got - want).norm() <= 5e-6 * want.norm()
    half = multiply(there, x.cuda(), None, torch.bfloat16).cpu()
    assert (half - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-24"])
def test_compiles_and_repeats_to_the_bit(scheme: str) -> None:
    there = {name: tensor.cuda() for name, tensor in stored(scheme, 128).items()}
    x = torch.randn(5, 640, device="cuda").half()
    first = multiply(there, x, None, torch.float32)
    compiled = torch.compile(lambda x: multiply(there, x, None, torch.float32), fullgraph=True)
    assert torch.equal(compiled(x), first) and torch.equal(
        multiply(there, x, None, torch.float32), first
    )
