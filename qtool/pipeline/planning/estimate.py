"""Estimates the seconds of a calibrated run from its work and measured rates.

The rates are measured by ``qtool bench quantize`` (docs/results/quantize.md has the tables) and
hold for blocks of at least a few thousand channels. Smaller blocks are bound by kernel launches,
which are not counted. Several GPUs share the work as benchmarks/journal/many-gpus.md describes.
"""

from dataclasses import dataclass

from qtool.calibration.cost import Work
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import ContinuationMemory
from qtool.pipeline.planning.work import work_of

#: share of the rounding's time that every rank spends on repeated work or waits: the Cholesky
#: factors and the exchange of terms (benchmarks/journal/many-gpus.md: 224 ms a block on one rank,
#: 164 on two)
REPEATED_ROUNDING = 0.46
#: fields of the work that several GPUs share
SHARED = (
    "forward_flops",
    "hessian_flops",
    "learning_flops",
    "search_flops",
    "search_weights",
    "search_tries",
    "packed_weights",
)


@dataclass(frozen=True)
class Rates:
    """Measured rates of one device, per second.

    Attributes:
        memory: bytes of the device's memory; 0 if it is the host's.
        seconds_a_token: seconds of a block for the next token of windows that the model continues.
        cached_bytes: bytes a second of keys and values that such a block reads.
        start: seconds before the first block.
        compiling: additional seconds of the first run on a machine.

    The other attributes are rates of the fields of :class:`~qtool.calibration.cost.Work` with the
    same names.
    """

    name: str
    memory: float
    forward_flops: float
    hessian_flops: float
    learning_flops: float
    learning_weights: float
    search_flops: float
    search_weights: float
    search_tries: float
    rounding_flops: float
    rounding_weights: float
    rounding_panels: float
    packed_weights: float
    read_bytes: float
    write_bytes: float
    seconds_a_token: float
    cached_bytes: float
    start: float
    compiling: float

    def seconds(self, work: Work, gpus: int = 1) -> float:
        """Seconds of a run: those of its blocks, one after another, or of its files if longer."""

        def of(*kinds: str) -> float:
            return sum(getattr(work, kind) / getattr(self, kind) for kind in kinds)

        shared = of(*SHARED)
        rounding = of("rounding_flops", "rounding_weights", "rounding_panels", "learning_weights")
        blocks = shared / gpus + rounding * (REPEATED_ROUNDING + (1 - REPEATED_ROUNDING) / gpus)
        written = of("write_bytes") / gpus  # every rank reads all of the source
        return self.start + max(blocks, of("read_bytes"), written)


H200 = Rates(
    name="NVIDIA H200",
    memory=140e9,
    forward_flops=540e12,
    hessian_flops=650e12,
    learning_flops=650e12,
    learning_weights=21e9,
    search_flops=350e12,
    search_weights=73e9,
    search_tries=3000.0,
    rounding_flops=73e12,
    rounding_weights=900e9,
    rounding_panels=6200.0,
    packed_weights=25e9,
    read_bytes=1.5e9,
    write_bytes=0.45e9,
    seconds_a_token=0.21e-3,
    cached_bytes=3.6e12,
    start=4.5,
    compiling=8.0,
)

#: rates of two cores: twice the rates that one thread reached in its CPU time when it smoothed,
#: clipped, rounded by GPTQ and distilled a block of 1024 channels on 8 x 256 tokens in float32
CPU = Rates(
    name="two CPU cores",
    memory=0,
    forward_flops=120e9,
    hessian_flops=86e9,
    learning_flops=67e9,
    learning_weights=4.1e6,
    search_flops=120e9,
    search_weights=350e6,
    search_tries=1e4,
    rounding_flops=120e9,
    rounding_weights=90e6,
    rounding_panels=560.0,
    packed_weights=450e6,
    read_bytes=1.5e9,
    write_bytes=0.45e9,
    seconds_a_token=1e-3,
    cached_bytes=10e9,
    start=3.0,
    compiling=0.0,
)


def seconds(
    job: Job,
    samples: int,
    seqlen: int,
    continuation: ContinuationMemory | None = None,
    rates: Rates = H200,
    gpus: int = 1,
) -> float:
    """Seconds of quantizing by ``job`` on ``gpus`` devices of ``rates``.

    Args:
        continuation: memory of the continuation, if the model continues the windows; one device
            does so.
    """
    took = rates.seconds(work_of(job, samples, seqlen), gpus)
    if continuation:
        launched = job.blocks * rates.seconds_a_token
        computed = continuation.step_flops / rates.forward_flops
        cached = continuation.step_cache / rates.cached_bytes
        took += continuation.steps * (max(launched, computed) + cached)
        took += continuation.parameters * job.source_dtype.itemsize / rates.read_bytes
    return took
