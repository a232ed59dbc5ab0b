"""Seconds of a calibrated run: its work by the rates that runs on that device reached.

The rates are measured by ``qtool bench quantize`` (docs/scale.md has the tables) and hold for
blocks of at least a few thousand channels; smaller ones are bound by launches, which nothing here
counts. Of several GPUs each takes its share of what docs/distributed.md says is split.
"""

from dataclasses import dataclass

from qtool.calibration.cost import Work
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import Writing
from qtool.pipeline.planning.work import work_of

#: of the rounding's time, what every rank repeats or waits for: the Cholesky factors and the
#: exchange of terms (docs/distributed.md: 224 ms a block on one rank, 164 on two)
REPEATED_ROUNDING = 0.46


@dataclass(frozen=True)
class Rates:
    """What runs reached on one device, a second.

    Attributes:
        memory: bytes of the device; 0 where it is the host's.
        forward, hessian, learning, search, rounding: operations. tried: weights rounded by a
            candidate of a search.
        tries: linears by a candidate. looked: weights by the rounding's own search. steps: blocks
            of columns.
        packed: weights packed or unpacked. read, write: bytes, beside the blocks.
        token: seconds that a block takes for the next token of windows that the model continues.
            cached: bytes of keys and values that it looks at then.
        start: seconds before the first block. compiling: what the first run on a machine takes
            longer.
    """

    name: str
    memory: float
    forward: float
    hessian: float
    learning: float
    search: float
    tried: float
    tries: float
    rounding: float
    looked: float
    steps: float
    packed: float
    read: float
    write: float
    token: float
    cached: float
    start: float
    compiling: float

    def seconds(self, work: Work, gpus: int = 1) -> float:
        """Of a run: its blocks one after another, or its files if those take longer."""
        shared = (
            work.forward_flops / self.forward
            + work.hessian_flops / self.hessian
            + work.learning_flops / self.learning
            + work.search_flops / self.search
            + work.search_weights / self.tried
            + work.search_tries / self.tries
            + work.packed_weights / self.packed
        )
        rounding = (
            work.rounding_flops / self.rounding
            + work.rounding_weights / self.looked
            + work.rounding_panels / self.steps
        )
        blocks = shared / gpus + rounding * (REPEATED_ROUNDING + (1 - REPEATED_ROUNDING) / gpus)
        written = work.write_bytes / self.write / gpus  # every rank reads all of the source
        return self.start + max(blocks, work.read_bytes / self.read, written)


H200 = Rates(
    name="NVIDIA H200",
    memory=140e9,
    forward=540e12,
    hessian=650e12,
    learning=490e12,
    search=350e12,
    tried=73e9,
    tries=4600.0,
    rounding=73e12,
    looked=900e9,
    steps=1770.0,
    packed=25e9,
    read=1.5e9,
    write=0.45e9,
    token=0.7e-3,
    cached=390e9,
    start=2.8,
    compiling=4.0,
)

#: of two cores: those that one thread reached in its CPU time, doubled. It smoothed, clipped,
#: rounded by GPTQ and distilled one block of 1024 channels on 8 x 256 tokens in float32
CPU = Rates(
    name="two CPU cores",
    memory=0,
    forward=120e9,
    hessian=86e9,
    learning=67e9,
    search=120e9,
    tried=350e6,
    tries=1e4,
    rounding=120e9,
    looked=90e6,
    steps=140.0,
    packed=450e6,
    read=1.5e9,
    write=0.45e9,
    token=1e-3,
    cached=10e9,
    start=3.0,
    compiling=0.0,
)


def seconds(
    job: Job,
    samples: int,
    seqlen: int,
    writing: Writing | None = None,
    rates: Rates = H200,
    gpus: int = 1,
) -> float:
    """Of quantizing by ``job`` on ``gpus`` devices of ``rates``.

    Args:
        writing: of the windows, where the model continues them, which one device does.
    """
    took = rates.seconds(work_of(job, samples, seqlen), gpus)
    if writing:
        cache = writing.cache * (writing.given + seqlen) / (2 * seqlen)  # it grows
        tokens = -(-samples // writing.at_once) * (seqlen - writing.given)
        computed = 2 * writing.parameters * samples * (seqlen - writing.given) / rates.forward
        took += max(tokens * (job.blocks * rates.token + cache / rates.cached), computed)
    return took
