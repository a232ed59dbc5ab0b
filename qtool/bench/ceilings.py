"""Measures the ceilings of this machine: file rates, memory rate, matmul rates."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qtool.calibration.cost import Work
from qtool.calibration.precision import tensor_cores
from qtool.io.source import Checkpoint
from qtool.pipeline.planning.memory import ContinuationMemory

PROBE_BYTES = 1 << 30
#: bytes of a weight in a learning iteration: its value (4 read, 2 written), its gradient (6, 4),
#: and Adam, which reads four numbers and writes three
LEARNING_BYTES = 44


@dataclass(frozen=True)
class Ceilings:
    """Rates a second: bytes of files and of device memory, operations of matmuls."""

    read: float
    write: float
    memory: float
    sixteen_bit: float
    tf32: float
    float32: float

    def floors(self, work: Work, continuation: ContinuationMemory | None) -> dict[str, float]:
        """The least seconds of each phase, with the ``continuation`` of windows if there is one."""
        windows = {}
        if continuation:
            read = (continuation.weights + continuation.step_cache) / self.memory
            computed = continuation.step_flops / self.sixteen_bit
            windows["windows"] = continuation.steps * max(read, computed)
        return windows | {
            "read": work.read_bytes / self.read,
            "forward": work.forward_flops / self.sixteen_bit,
            "Hessian": work.hessian_flops / self.sixteen_bit,
            "search": work.search_flops / self.tf32 + 4 * work.search_weights / self.memory,
            "rounding": work.rounding_flops / self.float32
            + (4 * work.rounding_weights + LEARNING_BYTES * work.learning_weights) / self.memory
            + work.learning_flops / self.sixteen_bit,
            "pack": 1.5 * work.packed_weights / self.memory,
            "write": work.write_bytes / self.write,
        }


def measure(source: Checkpoint, directory: Path, device: torch.device) -> Ceilings:
    """The ceilings, measured in under two seconds on a GPU.

    It reads from ``source``, writes to ``directory``, and multiplies and copies on ``device``.
    """
    size = 8192 if device.type == "cuda" else 512
    half = torch.bfloat16 if device.type == "cuda" else torch.float32

    def matmul(dtype: torch.dtype) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return 2 * size**3 / _seconds(lambda: torch.mm(a, b), device)

    block = torch.empty(min(PROBE_BYTES, size * size * 16), dtype=torch.uint8, device=device)
    memory = 2 * block.nbytes / _seconds(block.clone, device)
    with tensor_cores():
        tf32 = matmul(torch.float32)
    files = _read(source), _write(directory)
    return Ceilings(*files, memory, matmul(half), tf32, matmul(torch.float32))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the mean of five calls after a warm-up."""
    run()
    _wait(device)
    started = time.perf_counter()
    for _ in range(5):
        run()
    _wait(device)
    return (time.perf_counter() - started) / 5


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(source: Checkpoint) -> float:
    """Bytes a second of reading files into memory that is already allocated."""
    buffer, done, started = bytearray(1 << 26), 0, time.perf_counter()
    for path in sorted({entry.path for entry in source.entries.values()}):
        with path.open("rb", buffering=0) as file:
            while done < PROBE_BYTES and (got := file.readinto(buffer)):
                done += got
    return done / (time.perf_counter() - started)


def _write(directory: Path) -> float:
    """Bytes a second of writing a file until it is on disk."""
    path, data = directory / "probe.tmp", os.urandom(1 << 24)
    started = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(PROBE_BYTES // 2 // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return (PROBE_BYTES // 2) / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
