"""Checks a source before any work: it has each tensor of the model, and no others."""

import re
from collections.abc import Collection

import torch

from qtool.errors import QtoolError
from qtool.io.finite import finite_rows
from qtool.io.source import Checkpoint
from qtool.io.source_names import adopt
from qtool.models.architecture import DTYPES, Architecture

#: ending of the name of a buffer that old checkpoints hold and loaders compute themselves
ROTARY = "rotary_emb.inv_freq"


def check_source(
    source: Checkpoint,
    model: Architecture,
    packed: Collection[str] = (),
    *,
    keep_unknown: bool = False,
    instead: str = "pass --keep-unknown to copy it as it is",
) -> dict[str, tuple[int, ...]]:
    """Check that all tensors of the model are there with declared shapes, and no others.

    They must have a float dtype. Only headers are read.

    Args:
        packed: linears that are quantized in the source; the caller checks their tensors.
        keep_unknown: accept unknown tensors.
        instead: what can be done about an unknown tensor.

    Returns:
        The shapes of the tensors that were found, by name.

    Raises:
        QtoolError: names the first tensor that is wrong.
    """
    adopt(source, model)
    expected = {
        name: shape
        for name, shape in model.source_shapes().items()
        if name.removesuffix(".weight") not in packed
    }
    for name, shape in expected.items():
        entry = source.entry(name)
        if entry.shape != shape:
            raise QtoolError(
                f"{name}: shape {list(entry.shape)} found, {list(shape)} expected from config.json"
            )
        kept = name in model.family.outside or name in model.family.integers
        if entry.dtype not in DTYPES.values() and not kept:
            raise QtoolError(
                f"{name}: dtype {entry.dtype} found; a float16, bfloat16 or float32 weight is "
                "expected"
            )
    for name in source.entries:
        known = name in expected or is_second_head(name, model) or is_left_out(name, model)
        if known or keep_unknown or _is_computed(name, model):
            continue
        if name.rpartition(".")[0] not in packed:
            what = f"{model.family.name} models of {model.blocks} blocks"  # by config.json
            raise QtoolError(f"{name}: not a tensor of {what}; {instead}")
    return expected


def is_second_head(name: str, model: Architecture) -> bool:
    """Whether tensor ``name`` is a tied head that is stored beside the embedding it equals."""
    return model.tied and name == f"{model.family.head}.weight"


def is_left_out(name: str, model: Architecture) -> bool:
    """Whether tensor ``name`` belongs to a module that transformers' class does not have.

    It names such modules: those for multi-token prediction.
    """
    return not _is_in_block(name, model) and any(re.search(p, name) for p in model.family.ignored)


def _is_computed(name: str, model: Architecture) -> bool:
    """Whether tensor ``name`` is a buffer that old checkpoints hold and loaders compute."""
    patterns = model.family.ignored if _is_in_block(name, model) else ()
    return any(re.search(pattern, name) for pattern in (f"{ROTARY}$", *patterns))


def _is_in_block(name: str, model: Architecture) -> bool:
    block, _ = model.family.place(name)
    return block is not None and block < model.blocks


def require_tied(source: Checkpoint, model: Architecture) -> None:
    """Refuse a stored head that differs from the embedding it is tied to; both are read.

    Loaders disagree on such a model: transformers 5 takes the stored head, older ones and vLLM the
    embedding.

    Raises:
        QtoolError: the two differ, or hold NaN or Inf.
    """
    head, embedding = f"{model.family.head}.weight", f"{model.family.embedding}.weight"
    if not model.tied or head not in source:
        return
    pairs = zip(*(finite_rows(source, name) for name in (head, embedding)), strict=True)
    if source.entry(head).shape != source.entry(embedding).shape or not all(
        torch.equal(a.to(b), b) for a, b in pairs
    ):
        raise QtoolError(
            f"{head} is not {embedding}, although config.json ties the two: set "
            "tie_word_embeddings to false there, and in its text_config if it has one, where the "
            "model has a head of its own, or remove that tensor"
        )
