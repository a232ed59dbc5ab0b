"""Plots: no peak lost between channels, flat data too, colours that follow the page."""

import numpy as np
import pytest
import torch

from qtool.report import plots


def test_many_channels_are_drawn_by_their_largest():
    values = np.zeros(28672)
    values[20001] = 9.0
    found = plots.pooled(values)
    assert len(found) <= plots.COLUMNS and found.max() == 9.0
    assert int(found.argmax()) == 20001 // -(-28672 // plots.COLUMNS)
    assert np.array_equal(plots.pooled(np.arange(7.0)), np.arange(7.0))


def test_values_without_a_place_leave_an_axis_as_it_is():
    assert plots.limits([1.0, np.inf, np.nan]) == plots.limits([1.0])
    assert plots.limits([np.nan]) == plots.limits([0.0])


@pytest.mark.parametrize("value", [0.0, 2.0, -1.0])
def test_one_constant_value_can_be_drawn(value):
    low, high = plots.limits([value])
    assert low <= value <= high and low < high
    drawn = plots.stem("t", {0: value}, "x", "y", limits=(low, high))
    assert "nan" not in drawn.lower()


def test_colours_are_the_page_s():
    drawn = plots.stem("a <title>", {0: 1.0}, "x", "y", limits=(0, 2), mean=0.5)
    drawn += plots.channels("c", torch.ones(10), 1.0, before=True)
    assert not any(colour in drawn for colour in plots.VARIABLES)
    assert "var(--after)" in drawn and "var(--before)" in drawn and "currentColor" in drawn
    assert "a &lt;title&gt;" in drawn and "width=" not in drawn.split(">")[0]
