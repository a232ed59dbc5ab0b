"""Counts the operations and bytes of a calibrated run, from config.json and recipe alone.

:mod:`qtool.pipeline.planning.estimate` turns them into seconds, and ``bench quantize`` into the
least time that a device allows.
"""

from collections import Counter
from math import inf, prod

from qtool.calibration.cost import GRADIENTS, BlockShape, Work
from qtool.calibration.method import LEARNING_SEQUENCES, Method
from qtool.errors import QtoolError
from qtool.models.auto import running
from qtool.pipeline.job import Job
from qtool.plugins import is_of, require_returned
from qtool.runtime.packed_kv import kv_tensors


def block_shape(job: Job, block: int, samples: int, seqlen: int, itemsize: int = 2) -> BlockShape:
    """The shape of block ``block`` of ``job``, as its methods count their work."""
    linears, formats = job.linears(block), job.formats(block)
    return BlockShape(
        family=job.block_family(block),
        config=job.namespace,
        linears=linears,
        quantized={name: linears[name] for name in formats},
        schemes={name: own.scheme_object for name, own in formats.items()},
        samples=samples,
        seqlen=seqlen,
        itemsize=itemsize,
        differentiated=job.weighs_outputs,
    )


def block_work(job: Job, block: int, samples: int, seqlen: int) -> Work:
    """The work of a block, including the forward that makes the next block's inputs."""
    shape = block_shape(job, block, samples, seqlen)
    work = Work(
        read_bytes=sum(map(prod, job.block_shapes(block).values())) * job.source_dtype.itemsize,
        write_bytes=job.block_bytes(block),
        # plus the float model's forward if the rounding compares with it
        forward_flops=(1 + job.rounding.compares) * shape.forward_flops(),
        packed_weights=2 * shape.weights,
    )
    if job.needs_data and kv_tensors(job.format.kv, shape.family, shape.config):
        work += Work(forward_flops=shape.forward_flops())  # a forward that observes the keys
    if job.balances_experts and job.needs_data:  # a forward that observes the routers
        routed = (g.linears for g in shape.family.groups if g.routed)
        work += Work(forward_flops=shape.forward_flops() - sum(map(shape.linear_flops, routed)))
    if job.weighs_outputs:  # a forward pass, and one with gradients
        few = min(1.0, LEARNING_SEQUENCES / samples) * shape.forward_flops()
        work += Work(read_bytes=2 * work.read_bytes, forward_flops=(1 + GRADIENTS) * few)
    for method in job.methods:
        work += _work(method, shape)
    return work


def _work(method: Method, shape: BlockShape) -> Work:
    """The work of ``method`` on a block of ``shape``.

    Raises:
        QtoolError: it is no :class:`Work`, or an amount in it no finite number of at least 0.
    """
    with running(fails=f"{method.name}: work fails"):
        work = method.work(shape)
    require_returned(method, "work", work, Work)
    for name, amount in vars(work).items():
        if not is_of(amount, float) or not 0 <= amount < inf:
            raise QtoolError(
                f"{method.name}: work gives {amount!r} as {name}; a finite number of at least 0 is"
                " expected"
            )
    return work


def work_of(job: Job, samples: int, seqlen: int) -> Work:
    """The work of the whole run: all blocks, and reading and writing of embedding and head.

    The outputs of the last block are not computed.
    """
    total = Work()
    for block, times in Counter(job.representatives).items():
        total += block_work(job, block, samples, seqlen) * times
    last = block_shape(job, job.blocks - 1, samples, seqlen)
    nbytes = job.source_dtype.itemsize * sum(
        prod(shape) for shapes in job.embedding_and_head() for shape in shapes.values()
    )
    spared = Work(forward_flops=-last.forward_flops(), packed_weights=-last.weights)
    outside = Work(read_bytes=2 * nbytes if job.needs_data else nbytes, write_bytes=nbytes)
    return total + spared + outside
