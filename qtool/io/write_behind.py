"""Shards are written by a thread while the next blocks are computed; at most ``AHEAD`` of them wait
in memory.

A shard counts only when its record is on disk, and it is reported only then. What was begun is
finished, also when the run stops with an error: every finished block is kept.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

#: shards that may wait for the disk
AHEAD = 2


class WriteBehind:
    """Runs writes one after another in a thread.

    Args:
        written: called in the caller's thread after each write with the shard's number, in order.
    """

    def __init__(self, written: Callable[[int], None]) -> None:
        self.written = written
        self._thread = ThreadPoolExecutor(1, "write")
        self._pending: deque[tuple[int, Future[Any]]] = deque()

    def __enter__(self) -> "WriteBehind":
        return self

    def submit(self, shard: int, write: Callable[[], Any]) -> None:
        """Queue ``write`` of ``shard``; waits while too many are pending.

        Raises:
            QtoolError: an earlier write failed.
        """
        self._pending.append((shard, self._thread.submit(write)))
        self._settle(AHEAD)

    def wait(self) -> None:
        """Until everything is written."""
        self._settle(0)

    def _settle(self, allowed: int) -> None:
        while self._pending and (len(self._pending) > allowed or self._pending[0][1].done()):
            shard, future = self._pending.popleft()
            future.result()
            self.written(shard)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._thread.shutdown()
