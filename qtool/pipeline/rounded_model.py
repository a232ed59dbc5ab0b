"""A checkpoint's model with 4-bit weights, rounded to nearest and packed in memory.

It continues calibration windows if the model itself does not fit on a GPU.
"""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qtool import recipes
from qtool.io.source import Checkpoint
from qtool.models.auto import float_config
from qtool.pipeline.planning.memory import ROUNDED_SCHEME
from qtool.pipeline.quantize import job_of
from qtool.pipeline.streaming import embedding_and_head
from qtool.pipeline.streaming.streamed_blocks import StreamedBlocks
from qtool.runtime.load import load_tensors

#: number of blocks read and rounded in parallel, since one thread does not reach a disk's rate
THREADS = 4


def load_rounded(source: Checkpoint, device: torch.device) -> PreTrainedModel:
    """The model that ``load`` would return on ``device`` after ``quantize --recipe fast``.

    Its scheme is :data:`~qtool.pipeline.planning.memory.ROUNDED_SCHEME`. Weights pass through the
    device one by one; packed weights are kept on the host until all are done.

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
    with ThreadPoolExecutor(THREADS, "round") as threads:
        inner = chain.from_iterable(threads.map(rounded, range(job.blocks)))
        for name, rows in chain(tables, inner, head):
            pieces[name].append(_on_host(rows))
    config: Any = float_config(source.directory)
    config.quantization_config = job.format.to_dict()
    tensors = {
        name: own[0] if len(own := pieces.pop(name)) == 1 else torch.cat(own)
        for name in list(pieces)
    }
    return load_tensors(config, tensors, device)


def _on_host(x: Tensor) -> Tensor:
    """``x`` in host memory, in pinned memory if it comes from a GPU, which copies fast to it."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x) if x.is_cuda else x
