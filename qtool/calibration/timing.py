"""Where a run's time goes, stage by stage.

``with stage("forward"):`` attributes the time inside to one stage; a stage inside another takes its
time from the outer one, so that stages add up to the whole. On CUDA the marks are events on the
stream: the device's time is measured and nothing waits for it. Without :func:`recording` a stage
costs nothing and records nothing.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

#: what time is attributed to that no stage claims
OTHER = "other"


class Stages:
    """Seconds by stage on ``device``.

    Attributes:
        seconds: of the stages of the main thread; together they are its whole time.
        behind: of the threads that read and write beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.behind: dict[str, float] = defaultdict(float)
        self._lock = Lock()
        self._open = [OTHER]
        self._marks: list[tuple[torch.cuda.Event | float, str]] = []
        self.mark()

    def mark(self) -> None:
        """From here on, time belongs to the innermost open stage."""
        now: torch.cuda.Event | float = time.perf_counter()
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        self._marks.append((now, self._open[-1]))

    def settle(self) -> None:
        """Add up the marks so far; waits for the device."""
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
        """Begin a stage inside the one that is open."""
        self._open.append(name)
        self.mark()

    def close(self) -> None:
        """End the innermost stage."""
        self._open.pop()
        self.mark()

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Attribute the time inside, in any thread, to ``behind[name]``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.behind[name] += time.perf_counter() - started


_active: Stages | None = None


@contextmanager
def recording(stages: Stages) -> Iterator[Stages]:
    """Let :func:`stage` record into ``stages`` while open."""
    global _active
    before, _active = _active, stages
    try:
        yield stages
    finally:
        _active = before


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Attribute the time inside to ``name``. Only for the thread that runs the blocks."""
    if _active is None:
        yield
        return
    _active.open(name)
    try:
        yield
    finally:
        _active.close()
