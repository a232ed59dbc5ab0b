"""Ends a run whose ranks can no longer finish, in cases in which torchrun does not.

torchrun ends all ranks as soon as the process of one dies. It does not detect a rank that hangs or
whose machine is lost, and if one rank fails by itself, all others print errors too. So every rank
writes a heartbeat each second to the store that torchrun set up, and a thread of each rank reads
those of the others. If a rank is silent for :data:`SILENCE` seconds, the run ends with a sentence
that names it. If a rank fails by itself, it says why, and the others end without a message.
"""

import contextlib
import os
import socket
import sys
import time
from threading import Event, Thread
from typing import Any, NoReturn

from qtool.units import whole_number

#: seconds between two heartbeats; seconds without one after which a rank counts as lost
BEAT, SILENCE = 1.0, 20.0
FAILED = 2


class Watch:
    """The thread that listens to the other ranks.

    Args:
        store: a ``torch.distributed`` store that only this thread uses.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.stopped = Event()
        store.set(f"qtool/beat/{rank}", "0")
        store.set(f"qtool/place/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        # get waits until the other rank has set it
        self.places = [store.get(f"qtool/place/{other}").decode() for other in range(size)]
        self.thread = Thread(target=self._run, name="watch", daemon=True)
        self.answers = 0
        self.thread.start()
        Thread(target=self._guard, name="watch's guard", daemon=True).start()

    def _run(self) -> None:
        beats, lost = 0, 0
        heard: dict[int, tuple[bytes, float]] = {}
        while not self.stopped.wait(BEAT):
            beats += 1
            try:
                self.store.set(f"qtool/beat/{self.rank}", str(beats))
                self._listen(heard)
                self.answers += 1
                lost = 0
            except Exception:  # the store's process has ended, or is ending
                lost += 1
                if lost == 3:
                    self._leave("the store through which the ranks meet is gone")

    def _guard(self) -> None:
        """End the process if the store does not answer; its own timeouts do not end all waits."""
        answers, waited = 0, 0
        while not self.stopped.wait(BEAT):
            waited = waited + 1 if answers == self.answers else 0
            answers = self.answers
            if waited > SILENCE / BEAT:
                self._say("the store through which the ranks meet does not answer")

    def _listen(self, heard: dict[int, tuple[bytes, float]]) -> None:
        """End the process if another rank failed or is silent; ``heard`` has last heartbeats."""
        if self.store.check(["qtool/failed"]):
            os._exit(FAILED)  # the rank that failed has said why
        now = time.monotonic()
        beats = self.store.multi_get([f"qtool/beat/{other}" for other in range(self.size)])
        for other, beat in enumerate(beats):
            before, since = heard.get(other, (b"", now))
            if beat != before:
                heard[other] = beat, now
            elif now - since > SILENCE:
                self._leave(
                    f"rank {other} of {self.size} ({self.places[other]}) has given no sign of life"
                    f" for {SILENCE:.0f} s"
                )

    def _leave(self, why: str) -> NoReturn:
        if self.fail():
            self._say(why)
        os._exit(FAILED)

    def _say(self, why: str) -> NoReturn:
        message = f"qtool: {why}; go on with --resume, with any number of ranks"
        print(message, file=sys.stderr, flush=True)
        os._exit(FAILED)

    def fail(self) -> bool:
        """Mark that this rank cannot go on, so that the others end; True if it is the first.

        The first rank to fail says why.
        """
        first = self.rank == 1  # if the store ended with rank 0
        with contextlib.suppress(Exception):
            first = self.store.add("qtool/told", 1) == 1
            self.store.set("qtool/failed", "1")
        return first

    def stop(self) -> None:
        """Stop listening."""
        self.stopped.set()
        self.thread.join(5 * BEAT)


_watch: Watch | None = None


def begin(store: Any, rank: int, size: int) -> None:
    """Listen to the other ranks, and send heartbeats to them, until :func:`end`."""
    global _watch
    _watch = Watch(store, rank, size)


def end() -> None:
    """Stop listening; called after a barrier at which all ranks have finished."""
    global _watch
    if _watch:
        _watch.stop()
    _watch = None


def fail() -> bool:
    """Mark that this process cannot go on, so that the others end; True if it should say why."""
    if _watch:
        return _watch.fail()
    return is_first_rank()  # all ranks fail alike before they have met


def is_alone() -> bool:
    """Whether no launcher such as torchrun started other ranks, by its environment."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_first_rank() -> bool:
    """Whether this process is rank 0 or alone, by torchrun's environment, or has no valid rank."""
    return is_alone() or not whole_number(os.environ.get("RANK", "0"))


def leave(code: int) -> NoReturn:
    """End the process; with several ranks at once, since threads of collectives may still run."""
    if not is_alone():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
