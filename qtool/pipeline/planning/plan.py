"""The plan of a run from config.json alone: bits, bytes, memory and time, layer by layer.

Sizes are exact: they come from the code that packs, run on a slab of zeros. Memory and time are
estimates: for plain rounding from the constants below, for calibrated runs from
:mod:`qtool.pipeline.planning.memory` and :mod:`qtool.pipeline.planning.estimate`.
"""

from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from qtool.calibration.method import LEARNING_SEQUENCES
from qtool.calibration.rounding.rtn import chunk_bytes
from qtool.data.defaults import CALIBRATION_SEQLEN, SAMPLES
from qtool.errors import QtoolError, require_count
from qtool.models.architecture import dtype_name
from qtool.pipeline import free_memory
from qtool.pipeline.job import Job
from qtool.pipeline.planning import memory
from qtool.pipeline.planning.estimate import CPU, H200, Rates, seconds
from qtool.pipeline.streaming import activations
from qtool.recipes.schema import CONTINUED

#: weights a second that two CPU cores round to nearest, reading and writing included
CPU_WEIGHTS_PER_SECOND = 60e6
#: weights a second that an H200 rounds to nearest, without the start of the run
H200_WEIGHTS_PER_SECOND = 580e6


@dataclass(frozen=True)
class PlannedLinear:
    """One linear of a block: its format and its size on disk.

    Attributes:
        name: name within the block.
        scheme: scheme, or the dtype if the linear stays in 16 bits.
        group_size: input channels in a group; None means the whole channel.
        layout: layout; empty if the linear stays in 16 bits.
        shape: N and K.
        nbytes: bytes of all stored tensors of the linear but a bias.
    """

    name: str
    scheme: str
    group_size: int | None
    layout: str
    shape: tuple[int, int]
    nbytes: int

    @property
    def bits(self) -> float:
        """Stored bits a weight."""
        return self.nbytes * 8 / prod(self.shape)


@dataclass(frozen=True)
class PlannedBlocks:
    """Blocks that store the same tensors in the same formats, and the linears of one block."""

    blocks: list[int]
    linears: list[PlannedLinear]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job in numbers. Byte counts are of tensors; files add their headers (a few kilobytes).

    Attributes:
        job: the job that is planned.
        kinds: kinds of blocks.
        source_bytes: bytes of the model that is read.
        shard_bytes: bytes of each file that is written.
        host_bytes: peak bytes of host memory of all processes.
        seconds: seconds of the run.
        device: name of the device for which time and memory hold.
        gpus: number of these devices that share the run.
        device_bytes: peak bytes of each GPU.
        device_memory: bytes of memory of each GPU.
        activation_bytes: bytes of the calibration activations.
        place: place of the activations between blocks; empty if nothing is calibrated.
        compiling: additional seconds of the first run on a machine.
        continuation: memory while the model, which is then loaded whole, continues the calibration
            windows before the run.
        shortage: why the model cannot continue the windows, in words.
        repacked: the format whose codes are copied; empty if weights are quantized.
    """

    job: Job
    kinds: list[PlannedBlocks]
    source_bytes: int
    shard_bytes: list[int]
    host_bytes: int
    seconds: float
    device: str
    gpus: int = 1
    device_bytes: int = 0
    device_memory: float = 0
    activation_bytes: int = 0
    place: str = ""
    compiling: float = 0
    continuation: memory.ContinuationMemory | None = None
    shortage: str = ""
    repacked: str = ""

    def __str__(self) -> str:
        from qtool.pipeline.planning.plan_text import as_text  # imports this module

        return as_text(self)

    @property
    def linears(self) -> list[PlannedLinear]:
        """The linears of a block of the commonest kind."""
        return max(self.kinds, key=lambda kind: len(kind.blocks)).linears

    @property
    def output_bytes(self) -> int:
        """Bytes of the result."""
        return sum(self.shard_bytes)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the run needs on disk besides the source.

        They are those of the result, and of activations that fit nowhere else.
        """
        return self.output_bytes + (self.activation_bytes if self.place == "disk" else 0)

    @property
    def resume_bytes(self) -> int:
        """Bytes on disk that let a killed run continue at once, used only if there is room.

        They are the inputs of the newest block, and the earlier inputs until those are complete.
        """
        return 2 * self.activation_bytes


