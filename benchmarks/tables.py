"""Fill the tables of README and docs from stored results and from the package itself.

    python benchmarks/tables.py            # writes the files
    python benchmarks/tables.py --check    # exit code 1 if a file would change

A table stands between ``<!-- table NAME -->`` and ``<!-- /table -->``. Measured ones come from
``benchmarks/results/NAME.json``, each written by the command that the file names.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from qtool import calibration, recipes
from qtool.exchange.targets import TARGETS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.S)


def results(name: str) -> Any:
    """The stored results ``name``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns whose cells begin with a digit or a sign are right-aligned."""
    numeric = [all(re.match(r"[-+±]?\d|-?$", row[i]) for row in rows) for i in range(len(head))]
    rule = ["---:" if right else "---" for right in numeric]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def made_by(found: dict[str, Any]) -> str:
    """Where and by which command ``found`` was measured."""
    return f"\nMeasured by `{found['command']}` on {found['machine']}, {found['date']}.\n"


def schemes() -> str:
    """The schemes, with perplexity by recipe and bits a weight."""
    found = results("accuracy")
    about = {name: text for name, _, text in recipes.overview()}
    rows = []
    for scheme, group in groupby(found["rows"], key=lambda row: row["scheme"]):
        variants = list(group)
        perplexity = " / ".join(f"{row['perplexity']:.2f}" for row in variants)
        rows.append([f"`{scheme}`", about[scheme], perplexity, f"{variants[0]['bits']:.2f}"])
    full = (
        f"perplexity of the demo ({found['full']['perplexity']:.2f} in 16 bits): fast / paper / "
        "best"
    )
    return markdown(["scheme", "what it is", full, "bits a weight"], rows)


def methods() -> str:
    """The options of every transform and rounding, with their defaults."""
    rows = []
    for name, method in {**calibration.TRANSFORMS, **calibration.ROUNDINGS}.items():
        for option in fields(method):
            default = option.default
            if default is MISSING:
                default = option.default_factory() if callable(option.default_factory) else ""
            rows.append([f"`{name}`", f"`{option.name}`", f"`{default}`"])
    return markdown(["method", "option", "default"], rows)


def departures() -> str:
    """What the recipes `paper` do otherwise than their papers, and what it does to the result."""
    rows = [
        [f"`{scheme}`", departure["what"], departure["effect"]]
        for scheme, _, _ in recipes.overview()
        for departure in recipes.load(scheme, "paper").departures
    ]
    return markdown(["scheme", "departure", "effect"], rows)


def formats() -> str:
    """The export formats by name."""
    return markdown(
        ["format", "what it is"],
        [[f"`{target.name}`", target.about] for target in TARGETS.values()],
    )


def accuracy() -> str:
    """Every scheme and recipe on the demo."""
    found = results("accuracy")
    rows = [["full precision", "", f"{found['full']['perplexity']:.3f}", "", "", "16", "", ""]]
    for row in found["rows"]:
        rise = f"{row['rise']:+.2%} ± {100 * row['rise_error']:.2f}"
        size = [f"{row['bits']:.3f}", f"{row['megabytes']:.2f}", f"{row['seconds']:.0f}"]
        name = [f"`{row['scheme']}`", row["recipe"], f"{row['perplexity']:.3f}", rise]
        rows.append([*name, f"{row['kl']:.4f}", *size])
    head = ["scheme", "recipe", "perplexity", "rise", "KL, nats", "bits a weight", "MB", "seconds"]
    return markdown(head, rows) + made_by(found)


def columns(name: str) -> Callable[[], str]:
    """A table stored as ``head`` and ``rows`` of text, as the command printed it."""

    def table() -> str:
        found = results(name)
        parts = found.get("parts") or [found]
        return "\n".join(
            (f"**{part['title']}**\n\n" if "title" in part else "")
            + markdown(part["head"], part["rows"])
            for part in parts
        ) + made_by(found)

    return table


TABLES: dict[str, Callable[[], str]] = {
    "schemes": schemes,
    "methods": methods,
    "departures": departures,
    "formats": formats,
    "accuracy": accuracy,
    "kernels": columns("kernels"),
    "serving": columns("serving"),
    "runtime": columns("runtime"),
    "quantize": columns("quantize"),
    "peers": columns("peers"),
}


def documents() -> Iterator[Path]:
    """The files that hold tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    check = parser.parse_args().check
    stale = []
    for path in documents():
        before = path.read_text()
        after = BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", before)
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(after)
    print("\n".join(stale) or "all tables are up to date")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
