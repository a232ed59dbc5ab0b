"""Measures the time of a run, phase by phase.

``with phase("forward"):`` attributes the time inside to one phase. The time of a phase inside
another one is not counted for the outer one, so that phases add up to the whole. On CUDA the marks
are events on the stream: the device's time is measured and nothing waits for it. Without
:func:`recording` a phase costs nothing and records nothing.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

#: the name for time outside all phases
OTHER = "other"
#: ending of a record's names for the time of threads beside the main one
BESIDE = ", beside"


class PhaseTimer:
    """Seconds by phase on ``device``.

    Attributes:
        seconds: seconds of the phases of the main thread; together they are its whole time.
        beside: seconds of the threads that read and write while the main thread works.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.beside: dict[str, float] = defaultdict(float)
        self._lock = Lock()
        self._open = [OTHER]
        self._marks: list[tuple[torch.cuda.Event | float, str]] = []
        self.mark()

    def mark(self) -> None:
        """Attribute the time from here on to the innermost open phase."""
        now: torch.cuda.Event | float = time.perf_counter()
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        self._marks.append((now, self._open[-1]))

    def settle(self) -> None:
        """Add up the marks so far; this waits for the device."""
        self.mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (start, name), (stop, _) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(start, float) or isinstance(stop, float):
                self.seconds[name] += float(stop) - float(start)  # type: ignore[arg-type]
            else:
                self.seconds[name] += start.elapsed_time(stop) / 1e3
        del self._marks[:-1]

    def open(self, name: str) -> None:
        """Begin a phase inside the open one."""
        self._open.append(name)
        self.mark()

    def close(self) -> None:
        """End the innermost phase."""
        self._open.pop()
        self.mark()

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Attribute the time inside, in any thread, to ``beside[name]``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.beside[name] += time.perf_counter() - started


_active: PhaseTimer | None = None


@contextmanager
def recording(phases: PhaseTimer) -> Iterator[PhaseTimer]:
    """Let :func:`phase` record into ``phases`` while open."""
    global _active
    before, _active = _active, phases
    try:
        yield phases
    finally:
        _active = before


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Attribute the time inside to ``name``. Only for the thread that runs the blocks."""
    if _active is None:
        yield
        return
    _active.open(name)
    try:
        yield
    finally:
        _active.close()