def plan(
    job: Job,
    samples: int = SAMPLES,
    seqlen: int = CALIBRATION_SEQLEN,
    device_memory: float = H200.memory,
    host_memory: float | None = None,
    *,
    device: str = "cuda",
    gpus: int = 1,
    place: str = "auto",
) -> Plan:
    """The plan of ``job``, calibrated on ``samples`` windows of ``seqlen`` tokens; reads no weight.

    Args:
        seqlen: tokens of a window; it is limited to the model's context.
        device_memory: free bytes of a GPU.
        host_memory: free bytes of the host; by default this machine's.
        device: ``cuda`` (an H200's rates) or ``cpu`` (two cores').
        gpus: number of GPUs that share the run.
        place: where activations are kept between blocks: ``device``, ``host``, ``disk``, or
            ``auto``, the first with room.

    Raises:
        QtoolError: as :func:`require_devices`.
    """
    require_devices(device, gpus)
    where = torch.device(device)
    shapes = job.source_shapes()
    source = sum(prod(shape) for shape in shapes.values())
    sizes: dict[str, Any] = {
        "job": job,
        "kinds": kinds(job),
        "source_bytes": source * job.source_dtype.itemsize,
        "shard_bytes": job.shard_bytes(),
        "device_memory": device_memory if where.type == "cuda" else 0,
    }
    if not job.needs_data:
        return Plan(**sizes, **_uncalibrated(job, source, where, gpus))
    host = free_memory.host_memory()[1] if host_memory is None else host_memory
    free = device_memory if where.type == "cuda" else host
    window = job.window(seqlen)
    return Plan(**sizes, **_calibrated(job, samples, window, where, free, host, gpus, place))


def require_devices(device: str, gpus: int) -> None:
    """Check the devices of a plan.

    Raises:
        QtoolError: ``gpus`` is not a number of GPUs, or is several with ``cpu``; or the device has
            no rates.
    """
    require_count("--gpus", gpus)
    if device not in ("cuda", "cpu"):
        raise QtoolError(f"--device {device!r}: a plan is of cuda or cpu")
    if gpus > 1 and device != "cuda":
        raise QtoolError(f"--gpus {gpus} needs --device cuda; --device {device} is given")


def _uncalibrated(job: Job, weights: int, device: torch.device, gpus: int) -> dict[str, Any]:
    """Time and memory of a run without calibration: the fields of a :class:`Plan`."""
    if device.type == "cpu":
        took = weights / CPU_WEIGHTS_PER_SECOND
        return {"host_bytes": plain_host_bytes(job), "seconds": took, "device": CPU.name}
    if job.is_plain:  # memory holds one weight at a time, its codes and its packed form
        took = H200.start + weights / H200_WEIGHTS_PER_SECOND / gpus
        largest = max(n * k for b in job.distinct_blocks for n, k in job.linears(b).values())
        used = largest * (job.source_dtype.itemsize + 2) + chunk_bytes(largest)
    else:
        took = seconds(job, 1, 1, gpus=gpus)
        used = memory.working_bytes(job, 1, 1, device)
    return {
        "host_bytes": memory.host_bytes(job, 1, 1, device, 0) * gpus,
        "seconds": took,
        "device": H200.name,
        "gpus": gpus,
        "device_bytes": used,
    }


