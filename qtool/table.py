"""Tables of all commands: with colour on a terminal, plain text elsewhere."""

import io
import re
import sys
from collections.abc import Iterable, Sequence


def render(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as text; numbers to the right, words to the left.

    On a terminal it has the terminal's width, and colour unless ``NO_COLOR`` is set. In a pipe or
    a file every line is as long as its content, so that nothing is cut.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    terminal = sys.stdout.isatty()
    dashes = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)
    table = Table(
        box=box.SIMPLE_HEAD if terminal else dashes,
        pad_edge=False,
        padding=(0, 1),
        show_edge=False,
        header_style="bold",
    )
    for index, name in enumerate(header):
        numbers = bool(cells) and all(_is_number(row[index]) for row in cells)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # as it is: a name may hold brackets
    if terminal:
        console = Console(file=sys.stdout)
        with console.capture() as captured:
            console.print(table)
        return captured.get().rstrip("\n")
    plain = io.StringIO()
    width = sum(max(map(cell_len, column)) + 3 for column in zip(header, *cells, strict=True))
    Console(file=plain, width=width, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in plain.getvalue().splitlines())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, which ends with a new line; columns of numbers are right-aligned."""
    number = re.compile(r"[-+±\d.,%x/() e]*")
    numeric = [all(number.fullmatch(row[i]) for row in rows) for i in range(len(header))]
    rule = ["---:" if right else "---" for right in numeric]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def decimal(value: float, digits: int = 4) -> str:
    """``12.3457``, with ``digits`` behind the point; ``6.6732e+18`` from a million on."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}e}"


def _is_number(cell: str) -> bool:
    bare = cell.lstrip("+-").replace(".", "").replace(",", "").rstrip("%x")
    return cell in ("", "-") or bare.isdigit()
