"""Three small plots as inline SVG: a strip of dots, an area over channels, horizontal bars.

Each is 360 units wide, so that its text can be read on a phone, and has a title for those who
cannot see it. Colours are CSS classes (``dot``, ``area``, ``bar``, ``line``, ``grid``; ``before``
where it shows the baseline): the page decides on light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 170
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 20, 34
COLUMNS = 300  # of an area: more channels are drawn as the largest of their neighbours


@dataclass(frozen=True)
class Axis:
    """Values ``low`` to ``high`` along one side, with a label that names the unit."""

    label: str
    low: float
    high: float

    def ticks(self, count: int = 4) -> list[float]:
        """Round numbers (1, 2 or 5 times a power of ten) inside the range, about ``count`` of them."""
        span = self.high - self.low
        if not 0 < span < math.inf:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(span / count))
        step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= count + 1)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

    def part(self, value: float) -> float:
        """Where ``value`` lies between the ends, 0 to 1."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def axis(label: str, values: Sequence[float], whole: bool = False) -> Axis:
    """An axis that holds ``values``: from 0 unless ``whole`` (counted things: from the least to the
    greatest).
    """
    low, high = min(values), max(values)
    if whole:
        return Axis(label, low - 0.5, high + 0.5)
    return Axis(label, min(0.0, low * 1.08), max(high * 1.08, 0.0) or 1.0)


def strip(
    title: str,
    points: Sequence[tuple[float, float]],
    x: Axis,
    y: Axis,
    *,
    mean: float | None = None,
    kind: str = "",
) -> str:
    """A dot on a stem for each ``(x, y)``; a dashed line at ``mean``."""
    drawn, zero = [], _down(y, max(0.0, y.low))
    for at, value in points:
        across, down = _across(x, at), _down(y, value)
        drawn.append(
            f'<line class="stem {kind}" x1="{across}" x2="{across}" y1="{zero}" y2="{down}"/>'
        )
        hint = escape(f"{x.label} {at:g}: {value:.4g}")
        drawn.append(
            f'<circle class="dot {kind}" cx="{across}" cy="{down}" r="2.6"><title>{hint}</title></circle>'
        )
    if mean is not None:
        drawn.append(
            f'<line class="mean" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_down(y, mean)}" y2="{_down(y, mean)}"/>'
        )
    return _plot(title, x, y, drawn)


def area(title: str, values: Sequence[float], x_label: str, y: Axis, *, kind: str = "") -> str:
    """One column for each of ``values``, in their order."""
    x = Axis(x_label, 0, len(values))
    each = math.ceil(len(values) / COLUMNS)
    path = [f"M{LEFT} {_down(y, 0)}"]
    for start in range(0, len(values), each):
        top = _down(y, max(values[start : start + each]))
        path.append(
            f"L{_across(x, start)} {top}L{_across(x, min(start + each, len(values)))} {top}"
        )
    path.append(f"L{WIDTH - RIGHT} {_down(y, 0)}Z")
    return _plot(title, x, y, [f'<path class="area {kind}" d="{"".join(path)}"/>'])


def bars(title: str, rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars from 0, one for each ``(label, value, text, kind)``; the text stands above
    the bar.
    """
    longest, drawn = max(row[1] for row in rows) or 1.0, []
    for index, (label, value, text, kind) in enumerate(rows):
        top = 16 + 38 * index
        drawn.append(f'<text x="0" y="{top}">{escape(label)}</text>')
        drawn.append(
            f'<text class="value" x="{WIDTH}" y="{top}" text-anchor="end">{escape(text)}</text>'
        )
        drawn.append(
            f'<rect class="bar {kind}" x="0" y="{top + 6}" height="12" width="{WIDTH * value / longest:.1f}"/>'
        )
    return _svg(title, 38 * len(rows) + 2, drawn)


def _across(x: Axis, value: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * x.part(value), 1)


def _down(y: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, y.part(value)), 1)


def _plot(title: str, x: Axis, y: Axis, drawn: list[str]) -> str:
    frame = [f'<text class="label" x="0" y="11">{escape(y.label)}</text>']
    for tick in y.ticks():
        down = _down(y, tick)
        frame.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}"/>'
        )
        frame.append(
            f'<text class="tick" x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{number(tick)}</text>'
        )
    for tick in x.ticks(6):
        if tick == round(tick):
            frame.append(
                f'<text class="tick" x="{_across(x, tick)}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
                f"{number(tick)}</text>"
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    frame.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.label)}</text>'
    )
    return _svg(title, HEIGHT, frame + drawn)


def _svg(title: str, height: float, drawn: Sequence[str]) -> str:
    said = escape(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}"><title>{said}</title>'
        f"{''.join(drawn)}</svg>"
    )


def number(value: float) -> str:
    """A tick's text: no more digits than it needs."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value + 0.0:.6g}"
