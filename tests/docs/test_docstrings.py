"""Docstrings as the API reference reads them: an entry describes one name."""

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*(?:\n|$)|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (?! )(.*?): (.*(?:\n     .*)*)", re.MULTILINE)
Documented = ast.ClassDef | ast.FunctionDef


def names_in(node: Documented) -> set[str]:
    """All names that a function or a class mentions in its code."""
    kinds = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.FunctionDef: "name"}
    return {getattr(one, kinds[type(one)]) for one in ast.walk(node) if type(one) in kinds}


def wrong_entries(source: str) -> Iterator[str]:
    """The entries of ``Args:`` and ``Attributes:`` that name nothing, or more than one thing."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented):
            continue
        names, text = names_in(node), ast.get_docstring(node) or ""
        for section in SECTION.findall(text):
            for name, description in ENTRY.findall(section):
                second = set(re.findall(r"\.\s+(\w+): ", description)) & names
                if name not in names or second:
                    yield f"{node.name}: {', '.join([name, *second])}"


def test_an_entry_describes_one_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {entry}"
        for path in sorted((ROOT / "qtool").rglob("*.py"))
        for entry in wrong_entries(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_wrong_entries_are_seen() -> None:
    source = 'def f(x, y):\n    """F.\n\n    Args:\n        x{}: one.{}\n    """'
    assert not list(wrong_entries(source.format("", "")))
    assert list(wrong_entries(source.format(", y", ""))) == ["f: x, y"]
    assert list(wrong_entries(source.format("", " y: another."))) == ["f: x, y"]
    assert list(wrong_entries(source.format("z", ""))) == ["f: xz"]
