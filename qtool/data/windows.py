"""Calibration tokens: windows cut from a text.

The documents are joined by blank lines, tokenized at once and cut into consecutive windows of
``seqlen`` tokens; of these, ``samples`` are drawn with a seed, without replacement. The same text,
tokenizer and seed give the same tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qtool.errors import QtoolError


def windows(
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    seqlen: int,
    vocabulary: int,
    seed: int = 0,
) -> Tensor:
    """Token ids ``[at most samples, seqlen]``.

    Raises:
        QtoolError: the text is shorter than one window, or the tokenizer is not the model's.
    """
    ids = tokenizer("\n\n".join(documents), return_tensors="pt", verbose=False)["input_ids"][0]
    if len(ids) < seqlen:
        raise QtoolError(
            f"the calibration text has {len(ids)} tokens, fewer than one window of {seqlen}"
        )
    if int(ids.max()) >= vocabulary:
        raise QtoolError(
            f"the tokenizer gives id {int(ids.max())}, the model's vocabulary ends at {vocabulary - 1}"
        )
    all_windows = ids[: len(ids) // seqlen * seqlen].reshape(-1, seqlen)
    order = torch.randperm(len(all_windows), generator=torch.Generator().manual_seed(seed))
    return all_windows[order[:samples].sort().values]
