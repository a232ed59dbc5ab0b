"""Computes the peak memory of a calibrated run from config.json and recipe.

The peak is that of one block, its activations and its solver. It is counted, not measured: each
term of a sum is the memory that some code holds at its worst moment. Bytes on the device are the
bytes that torch allocates; its cache may reserve a third more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from qtool import recipes
from qtool.calibration.cost import BlockShape
from qtool.calibration.method import LEARNING_SEQUENCES, Method
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.errors import QtoolError, require_count
from qtool.io.finite import PIECE_BYTES
from qtool.models.auto import running
from qtool.models.parts import Heads
from qtool.pipeline.job import Job
from qtool.pipeline.planning.work import block_shape
from qtool.plugins import require_returned
from qtool.units import bytes_text

#: resident memory of the process with torch and transformers loaded, without and with CUDA
CPU_PROCESS, CUDA_PROCESS = 600_000_000, 2_000_000_000
#: share of the free memory that a run may use, on the device and on the host, which others use too
DEVICE_SHARE, HOST_SHARE = 0.9, 0.5
#: float32 pieces of embedding or head that their writer holds: the rows and their 16-bit forms; if
#: transforms rewrite them, the rows before, between and after, and in float64 before and after
WRITTEN_PIECES, REWRITTEN_PIECES = 2, 7
#: tokens of a batch; a longer window is a batch by itself
BATCH_TOKENS = 4096
#: bytes in 16 bits that a linear may read at once on a GPU, where larger batches are faster
WIDEST_INPUT = 1 << 29
#: a window is continued in equal pieces of about a quarter of its tokens, and of at least so many
#: and about so many at most: four pieces take a quarter of the steps of the whole window, over a
#: quarter of its keys and values
PIECE_TOKENS = 128, 256
#: share of a piece that is taken from a text if the model continues it
GIVEN_SHARE = 1 / 8
#: share of a run's memory for keys, values and working memory while the model continues pieces; if
#: they need more, the pieces are continued in several batches
CACHE_SHARE = 0.6
#: share of a GPU's memory for the weights of the model that continues pieces; a larger model is
#: rounded to ROUNDED_SCHEME
WEIGHTS_SHARE = 0.7
#: the scheme of such a rounded model: its 16-bit activations hold any outliers, and its kernels run
#: on every GPU
ROUNDED_SCHEME = "w4a16"


def activation_bytes(job: Job, tokens: int, window: int, device: torch.device) -> int:
    """Most bytes of a block's inputs for ``tokens`` in windows of ``window``.

    They include the float model's inputs if the rounding compares with it. An indexer is assumed to
    choose all tokens of a window.
    """
    paths, family = 1 + job.rounding.compares, job.family
    numbers = int(job.namespace.hidden_size) + family.beside_hidden
    each = numbers * compute_bytes(job, device) + window * family.index_bytes
    return paths * tokens * each


def compute_dtype(job: Job, device: torch.device) -> torch.dtype:
    """The dtype of forwards: the model's own on CUDA, float32 on a CPU."""
    return job.dtype if device.type == "cuda" else torch.float32


def compute_bytes(job: Job, device: torch.device) -> int:
    """Bytes of one number in a forward."""
    return compute_dtype(job, device).itemsize


def working_bytes(job: Job, tokens: int, window: int, device: torch.device) -> int:
    """Bytes on ``device`` without the activations: a block, and the most that a method holds."""
    return _most_bytes(job, job.methods, "held_bytes", tokens, window, device)


