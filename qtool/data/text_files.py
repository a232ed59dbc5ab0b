"""Reads documents and chats from a file, plain or compressed (.gz, .zst).

| ending              | rows                                                                |
|---------------------|---------------------------------------------------------------------|
| .raw                | one a line, blank ones empty: the rows of the hub's WikiText        |
| .jsonl .json        | one a line: its "text", or the chat of its "messages" and "tools"   |
| .parquet            | one a row, likewise                                                 |
| .txt, anything else | the whole file is one                                               |

An ending may be in capitals. Tables of text with other rows (.csv, .tsv) are refused.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from qtool.data.chat import NAME, Row
from qtool.errors import QtoolError, refuse_pipe

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
#: numbers of the first row, and of the one after the last
Rows: TypeAlias = tuple[int, int | None]
WHOLE: Rows = (0, None)
#: endings by which a name is taken to be a file's
ENDINGS = {".raw", ".jsonl", ".json", ".parquet", ".txt", ".utf8", ".md", *COMPRESSION}
#: endings of tables, whose separators and other columns are no text
TABLES = {".csv", ".tsv"}
#: the key of a row's content, and the type of the content: a document or a chat
COLUMNS = {"text": str, "messages": list}
#: the key of what may be beside a chat
TOOLS = "tools"


def read(path: Path, part: Rows = WHOLE) -> list[str]:
    """The documents of ``path``.

    Args:
        part: the documents to read; reading stops behind the last of them.

    Raises:
        QtoolError: the file is missing, is a directory, is empty, is not UTF-8, lacks "text" or
            holds chats, or is a .csv or .tsv.
    """
    found = rows(path, part)
    if not all(isinstance(row, str) for row in found):
        raise QtoolError(f'{path} holds chats (messages), documents under "text" are expected')
    return found  # type: ignore[return-value]


def rows(path: Path, part: Rows = WHOLE) -> list[Row]:
    """As :func:`read`, but a row may be a chat, under ``messages``."""
    require(path)
    try:
        found = list(islice(_rows(path), *part))
    except UnicodeDecodeError as error:
        raise QtoolError(
            f"{path} is not UTF-8 text, plain or compressed ({', '.join(COMPRESSION)}): "
            f"{error.reason} at byte {error.start}"
        ) from None
    except (OSError, EOFError) as error:
        raise QtoolError(f"{path} cannot be read: {error}") from None
    if not any(row.strip() if isinstance(row, str) else row["messages"] for row in found):
        raise QtoolError(f"{path} holds no text")
    return found


def require(path: Path) -> None:
    """Refuse a path that is no file.

    Raises:
        QtoolError: the path is missing, a directory, a pipe or a device.
    """
    if path.is_dir():
        raise QtoolError(f"{path} is a directory, expected a text, .jsonl or .parquet file")
    refuse_pipe(path, "a text, .jsonl or .parquet file")
    if not path.is_file():
        raise QtoolError(f"{path} does not exist, expected a text, .jsonl or .parquet file")


def sha256(path: Path) -> str:
    """Hex digest of the file's bytes and of the ending by which its rows are read.

    Raises:
        QtoolError: the file is missing or cannot be read.
    """
    require(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise QtoolError(f"{path} cannot be read: {error}") from None
    digest.update(_ending(path).encode())
    return digest.hexdigest()


def _ending(path: Path) -> str:
    """The ending of the file's name in small letters, without that of its compression."""
    return (Path(path.stem) if _compression(path) else path).suffix.lower()


def _compression(path: Path) -> str | None:
    return COMPRESSION.get(path.suffix.lower())


def _rows(path: Path) -> Iterator[Row]:
    """The rows of the file, by its ending."""
    ending = _ending(path)
    if ending in TABLES:
        raise QtoolError(
            f"{path} is a table, expected a text, or a .jsonl or .parquet file with documents under"
            ' "text"'
        )
    if ending == ".parquet":
        yield from _parquet(path)
        return
    with _open(path) as file:
        if ending == ".raw":
            yield from (line if line.strip() else "" for line in file)
        elif ending in (".jsonl", ".json"):
            yield from (
                _row_of(line, path, number) for number, line in enumerate(file, 1) if line.strip()
            )
        else:
            yield file.read()


def _open(path: Path) -> TextIO:
    """A text stream of ``path``; newlines are "\\n", and a byte order mark is dropped."""
    if not (compression := _compression(path)):
        return open(path, encoding="utf-8-sig")
    import io

    import pyarrow

    return io.TextIOWrapper(
        pyarrow.input_stream(str(path), compression=compression), encoding="utf-8-sig"
    )


def _row_of(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise QtoolError(
            f"{path} line {number} is not JSON: {error.msg.removesuffix(' at')} at column"
            f" {error.pos + 1}; one row in each line is expected"
        ) from None
    except (ValueError, RecursionError) as error:  # also for thousands of digits or brackets
        raise QtoolError(f"{path} line {number} cannot be read: {error}") from None
    return _named_content(row, f"{path} line {number}")


def _named_content(row: Any, name: str) -> Row:
    """As :func:`content_of`; a chat keeps the ``name``, for what is wrong with its messages."""
    content = content_of(row, name)
    return content if isinstance(content, str) else content | {NAME: name}


def columns_of(names: Sequence[str]) -> list[str]:
    """Those of the columns ``names`` that are read: that of the content first."""
    content = [name for name in COLUMNS if name in names][:1]
    return content + [TOOLS] * (content == ["messages"] and TOOLS in names)


def content_of(row: Any, name: str) -> Row:
    """The document or the chat of ``row``.

    Raises:
        QtoolError: it has none; ``name`` says which row it is.
    """
    for key, kind in COLUMNS.items():
        if isinstance(row, dict) and isinstance(row.get(key), kind):
            return row[key] if kind is str else {key: row[key], TOOLS: row.get(TOOLS)}
    raise QtoolError(
        f'{name} has {_found(row)}, expected a row with a string "text" or a list "messages"'
    )


def _found(row: Any) -> str:
    """A description of a row without a content: a content of another type, or other keys."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}"
    for name in COLUMNS:
        if name in row:
            return f'"{name}" of type {type(row[name]).__name__}'
    return f"the keys {', '.join(sorted(map(str, row))) or '(none)'}"


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = columns_of(names)
            if not columns:
                raise QtoolError(
                    f'{path} has the columns {", ".join(names)}, expected "text" or "messages"'
                )
            batches = file.iter_batches(batch_size=1024, columns=columns)
            found = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from (
                _named_content(row, f"{path} row {number}") for number, row in enumerate(found, 1)
            )
    except pyarrow.ArrowException as error:
        raise QtoolError(f"{path} is not a parquet file: {error}") from None
