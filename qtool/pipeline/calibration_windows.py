"""From a text's name to the token windows a run is calibrated on, if a recipe says so continued by
the model itself.
"""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.data import corpora
from qtool.data.continuation import continued
from qtool.data.windows import windows
from qtool.distributed import ranks
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import BATCH_TOKENS, writing
from qtool.pipeline.quantize import Calibration, fingerprint
from qtool.pipeline.streaming.activations import DEVICE_SHARE, HOST_SHARE, available_host_bytes
from qtool.recipes.recipe import CONTINUED, GIVEN
from qtool.runtime.load import load, load_tokenizer


def calibration(
    source: Checkpoint,
    job: Job,
    text: str,
    *,
    data_dir: Path | None,
    samples: int,
    seqlen: int,
    seed: int,
    device: str,
) -> Calibration:
    """``samples`` windows of ``seqlen`` tokens (at most the model's context) of the corpus or file
    ``text``.

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
    facts: dict[str, Any] = {
        "text": text,
        "sha256": corpus.sha256,
        "samples": len(ids),
        "seqlen": seqlen,
        "seed": seed,
    }
    written = None
    if job.recipe.windows == CONTINUED:
        written = ranks.broadcast(
            _written(source, job, ids, seed, torch.device(device)) if ranks.rank() == 0 else None
        )
    facts["windows"] = GIVEN if written is None else CONTINUED
    ids = ids if written is None else written
    tokens = list(ids.split(max(1, BATCH_TOKENS // seqlen)))
    return Calibration(tokens, facts | {"tokens": fingerprint(tokens)})


def _written(
    source: Checkpoint, job: Job, ids: Tensor, seed: int, device: torch.device
) -> Tensor | None:
    """The windows ``ids`` continued by the float model; None, and said so, where it does not fit
    ``device`` whole.
    """
    whole, free = _memory(device)
    need = writing(job, len(ids), ids.shape[1], device, whole)
    if not need.fits(free, HOST_SHARE * available_host_bytes()):
        _say(
            f"the windows stay the text's own: to continue them takes the whole model, {need.bytes / 1e9:.1f} GB "
            f"with its cache, and {free / 1e9:.1f} GB are free for it"
        )
        return None
    began = time.monotonic()
    dtype = None if device.type == "cuda" else torch.float32
    model = load(source.directory, device=str(device), dtype=dtype)
    written = continued(model, ids[:, : need.given], ids.shape[1], seed=seed, at_once=need.at_once)
    del model
    gc.collect()  # should it know itself: the run needs its room
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _say(
        f"{len(ids)} windows, continued by the model after {need.given} tokens of the text "
        f"({time.monotonic() - began:.0f} s)"
    )
    return written


def _memory(device: torch.device) -> tuple[float, float]:
    """Bytes of ``device``: all, and those that a run may have."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return whole, DEVICE_SHARE * free
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    ), HOST_SHARE * available_host_bytes()


def _say(line: str) -> None:
    if ranks.rank() == 0:
        print(line, file=sys.stderr)
