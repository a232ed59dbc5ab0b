"""Scales by least squares: those that each group's own products give, in panels of any width."""

import pytest
import torch
from torch import Tensor

from qtool import schemes
from qtool.calibration.rounding import scales
from qtool.calibration.rounding.scales import float_scale, refit
from qtool.errors import QtoolError
from qtool.schemes.base import Params, Scheme

N, K = 24, 256


def problem(name: str, group: int | None) -> tuple[Scheme, Tensor, Tensor, Params, Tensor]:
    """A scheme, ``T [N, K]``, its codes and parameters, and ``H [K, K]``."""
    random = torch.Generator().manual_seed(0)
    scheme = schemes.get(name, group) if group else schemes.get(name)
    target = torch.randn(N, K, generator=random)
    inputs = torch.randn(500, K, generator=random) @ torch.randn(K, K, generator=random)
    params = scheme.fit(target, clip=0.7)
    return scheme, target, scheme.quantize(target, params), params, 2 * inputs.T @ inputs


def one_by_one(
    scheme: Scheme, target: Tensor, codes: Tensor, params: Params, hessian: Tensor
) -> Tensor:
    """Each group's scale in float64, the error made anew for each."""
    values = scheme.dequantize(codes, params).double()
    whole, ratios = values.clone(), []
    scale = params[float_scale(params)]
    for columns in torch.arange(K).view(scale.shape[1] if scale.dim() == 2 else 1, -1):
        value = values[:, columns]
        error = target - whole
        wanted = ((error @ hessian.double())[:, columns] * value).sum(1)
        power = ((value @ hessian.double()[columns][:, columns]) * value).sum(1)
        ratios.append((1 + wanted / power).clamp(0.5, 2))
        whole[:, columns] *= ratios[-1][:, None]
    return scale.double() * torch.stack(ratios, 1).view(scale.shape)


@pytest.mark.parametrize("panel", [32, 128, 4096])
@pytest.mark.parametrize(
    ("name", "group"), [("w4a16", 64), ("w4a8-lqq", 64), ("w4a8-qoq", None), ("w8a8", None)]
)
def test_scales_are_those_of_the_groups_one_by_one(
    name: str, group: int | None, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scales, "PANEL", panel)
    given = problem(name, group)
    scheme, target, codes, params, hessian = given
    better = refit(scheme, params, codes, target, hessian)
    found = better[float_scale(params)]
    torch.testing.assert_close(found.double(), one_by_one(*given), rtol=2e-3, atol=1e-6)

    def lost(with_params: Params) -> float:
        error = target - scheme.dequantize(codes, with_params)
        return float(((error @ hessian) * error).sum())

    assert lost(better) < lost(params)


def test_a_scheme_with_an_offset_in_float_is_refused() -> None:
    scale = torch.ones(2, 1)
    assert float_scale({"scale": scale, "zero": scale.to(torch.int8)}) == "scale"
    with pytest.raises(QtoolError, match="the scheme has scale, offset: take the rounding rtn"):
        float_scale({"scale": scale, "offset": scale})
