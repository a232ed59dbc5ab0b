"""Parses calibration data given as a name, a file, texts, token ids or a data set.

| given                                     | is                                              |
|-------------------------------------------|-------------------------------------------------|
| ``"wikitext2"``, a name of :mod:`corpora` | the corpus's ``train`` text                     |
| a path (``.txt .jsonl .parquet`` ...)     | its documents, or chats under ``messages``      |
| ``["a text", ...]``                       | documents                                       |
| ``[{"text": ...}, ...]``                  | documents, or chats under ``messages``          |
| ``[[1, 2, ...], ...]``, 1-D or 2-D tensor | token ids                                       |
| ``datasets.Dataset``                      | documents (``text``) or chats (``messages``)    |
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from qtool.data import corpora, text_files
from qtool.data.chat import Row
from qtool.errors import QtoolError, plain

if TYPE_CHECKING:
    import datasets

CalibrationInput: TypeAlias = (
    "str | Path | Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[int]] | Tensor"
    " | datasets.Dataset"
)
ACCEPTED = (
    "a corpus, a file, a list of texts, token ids, or rows with text or messages (a list of dicts, "
    "or a datasets.Dataset)"
)


@dataclass(frozen=True)
class Documents:
    """Texts or chats.

    Attributes:
        name: their name in messages.
        sha256: hash of the file or texts; "" for a corpus, which its name identifies.
        read: function that returns them.
    """

    name: str
    sha256: str
    read: Callable[[], Sequence[Row]]


#: what data without a name is called
TEXTS, TOKEN_IDS, DATA_SET = UNNAMED = "texts", "token ids", "data set"


@dataclass(frozen=True)
class TokenIds:
    """Token ids: 1-D for a text, 2-D for windows, one a row."""

    ids: Tensor
    name: str = TOKEN_IDS

    @property
    def sha256(self) -> str:
        return _sha256(repr(tuple(self.ids.shape)).encode() + self.ids.numpy().tobytes())


def parse(given: CalibrationInput, *, data_dir: str | Path | None = None) -> Documents | TokenIds:
    """The calibration data that ``given`` stands for; a corpus or a file is not read yet.

    Raises:
        QtoolError: ``given`` is not in the table above, does not exist, or is empty.
    """
    require_data(given)
    if isinstance(given, str | Path):
        return _named(str(given), data_dir)
    if isinstance(given, Tensor):
        return _token_ids(given)
    if hasattr(given, "select_columns"):
        return _data_set(given)
    given = plain(given)
    if all(isinstance(text, str) for text in given):
        return _documents(TEXTS, list(given))
    if all(isinstance(row, dict) for row in given):
        numbered = ((f"calibration data: row {n + 1}", row) for n, row in enumerate(given))
        return _documents(TEXTS, [text_files.content_of(row, name) for name, row in numbered])
    if all(type(number) is int for number in given):
        return _token_ids(_tensor(given))
    if all(isinstance(row, Sequence) and not isinstance(row, str | bytes) for row in given):
        return _token_ids(_stack(given))
    raise QtoolError(f"calibration data: {ACCEPTED} is expected, found {_what(given)}")


def require_data(given: Any) -> None:
    """Refuse what cannot be calibration data; what it holds is not looked at.

    Raises:
        QtoolError: ``given`` is of no type in the table above, or empty.
    """
    if isinstance(given, str | Path | Tensor) or hasattr(given, "select_columns"):
        return
    if not isinstance(given, Sequence) or isinstance(given, bytes) or not len(given):
        raise QtoolError(f"calibration data: {ACCEPTED} is expected, found {_what(given)}")


def _named(name: str, data_dir: str | Path | None) -> Documents:
    if name in corpora.SOURCES:
        load = partial(corpora.load, name, split=corpora.TRAIN, data_dir=data_dir)
        return Documents(name, "", lambda: load().documents)
    path = corpora.require_file(name)
    return Documents(name, text_files.sha256(path), lambda: text_files.rows(path))


def _documents(name: str, rows: Sequence[Row]) -> Documents:
    stated = json.dumps(rows, default=str)  # a chat may hold dates
    return Documents(name, _sha256(stated.encode()), lambda: rows)


def _data_set(given: Any) -> Documents:
    names = given.column_names
    if isinstance(names, dict):
        raise QtoolError(f"calibration data: pass one split of the data set: {', '.join(names)}")
    columns = text_files.columns_of(names or ())
    if not hasattr(given, "__len__"):
        raise QtoolError(
            "calibration data: a data set is streamed; pass some of its rows, "
            "datasets.Dataset.from_list(list(data.take(1000)))"
        )
    if not columns:
        found = f"the columns {', '.join(names)}" if names else "no columns"
        raise QtoolError(
            "calibration data: a data set with a column text or messages is expected, found "
            f"{found}"
        )
    numbered = enumerate(given.select_columns(columns), 1)
    rows = [text_files.content_of(row, f"{DATA_SET}, row {number}") for number, row in numbered]
    return _documents(DATA_SET, rows)


def _stack(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of one length as a 2-D tensor; rows of other lengths joined into a 1-D tensor."""
    for row in rows:
        if not all(type(number) is int for number in row):
            raise QtoolError(
                "calibration data: a list of token ids holds something else; a chat is given as "
                '{"messages": [...]}'
            )
    if len(set(map(len, rows))) == 1:
        return _tensor(rows)
    return _tensor([number for row in rows for number in row])


def _tensor(numbers: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(numbers)
    except (RuntimeError, ValueError):
        raise QtoolError("calibration data: a token id has more than 63 bits") from None


def _token_ids(ids: Tensor) -> TokenIds:
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() not in (1, 2) or not whole or not ids.numel() or ids.shape[-1] < 2 or ids.is_meta:
        raise QtoolError(
            f"calibration data: token ids of shape {list(ids.shape)} and {ids.dtype} on "
            f"{ids.device.type} found; whole numbers [tokens] or [windows, tokens], not on meta "
            "and at least 2 tokens, are expected"
        )
    return TokenIds(ids.detach().cpu().long().contiguous())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _what(given: object) -> str:
    if isinstance(given, Sequence) and len(given):
        kinds = dict.fromkeys(type(one).__name__ for one in given)
        return f"a {type(given).__name__} of {' and '.join(kinds)}"
    return f"an empty {type(given).__name__}" if isinstance(given, Sequence) else repr(type(given))
