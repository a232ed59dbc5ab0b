"""What a calibrated run holds in memory at most, from config.json and recipe: one block, its activations, its solver.

Counted, not measured: each line of a sum is what some code keeps alive at its worst moment. Whole numbers of bytes on
the device are those torch allocates; its cache may reserve a third more.

Legend: P parameters of a block, N x K a linear's weight (or several stacked), T tokens of a batch.
"""

from collections.abc import Sequence
from math import prod

import torch

from qtool.calibration.clip import Clip
from qtool.calibration.distill import Distill
from qtool.calibration.gptq import Gptq
from qtool.calibration.gptq_problem import TOGETHER, problem_bytes
from qtool.calibration.method import Rounding, Transform
from qtool.calibration.rtn import CHUNK_ELEMENTS
from qtool.models.parts import LinearGroup
from qtool.pipeline.job import Job
from qtool.pipeline.work import BlockWork

#: resident memory of the process with torch and transformers loaded, without and with CUDA
CPU_PROCESS, CUDA_PROCESS = 600_000_000, 2_000_000_000
#: tokens of a batch, and of a step of an optimizer
BATCH_TOKENS, STEP_TOKENS = 4096, 16384


def activation_bytes(job: Job, tokens: int, device: torch.device) -> int:
    """The hidden states of ``tokens`` between two blocks, and the float model's where the rounding looks at them."""
    paths = 1 + job.rounding.compares
    return paths * tokens * int(job.config["hidden_size"]) * compute_bytes(job, device)


def compute_bytes(job: Job, device: torch.device) -> int:
    """Of one number in a forward: the model's 16 bits on CUDA, float32 elsewhere."""
    return 2 if device.type == "cuda" and job.dtype.itemsize == 2 else 4


def working_bytes(job: Job, tokens: int, device: torch.device) -> int:
    """On ``device``, beside the activations: a block, the largest solver or search, a batch's own tensors.

    Learning has the float block's outputs for all ``tokens`` too, and what a step keeps for its gradients: inputs and
    outputs of all linears, the block's output three times in float32.
    """
    worst = max(_working_bytes(job, block, device) for block in job.first_of_kinds())
    if not isinstance(job.rounding, Distill):
        return worst
    hidden, size = int(job.config["hidden_size"]), compute_bytes(job, device)
    blocks = (BlockWork(job, block, 1, STEP_TOKENS) for block in job.first_of_kinds())
    seen = max(sum(sum(shape) * work.share(name) for name, shape in work.shapes.items()) for work in blocks)
    return worst + tokens * hidden * size + int(STEP_TOKENS * (size * seen + 12 * hidden))


def _working_bytes(job: Job, block: int, device: torch.device) -> int:
    """16-bit weights, a batch's tensors and a packed block that waits to be written; then what a method holds."""
    shapes = job.linears(block)
    parameters = sum(map(prod, job.block_shapes(block).values()))
    computing = compute_bytes(job, device) % 4  # 0: the exact weights themselves compute
    batch = BATCH_TOKENS * 3 * max(sum(shape) for shape in shapes.values()) * compute_bytes(job, device)
    methods: list[Transform | Rounding] = [*job.transforms, job.rounding]
    held = max(_method_bytes(job, block, method) for method in methods)
    return parameters * computing + batch + job.block_bytes(block) + held


def _method_bytes(job: Job, block: int, method: Transform | Rounding) -> int:
    """Exact weights, float32, and what ``method`` allocates beside them."""
    shapes = {n: s for n, s in job.linears(block).items() if job.format.of(job.full(block, n))}
    exact, largest = 4 * sum(map(prod, shapes.values())), max(map(prod, shapes.values()), default=0)
    if isinstance(method, Distill):  # a copy that learns, its gradient and Adam's two moments; codes and values
        start = _method_bytes(job, block, Gptq()) if method.start == "gptq" else 0
        return max(start, 6 * exact)
    if isinstance(method, Gptq):
        return _gptq_bytes(job.block_family(block).groups, shapes, method)
    if isinstance(method, Clip):
        return exact + 5 * 4 * largest
    return exact + 4 * 4 * (largest if method.needs_data else min(largest, CHUNK_ELEMENTS[1]))


def _gptq_bytes(groups: Sequence[LinearGroup], shapes: dict[str, tuple[int, int]], method: Gptq) -> int:
    """The worst group: weights not rounded yet, codes of the others, and the larger half of its own solution.

    First Hessian, damped one and factor; then Hessian and feedback beside the stacked weight, its target, errors and
    codes. Experts have all their Hessians at once, and several are solved together.
    """
    left, total = sum(map(prod, shapes.values())), sum(map(prod, shapes.values()))
    routed = sum(4 * shapes[g.linears[0]][1] ** 2 for g in groups if g.routed and g.linears[0] in shapes)
    worst, drift = 0, bool(method.residual)
    for group in groups:
        rows = [shapes[name] for name in group.linears if name in shapes]
        if rows:
            n, k = sum(shape[0] for shape in rows), rows[0][1]
            factoring, sweeping = (3 + drift) * 4 * k * k, (2 + drift + bool(method.rounds)) * 4 * k * k + 20 * n * k
            solving = int(max(factoring, sweeping)) + (_together(groups, shapes, group, n, k) - 1) * problem_bytes(n, k)
            worst = max(worst, 4 * left + (total - left) + solving)
            left -= n * k
    return worst + routed + (2 * total if drift else 0)


def _together(
    groups: Sequence[LinearGroup], shapes: dict[str, tuple[int, int]], group: LinearGroup, n: int, k: int
) -> int:
    """Experts of a shape ``[n, k]`` that GPTQ solves at once."""
    if not group.routed:
        return 1
    alike = sum(g.fold == group.fold for g in groups if g.routed and g.linears[0] in shapes)
    return min(alike, max(1, TOGETHER // problem_bytes(n, k)))


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
    block = largest * job.dtype.itemsize
    if device.type == "cuda":  # pinned memory of a block is used again once that is on the GPU: one to two of them
        return CUDA_PROCESS + kept_on_host + 3 * block // 2 + packed
    return CPU_PROCESS + kept_on_host + max(4 * embedded, 2 * block + working_bytes(job, tokens, device))
