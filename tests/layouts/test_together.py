"""Weights that are packed together have the bytes that each has alone, and come back."""

import pytest
import torch

from qtool.errors import QtoolError
from qtool.format import LinearFormat, same_bytes
from qtool.layouts import LAYOUTS
from qtool.layouts.digits import parse_digits
from qtool.schemes import SCHEMES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_together_they_are_what_each_is(scheme: str, layout: str) -> None:
    linear_format = LinearFormat(scheme, SCHEMES[scheme].default_group_size, layout)
    n, k, chosen = 256, 256, linear_format.scheme_object
    try:
        linear_format.require("linear", n, k)
    except QtoolError:
        pytest.skip(f"no {scheme} lies in {layout}")
    weights = []
    for seed in range(3):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
        params = chosen.fit(weight)
        if "eight_bit" in params:  # a map for each
            params["eight_bit"] = torch.tensor([seed % 2, 1], dtype=torch.uint8)
        weights.append((chosen.quantize(weight, params), params))
    packed = linear_format.pack_all(weights)
    for own, (codes, params) in zip(packed, weights, strict=True):
        alone = linear_format.pack(codes, params)
        assert own.keys() == alone.keys()
        for name, tensor in alone.items():
            assert own[name].dtype == tensor.dtype and same_bytes(own[name], tensor)
            assert own[name].is_contiguous()
    for (codes, params), (expected, kept) in zip(
        linear_format.unpack_all(packed, n, k), weights, strict=True
    ):
        assert torch.equal(codes, expected) and codes.dtype == expected.dtype
        assert all(same_bytes(params[name], t) for name, t in kept.items())


def test_stored_tensors_are_compared_by_shape_and_bytes() -> None:
    one = torch.ones(2, 3)
    assert same_bytes(one, one.T.contiguous().T) and same_bytes(one[0, 0], one[1, 1])
    assert not same_bytes(one, one.T) and not same_bytes(one, one + 1)


def test_the_digits_of_a_layout_are_parsed_once() -> None:
    """A mixture packs thousands of small experts, for which parsing would take as long."""
    layout = LAYOUTS["marlin"]
    first, *others = (torch.zeros(n, 128, dtype=torch.uint8) for n in (64, 128, 192))
    layout.unpack(layout.pack(first), 64, 128, signed=False)
    parsed = parse_digits.cache_info().misses
    for codes in others:
        layout.unpack(layout.pack(codes), *codes.shape, signed=False)
    assert parse_digits.cache_info().misses == parsed
