"""A checkpoint's model with 4-bit weights, rounded to nearest and packed in memory.

It continues calibration windows if the model itself does not fit on a GPU.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qtool import recipes
from qtool.format.linear import LinearFormat
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

#: number of threads that read and round, since one does not reach a disk's rate
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
    blocks = StreamedBlocks(source, job, device)

    def block(index: int) -> Iterator[tuple[str, Tensor]]:
        return blocks.tensors(index, None, job.block_tensors(index), {})

    def made(part: Callable[[], Iterable[tuple[str, Tensor]]]) -> list[tuple[str, Tensor]]:
        return [(name, _on_host(rows)) for name, rows in part()]

    outside = (embedding_and_head.tables, embedding_and_head.head)
    parts = [partial(tensors, source, job, device) for tensors in outside]
    parts += [partial(block, index) for index in range(job.blocks)]
    pieces: dict[str, list[Tensor]] = defaultdict(list)
    linears = _distinct_linears(job, device) if counts else []
    with ThreadPoolExecutor(1) as compiler, ThreadPoolExecutor(THREADS, "round") as threads:
        compiled = compiler.submit(compile_kernels, linears, counts, job.dtype)
        for name, rows in chain.from_iterable(threads.map(made, parts)):
            pieces[name].append(rows)
    compiled.result()  # or its error
    config: Any = float_config(source.directory)
    config.quantization_config = job.format.to_dict()
    tensors = {
        name: own[0] if len(own := pieces.pop(name)) == 1 else torch.cat(own)
        for name in list(pieces)
    }
    return load_tensors(config, tensors, device)


def _distinct_linears(job: Job, device: torch.device) -> list[QuantLinear]:
    """A linear, of any weight, for each shape and format in the blocks of ``job``."""
    kinds: dict[tuple[int, int, LinearFormat], None] = {}
    for block in job.distinct_blocks:
        family, shapes = job.block_family(block), job.linears(block)
        for name, linear_format in job.formats(block).items():
            if not family.group_of(name).routed:
                n, k = shapes[name]
                kinds[k, n, linear_format] = None
    return [
        QuantLinear(*kind, bias=False, permuted=False, dtype=job.dtype, device=device)
        for kind in kinds
    ]


def _on_host(x: Tensor) -> Tensor:
    """``x`` in host memory, in pinned memory if it comes from a GPU, which copies fast to it."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x) if x.is_cuda else x
