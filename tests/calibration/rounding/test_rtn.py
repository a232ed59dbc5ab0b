"""Round to nearest: the recorded error is the relative distance of the weights."""

import pytest
import torch

from qtool import schemes
from qtool.calibration.rounding import rtn


def test_the_weight_error_is_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    scheme = schemes.get("w4a4", 128)
    nearest = scheme.fake_weight(weight, scheme.fit(weight))
    expected = float((nearest - weight).norm() / weight.norm())
    for elements in (1 << 20, 10 * 256):  # in one piece, and ten rows at a time
        monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", (elements, elements))
        rounded = rtn.round_to_nearest(scheme, weight)
        assert rounded.weight_error == pytest.approx(expected, rel=1e-5)
        assert torch.equal(scheme.dequantize(rounded.codes, rounded.params), nearest)


def test_a_weight_of_zeros_has_no_error() -> None:
    assert rtn.round_to_nearest(schemes.get("w8a8"), torch.zeros(4, 64)).weight_error == 0