def spare_bytes(job: Job, tokens: int, window: int, device: torch.device) -> int:
    """Bytes beyond :func:`working_bytes` that methods take where the device has room."""
    itemsize = compute_bytes(job, device)
    shapes = [
        block_shape(job, block, tokens // window, window, itemsize) for block in job.distinct_blocks
    ]
    return max(_counted(method, "spare_bytes", shape) for method in job.methods for shape in shapes)


def learning_bytes(job: Job, window: int, device: torch.device) -> int:
    """Bytes on ``device`` while transforms learn, when no activations are kept; 0 if none does."""
    learning = [method for method in job.transforms if method.learns]
    tokens = LEARNING_SEQUENCES * window
    return _most_bytes(job, learning, "learning_bytes", tokens, window, device) if learning else 0


def source_job(job: Job) -> Job:
    """``job`` without its methods: its blocks are those of the source."""
    return replace(job, transforms=[], rounding=RoundToNearest())


def gradient_bytes(job: Job, tokens: int) -> int:
    """Bytes that the gradients of the residual stream take for ``tokens``, all of it in float32.

    They are the gradients themselves, before and after a block, and three second moments. The
    blocks, and the inputs of all blocks, are not counted.
    """
    hidden = int(job.namespace.hidden_size)
    return 4 * (2 * tokens * hidden + 3 * hidden**2)


def _most_bytes(
    job: Job, methods: Sequence[Method], counts: str, tokens: int, window: int, device: torch.device
) -> int:
    """Bytes of the largest block: weights, tensors of a batch and of a method, a packed block.

    ``counts`` is the name of the function that counts what one of ``methods`` holds.
    """
    itemsize, found = compute_bytes(job, device), 0
    for block in job.distinct_blocks:
        shape = block_shape(job, block, tokens // window, window, itemsize)
        parameters = sum(map(prod, job.block_shapes(block).values()))
        computing = itemsize % 4  # 0 if forwards use the exact weights themselves
        # a few tensors for all tokens, or each once for all pairs of a token and an expert
        widest = max(map(sum, shape.linears.values()), default=0)
        experts = [name for name in shape.linears if shape.family.group_of(name).routed]
        paired = sum(shape.share(name) * sum(shape.linears[name]) for name in experts)
        sequences = batch_sequences(job, window, device, max(1, BATCH_TOKENS // window))
        at_once = min(tokens, sequences * window)
        batch = int(at_once * max(3 * widest, paired)) * itemsize
        held = max(_counted(method, counts, shape) for method in methods)
        found = max(found, parameters * computing + batch + job.block_bytes(block) + held)
    return found


def _counted(method: Method, counts: str, shape: BlockShape) -> int:
    """The bytes of a block of ``shape`` that the function ``counts`` of ``method`` counts.

    Raises:
        QtoolError: it counts less than 0, or no whole number.
    """
    with running(fails=f"{method.name}: {counts} fails"):
        found = getattr(method, counts)(shape)
    require_returned(method, counts, found, int)
    require_count(f"{method.name}: {counts}", found, least=0)
    return found


def batch_sequences(job: Job, window: int, device: torch.device, given: int) -> int:
    """Calibration windows in a batch: ``given`` on a CPU, as many as fit on a GPU.

    A batch has whole iterations of an optimizer.
    """
    iteration = job.rounding.iteration
    if device.type == "cuda":
        widest = max(k for block in job.distinct_blocks for _, k in job.linears(block).values())
        given = max(1, WIDEST_INPUT // (2 * widest * window))
        given = 1 << (given.bit_length() - 1)
    return -(-given // iteration) * iteration


def host_bytes(job: Job, tokens: int, window: int, device: torch.device, kept_on_host: int) -> int:
    """The process's peak in bytes: what is read and written at a time, or the embedding's rows.

    Args:
        kept_on_host: bytes of activations kept in host memory.
    """
    blocks = job.distinct_blocks
    largest = max(sum(map(prod, job.block_shapes(block).values())) for block in blocks)
    packed = max(map(job.block_bytes, blocks))
    dims = job.family.dimensions(job.namespace)
    embedded = min(tokens, dims["vocab"]) * dims["hidden"] * job.source_dtype.itemsize
    rewritten = any(transform.rewrites_embedding for transform in job.transforms)
    pieces = REWRITTEN_PIECES if rewritten else WRITTEN_PIECES
    written = pieces * min(PIECE_BYTES, 4 * dims["vocab"] * dims["hidden"])  # beside the blocks
    block = largest * job.source_dtype.itemsize
    if device.type == "cuda":
        # pinned memory is reused once its block is on the GPU: it holds one to two blocks
        return CUDA_PROCESS + kept_on_host + 3 * block // 2 + packed
    return CPU_PROCESS + max(
        kept_on_host + 4 * embedded,
        kept_on_host + 2 * block + working_bytes(job, tokens, window, device) + written,
        2 * block + learning_bytes(job, window, device),
    )


@dataclass(frozen=True, kw_only=True)
class ContinuationMemory:
    """Memory that a device holds while the model continues the calibration windows.

    Attributes:
        pieces: pieces of all windows, each of ``length`` tokens; the first ``given`` are a text's.
        batch_size: number of pieces that are continued at once.
        parameters: number of the model's parameters.
        weights: bytes of the model's weights.
        cache: bytes of keys and values of a batch.
        working: bytes of everything else.
        rounded: the model's weights are rounded to :data:`ROUNDED_SCHEME`.
    """

    pieces: int
    length: int
    given: int
    batch_size: int
    parameters: int
    weights: int
    cache: int
    working: int
    rounded: bool

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.working

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory through which weights reach a GPU.

        Rounded ones are in pinned memory, which torch allocates in powers of two.
        """
        return self.weights * 3 // 2 if self.rounded else self.weights

    @property
    def how(self) -> str:
        """The words that follow "the model" in a sentence."""
        return f", rounded to {ROUNDED_SCHEME}" if self.rounded else ""

    @property
    def steps(self) -> int:
        """Number of forwards, each of which adds a token to all pieces of a batch."""
        return -(-self.pieces // self.batch_size) * (self.length - self.given)

    @property
    def step_flops(self) -> float:
        return 2.0 * self.parameters * self.batch_size

    @property
    def step_cache(self) -> float:
        """Mean bytes of keys and values that a step reads from the growing cache."""
        return self.cache * (self.given + self.length) / (2 * self.length)

    def shortage(self, device: torch.device, device_memory: float, host_memory: float) -> str:
        """A text on which memory is too small and for how many bytes; empty if both have room.

        The weights of a model on a GPU pass through host memory.
        """
        where = "host" if device.type == "cpu" else device.type
        needs = (
            (self.bytes, " with its cache", device_memory, where),
            (self.host_bytes, "", host_memory, "host"),
        )
        for needed, what, free, kind in needs:
            if needed > free:
                return (
                    f"takes the whole model{self.how}, {bytes_text(needed)}{what}, where "
                    f"{bytes_text(free)} of {kind} memory are free for it: pass --windows given "
                    "for windows that are all of the text"
                )
        return ""


def continuation_memory(
    job: Job, samples: int, seqlen: int, device: torch.device, memory: float
) -> ContinuationMemory:
    """The memory of continuing ``samples`` windows on a device of ``memory`` bytes.

    It is the model and, for each piece, its keys and values and the working memory: a block's
    tensors for the given tokens, and the logits of one token. Whether the model is rounded, and how
    many pieces it continues at once, depend on the whole memory, not on the free memory, so that
    every token is the same in each run.
    """
    itemsize, heads = compute_bytes(job, device), Heads.of(job.namespace)
    least, most = PIECE_TOKENS
    counts = range(max(1, seqlen // min(max(seqlen // 4, least), most)), 0, -1)
    pieces = samples * next(count for count in counts if seqlen % count == 0)
    length = samples * seqlen // pieces
    given = max(1, int(length * GIVEN_SHARE))
    widest = max(
        sum(shape) for block in job.distinct_blocks for shape in job.linears(block).values()
    )
    cached = 2 * job.blocks * heads.kv * heads.dim * length * itemsize
    beside = 3 * given * widest * itemsize + 4 * 4 * int(job.namespace.vocab_size)
    parameters = sum(map(prod, job.source_shapes().values()))
    weights, rounded = itemsize * parameters, None
    if device.type == "cuda" and weights > WEIGHTS_SHARE * memory:
        rounded = rounded_bytes(job)
    weights = rounded or weights
    usable = memory * (DEVICE_SHARE if device.type == "cuda" else HOST_SHARE)
    room = min(CACHE_SHARE * usable, usable - weights)
    parts = -(-pieces // max(1, int(room // (cached + beside))))
    batch_size = -(-pieces // parts)
    return ContinuationMemory(
        pieces=pieces,
        length=length,
        given=given,
        batch_size=batch_size,
        parameters=parameters,
        weights=weights,
        cache=batch_size * cached,
        working=batch_size * beside,
        rounded=rounded is not None,
    )


def rounded_bytes(job: Job) -> int | None:
    """Bytes of ``job``'s model in :data:`ROUNDED_SCHEME`; None if its shapes do not allow it."""
    recipe = recipes.load(ROUNDED_SCHEME)
    try:
        return sum(Job.of(job.config, recipe, job.source_dtype).shard_bytes())
    except QtoolError:
        return None
