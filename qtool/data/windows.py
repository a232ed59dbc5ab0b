"""Calibration windows: token ids of a text, cut into pieces of one length.

The documents are joined by blank lines, tokenized and cut into consecutive windows of ``seqlen``
tokens. ``samples`` of these windows are drawn with a seed, without replacement. The same
text, tokenizer and seed give the same tokens. If the text begins with a BOS, every window does: a
model may keep massive activations and attention sinks for this token, and every request that is
served begins with it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qtool.errors import QtoolError

#: most characters that are tokenized at once: a tokenizer takes some 500 bytes for each token
AT_ONCE = 1 << 25


def token_ids(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    *,
    add_special_tokens: bool = True,
) -> Tensor:
    """Token ids ``[tokens]`` of ``text``; a long text is tokenized in parts (:data:`AT_ONCE`).

    Args:
        add_special_tokens: put the tokenizer's BOS before the text, if it has one. A chat template
            writes it itself.

    Raises:
        QtoolError: the tokenizer belongs to another model than one of ``vocabulary`` tokens.
    """
    parts = (
        tokenizer(
            part,
            add_special_tokens=add_special_tokens and number == 0,
            return_tensors="pt",
            verbose=False,
        )
        for number, part in enumerate(_parts(text))
    )
    ids = torch.cat([part["input_ids"][0] for part in parts])
    if len(ids):
        require_embedded(int(ids.max()), vocabulary)
    return ids


def require_embedded(token_id: int, vocabulary: int) -> None:
    """Refuse an id beyond the ``vocabulary`` that a model embeds.

    Raises:
        QtoolError: names the id and the size of the vocabulary.
    """
    if token_id >= vocabulary:
        raise QtoolError(
            f"the tokenizer gives token id {token_id} but the model embeds {vocabulary} ids "
            f"(0 to {vocabulary - 1}): is it another model's tokenizer?"
        )


def bos_of(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS with which the text of the token ``ids`` begins; None if it begins with no BOS."""
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and ids[:1].tolist() == [bos] else None


def _parts(text: str) -> Iterator[str]:
    """``text`` in parts of at most :data:`AT_ONCE` characters, cut behind blank lines if it can."""
    start = 0
    while len(text) - start > AT_ONCE:
        blank = text.rfind("\n\n", start, start + AT_ONCE)
        stop = start + AT_ONCE if blank < 0 else blank + 2
        yield text[start:stop]
        start = stop
    yield text[start:]


def cut(
    ids: Tensor,
    *,
    samples: int,
    seqlen: int,
    vocabulary: int,
    seed: int = 0,
    bos: int | None = None,
    name: str = "the text",
) -> Tensor:
    """Windows ``[at most samples, seqlen]`` of token ids ``[tokens]`` or ``[rows, tokens]``.

    Rows are cut one by one, and the rest of a row is dropped. A ``bos`` takes the place of each
    window's first token. Messages call the data ``name``.

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
    windows = all_windows[order[:samples].sort().values]
    if bos is not None:
        windows[:, 0] = bos
    return windows
