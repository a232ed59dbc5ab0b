"""How many operations and bytes a calibrated run takes, from config.json and recipe alone.

:mod:`qtool.pipeline.planning.estimate` turns them into seconds, ``bench quantize`` into the least
time a device allows.
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
        read_bytes=sum(map(prod, job.block_shapes(block).values())) * job.source_dtype.itemsize,
        write_bytes=job.block_bytes(block),
        forward_flops=(1 + job.rounding.compares) * shape.forward(),  # the float model's beside
        packed_weights=2 * shape.weights,
    )
    for method in job.methods:
        work += method.work(shape)
    return work


def work_of(job: Job, samples: int, seqlen: int) -> Work:
    """The whole run: all blocks, and embedding and head, which are read and written.

    The outputs of the last block are not needed.
    """
    total = Work()
    for block, times in Counter(job.representatives).items():
        total += block_work(job, block, samples, seqlen) * times
    last = block_shape(job, job.blocks - 1, samples, seqlen)
    edges = job.source_dtype.itemsize * sum(
        prod(shape) for shapes in job.embedding_and_head() for shape in shapes.values()
    )
    spared = Work(forward_flops=-last.forward(), packed_weights=-last.weights)
    return (
        total + spared + Work(read_bytes=2 * edges if job.needs_data else edges, write_bytes=edges)
    )
