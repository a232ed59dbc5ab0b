"""Run the commands of ``make quickstart`` and keep what they say for the README.

python -m tests.docs.quickstart      # writes benchmarks/results/quickstart.txt
python benchmarks/tables.py          # puts it into README.md
"""

import re
import subprocess
import sys
from collections.abc import Callable

from tests.docs.pages import ROOT

RESULT = ROOT / "benchmarks" / "results" / "quickstart.txt"
#: the plan is long, and the README shows what follows it
SHOWN = ("quantize", "verify", "eval")


def commands() -> list[list[str]]:
    """The arguments of every ``qtool`` in the Makefile's quickstart."""
    text = (ROOT / "Makefile").read_text()
    (demo,) = re.findall(r"^DEMO := (.*)$", text, re.MULTILINE)
    recipe = text[text.index("\nquickstart:") :].split("\n\n")[0]
    lines = re.findall(r"^\t\$\(BIN\)/qtool (.*)$", recipe, re.MULTILINE)
    return [line.replace("$(DEMO)", demo).split() for line in lines]


def transcript(run: Callable[[list[str]], str]) -> str:
    """The commands and their output; ``run`` gives a command's."""
    parts = []
    for arguments in commands():
        said = run(arguments)
        if arguments[0] in SHOWN:
            parts.append(f"$ qtool {' '.join(arguments)}\n{said.rstrip()}\n")
    return "\n".join(parts)


def main() -> None:
    def run(arguments: list[str]) -> str:
        command = [sys.executable, "-m", "qtool", *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    RESULT.write_text(transcript(run))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
