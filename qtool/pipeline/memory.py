"""What a calibrated run holds in memory at most, from config.json and recipe: one block, its activations, its solver.

Counted, not measured: each line of a sum is what some code keeps alive at its worst moment. Whole numbers of bytes on
the device are those torch allocates; its cache may reserve a third more.

Legend: P parameters of a block, N x K a linear's weight (or several stacked), T tokens of a batch.
"""

from math import prod

import torch

from qtool.calibration.clip import Clip
from qtool.calibration.distill import Distill
from qtool.calibration.gptq import Gptq
from qtool.calibration.method import Rounding, Transform
from qtool.calibration.rtn import CHUNK_ELEMENTS
from qtool.models.parts import LinearGroup
from qtool.pipeline.job import Job
from qtool.pipeline.write_behind import AHEAD

#: resident memory of the process with torch and transformers loaded, without and with CUDA
CPU_PROCESS, CUDA_PROCESS = 600_000_000, 1_300_000_000
#: tokens of a batch
BATCH_TOKENS = 4096


def activation_bytes(job: Job, tokens: int, device: torch.device) -> int:
    """The hidden states of ``tokens`` between two blocks, and the float model's where the rounding looks at them."""
    paths = 1 + job.rounding.compares
    return paths * tokens * int(job.config["hidden_size"]) * compute_bytes(job, device)


def compute_bytes(job: Job, device: torch.device) -> int:
    """Of one number in a forward: the model's 16 bits on CUDA, float32 elsewhere."""
    return 2 if device.type == "cuda" and job.dtype.itemsize == 2 else 4


def working_bytes(job: Job, device: torch.device) -> int:
    """On ``device``, beside the activations: a block, the largest solver or search, a batch's own tensors."""
    return max(_working_bytes(job, block, device) for block in job.first_of_kinds())


def _working_bytes(job: Job, block: int, device: torch.device) -> int:
    shapes = job.linears(block)
    parameters = sum(map(prod, job.block_shapes(block).values()))
    weights = parameters * (4 + compute_bytes(job, device) % 4)  # exact ones, and 16-bit copies where those compute
    packed = job.block_bytes(block)
    widest = max(sum(shape) for shape in shapes.values())
    batch = BATCH_TOKENS * 3 * widest * compute_bytes(job, device)
    methods: list[Transform | Rounding] = [*job.transforms, job.rounding]
    return weights + packed * (AHEAD + 1) + batch + max(_method_bytes(job, block, method) for method in methods)


def _method_bytes(job: Job, block: int, method: Transform | Rounding) -> int:
    """What ``method`` allocates beside the block."""
    shapes = {n: s for n, s in job.linears(block).items() if job.format.of(job.full(block, n))}
    largest = max(map(prod, shapes.values()), default=0)
    if isinstance(method, Distill):  # a copy, Adam's two moments and the gradient of each weight, float32
        start = _method_bytes(job, block, Gptq()) if method.start == "gptq" else 0
        return max(start, 5 * 4 * sum(map(prod, shapes.values())))
    if isinstance(method, Gptq):
        copy = 2 * sum(map(prod, shapes.values())) if method.residual else 0
        groups = job.block_family(block).groups
        routed = sum(4 * shapes[g.linears[0]][1] ** 2 for g in groups if g.routed and g.linears[0] in shapes)
        return copy + routed + max((_solver_bytes(g, shapes, method) for g in groups), default=0)
    if isinstance(method, Clip):
        return 5 * 4 * largest
    return 4 * 4 * (largest if method.needs_data else min(largest, CHUNK_ELEMENTS[1]))


def _solver_bytes(group: LinearGroup, shapes: dict[str, tuple[int, int]], method: Gptq) -> int:
    """Hessian, its factor and feedback; the stacked weight, its target, errors and codes."""
    rows = [shapes[name] for name in group.linears if name in shapes]
    if not rows:
        return 0
    n, k = sum(shape[0] for shape in rows), rows[0][1]
    return (4 + bool(method.residual)) * 4 * k * k + 5 * 4 * n * k


def host_bytes(job: Job, device: torch.device, tokens: int, kept_on_host: int) -> int:
    """The process's peak: blocks on their way in and out, or the rows of the embedding at the start.

    Args:
        kept_on_host: bytes of activations kept in host memory.
    """
    blocks = job.first_of_kinds()
    largest = max(sum(map(prod, job.block_shapes(block).values())) for block in blocks)
    packed = max(map(job.block_bytes, blocks))
    dims = job.family.dimensions(job.namespace)
    embedded = min(tokens, dims["vocab"]) * dims["hidden"] * job.dtype.itemsize
    passing = 2 * largest * job.dtype.itemsize
    if device.type == "cuda":
        return CUDA_PROCESS + kept_on_host + max(2 * embedded, passing + packed)
    return CPU_PROCESS + kept_on_host + max(4 * embedded, passing + working_bytes(job, device))
