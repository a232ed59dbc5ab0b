"""Computes the peak memory of a calibrated run from config.json and recipe.

It is that of one block, its activations and its solver. Counted, not measured: each line of a sum
is what some code keeps alive at its worst moment. Bytes on the device are those torch allocates;
its cache may reserve a third more.
"""

from dataclasses import dataclass
from math import prod

import torch

from qtool.models.parts import Heads
from qtool.pipeline.job import Job
from qtool.pipeline.planning.work import block_shape

#: resident memory of the process with torch and transformers loaded, without and with CUDA
CPU_PROCESS, CUDA_PROCESS = 600_000_000, 2_000_000_000
#: tokens of a batch
BATCH_TOKENS = 4096
#: tokens of the pieces, at least, in which the model continues longer windows, each by itself:
#: four pieces take a quarter of a window's steps, over a quarter of its keys and values
PIECE_TOKENS = 512
#: of a piece that a text gives where the model continues it
GIVEN_SHARE = 1 / 8
#: of a device's memory for keys and values while the model continues pieces: what takes more is
#: written in parts
CACHE_SHARE = 0.3


def activation_bytes(job: Job, tokens: int, window: int, device: torch.device) -> int:
    """Bytes of what enters a block for ``tokens`` in windows of ``window``, at most.

    Where the rounding compares with the float model, the float model's too. An indexer is taken to
    choose all tokens of a window.
    """
    paths, family = 1 + job.rounding.compares, job.family
    numbers = int(job.namespace.hidden_size) + family.beside_hidden
    each = numbers * compute_bytes(job, device) + window * family.index_bytes
    return paths * tokens * each


def compute_bytes(job: Job, device: torch.device) -> int:
    """Bytes of one number in a forward: the model's 16 bits on CUDA, float32 elsewhere."""
    return 2 if device.type == "cuda" and job.dtype.itemsize == 2 else 4


def working_bytes(job: Job, tokens: int, device: torch.device) -> int:
    """Bytes on ``device`` beside the activations: a block, and what its methods hold at most."""
    return max(_working_bytes(job, block, tokens, device) for block in job.distinct_blocks)


def _working_bytes(job: Job, block: int, tokens: int, device: torch.device) -> int:
    """Bytes of block ``block``: weights, tensors of a batch and of a method, a packed block."""
    itemsize = compute_bytes(job, device)
    shape = block_shape(job, block, 1, tokens, itemsize)
    parameters = sum(map(prod, job.block_shapes(block).values()))
    computing = itemsize % 4  # 0: the exact weights themselves compute
    # of all tokens, or of all pairs of a token and an expert
    widest = max(map(sum, shape.linears.values()))
    experts = [name for name in shape.linears if shape.family.group_of(name).routed]
    paired = sum(shape.share(name) * sum(shape.linears[name]) for name in experts)
    batch = int(BATCH_TOKENS * 3 * max(widest, paired)) * itemsize
    held = max(method.held_bytes(shape) for method in job.methods)
    return parameters * computing + batch + job.block_bytes(block) + held


def host_bytes(job: Job, device: torch.device, tokens: int, kept_on_host: int) -> int:
    """The process's peak in bytes: blocks read and written, or at first the embedding's rows.

    Args:
        kept_on_host: bytes of activations kept in host memory.
    """
    blocks = job.distinct_blocks
    largest = max(sum(map(prod, job.block_shapes(block).values())) for block in blocks)
    packed = max(map(job.block_bytes, blocks))
    dims = job.family.dimensions(job.namespace)
    embedded = min(tokens, dims["vocab"]) * dims["hidden"] * job.source_dtype.itemsize
    block = largest * job.source_dtype.itemsize
    if device.type == "cuda":
        # pinned memory of a block is used again once that is on the GPU: one to two of them
        return CUDA_PROCESS + kept_on_host + 3 * block // 2 + packed
    return (
        CPU_PROCESS
        + kept_on_host
        + max(4 * embedded, 2 * block + working_bytes(job, tokens, device))
    )


@dataclass(frozen=True)
class ContinuationMemory:
    """Memory that a device holds while the model continues the calibration windows.

    Attributes:
        pieces: of all windows, each of ``length`` tokens, of which the text gives ``given``.
        at_once: pieces that are continued side by side.
        parameters: of the model. weights, cache: bytes.
    """

    pieces: int
    length: int
    given: int
    at_once: int
    parameters: int
    weights: int
    cache: int

    @property
    def bytes(self) -> int:
        return self.weights + self.cache

    def fits(self, device_memory: float, host_memory: float) -> bool:
        """Whether there is room on the device, and on the host, which the weights pass through."""
        return self.bytes <= device_memory and self.weights <= host_memory


def continuation_memory(
    job: Job, samples: int, seqlen: int, device: torch.device, memory: float
) -> ContinuationMemory:
    """The memory of continuing ``samples`` windows on a device of ``memory`` bytes.

    Counted are the float model and, for each piece, its keys and values, what a block makes of its
    beginning and a token's logits. The number of pieces at once depends on the whole memory, not
    on what is free, so that it, and with it every token, is the same each time.
    """
    itemsize, heads = compute_bytes(job, device), Heads.of(job.namespace)
    counts = range(max(1, seqlen // PIECE_TOKENS), 0, -1)
    pieces = samples * next(count for count in counts if seqlen % count == 0)
    length = samples * seqlen // pieces
    given = max(1, int(length * GIVEN_SHARE))
    widest = max(
        sum(shape) for block in job.distinct_blocks for shape in job.linears(block).values()
    )
    cached = 2 * job.blocks * heads.kv * heads.dim * length * itemsize
    piece = cached + 3 * given * widest * itemsize + 3 * 4 * int(job.namespace.vocab_size)
    at_once = min(pieces, 1 << max(0, int(CACHE_SHARE * memory // piece).bit_length() - 1))
    parameters = sum(map(prod, job.source_shapes().values()))
    return ContinuationMemory(
        pieces, length, given, at_once, parameters, itemsize * parameters, at_once * piece
    )
