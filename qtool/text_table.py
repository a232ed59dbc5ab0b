"""A plain text table: what every command prints."""

from collections.abc import Iterable, Sequence


def render(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their content; numbers to the right, words to the left."""
    cells = [tuple(str(cell) for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in [tuple(header), *cells]) for i in range(len(header))]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ).rstrip()

    return "\n".join(
        [line(tuple(header)), line(["-" * w for w in widths]), *(line(row) for row in cells)]
    )


def _is_number(cell: str) -> bool:
    return (
        cell in ("", "-")
        or cell.lstrip("+-").replace(".", "").replace(",", "").rstrip("%x").isdigit()
    )
