"""What README and docs contain: pages, code blocks, commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:qtool|python3?|make|pip|vllm|torchrun|sh|bash) [^`\n]+)`")
SHELL = ("", "bash", "sh")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    ``whole``: it stands in a block and can be run as it is; else it is named in a sentence, where
    its arguments may be left out.
    """

    page: str
    text: str
    whole: bool

    @property
    def words(self) -> list[str]:
        """Its words, without a comment."""
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def name_of(page: Path) -> str:
    """A page as messages call it."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of ``page`` in these languages."""
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def commands() -> Iterator[Command]:
    """All commands of all pages; the output of a command is in a block of language ``text``."""
    for page in PAGES:
        for block in blocks(page, *SHELL):
            for line in block.splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    yield Command(name_of(page), line.strip(), whole=True)
        for text in INLINE.findall(FENCE.sub("", page.read_text())):
            yield Command(name_of(page), text, whole=False)
