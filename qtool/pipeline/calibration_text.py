"""From a text's name to the token windows a run is calibrated on, if a recipe says so continued by the model itself."""

import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool import corpora, ranks
from qtool.calibration.continued import continued, given_tokens
from qtool.calibration.data import windows
from qtool.checkpoint.source import Checkpoint
from qtool.models.parts import Heads
from qtool.pipeline.activations import DEVICE_SHARE, HOST_SHARE, available_host_bytes
from qtool.pipeline.job import Job
from qtool.pipeline.memory import BATCH_TOKENS
from qtool.pipeline.quantize import Calibration, fingerprint
from qtool.recipes.recipe import CONTINUED, GIVEN
from qtool.runtime.load import load, load_tokenizer

#: of the KV cache while windows are written: more of them are written one part after another
CACHE_BYTES = 24e9


def calibration(
    source: Checkpoint, job: Job, text: str, *, data_dir: Path | None, samples: int, seqlen: int, seed: int, device: str
) -> Calibration:
    """``samples`` windows of ``seqlen`` tokens (at most the model's context) of the corpus or file ``text``.

    Raises:
        QtoolError: no such text, one shorter than a window, or a tokenizer that is not the model's.
    """
    corpus = corpora.load(text, split="train", data_dir=data_dir)
    seqlen = min(seqlen, source.config.get("max_position_embeddings") or seqlen)
    ids = windows(
        corpus.documents,
        load_tokenizer(source.directory),
        samples=samples,
        seqlen=seqlen,
        vocabulary=source.config["vocab_size"],
        seed=seed,
    )
    if len(ids) < samples:
        _say(f"{text} has {len(ids)} windows of {seqlen} tokens, not the {samples} asked for")
    facts: dict[str, Any] = {"text": text, "sha256": corpus.sha256, "samples": len(ids), "seqlen": seqlen, "seed": seed}
    if job.recipe.windows == CONTINUED:
        written = ranks.first(_written(source, job, ids, seed, torch.device(device)) if ranks.rank() == 0 else None)
        facts["windows"] = GIVEN if written is None else CONTINUED
        ids = ids if written is None else written
    tokens = list(ids.split(max(1, BATCH_TOKENS // seqlen)))
    return Calibration(tokens, facts | {"tokens": fingerprint(tokens)})


def _written(source: Checkpoint, job: Job, ids: Tensor, seed: int, device: torch.device) -> Tensor | None:
    """The windows ``ids`` continued by the float model; None, and said so, where it does not fit ``device`` whole."""
    itemsize = job.dtype.itemsize if device.type == "cuda" else 4
    at_once = windows_at_once(job, ids.shape[1], itemsize)
    weights = itemsize * sum(prod(entry.shape) for entry in source.entries.values())
    need = weights + min(at_once, len(ids)) * window_bytes(job, ids.shape[1], itemsize)
    room = HOST_SHARE * available_host_bytes()
    if device.type == "cuda" and weights <= room:  # it is read by way of the host
        room = DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
    if need > room:
        _say(f"the windows stay the text's own: to continue them the whole model would be held, {need / 1e9:.1f} GB, "
             f"and {room / 1e9:.1f} GB are free for it")  # fmt: skip
        return None
    began = time.monotonic()
    dtype = None if device.type == "cuda" else torch.float32
    written = continued(load(source.directory, device=str(device), dtype=dtype), ids, seed=seed, at_once=at_once)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _say(f"{len(ids)} windows, continued by the model after {given_tokens(ids.shape[1])} tokens of the text "
         f"({time.monotonic() - began:.0f} s)")  # fmt: skip
    return written


def windows_at_once(job: Job, seqlen: int, itemsize: int) -> int:
    """How many windows are written side by side: of the model alone, so that the same ones come out on any machine."""
    room = int(CACHE_BYTES // window_bytes(job, seqlen, itemsize))
    return 1 << max(0, room.bit_length() - 1)


def window_bytes(job: Job, seqlen: int, itemsize: int) -> int:
    """What a window takes while it is written: its keys and values, and the logits of a token with two copies."""
    heads = Heads.of(job.namespace)
    return 2 * job.blocks * heads.kv * heads.dim * seqlen * itemsize + 3 * 4 * int(job.config["vocab_size"])


def _say(line: str) -> None:
    if ranks.rank() == 0:
        print(line, file=sys.stderr)
