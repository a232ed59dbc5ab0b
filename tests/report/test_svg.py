"""Plots: few round ticks, no peak lost between channels, flat data too."""

import re

import pytest

from qtool.report import svg


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.07), (-0.5, 63.5), (0, 31000), (-0.02, 0.001)]
)
def test_ticks_are_few_round_and_inside(low, high):
    ticks = svg.Axis("", low, high).ticks()
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert all(len(svg.number(tick).strip("-0.,").replace(",", "")) <= 4 for tick in ticks)


def test_many_channels_are_drawn_by_their_largest():
    values = [0.0] * 28672
    values[20001] = 9.0
    plot = svg.area("t", values, "channel", svg.axis("y", values))
    assert len(plot) < 20_000
    assert min(float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)L", plot)) < svg.TOP + 20


def test_one_constant_value_can_be_drawn():
    for values in ([0.0], [2.0], [-1.0]):
        assert "nan" not in svg.strip(
            "t", [(0, values[0])], svg.axis("x", [0], whole=True), svg.axis("y", values)
        )
    assert "nan" not in svg.bars("t", [("a", 0.0, "0", "")])