def _calibrated(
    job: Job,
    samples: int,
    seqlen: int,
    device: torch.device,
    device_memory: float,
    host_memory: float,
    gpus: int,
    place: str,
) -> dict[str, Any]:
    """Time, memory and activations of a calibrated run: the fields of a :class:`Plan`."""
    rates: Rates = H200 if device.type == "cuda" else CPU
    tokens = -(-samples // gpus) * seqlen  # tokens of each rank
    free = device_memory, host_memory / gpus
    place, device_bytes, host_bytes = _kept(job, tokens, seqlen, device, *free, place=place)
    device_bytes = max(device_bytes, memory.learning_bytes(job, seqlen, device))
    if job.weighs_outputs:
        few = min(samples, LEARNING_SEQUENCES) * seqlen
        beside = memory.gradient_bytes(job, few)
        own = memory.source_job(job)
        _, on_device, on_host = _kept(own, job.blocks * few, seqlen, device, *free, beside)
        device_bytes, host_bytes = max(device_bytes, on_device), max(host_bytes, on_host)
    continued, shortage = _continuation(job, samples, seqlen, device, device_memory, host_memory)
    if continued and device.type == "cuda":
        device_bytes = max(device_bytes, continued.bytes)
        host_bytes = max(host_bytes, memory.CUDA_PROCESS + continued.host_bytes)
    elif continued:
        host_bytes = max(host_bytes, memory.CPU_PROCESS + continued.bytes)
    return {
        "host_bytes": host_bytes * gpus,
        "seconds": seconds(job, samples, seqlen, continued, rates, gpus),
        "device": rates.name,
        "gpus": gpus,
        "device_bytes": device_bytes if device.type == "cuda" else 0,
        "activation_bytes": memory.activation_bytes(job, tokens, seqlen, device) * gpus,
        "place": activations.reported(place, device),
        "compiling": rates.compiling,
        "continuation": continued,
        "shortage": shortage,
    }


def _kept(
    job: Job,
    tokens: int,
    seqlen: int,
    device: torch.device,
    device_memory: float,
    host_memory: float,
    beside: int = 0,
    place: str = "auto",
) -> tuple[str, int, int]:
    """Where the activations of ``tokens`` are kept, and all bytes of the device and the host.

    ``beside`` bytes of the device are for other things than a block and the activations. A
    ``place`` other than ``auto`` is taken whether or not it has room.
    """
    if place == "auto":
        room = activations.device_room(job, tokens, seqlen, device, device_memory, beside)
        place = activations.choose(job, tokens, seqlen, device, room, host_memory)
    else:
        place = activations.given(place, device)
        room = inf if place == "device" else 0.0
    kept = memory.activation_bytes(job, tokens, seqlen, device) if place != "disk" else 0
    if device.type != "cuda":
        return place, 0, memory.host_bytes(job, tokens, seqlen, device, kept + beside)
    on_device = int(min(kept, room))
    held = memory.working_bytes(job, tokens, seqlen, device) + beside + on_device
    floats = job.rounding.compares * (kept // 2)
    if kept + floats <= room:  # the float model's inputs are stored while its outputs are made
        held += floats
    free = int(memory.DEVICE_SHARE * device_memory) - held
    held += min(max(0, free), memory.spare_bytes(job, tokens, seqlen, device))
    return place, held, memory.host_bytes(job, tokens, seqlen, device, kept - on_device)


def _continuation(
    job: Job,
    samples: int,
    seqlen: int,
    device: torch.device,
    device_memory: float,
    host_memory: float,
) -> tuple[memory.ContinuationMemory | None, str]:
    """The memory while the model continues the windows, and why it cannot, if it cannot."""
    if job.recipe.windows != CONTINUED:
        return None, ""
    need = memory.continuation_memory(job, samples, seqlen, device, device_memory)
    share = memory.DEVICE_SHARE if device.type == "cuda" else memory.HOST_SHARE
    free = share * device_memory, memory.HOST_SHARE * host_memory
    shortage = need.shortage(device, *free)
    return (None if shortage else need), shortage


def kinds(job: Job) -> list[PlannedBlocks]:
    """The blocks of ``job``, grouped by equal tensors and formats."""
    groups: dict[int, list[int]] = {}
    for block, first in enumerate(job.representatives):
        groups.setdefault(first, []).append(block)
    return [
        PlannedBlocks(
            blocks, [_linear(job, first, name, shape) for name, shape in job.linears(first).items()]
        )
        for first, blocks in groups.items()
    ]


def _linear(job: Job, block: int, name: str, shape: tuple[int, int]) -> PlannedLinear:
    full = job.full(block, name)
    found = job.format.of(full)
    if found is None:
        nbytes = prod(shape) * job.dtype.itemsize
        return PlannedLinear(name, dtype_name(job.dtype), None, "", shape, nbytes)
    nbytes = job.packed_bytes(full, *shape)
    return PlannedLinear(name, found.scheme, found.group_size, found.layout, shape, nbytes)


def plain_host_bytes(job: Job) -> int:
    """Peak host memory of a run without calibration.

    A streamed run holds one weight, its codes, its packed form and temporaries of a chunk; another
    run holds one block in float32, twice.
    """
    blocks = [[n * k for n, k in job.linears(block).values()] for block in job.distinct_blocks]
    if job.is_plain:
        return (
            memory.CPU_PROCESS
            + max(map(max, blocks)) * (job.source_dtype.itemsize + 2)
            + (200 << 20)
        )
    return memory.CPU_PROCESS + 2 * 4 * max(map(sum, blocks))
