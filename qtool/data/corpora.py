"""Loads the text of a named corpus or a file; local copies are used before the network.

A corpus has two roles, so that a model is not evaluated on the text it was calibrated on: ``train``
(calibration) and ``test`` (perplexity). A local copy of a role is looked up in ``data_dir``, or in
the directory that ``QTOOL_DATA_DIR`` names:

- ``wikitext2``: wikitext2/wiki.{split}.raw, wikitext-2-raw/wiki.{split}.raw,
  wikitext-2-raw-v1/{split}-*.parquet, wikitext2/{split}.*; on the hub Salesforce/wikitext,
  wikitext-2-raw-v1, the split with the role's name.
- ``c4``: c4/c4-{train,validation}.*.json.gz (also under c4/en/), c4/{split}.*, c4.*,
  calibration/c4.utf8; on the hub allenai/c4, the first 10,000 documents of train shard 0 and the
  first 1,100 of validation shard 0.
- ``pile``: pile/{split}.*, pile.*, calibration/pile.utf8; on the hub NeelNanda/pile-10k, rows 0 to
  8,999 and 9,000 to 9,999.
- ``demo``: ships with qtool, calibration.txt (train) and heldout.txt (test).

``{split}`` is train or test, ``.*`` is .jsonl, .parquet or .txt. A local copy is used whole. Only
from the published C4 shards the same documents are taken as from the hub. ``c4.*``, ``pile.*`` and
``calibration/*.utf8`` have no split and serve both roles.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from qtool.data import text_files
from qtool.data.text_files import WHOLE, Rows
from qtool.errors import QtoolError, expand_home, require_path, suggest
from qtool.io import hub
from qtool.io.model_directory import DEMO

TRAIN, TEST = "train", "test"
#: most characters of a path to a file that does not exist; a longer string is a text
LONGEST = 255
BLANK_LINE = "\n\n"
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """One role of one corpus: patterns of local files, the hub's data set, and the rows to take."""

    local: tuple[tuple[str, Rows], ...]
    hub: dict[str, Any] = field(default_factory=dict)  # arguments of datasets.load_dataset
    rows: Rows = WHOLE  # rows of the hub's data set
    between: str = BLANK_LINE  # what stands between two documents


def _whole(*patterns: str) -> tuple[tuple[str, Rows], ...]:
    return tuple((pattern, WHOLE) for pattern in patterns)


def _any_format(stem: str) -> tuple[tuple[str, Rows], ...]:
    return _whole(f"{stem}.jsonl", f"{stem}.parquet", f"{stem}.txt")


def _wikitext2(split: str) -> Source:
    return Source(
        local=_whole(
            f"wikitext2/wiki.{split}.raw",
            f"wikitext-2-raw/wiki.{split}.raw",
            f"wikitext-2-raw-v1/{split}-*.parquet",
        )
        + _any_format(f"wikitext2/{split}"),
        hub={"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": split},
    )


def _c4(split: str, published: str, shards: int, rows: Rows) -> Source:
    shard = f"c4-{published}.00000-of-{shards:05d}.json.gz"
    return Source(
        local=(
            (f"c4/c4-{published}.*.json.gz", rows),
            (f"c4/en/c4-{published}.*.json.gz", rows),
            *_any_format(f"c4/{split}"),
            *_any_format("c4"),
            *_whole("calibration/c4.utf8"),
        ),
        hub={
            "path": "allenai/c4",
            "data_files": {published: f"en/{shard}"},
            "split": published,
            "streaming": True,
        },
        rows=rows,
        between=" " if split == TEST else BLANK_LINE,  # as in the GPTQ scripts
    )


def _pile(split: str, rows: Rows) -> Source:
    return Source(
        local=_any_format(f"pile/{split}") + _any_format("pile") + _whole("calibration/pile.utf8"),
        hub={"path": "NeelNanda/pile-10k", "split": "train"},
        rows=rows,
    )


SOURCES: dict[str, dict[str, Source]] = {
    "wikitext2": {TRAIN: _wikitext2(TRAIN), TEST: _wikitext2(TEST)},
    "c4": {
        TRAIN: _c4(TRAIN, "train", 1024, (0, 10_000)),
        TEST: _c4(TEST, "validation", 8, (0, 1_100)),  # the GPTQ scripts call it "c4_new"
    },
    "pile": {TRAIN: _pile(TRAIN, (0, 9_000)), TEST: _pile(TEST, (9_000, 10_000))},
    "demo": {TRAIN: Source(_whole("calibration.txt")), TEST: Source(_whole("heldout.txt"))},
}


