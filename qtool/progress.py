"""Progress of long work: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

from qtool.errors import QtoolError

#: called with (done, total, notes) after each shard, block or linear
Progress = Callable[[int, int, Mapping[str, Any]], None]

#: seconds between units that count as finished at once: their pace says nothing of what is left
AT_ONCE = 0.1

_silent = False


def require_progress(value: object) -> None:
    """Check that ``value`` is a :data:`Progress` or None.

    Raises:
        QtoolError: it is neither.
    """
    if value is not None and not callable(value):
        raise QtoolError(f"progress {value!r}: a function of (done, total, notes) is expected")


def silence(silent: bool) -> None:
    """Switch bars and lines off, or on again if not ``silent``."""
    global _silent
    _silent = silent


def shows_bars() -> bool:
    """Whether a bar would be seen: stderr is a terminal and nobody silenced it."""
    return not _silent and sys.stderr.isatty()


def bar(name: str, total: int, unit: str) -> Any:
    """A bar of ``total`` units, by its ``name``; nothing where none would be seen."""
    return tqdm(total=total, desc=name, unit=unit, disable=not shows_bars(), leave=False)


class Display:
    """A :data:`Progress` that a person sees, with the time that is left.

    Used as a context, so that the bar is gone before a result is printed.

    Args:
        name: of the work.
        unit: what is counted.
        facts: what to say beside it, from the notes of a unit.
        lines: at most about so many in a log; by default one a unit.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        facts: Callable[[Mapping[str, Any]], str] | None = None,
        *,
        lines: int | None = None,
    ) -> None:
        self.name, self.unit, self.facts, self.lines = name, unit, facts, lines
        self.bar: Any = None
        self.started = time.monotonic()
        self.first: tuple[int, float] | None = None

    def __enter__(self) -> "Display":
        return self

    def restart(self, seconds: float) -> None:
        """Count time from here on, after ``seconds`` that the work took before."""
        self.started = time.monotonic() - seconds

    def __call__(self, done: int, total: int, notes: Mapping[str, Any]) -> None:
        if _silent:
            return
        facts = self.facts(notes) if self.facts else ""
        if shows_bars():
            if self.bar is None:
                self.bar = bar(self.name, total, self.unit)
                self.bar.start_t -= time.monotonic() - self.started
            self.bar.set_postfix_str(facts, refresh=False)
            self.bar.update(done - self.bar.n)
        elif done == total or not self.lines or not done % max(1, total // self.lines):
            said = [f"{self.unit} {done}/{total}", *self._times(done, total), facts]
            try:
                print(", ".join(filter(None, said)), file=sys.stderr, flush=True)
            except BrokenPipeError:
                raise
            except OSError:  # the log's disk is full: the work goes on without its lines
                return

    def _times(self, done: int, total: int) -> list[str]:
        """Seconds since the start and seconds left, by the pace after the first unit."""
        now = time.monotonic()
        if self.first is None or now - self.first[1] < AT_ONCE:
            self.first = done, now
        before, since = self.first
        elapsed = f"{now - self.started:.0f} s"
        if done == before:
            return [elapsed]
        return [elapsed, f"{(now - since) / (done - before) * (total - done):.0f} s left"]

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
