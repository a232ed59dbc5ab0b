"""A room imports only from rooms below it: at the top of a file, in a function, or by a string."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import qtool

PACKAGE = Path(qtool.__file__).parent
#: modules of the package itself that name no room: what each room may use
GROUND = {"__version__", "errors", "plugins", "progress", "strict_json", "table", "units"}
#: the rooms from the ground up, as docs describe them; rooms of one line do not import each other
FLOORS = [
    {"schemes"},
    {"layouts"},
    {"kernels"},
    {"distributed"},
    {"models"},
    {"io"},
    {"format"},
    {"runtime"},
    {"data"},
    {"calibration"},
    {"recipes"},
    {"exchange"},
    {"pipeline"},
    {"eval"},
    {"report", "bench"},
    {"serving"},
    {"register", "lm_eval", "transformers"},
    {"api"},
    {"cli_arguments", "cli_errors"},
    {"cli_bench"},
    {"cli"},
    {"__init__", "__main__"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
#: a string that can be imported
NAMED = re.compile(rf"qtool\.({'|'.join(HEIGHT)})(\.\w+)*")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """``(line, room)`` of each qtool module that ``source`` imports, or names in a string."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and NAMED.fullmatch(str(node.value)):
            names = [node.value]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "qtool" and rest:
                yield node.lineno, rest.partition(".")[0]


def upward(room: str, source: str) -> list[str]:
    """What ``source``, a file of ``room``, imports from rooms that are not below it."""
    return [
        f"line {line}: {room} imports {other}"
        for line, other in imports(source)
        if other not in GROUND | {room} and HEIGHT.get(other, len(FLOORS)) >= HEIGHT[room]
    ]


def test_rooms_import_only_from_below() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        source = path.read_text()
        if room in GROUND:
            above = [other for _, other in imports(source) if other not in GROUND]
            found += [f"{path.name}: {room} imports {other}" for other in above]
        else:
            found += [f"{path.relative_to(PACKAGE)}, {line}" for line in upward(room, source)]
    assert not found, "\n".join(found)


def test_upward_imports_are_seen() -> None:
    source = "def f():\n    from qtool.pipeline.job import Job\n    import qtool.eval\n"
    assert upward("exchange", source) == [
        "line 2: exchange imports pipeline",
        "line 3: exchange imports eval",
    ]
    assert upward("report", source) == []
    assert upward("eval", 'load("qtool.serving.bench")') == ["line 1: eval imports serving"]
