"""Ranks of one run look after each other, so that none waits for a dead one.

Every rank gives a sign of life each second through the store that torchrun set up. A thread of each
looks at the others: one whose process is gone, or that is silent for :data:`SILENCE`, ends the run
with a message that names it. Where one rank fails by itself it tells the reason, and the others
leave without a word.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

#: seconds between two signs of life; seconds without one after which a rank counts as dead
BEAT, SILENCE = 1.0, 20.0
#: seconds in which a rank that was asked to stop still looks for the one that died (torchrun kills
#: after 30)
LAST_LOOK = 20.0
FAILED, TERMINATED = 2, 128 + signal.SIGTERM
DONE, STOPPING = b"done", b"stopping"


class Watch:
    """The thread that looks after the other ranks.

    Args:
        store: a ``torch.distributed`` store, for this thread alone.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.beats = 0
        self.asked_to_stop: float | None = None
        self.stopped = Event()
        store.set(f"qtool/beat/{rank}", b"0")
        store.set(f"qtool/place/{rank}", f"{socket.gethostname()} {_namespace()} {os.getpid()}")
        self.places = [
            store.get(f"qtool/place/{other}").decode().split() for other in range(size)
        ]  # waits for all
        self.heard: dict[int, tuple[bytes, float]] = {}
        self.signals, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(
            wake, warn_on_full_buffer=False
        )  # is written to even while the main thread is in C++
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.thread = Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        lost = 0
        while not self.stopped.is_set():
            if select.select([self.signals], [], [], BEAT)[0] and signal.SIGTERM in os.read(
                self.signals, 64
            ):
                self.asked_to_stop = self.asked_to_stop or time.monotonic()
            try:
                self._look()
                lost = 0
            except Exception:  # the store's host is gone, or is going
                lost += 1
                if lost >= 3 and not self.stopped.is_set():
                    self._leave(
                        "the store through which the ranks meet is gone, and rank 0 or its "
                        "machine with it"
                    )

    def _look(self) -> None:
        """Give a sign of life, look for the others'; ends the process where there is a reason."""
        self.beats += 1
        self.store.set(
            f"qtool/beat/{self.rank}", STOPPING if self.asked_to_stop else str(self.beats).encode()
        )
        if self.store.check(["qtool/failed"]):
            os._exit(FAILED)  # whoever failed has told why
        now, beats = (
            time.monotonic(),
            self.store.multi_get([f"qtool/beat/{other}" for other in range(self.size)]),
        )
        for other, beat in enumerate(beats):
            if beat not in (DONE, STOPPING) and other != self.rank:
                self._judge(other, beat, now)
        if self.asked_to_stop:
            ending = all(beat in (DONE, STOPPING) for beat in beats)
            if ending or now - self.asked_to_stop > LAST_LOOK:
                self._leave("stopped by SIGTERM", TERMINATED)
            time.sleep(0.1)

    def _judge(self, other: int, beat: bytes, now: float) -> None:
        host, namespace, pid = self.places[other]
        before, since = self.heard.get(other, (b"", now))
        if beat != before:
            self.heard[other] = beat, now
        if (host, namespace) == (socket.gethostname(), _namespace()) and not _runs(pid):
            self._dead(other, "is dead: killed, or out of memory")
        elif beat == before and now - since > SILENCE:
            self._dead(other, f"has given no sign of life for {SILENCE:.0f} s")

    def _dead(self, other: int, what: str) -> None:
        if self.store.check(["qtool/failed"]):
            os._exit(FAILED)
        if self.store.get(f"qtool/beat/{other}") in (
            DONE,
            STOPPING,
        ):  # it said so just before it went
            return
        host, _, pid = self.places[other]
        self._leave(f"rank {other} of {self.size} (process {pid} on {host}) {what}")

    def _leave(self, why: str, code: int = FAILED) -> NoReturn:
        first = self.rank == 1  # where the store went with rank 0
        with contextlib.suppress(Exception):
            first = self.store.add("qtool/told", 1) == 1
        if first:
            print(
                f"qtool: {why}; go on with --resume, with any number of ranks",
                file=sys.stderr,
                flush=True,
            )
        os._exit(code)

    def fail(self) -> bool:
        """Mark that this rank cannot go on, so that the others end; True if it is the first.

        The first one says why.
        """
        first = True
        with contextlib.suppress(Exception):  # the store may be gone
            first = self.store.add("qtool/told", 1) == 1
            self.store.set("qtool/failed", b"1")
        return first

    def done(self) -> None:
        """This rank has nothing left to do."""
        self.stopped.set()
        self.thread.join(5 * BEAT)
        with contextlib.suppress(
            Exception
        ):  # the store is rank 0's where no launcher keeps one, and may be gone
            self.store.set(f"qtool/beat/{self.rank}", DONE)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


_watch: Watch | None = None


def begin(store: Any, rank: int, size: int) -> None:
    """Watch the other ranks, and let them watch this one, until :func:`end`."""
    global _watch
    _watch = Watch(store, rank, size)


def end() -> None:
    """This rank has nothing left to do."""
    global _watch
    if _watch:
        _watch.done()
    _watch = None


def fail() -> bool:
    """This process cannot go on, and the other ranks need not; whether it is the one to say why."""
    if _watch:
        return _watch.fail()
    return os.environ.get("RANK", "0") == "0"  # before the ranks meet all fail alike


def leave(code: int) -> NoReturn:
    """End the process, at once if there are several ranks: a thread may be in a collective."""
    if _watch:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _namespace() -> str:
    """Where process ids mean the same."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "none"


def _runs(pid: str) -> bool:
    """Whether a process of this machine is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not Path("/proc/self").exists()
