"""``qtool bench quantize``: one measured run, with the floor of each of its phases."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.bench.ceilings import Ceilings, measure
from qtool.calibration.timing import BESIDE
from qtool.errors import QtoolError
from qtool.io.integrity import RECORD, read_record
from qtool.io.run_record import record_path
from qtool.io.safetensors import write_json
from qtool.io.source import Checkpoint
from qtool.pipeline.calibration_windows import Windows
from qtool.pipeline.free_memory import gpu_memory
from qtool.pipeline.job import Job
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.planning.estimate import H200
from qtool.pipeline.planning.plan import Plan, plan
from qtool.pipeline.planning.plan_text import as_dict as planned_facts
from qtool.pipeline.planning.work import work_of
from qtool.pipeline.quantize import Calibration, fingerprint, quantize, source_dtype
from qtool.progress import Progress
from qtool.recipes import Recipe
from qtool.table import render
from qtool.units import bytes_text, duration


@dataclass(frozen=True)
class Measured:
    """One run: its record, the machine's ceilings, and the floor of each phase in seconds.

    ``reserved`` is the most device bytes that torch's cache held, which is more than the bytes that
    were allocated at once. ``planned`` is the plan of the job, as by ``qtool plan``.
    """

    record: dict[str, Any]
    ceilings: Ceilings
    floors: dict[str, float]
    reserved: int
    planned: Plan

    def table(self) -> str:
        """A table of phases with seconds, floors and ratios, and a column for I/O threads."""
        phases = dict(self.record["phases"])
        beside = {
            name.removesuffix(BESIDE): phases.pop(name)
            for name in list(phases)
            if name.endswith(BESIDE)
        }
        rows = [
            _row(name, phases[name], beside.get(name), self.floors.get(name))
            for name in sorted(phases, key=lambda name: -phases[name])
        ]
        rows.append(("all", f"{self.record['seconds']:.2f}", "", "", ""))
        record, planned, rates = self.record, self.planned, self.ceilings
        used = expected = first = ""
        if planned.device_bytes:
            used = f", device {bytes_text(record['peak_device_bytes'])}"
            used += f", {bytes_text(self.reserved)} reserved"
            expected = f", device {bytes_text(planned.device_bytes)}"
        if planned.compiling:
            first = f" (first run {planned.compiling:.0f} s more)"
        return "\n".join(
            [
                render(("phase", "s", "beside, s", "floor, s", "of floor"), rows),
                f"peak memory: host {bytes_text(record['peak_host_bytes'])}{used} "
                f"({record['device']})",
                f"planned: {duration(planned.seconds)}{first}, "
                f"host {bytes_text(planned.host_bytes)}{expected}",
                f"ceilings: read {rates.read / 1e9:.1f} GB/s, write {rates.write / 1e9:.1f} GB/s, "
                f"memory {rates.memory / 1e9:.0f} GB/s, 16-bit {rates.sixteen_bit / 1e12:.3g}, "
                f"TF32 {rates.tf32 / 1e12:.3g}, float32 {rates.float32 / 1e12:.3g} TFLOP/s",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """The measurements as plain data, for ``--json``."""
        return {
            "record": self.record,
            "ceilings": asdict(self.ceilings),
            "floors": self.floors,
            "reserved_device_bytes": self.reserved,
            "planned": planned_facts(self.planned),
        }


def _row(name: str, seconds: float, beside: float | None, floor: float | None) -> tuple[str, ...]:
    busy = seconds if beside is None else beside
    return (
        name,
        f"{seconds:.2f}",
        "" if beside is None else f"{beside:.2f}",
        "" if floor is None else f"{floor:.2f}",
        f"{busy / floor:.1f}x" if floor else "",
    )


def random_tokens(vocabulary: int, samples: int, seqlen: int) -> Calibration:
    """``samples`` windows of ``seqlen`` random tokens, in batches of about 4096."""
    ids = torch.randint(vocabulary, (samples, seqlen), generator=torch.Generator().manual_seed(0))
    tokens = list(ids.split(max(1, 4096 // seqlen)))
    return Calibration(
        tokens,
        {
            "text": "random tokens",
            "samples": samples,
            "seqlen": seqlen,
            "seed": 0,
            "tokens": fingerprint(tokens),
        },
    )


def _require_replaceable(out: Path) -> None:
    """Refuse a directory that holds anything but a measured run, which a new one replaces."""
    if out.exists() and "bench" not in read_record(out):
        raise QtoolError(f"{out} is no measured run, and not replaced: choose another --work")
    if (partial := out.with_name(out.name + ".partial")).exists():
        raise QtoolError(f"{partial} is an unfinished run: choose another --work or remove it")


def run(
    source: Path,
    recipe: Recipe,
    out: Path,
    *,
    samples: int,
    seqlen: int,
    device: str,
    activations: str = "auto",
    device_memory: float | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Quantize ``source`` into ``out`` from the start, on random tokens if the recipe needs data.

    The measurements are stored as ``bench`` in the result's ``qtool.json``.

    Args:
        device_memory: GB of the GPU's memory that the run may use; by default all.

    Raises:
        QtoolError: as :func:`~qtool.pipeline.quantize.quantize` does; or ``device_memory`` is given
            with a CPU, ``out`` holds anything but an earlier measured run, or ``OUT.partial``
            exists.
    """
    where = torch.device(device)
    cuda = where.type == "cuda"
    if device_memory is not None and not cuda:
        raise QtoolError(f"--device-memory {device_memory}: --device cuda is expected beside it")
    _require_replaceable(out)
    checkpoint = Checkpoint(source)
    job = Job.of(checkpoint.config, recipe, source_dtype(checkpoint))
    calibration = None
    if job.needs_data:
        tokens = random_tokens(job.namespace.vocab_size, samples, seqlen).tokens
        options = QuantizeOptions(samples=samples, seqlen=seqlen)
        calibration = Windows(checkpoint, job, torch.cat(list(tokens)), options, device)
    shutil.rmtree(out, ignore_errors=True)
    ceilings = measure(checkpoint, out.parent, where)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        if device_memory is not None:
            share = min(1.0, 1e9 * device_memory / torch.cuda.mem_get_info(device)[1])
            torch.cuda.set_per_process_memory_fraction(share, where.index)
    quantize(
        checkpoint,
        recipe,
        out,
        calibration=calibration,
        device=device,
        progress=progress,
        activations=activations,
    )
    record = json.loads(record_path(out).read_text())
    reserved = torch.cuda.max_memory_reserved(device) if cuda else 0
    memory = gpu_memory(where)[0] if cuda else H200.memory
    planned = plan(job, samples, seqlen, memory, device=where.type, place=activations)
    floors = ceilings.floors(work_of(job, samples, job.window(seqlen)), planned.continuation)
    measured = Measured(record, ceilings, floors, reserved, planned)
    write_json(out / RECORD, read_record(out) | {"bench": measured.as_dict()})
    return measured
