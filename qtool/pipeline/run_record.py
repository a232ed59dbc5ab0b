"""What a run cost: time and memory, in ``OUT.run.json`` beside the directory OUT.

Not inside: OUT holds nothing that differs between two runs of one job, or between a run and its
resumption, so ``diff -r`` proves them equal. The record names the job it belongs to by a hash; a
checkpoint that is moved or renamed keeps it if the file moves along, as ``DIR.run.json`` beside or
``run.json`` inside. A record of another job, left behind under the same name, is not believed.

A resumed run adds a session. The file is written when a session begins and after each shard, so a
killed session counts up to its last whole shard::

    {"format_version": 1, "job": "<sha256>",
     "seconds": 81.2, "peak_host_bytes": 912000000, "peak_device_bytes": 0, "device": "cpu",
     "stages": {"read": 3.1}, "sessions": [{"started": "2026-01-31T12:00:00Z", "device": "cpu",
     "shards": 14, "seconds": 81.2,
                   "peak_host_bytes": 912000000, "peak_device_bytes": 0, "stages": {"read": 3.1}}]}

Seconds are of wall time, added over sessions; peaks are the largest of any session. Host memory is
the process's resident set, device memory what torch allocated, both of the first of several ranks.
Stages are named by the pipeline; those that run side by side may add up to more than the whole,
those that nobody named to less.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qtool.distributed import ranks
from qtool.io.output import job_hash
from qtool.io.safetensors import write_json

FORMAT_VERSION = 1
SUFFIX, INSIDE = ".run.json", "run.json"


@dataclass
class Session:
    """One process's part of a run. ``shards``: how many it wrote."""

    started: str
    device: str
    shards: int = 0
    seconds: float = 0.0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0
    stages: dict[str, float] = field(default_factory=dict)


class RunRecord:
    """The record of the run that writes ``directory``.

    Args:
        directory: OUT. identity: the job, as :class:`Output` has it. device: the run's.
        continued: the run was begun before; its sessions are kept if they are of this job.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], device: torch.device, *, continued: bool
    ) -> None:
        self.path, self.device, self.job = beside(directory), device, job_hash(identity)
        before = _read(self.path) if continued else {}
        self.earlier = list(before["sessions"]) if before.get("job") == self.job else []
        self.session = Session(
            datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), device_name(device)
        )
        self.began = time.monotonic()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.write()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent within to stage ``name``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.session.stages[name] = (
                self.session.stages.get(name, 0.0) + time.monotonic() - began
            )

    def shard_written(self) -> None:
        """Note one more shard on disk."""
        self.session.shards += 1
        self.write()

    def write(self) -> None:
        """Bring the file up to date; of several ranks the first does."""
        if ranks.rank() > 0:
            return
        session = self.session
        session.seconds = time.monotonic() - self.began
        session.peak_host_bytes = peak_host_bytes()
        if self.device.type == "cuda":
            session.peak_device_bytes = torch.cuda.max_memory_allocated(self.device)
        sessions = [*self.earlier, {**vars(session), "stages": dict(session.stages)}]
        stages: dict[str, float] = {}
        for one in sessions:
            for name, seconds in one["stages"].items():
                stages[name] = stages.get(name, 0.0) + seconds
        total = {
            "format_version": FORMAT_VERSION,
            "job": self.job,
            "seconds": sum(one["seconds"] for one in sessions),
            "peak_host_bytes": max(one["peak_host_bytes"] for one in sessions),
            "peak_device_bytes": max(one["peak_device_bytes"] for one in sessions),
            "device": ", ".join(dict.fromkeys(one["device"] for one in sessions)),
            "stages": stages,
            "sessions": sessions,
        }
        write_json(self.path, total)


def read_run(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the native checkpoint ``directory`` made as ``identity``; nothing if there is
    none of that job.
    """
    for path in (beside(directory), directory / INSIDE):
        found = _read(path)
        if found.get("job") == job_hash(identity):
            return found
    return {}


def beside(directory: Path) -> Path:
    """Where the record of ``directory`` lies."""
    directory = directory.absolute()
    return directory.with_name(directory.name + SUFFIX)


def peak_host_bytes() -> int:
    """The largest resident set this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    """``NVIDIA H200``, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(path: Path) -> dict[str, Any]:
    """A whole record; nothing where the file is missing, damaged or of another version."""
    try:
        found = json.loads(path.read_text())
        totals: dict[str, Any] = {key: str(found[key]) for key in ("job", "device")}
        totals |= {
            key: float(found[key]) for key in ("seconds", "peak_host_bytes", "peak_device_bytes")
        }
        known = found["format_version"] == FORMAT_VERSION
        sessions = [asdict(Session(**session)) for session in found["sessions"]]
        stages = {name: float(seconds) for name, seconds in found["stages"].items()}
        return {**totals, "stages": stages, "sessions": sessions} if known else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
