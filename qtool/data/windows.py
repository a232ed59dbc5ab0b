"""Calibration windows: token ids of a text, cut into pieces of one length.

The documents are joined by blank lines, tokenized at once and cut into consecutive windows of
``seqlen`` tokens. ``samples`` of these windows are drawn with a seed, without replacement. The same
text, tokenizer and seed give the same tokens.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qtool.errors import QtoolError


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Tensor:
    """Token ids ``[tokens]`` of ``text``.

    Raises:
        QtoolError: the tokenizer belongs to another model than one of ``vocabulary`` tokens.
    """
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    if len(ids) and int(ids.max()) >= vocabulary:
        raise QtoolError(
            f"the tokenizer gives id {int(ids.max())}, the model's vocabulary ends at "
            f"{vocabulary - 1}"
        )
    return ids


def cut(
    ids: Tensor,
    *,
    samples: int,
    seqlen: int,
    vocabulary: int,
    seed: int = 0,
    name: str = "the text",
) -> Tensor:
    """Windows ``[at most samples, seqlen]`` of token ids ``[tokens]`` or ``[rows, tokens]``.

    Rows are cut one by one, and the rest of a row is dropped. Messages call the data ``name``.

    Raises:
        QtoolError: fewer tokens than one window, or an id that the model does not have.
    """
    if (tokens := ids.shape[-1]) < seqlen:
        raise QtoolError(
            f"calibration data: {name} has {tokens} token{'s' * (tokens != 1)}, fewer than one "
            f"window of {seqlen}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise QtoolError(
            f"calibration data: token ids from {int(ids.min())} to {int(ids.max())} found, the "
            f"model has 0 to {vocabulary - 1}"
        )
    all_windows = ids[..., : ids.shape[-1] // seqlen * seqlen].reshape(-1, seqlen)
    order = torch.randperm(len(all_windows), generator=torch.Generator().manual_seed(seed))
    return all_windows[order[:samples].sort().values]
