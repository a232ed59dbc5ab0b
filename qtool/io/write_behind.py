"""Writes files in a thread while the next blocks are computed.

A file counts, and is reported, only when its record is on disk. Submitted files are written even if
the run stops with an error, so every finished block is kept.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
#: number of writes that may wait for the disk
AHEAD = 2


class WriteBehind:
    """Runs writes one after another in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "write")
        self._pending: deque[tuple[Future[None], Callable[[], None]]] = deque()

    def __enter__(self) -> "WriteBehind":
        return self

    def submit(self, write: Callable[[], None], written: Callable[[], None]) -> None:
        """Queue ``write``; this waits while too many writes are pending.

        Args:
            written: called in the caller's thread after the write, in the order of the writes.

        Raises:
            QtoolError: an earlier write failed.
        """
        self._pending.append((self._thread.submit(write), written))
        self._settle(AHEAD)

    def submit_optional(self, write: Callable[[], T]) -> Future[T]:
        """Queue ``write``; only the caller may wait for it."""
        return self._thread.submit(write)

    def wait(self) -> None:
        """Wait until everything is written."""
        self._settle(0)

    def _settle(self, allowed: int) -> None:
        while self._pending and (len(self._pending) > allowed or self._pending[0][0].done()):
            future, written = self._pending.popleft()
            future.result()
            written()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._thread.shutdown()
