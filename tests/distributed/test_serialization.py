"""What is taken apart and packed is put together the same."""

import torch

from qtool.calibration.rounding.rounded import Rounded
from qtool.distributed import serialization


def test_a_value_with_tensors_survives_the_journey() -> None:
    scale = torch.randn(3, dtype=torch.float16)
    value = {
        "a": Rounded(torch.arange(5, dtype=torch.int8), {"s1": scale}, 0.5),
        "b": [scale, (1, None)],
        "c": scale[:0],
    }
    blob, tensors = serialization.split_tensors(value)
    assert len(tensors) == 3  # the scale travels once
    described = serialization.specs_of(tensors)
    found = serialization.join_tensors(blob, described, serialization.pack(tensors, "cpu"))
    assert torch.equal(found["a"].codes, value["a"].codes) and found["a"].weight_error == 0.5  # type: ignore[attr-defined]
    assert torch.equal(found["a"].params["s1"], scale) and found["a"].params["s1"] is found["b"][0]
    assert found["b"][1] == (1, None) and found["c"].shape == (0,)


def test_buffers_of_several_ranks_may_lie_one_after_another() -> None:
    value = [torch.randn(3), torch.ones(1, dtype=torch.bool)]
    blob, tensors = serialization.split_tensors(value)
    described = serialization.specs_of(tensors)
    for room in serialization.pack(tensors, "cpu").repeat(2, 1):
        found = serialization.join_tensors(blob, described, room)
        assert all(torch.equal(mine, its) for mine, its in zip(value, found, strict=True))


def test_a_value_without_tensors_needs_no_room() -> None:
    blob, tensors = serialization.split_tensors([1, "two"])
    nothing = serialization.pack(tensors, "cpu")
    assert not len(nothing) and serialization.join_tensors(blob, [], nothing) == [1, "two"]
