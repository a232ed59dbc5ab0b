"""Pieces of a page: everything that is not a piece itself is escaped, for a checkpoint's names are
anyone's.
"""

from collections.abc import Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: str) -> Html:
    """``<name ...>children</name>``; ``class_`` stands for ``class``."""
    written = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """Pieces side by side."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children))


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: str,
    *,
    last_is_sum: bool = False,
) -> Html:
    """A table; ``numbers`` has an ``r`` for each column of numbers, anything else for one of words.

    Every cell knows its column's name: on a phone, where columns do not fit, it stands before the
    value.
    """

    def line(cell: str, values: Sequence[object], **attributes: str) -> Html:
        cells = (
            tag(
                cell,
                value,
                **({"class_": "number"} if kind == "r" else {}),
                **({"data-label": name} if name else {}),
            )
            for value, kind, name in zip(values, numbers, header, strict=True)
        )
        return tag("tr", *cells, **attributes)

    body = [
        line("td", row, **({"class_": "sum"} if last_is_sum and row is rows[-1] else {}))
        for row in rows
    ]
    head = tag("thead", line("th", header)) if any(header) else ""
    named = {"class_": "columns"} if any(header) else {}
    return tag("table", head, tag("tbody", *body), **named)


def facts(pairs: Sequence[tuple[str, object]]) -> Html:
    """A table of names and values."""
    return table(("", ""), pairs, "ll")


def missing(what: str, *commands: str) -> Html:
    """What is not there, and the commands that would fill it."""
    return tag(
        "p", what, " ", *(join(tag("code", command), " ") for command in commands), class_="missing"
    )


def plots(*figures: Html) -> Html:
    """Figures side by side where there is room."""
    return tag("div", *figures, class_="plots")


def figure(title: str, svg: str, reading: str) -> Html:
    """A plot under its title, with one sentence that reads it."""
    return tag(
        "figure",
        tag("h4", title) if title else "",
        Html(svg),
        tag("figcaption", reading) if reading else "",
    )


def plain(value: object) -> str:
    """A value of a configuration, as one writes it."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def nbytes(count: float) -> str:
    """A number of bytes in decimal units."""
    unit = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= u[0]), (1, "B"))
    return f"{count / unit[0]:,.2f} {unit[1]}"


def duration(seconds: float) -> str:
    """A time as one reads it: ``2 h 5 min``, ``3 min 20 s``, ``12.4 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    big, small = divmod(int(seconds), 60)
    if big < 60:
        return f"{big} min {small} s"
    return f"{big // 60} h {big % 60} min"
