"""Documents out of a file: plain text, WikiText raw, JSON lines or parquet, plain or compressed
(.gz, .zst).

| ending             | documents                                                                |
|--------------------|--------------------------------------------------------------------------|
| .raw               | one a line, a blank line being an empty one: the rows of the hub's WikiText |
| .jsonl .json       | one a line, its "text" key                                               |
| .parquet           | one a row, its "text" column                                             |
| .txt, anything else | the whole file is one                                                   |
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from qtool.errors import QtoolError

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
ENDINGS = {
    ".raw",
    ".jsonl",
    ".json",
    ".parquet",
    ".txt",
    ".utf8",
    ".md",
    *COMPRESSION,
}  # what a file's name looks like


def read(path: Path, rows: tuple[int, int | None] = (0, None)) -> list[str]:
    """The documents of ``path``, only ``rows`` (first, one past the last) of them; reading stops
    after the last.

    Raises :class:`QtoolError` if the file is missing, is a directory, is empty, is not UTF-8 or
    lacks "text".
    """
    if path.is_dir():
        raise QtoolError(f"{path} is a directory, expected a text, .jsonl or .parquet file")
    if not path.is_file():
        raise QtoolError(f"{path} does not exist, expected a text, .jsonl or .parquet file")
    try:
        documents = list(islice(_documents(path), *rows))
    except UnicodeDecodeError as error:
        raise QtoolError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except (OSError, EOFError) as error:
        raise QtoolError(f"{path} cannot be read: {error}") from None
    if not any(document.strip() for document in documents):
        raise QtoolError(f"{path} holds no text")
    return documents


def _documents(path: Path) -> Iterator[str]:
    compressed = path.suffix in COMPRESSION
    ending = Path(path.stem).suffix if compressed else path.suffix
    if ending == ".parquet":
        return _parquet(path)
    return _lines_or_whole(path, ending, COMPRESSION.get(path.suffix))


def _lines_or_whole(path: Path, ending: str, compression: str | None) -> Iterator[str]:
    with _open(path, compression) as file:
        if ending == ".raw":
            yield from (line if line.strip() else "" for line in file)
        elif ending in (".jsonl", ".json"):
            yield from (
                _text_of(line, path, number) for number, line in enumerate(file, 1) if line.strip()
            )
        else:
            yield file.read()


def _open(path: Path, compression: str | None) -> TextIO:
    """A text stream; newlines are "\\n", a byte order mark is dropped."""
    if compression is None:
        return open(path, encoding="utf-8-sig")
    import io

    import pyarrow

    return io.TextIOWrapper(
        pyarrow.input_stream(str(path), compression=compression), encoding="utf-8-sig"
    )


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise QtoolError(
            f"{path} line {number} is not JSON: {error.msg} at column {error.colno}"
        ) from None
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return row["text"]
    found = (
        f"the keys {', '.join(sorted(row)) or '(none)'}"
        if isinstance(row, dict)
        else f"a {type(row).__name__}"
    )
    raise QtoolError(f'{path} line {number} has {found}, expected an object with a string "text"')


def _parquet(path: Path) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise QtoolError(f'{path} has the columns {", ".join(names)}, expected "text"')
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                yield from (text or "" for text in batch.column(0).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise QtoolError(f"{path} is not a parquet file: {error}") from None
