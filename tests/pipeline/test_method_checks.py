"""What a rounding gives is refused where it is not what would be packed."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.distributed import ranks
from qtool.errors import CheckFailed, QtoolError
from qtool.format import LinearFormat
from qtool.pipeline.streaming.method_checks import (
    check_codes,
    require_packable,
    require_same_on_ranks,
)

FORMAT = LinearFormat("w4a8-lqq", 64, "row-major")
META = torch.empty(8, 128, dtype=torch.uint8, device="meta")
RIGHT = "codes uint8 [8, 128], offset uint8 [8, 2], s1 float32 [8], s2 uint8 [8, 2]"


def rounded(n: int = 8, **changed: Any) -> Rounded:
    scheme, weight = FORMAT.scheme_object, torch.randn(n, 128)
    params = scheme.fit(weight)
    found = Rounded(scheme.quantize(weight, params), params)
    found.codes = changed.pop("codes", found.codes)
    found.params = {k: v for k, v in (params | changed).items() if v is not None}
    return found


def require(found: Any) -> None:
    require_packable(RoundToNearest(), found, {"up": FORMAT}, {"up": (8, 128), "down": (128, 8)})


def test_what_is_packed_is_taken() -> None:
    require({"up": rounded()})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "round gives NoneType; Mapping is expected"),
        ({}, "round gives nothing for 'up'; a Rounded for each linear"),
        ({"up": rounded(), "down": rounded()}, "round gives something for 'down'; a Rounded"),
        ({"up": (1, 2)}, "round gives tuple for up; Rounded is expected"),
        ({"up": rounded(codes=torch.zeros(8, 128))}, "codes float32 [8, 128]"),
        ({"up": rounded(codes=torch.zeros(128, 8, dtype=torch.uint8))}, "codes uint8 [128, 8]"),
        ({"up": rounded(4)}, "codes uint8 [4, 128]"),
        ({"up": rounded(s1=torch.ones(8, dtype=torch.float64))}, "s1 float64 [8]"),
        ({"up": rounded(s1=torch.ones(8, 1))}, "s1 float32 [8, 1]"),
        ({"up": rounded(s1=None)}, "offset uint8 [8, 2], s2 uint8 [8, 2] for up"),
        ({"up": Rounded(None, rounded().params)}, "codes NoneType, offset uint8 [8, 2]"),  # type: ignore[arg-type]
        ({"up": Rounded(rounded().codes, None)}, "NoneType for the parameters of up"),  # type: ignore[arg-type]
        (
            {"up": replace(rounded(), weight_error=torch.ones(()))},
            "as the weight_error of up; float | None is",
        ),
        (
            {"up": replace(rounded(), weight_error=torch.nan)},
            "round gives nan as the weight_error of up; a finite one is expected",
        ),
        (
            {"up": rounded(**{k: t.to("meta") for k, t in rounded().params.items()}, codes=META)},
            "codes and parameters on meta for up; one device, not meta, is expected",
        ),
        (
            {"up": rounded(s1=torch.ones(8, device="meta"))},
            "codes and parameters on cpu, meta for up; one device, not meta, is expected",
        ),
        ({"up": rounded(more=torch.ones(8))}, "more float32 [8]"),
    ],
)
def test_anything_else_is_refused(found: Any, said: str) -> None:
    with pytest.raises(QtoolError) as caught:
        require(found)
    assert str(caught.value).startswith("rtn: ") and said in str(caught.value)
    if "[" in said:
        assert str(caught.value).endswith(f"for up; {RIGHT} is expected")


def test_of_linears_that_are_checked_at_once_the_broken_one_is_named() -> None:
    wide = rounded(codes=torch.full((8, 128), 16, dtype=torch.uint8))
    check_codes(FORMAT.scheme_object, {"block.q": rounded(), "block.k": rounded()})
    with pytest.raises(CheckFailed, match=r"^block\.k: invariant codes of 4 bits broken at \(0, 0"):
        check_codes(FORMAT.scheme_object, {"block.q": rounded(), "block.k": wide})


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (lambda up: {"up": up.t().contiguous().t()}, True),
        (lambda up: {"up": up + 2.0**-20}, False),
        (lambda up: {"up": up.flip(0)}, False),
        (lambda up: {"up": up.flip(1)}, False),
        (lambda up: {}, False),
    ],
)
def test_what_a_method_from_outside_gives_on_one_rank_alone_is_refused(
    other: Callable[[Tensor], dict[str, Tensor]], alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, up, sent = type("Mine", (RoundToNearest,), {"name": "mine"})(), torch.rand(8, 4), []
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(ranks, "all_gather", lambda value: [*sent, sent.append(value) or value])
    require_same_on_ranks(mine, "round", 3, [("up", up)])
    monkeypatch.setattr(ranks, "all_gather", lambda value: [sent[0], value])
    said = nullcontext() if alike else pytest.raises(QtoolError, match="mine: round gives up of bl")
    with said:
        require_same_on_ranks(mine, "round", 3, other(up).items())
    require_same_on_ranks(RoundToNearest(), "round", 3, {}.items())  # of this package