@dataclass(frozen=True)
class Corpus:
    """Documents and their ``origin``: a file's path or ``hub:<data set>``."""

    name: str
    origin: str
    documents: list[str]
    between: str = BLANK_LINE

    @property
    def text(self) -> str:
        """The text that is tokenized."""
        return joined(self.documents, self.between)

    @property
    def sha256(self) -> str:
        """Hex digest of :attr:`text` in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def joined(documents: Iterable[str], between: str = BLANK_LINE) -> str:
    """``documents`` as one text, with blank lines (or ``between``) between them.

    Single halves of surrogate pairs become U+FFFD: a cut string in JSON may hold them, and no
    tokenizer takes them.
    """
    return SURROGATE.sub("\ufffd", between.join(documents))


def is_corpus(source: str) -> bool:
    """Whether ``source`` means text (a corpus or a file), not a zero-shot task."""
    named = (
        source in SOURCES or Path(source).suffix.lower() in text_files.ENDINGS or os.sep in source
    )
    return named or os.path.isfile(source)  # isfile takes a name of any length


def load(source: str, *, split: str, data_dir: str | Path | None = None) -> Corpus:
    """The ``split`` (train or test) of a named corpus, or the whole of the file ``source``.

    Raises:
        QtoolError: an unknown name, an unreadable file, a ``data_dir`` that does not exist, or a
            corpus that is neither local nor reachable.
    """
    if data_dir:
        data_directory(data_dir)  # checked even though the demo and a file do not need it
    if source not in SOURCES:
        return Corpus(Path(source).name, source, text_files.read(require_file(source)))
    wanted = SOURCES[source][split]
    directory = DEMO if source == "demo" else data_directory(data_dir)
    if directory:
        for pattern, rows in wanted.local:
            for path in sorted(directory.glob(pattern))[:1]:
                return Corpus(source, str(path), text_files.read(path, rows), wanted.between)
    if not wanted.hub:
        raise QtoolError(
            f"{DEMO} lacks {wanted.local[0][0]}: this installation of qtool is incomplete"
        )
    documents = _download(source, split, wanted)
    return Corpus(source, f"hub:{wanted.hub['path']}", documents, wanted.between)


def require_file(source: str) -> Path:
    """The path of ``source``, whether or not there is a file.

    Raises:
        QtoolError: ``source`` looks like the name of an unknown corpus, or like a text.
    """
    path = expand_home(source)  # the shell leaves the ~ of a.txt:16,~/b.txt:16
    if not (os.path.exists(source and path) or (is_corpus(source) and len(source) <= LONGEST)):
        raise QtoolError(
            f"unknown corpus {shorten(source, 60, placeholder='...')!r}, and no such file: "
            f"{suggest(source, SOURCES)}" + "; a text itself is given in a list" * (" " in source)
        )
    return path


def data_directory(data_dir: str | Path | None) -> Path | None:
    """The directory of local copies: ``data_dir``, else ``QTOOL_DATA_DIR``, else None.

    Raises:
        QtoolError: the directory does not exist, or ``data_dir`` is not a path.
    """
    named = data_dir or os.environ.get("QTOOL_DATA_DIR")
    directory = require_path("data_dir", named) if named else None
    if directory and not directory.is_dir():
        raise QtoolError(f"the data directory {named} does not exist")
    return directory


def _download(source: str, split: str, wanted: Source) -> list[str]:
    """The documents of the hub's data set.

    Raises:
        QtoolError: it is not reachable, or a row has no text; the message names the row.
    """
    import datasets

    first = wanted.local[0][0]
    try:
        with hub.access():
            rows = datasets.load_dataset(**wanted.hub)
            documents = [row["text"] for row in islice(rows, *wanted.rows)]
    except Exception as error:  # datasets raises a dozen types, none of them meant for a user
        state = hub.why_not(error)
        raise QtoolError(
            f"the {split} text of {source} is not here and cannot be downloaded from "
            f"{wanted.hub['path']} ({state}): put it at {first} in a directory given by --data-dir "
            "or QTOOL_DATA_DIR, or name a text file instead"
        ) from error
    for number, text in enumerate(documents, wanted.rows[0] + 1):
        text_files.content_of({"text": text}, f"{wanted.hub['path']} row {number}")
    return documents
