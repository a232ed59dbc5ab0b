"""QQQ: exact per channel; in groups the codes are ours and the second rounding is what the export
reports.
"""

import json

import pytest
import torch

from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, stored


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_per_channel_is_exact(scheme: str, native: Native, exported: Export) -> None:
    ours = native(scheme, "channel")
    done = exported(ours, "qqq")
    assert set(done.errors.values()) == {0.0}
    for linear, module in linears(ours).items():
        tensors = stored(done.directory, linear)
        assert sorted(tensors) == ["B", "s_channel"]
        assert torch.equal(readers.qqq(tensors).float(), module.dequantize())


def test_groups_are_rounded_once_more_and_the_error_is_reported(
    native: Native, exported: Export
) -> None:
    ours = native("w4a16", 128)
    done = exported(ours, "qqq")
    for linear, module in linears(ours).items():
        tensors = stored(done.directory, linear)
        weight, found = module.dequantize().double(), readers.qqq(tensors)
        error = float((found - weight).norm() / weight.norm())
        assert error == pytest.approx(done.errors[linear], rel=1e-4)
        assert 0 < error < 0.02
        # within half a step of the channel's int8 grid, and fp16's rounding of the group scale
        step = readers.marlin_channel(tensors["s_channel"]).double().t()
        assert bool(((found - weight).abs() <= step * (0.5 + 128 * 2**-11)).all())
    assert "largest relative error of a weight" in str(done)


def test_what_changes_is_said(native: Native, exported: Export) -> None:
    assert exported(native("w4a16", 128), "qqq").notes == [
        "activations of w4a16: 16-bit here, int8 per token there"
    ]


@pytest.mark.parametrize(("size", "written"), [("channel", -1), (128, 128)])
def test_config(size: int | str, written: int, native: Native, exported: Export) -> None:
    directory = exported(native("w4a16", size), "qqq").directory
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert {"quant_method": "qqq", "wbits": 4, "group_size": written}.items() <= config.items()
