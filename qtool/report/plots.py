"""The report's plots as inline SVG, drawn by matplotlib.

matplotlib gets marker colours, which become CSS variables and ``currentColor`` in the SVG, so that
the page decides between light and dark. Text stays text.
"""

import io
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: marker colours, with the names that the page uses
TEXT, AFTER, BEFORE, GRID, QUIET = "#010101", "#020202", "#030303", "#040404", "#050505"
VARIABLES = {
    TEXT: "currentColor",
    AFTER: "var(--after)",
    BEFORE: "var(--before)",
    GRID: "var(--grid)",
    QUIET: "var(--quiet)",
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "qtool",
    "font.size": 8,
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "grid.color": GRID,
    "text.color": TEXT,
}
#: columns of a plot of channels; of more channels the largest of neighbours are drawn
COLUMNS = 300


def stem(
    title: str,
    points: Mapping[int, float],
    x_label: str,
    y_label: str,
    *,
    limits: tuple[float, float],
    mean: float | None = None,
) -> str:
    """A stem plot of ``x: y``, with the y axis over ``limits`` and a dashed line at ``mean``."""
    with rc_context(STYLE):
        axes = _axes(x_label, y_label)
        base = max(0.0, limits[0])
        axes.vlines(list(points), base, list(points.values()), color=AFTER, alpha=0.45, lw=1)
        axes.plot(list(points), list(points.values()), "o", color=AFTER, ms=3.5)
        if mean is not None:
            axes.axhline(mean, color=TEXT, ls="--", lw=1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(*limits)
        return _svg(axes, title)


def channels(title: str, amax: torch.Tensor, top: float, *, before: bool) -> str:
    """An area over the channels of ``amax [K]``, up to ``top``."""
    values = pooled(amax.numpy())
    with rc_context(STYLE):
        axes = _axes(f"input channel (of {len(amax):,})", "× median channel")
        edges = np.linspace(0, len(amax), len(values) + 1)
        axes.stairs(values, edges, fill=True, color=BEFORE if before else AFTER)
        axes.set_ylim(0, top)
        return _svg(axes, title)


def pooled(values: np.ndarray) -> np.ndarray:
    """At most COLUMNS values, each the largest of its neighbours, so that no peak is lost."""
    each = -(-len(values) // COLUMNS)
    padded = np.pad(values, (0, -len(values) % each), constant_values=-np.inf)
    return padded.reshape(-1, each).max(1)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """A range of an axis that holds 0 and the finite ones of ``values``."""
    finite = [value for value in values if isfinite(value)] or [0.0]
    return min(0.0, min(finite) * 1.08), max(max(finite) * 1.08, 0.0) or 1.0


def _axes(x_label: str, y_label: str) -> Axes:
    axes = Figure(figsize=(5, 2.3), layout="constrained").subplots()
    axes.grid(axis="y", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return axes


def _svg(axes: Axes, title: str) -> str:
    """The figure as an ``<svg>`` element with the name ``title``, scaling with the page."""
    buffer, figure = io.StringIO(), axes.get_figure()
    assert isinstance(figure, Figure)
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    drawn = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.S)
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r' (?:width|height)="[\d.]+pt"| xmlns(?::xlink)?="[^"]*"', "", drawn, count=4)
    drawn = drawn.replace("<svg", '<svg role="img"', 1).replace("xlink:href", "href")
    for colour, variable in VARIABLES.items():
        drawn = drawn.replace(colour, variable)
    return drawn
