"""What a run will do, from config.json alone: bits, bytes, memory and time, layer by layer.

Sizes are exact: they come from the code that packs, run on a slab of zeros. Memory and time are
estimates: of plain rounding by the constants below, on two CPU cores; of calibrated runs by
:mod:`qtool.pipeline.planning.memory` and :mod:`qtool.pipeline.planning.estimate`, on one GPU.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from qtool.pipeline.job import Job
from qtool.pipeline.planning import memory
from qtool.pipeline.planning.estimate import H200, seconds
from qtool.pipeline.streaming import activations
from qtool.recipes.recipe import CONTINUED, GIVEN
from qtool.text_table import render

#: weights rounded to nearest a second on two CPU cores, reading and writing included
PLAIN_WEIGHTS_PER_SECOND = 60e6


@dataclass(frozen=True)
class PlannedLinear:
    """One linear of a block: its format and what it will take on disk."""

    name: str
    scheme: str
    group_size: int | None
    layout: str
    shape: tuple[int, int]
    nbytes: int

    @property
    def bits(self) -> float:
        return self.nbytes * 8 / prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """A job in numbers. Byte counts are of tensors; files add their headers (a few kilobytes).

    Attributes:
        linears: of a block of the commonest kind.
        device: what time and memory are of. compiling: seconds that the first run on a machine
            takes longer.
        activation_bytes, place: the calibration activations and where they are kept between blocks.
        continued: the model writes most of the calibration windows first, and is held whole
            meanwhile.
    """

    job: Job
    linears: list[PlannedLinear]
    source_bytes: int
    shard_bytes: list[int]
    host_bytes: int
    seconds: float
    device: str = "cpu"
    device_bytes: int = 0
    activation_bytes: int = 0
    place: str = ""
    compiling: float = 0
    continued: bool = False

    @property
    def output_bytes(self) -> int:
        return sum(self.shard_bytes)

    @property
    def disk_bytes(self) -> int:
        """What the run takes on disk beside the source: the result, and activations that fit
        nowhere else.
        """
        return self.output_bytes + (self.activation_bytes if self.place == "disk" else 0)


def plan(
    job: Job,
    samples: int = 128,
    seqlen: int = 2048,
    device_memory: float = H200.memory,
    host_memory: float | None = None,
) -> Plan:
    """The plan of ``job``, calibrated on ``samples`` windows of ``seqlen`` tokens; reads no
    weights.

    Args:
        device_memory: free bytes of the GPU that a calibrated run gets.
        host_memory: free bytes of the host; by default this machine's.
    """
    size = job.dtype.itemsize
    shapes = job.source_shapes()
    weights = sum(prod(shape) for shape in shapes.values())
    first, last = job.embedding_and_head()
    if job.tied and not job.unties:
        del last[f"{job.family.head}.weight"]
    ends = [sum(map(prod, end.values())) * size for end in (first, last)]
    nbytes = {block: job.block_bytes(block) for block in job.first_of_kinds()}
    shards = [ends[0], *(nbytes[block] for block in job.kinds), ends[1]]
    commonest = Counter(job.kinds).most_common(1)[0][0]
    linears, source = _linears(job, commonest), weights * size
    if not job.needs_data:
        return Plan(
            job, linears, source, shards, _host_bytes(job), weights / PLAIN_WEIGHTS_PER_SECOND
        )
    device, tokens = torch.device("cuda"), samples * seqlen
    host = activations.available_host_bytes() if host_memory is None else host_memory
    place = activations.choose(job, tokens, device, device_memory, host)
    kept, working = (
        memory.activation_bytes(job, tokens, device),
        memory.working_bytes(job, tokens, device),
    )
    host_bytes = memory.host_bytes(job, device, tokens, kept if place == "host" else 0)
    device_bytes, writing = working + (kept if place == "device" else 0), None
    if job.recipe.windows == CONTINUED:
        writing = memory.writing(job, samples, seqlen, device, device_memory)
        if writing.fits(activations.DEVICE_SHARE * device_memory, activations.HOST_SHARE * host):
            device_bytes = max(device_bytes, writing.bytes)
            host_bytes = max(host_bytes, memory.CUDA_PROCESS + writing.weights)
        else:
            writing = None
    took = seconds(job, samples, seqlen, writing)
    return Plan(
        job,
        linears,
        source,
        shards,
        host_bytes,
        took,
        H200.name,
        device_bytes,
        kept,
        place,
        H200.compiling,
        writing is not None,
    )


def _linears(job: Job, block: int) -> list[PlannedLinear]:
    return [_linear(job, block, name, shape) for name, shape in job.linears(block).items()]


def _linear(job: Job, block: int, name: str, shape: tuple[int, int]) -> PlannedLinear:
    n, k = shape
    full = job.full(block, name)
    linear_format = job.format.of(full)
    if linear_format is None:
        dtype = str(job.dtype).removeprefix("torch.")
        return PlannedLinear(name, dtype, None, "", (n, k), n * k * job.dtype.itemsize)
    nbytes = linear_format.nbytes(n, k) + (4 * k if job.format.is_permuted(full) else 0)
    return PlannedLinear(
        name, linear_format.scheme, linear_format.group_size, linear_format.layout, (n, k), nbytes
    )


def _host_bytes(job: Job) -> int:
    """Streamed: one weight, its codes, its packed form and chunk temporaries. Else: one block in
    float32, twice.
    """
    blocks = [[n * k for n, k in job.linears(block).values()] for block in job.first_of_kinds()]
    if job.is_plain:
        return memory.CPU_PROCESS + max(map(max, blocks)) * (job.dtype.itemsize + 2) + (200 << 20)
    return memory.CPU_PROCESS + 2 * 4 * max(map(sum, blocks))


def as_dict(planned: Plan) -> dict[str, Any]:
    """The plan as plain data, for ``--json``."""
    linears = [
        {
            "name": x.name,
            "scheme": x.scheme,
            "group_size": x.group_size,
            "layout": x.layout,
            "shape": list(x.shape),
            "bytes": x.nbytes,
            "bits_per_weight": x.bits,
        }
        for x in planned.linears
    ]
    return {
        "scheme": planned.job.format.scheme,
        "reason": planned.job.recipe.reason,
        "left_out": list(planned.job.recipe.left_out),
        "unsupported": planned.job.family.unsupported or None,
        "blocks": planned.job.blocks,
        "linears_of_a_block": linears,
        "source_bytes": planned.source_bytes,
        "output_bytes": planned.output_bytes,
        "peak_host_bytes": planned.host_bytes,
        "seconds": planned.seconds,
        "seconds_to_compile": planned.compiling,
        "device": planned.device,
        "peak_device_bytes": planned.device_bytes,
        "activation_bytes": planned.activation_bytes,
        "activations": planned.place,
        "windows": CONTINUED if planned.continued else GIVEN,
        "disk_bytes": planned.disk_bytes,
    }


def _experts_once(linears: Sequence[PlannedLinear]) -> Iterator[tuple[str, PlannedLinear]]:
    """Name and linear, with one line for all experts alike."""
    alike: dict[tuple[str, object], list[PlannedLinear]] = {}
    for x in linears:
        name = re.sub(r"\.\d+\.", ".*.", x.name)
        alike.setdefault((name, (x.scheme, x.group_size, x.layout, x.shape)), []).append(x)
    for (name, _), found in alike.items():
        yield (f"{name} ({len(found)})" if len(found) > 1 else found[0].name), found[0]


def as_text(planned: Plan) -> str:
    """The plan as a person reads it."""
    rows = [
        (
            name,
            f"{x.shape[0]} x {x.shape[1]}",
            x.scheme,
            x.group_size or ("channel" if x.layout else ""),
            x.layout,
            f"{x.bits:.3f}",
            f"{x.nbytes / 1e6:.2f}",
        )
        for name, x in _experts_once(planned.linears)
    ]
    job = planned.job
    table = render(("linear of a block", "shape", "scheme", "group", "layout", "bits", "MB"), rows)
    return "\n".join(
        [
            f"{job.family.name}, {job.blocks} blocks, {job.format.scheme}, recipe {job.recipe.variant}: "
            + " -> ".join([*(t.name for t in job.transforms), job.rounding.name]),
            *(
                [f"only a plan: quantizing it would need {job.family.unsupported}"]
                if job.family.unsupported
                else []
            ),
            *job.recipe.left_out,
            *([f"chosen because {job.recipe.reason}"] if job.recipe.reason else []),
            table,
            f"read {planned.source_bytes / 1e9:.2f} GB, write {planned.output_bytes / 1e9:.2f} GB "
            f"({planned.source_bytes / planned.output_bytes:.2f}x smaller) in {len(planned.shard_bytes)} shards",
            *_costs(planned),
        ]
    )


def _costs(planned: Plan) -> Iterator[str]:
    """Memory, time and disk."""
    took = f"time about {duration(planned.seconds)}"
    host = f"peak host memory about {planned.host_bytes / 1e9:.2f} GB"
    if not planned.place:
        yield f"{host}, {took}"
        return
    took += f" (first run {planned.compiling:.0f} s more)"
    yield f"on one {planned.device}: {took}, peak device memory about {planned.device_bytes / 1e9:.1f} GB, {host}"
    if planned.continued:
        yield "calibration windows: begun by the text and continued by the model (--windows given: all of the text)"
    kept = f"calibration activations: {planned.activation_bytes / 1e9:.2f} GB, kept {activations.PLACES[planned.place]}"
    yield f"{kept}; disk {planned.disk_bytes / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """``95 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
