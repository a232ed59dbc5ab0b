"""The record of a run's time and memory, in ``OUT.run.json`` beside the directory OUT.

Not inside: OUT holds nothing that differs between two runs of one job, or between a run and its
resumption, so ``diff -r`` proves them equal. The record names the job it belongs to by a hash; a
checkpoint that is moved or renamed keeps it if the file moves along, as ``DIR.run.json`` beside or
``run.json`` inside. A record of another job, left behind under the same name, is not believed.

A resumed run adds an attempt. The file is written before an attempt's first block and after each
shard, so a killed attempt counts up to its last whole shard::

    {"format_version": 2, "job": "<sha256>",
     "seconds": 81.2, "peak_host_bytes": 912000000, "peak_device_bytes": 0, "device": "cpu",
     "phases": {"read": 3.1}, "attempts": [{"started": "2026-01-31T12:00:00Z", "device": "cpu",
     "shards": 14, "seconds": 81.2,
                   "peak_host_bytes": 912000000, "peak_device_bytes": 0, "phases": {"read": 3.1}}]}

Seconds are of wall time, added over attempts; peaks are the largest of any attempt. Host memory is
the process's resident set, device memory what torch allocated, both of the first of several ranks.
Phases are named by the pipeline; those that run side by side may add up to more than the whole,
those that nobody named to less.
"""

import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qtool.distributed import ranks
from qtool.io.output import job_hash
from qtool.io.safetensors import write_json

FORMAT_VERSION = 2
SUFFIX, INSIDE = ".run.json", "run.json"


@dataclass
class Attempt:
    """One process's part of a run; ``shards`` is how many it wrote."""

    started: str
    device: str
    shards: int = 0
    seconds: float = 0.0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)


class RunRecord:
    """The record of the run that writes ``directory``.

    Args:
        directory: OUT.
        identity: the job, as :class:`Output` has it.
        device: the run's.
        continued: the run was started before; its attempts are kept if they are of this job.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], device: torch.device, *, continued: bool
    ) -> None:
        self.path, self.device, self.job = record_path(directory), device, job_hash(identity)
        before = _read(self.path) if continued else {}
        self.earlier = list(before["attempts"]) if before.get("job") == self.job else []
        self.attempt = Attempt(
            datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), device_name(device)
        )
        self.began = time.monotonic()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def shard_written(self) -> None:
        """Note one more shard on disk."""
        self.attempt.shards += 1
        self.write()

    def write(self) -> None:
        """Bring the file up to date; only rank 0 does."""
        if ranks.rank() > 0:
            return
        attempt = self.attempt
        attempt.seconds = time.monotonic() - self.began
        attempt.peak_host_bytes = peak_host_bytes()
        if self.device.type == "cuda":
            attempt.peak_device_bytes = torch.cuda.max_memory_allocated(self.device)
        attempts = [*self.earlier, {**vars(attempt), "phases": dict(attempt.phases)}]
        phases: dict[str, float] = {}
        for one in attempts:
            for name, seconds in one["phases"].items():
                phases[name] = phases.get(name, 0.0) + seconds
        total = {
            "format_version": FORMAT_VERSION,
            "job": self.job,
            "seconds": sum(one["seconds"] for one in attempts),
            "peak_host_bytes": max(one["peak_host_bytes"] for one in attempts),
            "peak_device_bytes": max(one["peak_device_bytes"] for one in attempts),
            "device": ", ".join(dict.fromkeys(one["device"] for one in attempts)),
            "phases": phases,
            "attempts": attempts,
        }
        write_json(self.path, total)


def read_run(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the native checkpoint ``directory``, or {} if there is none of that job."""
    for path in (record_path(directory), directory / INSIDE):
        found = _read(path)
        if found.get("job") == job_hash(identity):
            return found
    return {}


def record_path(directory: Path) -> Path:
    """The path of the record of ``directory``."""
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
        attempts = [asdict(Attempt(**attempt)) for attempt in found["attempts"]]
        phases = {name: float(seconds) for name, seconds in found["phases"].items()}
        return {**totals, "phases": phases, "attempts": attempts} if known else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
