"""The README's output of ``make quickstart`` is what the commands say, but for the numbers."""

import re
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner

from qtool.cli import cli
from tests.docs.pages import ROOT
from tests.docs.quickstart import RESULT, commands, transcript
from tests.docs.test_commands import tiny_arguments


def shape(text: str) -> list[str]:
    """The lines without numbers, names of models and widths of columns."""
    lines = (re.sub(r"\bmodel\.[\w.]+", "LINEAR", line) for line in text.splitlines())
    lines = (re.sub(r"\S*/\S+|\bdemo\b|\bwikitext2\b", "NAME", line) for line in lines)
    lines = (re.sub(r"[-+±]?\d[\d.e%-]*", "#", line) for line in lines)
    lines = (re.sub(r"\bin #? ?(s|min)\b", "in #", line) for line in lines)
    return [re.sub(r"[-\s]+", " ", line).strip() for line in lines if line.strip("- ")]


def test_the_readme_shows_what_quickstart_says(tiny: SimpleNamespace, tmp_path: Path) -> None:
    def run(arguments: list[str]) -> str:
        replaced = tiny_arguments(arguments, tiny)
        replaced = [str(tmp_path / "out") if a.startswith("out/") else a for a in replaced]
        result = CliRunner().invoke(cli, [a.replace("{tmp}", str(tmp_path)) for a in replaced])
        assert result.exit_code == 0, (replaced, result.output)
        return result.stdout

    found, stored = transcript(run), RESULT.read_text()
    assert len(commands()) == 4
    for here, there in zip(shape(found), shape(stored), strict=True):
        assert here == there
    assert stored in (ROOT / "README.md").read_text()
