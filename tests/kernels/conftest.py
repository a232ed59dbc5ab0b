"""A packed random weight and the scheme's own product, for the tests of the W4A8 op."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qtool import schemes
from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.dual_mma import DUAL_MMA

Arguments = tuple[dict[str, object], Tensor]


@pytest.fixture(
    params=[
        ("w4a8-lqq", 32),
        ("w4a8-lqq", 64),
        ("w4a8-lqq", 128),
        ("w4a8-qoq-g128", 128),
        ("w4a8-qoq", None),
    ],
    ids=lambda p: f"{p[0]}-{p[1] or 'channel'}",
)
def w4a8_case(request: pytest.FixtureRequest) -> tuple[str, int | None]:
    """Scheme and group size, each in turn."""
    return request.param


@pytest.fixture
def w4a8_arguments() -> Callable[..., Arguments]:
    """``w4a8_arguments(scheme, group, m, n, k)``: the op's arguments, and the scheme's float32
    product.
    """
    return arguments


def arguments(
    scheme: str,
    group: int | None,
    m: int = 5,
    n: int = 128,
    k: int = 256,
    layout: DigitLayout = DUAL_MMA,
) -> Arguments:
    """The op's arguments for a random weight, and the scheme's own float32 product."""
    generator = torch.Generator().manual_seed(1)
    s = schemes.get(scheme, group)
    weight, x = torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator)
    params = s.fit(weight)
    codes = s.quantize(weight, params)
    qx, sx = s.activation.quantize(x)
    packed = {name: layout.pack_group(p) if p.dim() == 2 else p for name, p in params.items()}
    given = {
        "x": qx,
        "sx": sx[:, 0].contiguous(),
        "qweight": layout.pack(codes)["qweight"],
        "s1": packed.get("s1", packed.get("scale")),
        "s2": packed.get("s2"),
        "offset": packed.get("offset"),
        "zero": packed.get("zero"),
        "token_sum": qx.sum(1, dtype=torch.int32),
        "bias": None,
        "scheme": scheme,
        "group_size": group,
        "out_dtype": torch.float32,
    }
    return given, s.matmul(x, codes, params)
