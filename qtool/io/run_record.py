"""The record of a run's time and memory, in ``OUT.run.json`` beside the directory OUT.

The record is not inside OUT: nothing there differs between two runs of one job, or between a run
and its resumption, so ``diff -r`` proves them equal. The record names its job by a hash. If a
checkpoint is moved or renamed, the file can move along, as ``DIR.run.json`` beside or ``run.json``
inside the directory. A record of another job under the same name is ignored.

A resumed run adds an attempt. The file is written before an attempt's first block and after each
shard, so a killed attempt counts up to its last complete shard::

    {"format_version": 2, "job": "<sha256>", "device": "cpu",
     "seconds": 81.2, "peak_host_bytes": 912000000, "peak_device_bytes": 0,
     "phases": {"read": 3.1},
     "attempts": [{"started": "2026-01-31T12:00:00Z", "device": "cpu", "threads": 8, "shards": 14,
                   "seconds": 81.2, "peak_host_bytes": 912000000, "peak_device_bytes": 0,
                   "phases": {"read": 3.1}}]}

Seconds are wall time, added over attempts; peaks are the largest of any attempt. Host memory is the
process's resident set, and device memory is the memory that torch allocated, both on the first of
several ranks. The pipeline names the phases. Their sum may be larger than the whole, if some run in
parallel, or smaller, if some time has no phase.
"""

import json
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any, get_type_hints

import torch

from qtool.distributed import ranks
from qtool.errors import QtoolError, refuse_pipe
from qtool.io.output import content_hash
from qtool.io.safetensors import write_json
from qtool.plugins import require_kinds

FORMAT_VERSION = 2
SUFFIX, INSIDE = ".run.json", "run.json"


@dataclass
class Attempt:
    """One process's part of a run.

    Attributes:
        threads: torch's threads of a run on a CPU; 0 on a GPU, or if they were not recorded.
        shards: the number of shards that it wrote.
    """

    started: str
    device: str
    threads: int = 0
    shards: int = 0
    seconds: float = 0.0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)


class RunRecord:
    """The record of the run that writes ``directory``.

    Args:
        directory: OUT.
        identity: the facts of the job, as in :class:`Output`.
        device: device of the run.
        continued: the run was started before; its attempts are kept if they belong to this job.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], device: torch.device, *, continued: bool
    ) -> None:
        self.path, self.device, self.job = record_path(directory), device, content_hash(identity)
        before = _read(self.path) if continued else {}
        self.earlier = list(before["attempts"]) if before.get("job") == self.job else []
        self.attempt = Attempt(
            datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            torch.get_num_threads() if device.type == "cpu" else 0,
        )
        if ranks.rank() == 0:
            for unfinished in self.path.parent.glob(f"{escape(self.path.name)}.*.tmp"):
                unfinished.unlink(missing_ok=True)  # a killed run left it
        self.began = time.monotonic()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def other_threads(self) -> list[int]:
        """The numbers of threads of earlier attempts that are known and not this one's."""
        return sorted({one["threads"] for one in self.earlier} - {0, self.attempt.threads})

    @property
    def earlier_seconds(self) -> float:
        """Seconds of the earlier attempts."""
        return sum(one["seconds"] for one in self.earlier)

    def shard_written(self) -> None:
        """Note one more shard on disk."""
        self.attempt.shards += 1
        self.write()

    def write(self) -> None:
        """Update the file; only rank 0 does so."""
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
            "seconds": self.earlier_seconds + attempt.seconds,
            "peak_host_bytes": max(one["peak_host_bytes"] for one in attempts),
            "peak_device_bytes": max(one["peak_device_bytes"] for one in attempts),
            "device": ", ".join(dict.fromkeys(one["device"] for one in attempts)),
            "phases": phases,
            "attempts": attempts,
        }
        write_json(self.path, total)


def read_run(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the native checkpoint ``directory``, or {} if that job has none."""
    for path in (record_path(directory), directory / INSIDE):
        found = _read(path)
        if found.get("job") == content_hash(identity):
            return found
    return {}


def record_path(directory: Path) -> Path:
    """The path of the record of ``directory``."""
    directory = directory.absolute()
    return directory.with_name(directory.name + SUFFIX)


def peak_host_bytes() -> int:
    """The largest resident set this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read(path: Path) -> dict[str, Any]:
    """The record in ``path``; {} if the file is missing, damaged or of another version.

    Raises:
        QtoolError: it is a pipe or a device.
    """
    refuse_pipe(path)
    try:
        found = json.loads(path.read_text())
        if found["format_version"] != FORMAT_VERSION:
            return {}
        totals: dict[str, Any] = {key: str(found[key]) for key in ("job", "device")}
        totals |= {
            key: float(found[key]) for key in ("seconds", "peak_host_bytes", "peak_device_bytes")
        }
        attempts = [Attempt(**attempt) for attempt in found["attempts"]]
        for attempt in attempts:
            require_kinds(attempt, "attempt", get_type_hints(Attempt))
        phases = {name: float(seconds) for name, seconds in found["phases"].items()}
        return {**totals, "phases": phases, "attempts": list(map(asdict, attempts))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, QtoolError):
        return {}
