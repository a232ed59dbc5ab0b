"""Seconds of a calibrated run on a known GPU: its work by the rates that runs on that GPU reached.

The rates are measured by ``qtool bench quantize`` (docs/scale.md has the tables) and hold for
blocks of at least a few thousand channels; smaller ones are bound by launches, which nothing here
counts.
"""

from dataclasses import dataclass

from qtool.calibration.cost import Work
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import Writing
from qtool.pipeline.planning.work import work_of


@dataclass(frozen=True)
class Rates:
    """What runs reached on one device, a second.

    Attributes:
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

    def seconds(self, work: Work) -> float:
        """Of a run: its blocks one after another, or its files if those take longer."""
        blocks = (
            work.forward_flops / self.forward
            + work.hessian_flops / self.hessian
            + work.learning_flops / self.learning
            + work.search_flops / self.search
            + work.search_weights / self.tried
            + work.search_tries / self.tries
            + work.rounding_flops / self.rounding
            + work.rounding_weights / self.looked
            + work.rounding_steps / self.steps
            + work.packed_weights / self.packed
        )
        return self.start + max(blocks, work.read_bytes / self.read, work.write_bytes / self.write)


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


def seconds(
    job: Job, samples: int, seqlen: int, writing: Writing | None = None, rates: Rates = H200
) -> float:
    """Of quantizing by ``job`` on the GPU of ``rates``; ``writing``: of the windows, where the
    model continues them.
    """
    took = rates.seconds(work_of(job, samples, seqlen))
    if writing:
        cache = writing.cache * (writing.given + seqlen) / (2 * seqlen)  # it grows
        tokens = -(-samples // writing.at_once) * (seqlen - writing.given)
        took += tokens * (job.blocks * rates.token + cache / rates.cached)
    return took
