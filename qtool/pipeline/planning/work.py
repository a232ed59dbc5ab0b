"""How much a calibrated run has to do, stage by stage, from config.json and recipe alone.

Counts, no times: :mod:`qtool.pipeline.planning.estimate` turns them into seconds, ``bench
quantize`` into floors. A stage is what :class:`qtool.calibration.timing.Stages` records under the
same name.
"""

from collections import Counter
from math import prod

from qtool.calibration.cost import BlockShape, Work
from qtool.pipeline.job import Job


def block_shape(job: Job, block: int, samples: int, seqlen: int, itemsize: int = 2) -> BlockShape:
    """Block ``block`` of ``job``, calibrated on ``samples`` sequences, as its methods count it."""
    linears = job.linears(block)
    quantized = {
        name: shape for name, shape in linears.items() if job.format.of(job.full(block, name))
    }
    return BlockShape(
        job.block_family(block), job.namespace, linears, quantized, samples, seqlen, itemsize
    )


def block_work(job: Job, block: int, samples: int, seqlen: int) -> Work:
    """Everything a block takes, the forward that makes the next block's inputs included."""
    shape = block_shape(job, block, samples, seqlen)
    work = Work(
        read_bytes=sum(map(prod, job.block_shapes(block).values())) * job.dtype.itemsize,
        write_bytes=job.block_bytes(block),
        forward_flops=(1 + job.rounding.compares) * shape.forward(),  # the float model's beside
        packed_weights=2 * shape.weights,
    )
    for method in job.methods:
        work += method.work(shape)
    return work


def work_of(job: Job, samples: int, seqlen: int) -> Work:
    """The whole run: all blocks (the last one's outputs are not needed) and the ends, which are
    read and written.
    """
    total = Work()
    for block, times in Counter(job.kinds).items():
        total += block_work(job, block, samples, seqlen) * times
    last = block_shape(job, job.blocks - 1, samples, seqlen)
    ends = (
        sum(prod(shape) for end in job.embedding_and_head() for shape in end.values())
        * job.dtype.itemsize
    )
    spared = Work(forward_flops=-last.forward(), packed_weights=-last.weights)
    return total + spared + Work(read_bytes=2 * ends if job.needs_data else ends, write_bytes=ends)
