"""Stored tensors joined and cut are those of the joined and cut weight."""

from dataclasses import replace

import pytest
import torch

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.schemes import get
from qtool.serving.partition import axes, cuts_inputs, require_shares
from tests.serving.conftest import FORMATS


def linear_format(scheme: str, layout: str) -> LinearFormat:
    return LinearFormat(scheme, get(scheme).group_size, layout, "bfloat16")


@pytest.mark.parametrize("scheme, layout", FORMATS)
def test_joined_along_the_output_axis(scheme: str, layout: str) -> None:
    found = linear_format(scheme, layout)
    weights = [found.scheme_object.prune(torch.randn(n, 256)) for n in (128, 256)]

    def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        params = found.scheme_object.fit(weight)
        return found.pack(found.scheme_object.quantize(weight, params), params)

    first, second, both = packed(weights[0]), packed(weights[1]), packed(torch.cat(weights))
    for name, axis in axes(found, 384, 256).items():
        joined = (
            first[name]
            if axis.output is None
            else torch.cat([first[name], second[name]], axis.output)
        )
        assert torch.equal(joined, both[name]), name


@pytest.mark.parametrize("scheme, layout", FORMATS)
def test_cut_along_the_input_axis(scheme: str, layout: str) -> None:
    assert cuts_inputs(linear_format(scheme, layout), 1024, 4) == (layout != "compute-aware")


def test_a_rank_with_one_group_of_marlin_has_another_order() -> None:
    """MARLIN orders the scales of one group as per-channel scales."""
    found = linear_format("w4a16", "marlin")
    assert cuts_inputs(found, 512, 2)
    assert not cuts_inputs(found, 512, 4)


def test_refusals_name_the_layer_and_the_way_out() -> None:
    found = linear_format("w4a8-lqq", "dual-mma")
    require_shares("qkv", found, (64, 64), 64, 4, permuted=False)
    with pytest.raises(
        QtoolError,
        match=r"^qkv: .* 32 x 64 .* tiles of 64 x 64; .*smaller tensor-parallel size, or",
    ):
        require_shares("qkv", found, (64, 32), 64, 1, permuted=False)
    with pytest.raises(QtoolError, match=r"^down: its input channels are permuted across 2 ranks"):
        require_shares("down", found, (64,), 64, 2, permuted=True)
    with pytest.raises(
        QtoolError, match=r"^down: layout compute-aware cannot be cut .* among 2 ranks"
    ):
        require_shares(
            "down", linear_format("w4a8-qoq-g128", "compute-aware"), (64,), 128, 2, permuted=False
        )


def test_a_rank_s_share_of_rotated_inputs() -> None:
    """Ranks rotate what they have: 64 channels must not be cut."""
    found = replace(linear_format("w8a8", "row-major-8"), rotated=True)
    require_shares("down", found, (64,), 128, 4, permuted=False)
    with pytest.raises(
        QtoolError,
        match=r"^down: its inputs are rotated at run time, 64 at a time, which does not divide 96 "
        r"input channels; this is one rank's share: use a smaller tensor-parallel size, or another "
        r"layout$",
    ):
        require_shares("down", found, (64,), 96, 4, permuted=False)
