"""What a run will do, from config.json alone: bits, bytes, memory and time, layer by layer.

Sizes are exact: they come from the code that packs, run on a slab of zeros. Memory and time are estimates;
the constants below are measured by ``benchmarks/quantize`` and printed with the plan.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from qtool.models.family import Heads
from qtool.pipeline.job import Job
from qtool.runtime.packed_kv import kv_tensors
from qtool.text_table import render

#: resident memory of the process with torch and transformers loaded
PROCESS_BYTES = 600_000_000
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
    """A job in numbers. Byte counts are of tensors; files add their headers (a few kilobytes)."""

    job: Job
    linears: list[PlannedLinear]  # of block 0; the others are alike unless rules say otherwise
    source_bytes: int
    shard_bytes: list[int]
    host_bytes: int
    seconds: float

    @property
    def output_bytes(self) -> int:
        return sum(self.shard_bytes)


def plan(job: Job) -> Plan:
    """The plan of ``job``; reads no weights."""
    size = job.dtype.itemsize
    shapes = job.source_shapes()
    weights = sum(prod(shape) for shape in shapes.values())
    first, last = job.ends()
    if job.tied and not job.unties:
        del last[f"{job.family.head}.weight"]
    ends = [sum(map(prod, end.values())) * size for end in (first, last)]
    shards = [ends[0], *(_block_bytes(job, block) for block in range(job.blocks)), ends[1]]
    return Plan(job, _linears(job, 0), weights * size, shards,
                _host_bytes(job), weights / PLAIN_WEIGHTS_PER_SECOND)  # fmt: skip


def _block_bytes(job: Job, block: int) -> int:
    """Stored bytes of a block: its linears as planned, the rest as it is."""
    linears = _linears(job, block)
    every = sum(prod(shape) for shape in job.block_shapes(block).values())
    rest = every - sum(prod(linear.shape) for linear in linears)
    scales = kv_tensors(job.format.kv, job.family, Heads.of(job.namespace))
    kv_bytes = sum(t.numel() * t.dtype.itemsize for t in scales.values())
    return sum(linear.nbytes for linear in linears) + rest * job.dtype.itemsize + kv_bytes


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
    return PlannedLinear(name, linear_format.scheme, linear_format.group_size, linear_format.layout, (n, k), nbytes)


def _host_bytes(job: Job) -> int:
    """Streamed: one weight, its codes, its packed form and chunk temporaries. Else: one block in float32, twice."""
    blocks = [[n * k for n, k in job.linears(block).values()] for block in job.first_of_kinds()]
    if job.is_plain:
        return PROCESS_BYTES + max(map(max, blocks)) * (job.dtype.itemsize + 2) + (200 << 20)
    return PROCESS_BYTES + 2 * 4 * max(map(sum, blocks))


def as_dict(planned: Plan) -> dict[str, Any]:
    """The plan as plain data, for ``--json``."""
    linears = [
        {"name": x.name, "scheme": x.scheme, "group_size": x.group_size, "layout": x.layout, "shape": list(x.shape),
         "bytes": x.nbytes, "bits_per_weight": x.bits}
        for x in planned.linears
    ]  # fmt: skip
    return {
        "scheme": planned.job.format.scheme,
        "reason": planned.job.recipe.reason,
        "blocks": planned.job.blocks,
        "linears_of_a_block": linears,
        "source_bytes": planned.source_bytes,
        "output_bytes": planned.output_bytes,
        "peak_host_bytes": planned.host_bytes,
        "seconds": planned.seconds,
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
        (name, f"{x.shape[0]} x {x.shape[1]}", x.scheme, x.group_size or "channel", x.layout, f"{x.bits:.3f}",
         f"{x.nbytes / 1e6:.2f}")
        for name, x in _experts_once(planned.linears)
    ]  # fmt: skip
    job = planned.job
    table = render(("linear of a block", "shape", "scheme", "group", "layout", "bits", "MB"), rows)
    return "\n".join([
        f"{job.family.name}, {job.blocks} blocks, {job.format.scheme}, recipe {job.recipe.variant}: "
        + " -> ".join([*(t.name for t in job.transforms), job.rounding.name]),
        *([f"chosen because {job.recipe.reason}"] if job.recipe.reason else []),
        table,
        f"read {planned.source_bytes / 1e9:.2f} GB, write {planned.output_bytes / 1e9:.2f} GB "
        f"({planned.source_bytes / planned.output_bytes:.2f}x smaller) in {len(planned.shard_bytes)} shards",
        f"peak host memory about {planned.host_bytes / 1e9:.2f} GB, time about {planned.seconds:.0f} s",
    ])  # fmt: skip
