"""A checkpoint's model with 4-bit weights, rounded to nearest and packed in memory.

It continues calibration windows if the model itself does not fit on a GPU.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qtool import recipes
from qtool.io.source import Checkpoint
from qtool.models.auto import float_config
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import ROUNDED_SCHEME
from qtool.pipeline.quantize import job_of
from qtool.pipeline.streaming import embedding_and_head
from qtool.pipeline.streaming.streamed_blocks import StreamedBlocks
from qtool.runtime.compile_kernels import compile_kernels
from qtool.runtime.linear import QuantLinear
from qtool.runtime.load import load_tensors

#: number of blocks read and rounded in parallel, since one thread does not reach a disk's rate
THREADS = 4


def load_rounded(
    source: Checkpoint, device: torch.device, counts: Sequence[int] = ()
) -> PreTrainedModel:
    """The model that ``load`` would return on ``device`` after ``quantize --recipe fast``.

    Its scheme is :data:`~qtool.pipeline.planning.memory.ROUNDED_SCHEME`. Weights pass through the
    device one by one; packed weights are kept on the host until all are done.

    Args:
        counts: numbers of tokens for which kernels are compiled meanwhile.

    Raises:
        QtoolError: the scheme cannot have a linear's shape, or transformers refuses the model.
    """
    job = job_of(source, recipes.load(ROUNDED_SCHEME, "fast"), keep_unknown=True)
    blocks, shards = StreamedBlocks(source, job, device), job.shards()[1:-1]

    def rounded(index: int) -> list[tuple[str, Tensor]]:
        made = blocks.tensors(index, None, shards[index], {})
        return [(name, _on_host(tensor)) for name, tensor in made]

    tables = embedding_and_head.tables(source, job, device)
    head = embedding_and_head.head(source, job, device)
    pieces: dict[str, list[Tensor]] = defaultdict(list)
    linears = _joined_linears(job, device) if counts else []
    with ThreadPoolExecutor(1) as compiler, ThreadPoolExecutor(THREADS, "round") as threads:
        compiled = compiler.submit(compile_kernels, linears, counts, job.dtype)
        inner = chain.from_iterable(threads.map(rounded, range(job.blocks)))
        for name, rows in chain(tables, inner, head):
            pieces[name].append(_on_host(rows))
    compiled.result()  # or its error
    config: Any = float_config(source.directory)
    config.quantization_config = job.format.to_dict()
    tensors = {
        name: own[0] if len(own := pieces.pop(name)) == 1 else torch.cat(own)
        for name in list(pieces)
    }
    return load_tensors(config, tensors, device)


def _joined_linears(job: Job, device: torch.device) -> list[QuantLinear]:
    """A linear, of any weight, for each kind of joined linears in the blocks of ``job``.

    The runtime multiplies linears that read one input as one (:mod:`qtool.runtime.merge`).
    """
    found = {}
    for block in job.distinct_blocks:
        formats, shapes = job.formats(block), job.linears(block)
        for group in job.block_family(block).groups:
            names = [name for name in group.linears if name in formats]
            if names and not group.routed:
                kind = shapes[names[0]][1], sum(shapes[n][0] for n in names), formats[names[0]]
                found[kind] = QuantLinear(
                    *kind, bias=False, permuted=False, dtype=job.dtype, device=device
                )
    return [*found.values()]


def _on_host(x: Tensor) -> Tensor:
    """``x`` in host memory, in pinned memory if it comes from a GPU, which copies fast to it."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x) if x.is_cuda else x
