"""qtool's exceptions, and spelling suggestions for their messages."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Number
from os import PathLike
from pathlib import Path
from typing import Any

#: most bytes of a file's name; and of a new one's, so that ``OUT.run.json.4194304.tmp`` beside it
#: has no more
LONGEST_NAME, LONGEST_NEW_NAME = 255, 255 - len(".run.json.4194304.tmp")


class QtoolError(Exception):
    """Bad input or bad usage, in one sentence.

    It names the thing, what was found, and what would be accepted.
    """


class CheckFailed(QtoolError):
    """A verification found a mismatch: the input was readable, its content is wrong."""


class DamagedFile(CheckFailed):
    """A file is missing, or its hash is another than recorded; results of the others are whole."""


class NotDownloaded(QtoolError):
    """A file of weights is missing, or there is only Git LFS's pointer to it."""


class Interrupted(QtoolError):
    """A temporary cause ended the work; the written files are whole, and it can continue."""


class NoSpace(Interrupted):
    """A disk is full."""


@contextmanager
def checking(name: str) -> Iterator[None]:
    """Put ``name`` into the message of a check that fails while open."""
    try:
        yield
    except CheckFailed as error:
        raise CheckFailed(f"{name}: {error}") from error


def suggest(word: object, known: Iterable[str]) -> str:
    """``did you mean X?`` for names that begin with ``word``, else the nearest, else all."""
    known, text = sorted(set(known)), str(word)
    begun = [name for name in known if text and name.startswith(text)]
    close = begun or get_close_matches(text, known, n=1)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(known) or 'none'}"


def require_count(name: str, value: object, least: int = 1) -> None:
    """Check that ``value`` is a whole number of at least ``least``.

    Raises:
        QtoolError: naming it.
    """
    if type(value) is not int or value < least:
        raise QtoolError(f"{name} {value!r}: a whole number of at least {least} is expected")


def plain(given: Any) -> Any:
    """``given`` with Python's numbers in place of numpy's, in mappings and lists too."""
    if isinstance(given, Mapping):
        return {key: plain(value) for key, value in given.items()}
    if isinstance(given, list):
        return [plain(value) for value in given]
    return given.item() if isinstance(given, Number) and hasattr(given, "item") else given


def require_positive(name: str, value: object) -> None:
    """Check that ``value`` is a finite number above 0.

    Raises:
        QtoolError: naming it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise QtoolError(f"{name} {value!r}: a number above 0 is expected")


def require_path(name: str, value: object) -> Path:
    """``value``, a string or a path, as a path; ``~`` is the home directory.

    Raises:
        QtoolError: it is neither, names no file or has a name that no file has; naming it.
    """
    if not isinstance(value, str | PathLike):
        raise QtoolError(f"{name} {in_one_line(repr(value))}: a string or a path is expected")
    if not str(value) or "\0" in str(value):
        raise QtoolError(f"{name} {str(value)!r}: it names no file")
    path = expand_home(value)
    if (length := max(map(_name_bytes, path.parts), default=0)) > LONGEST_NAME:
        raise QtoolError(
            f"{name} {in_one_line(repr(str(value)))}: a name in it has {length} bytes; at most "
            f"{LONGEST_NAME} are expected"
        )
    return path


def _name_bytes(name: str) -> int:
    return len(os.fsencode(name))


def refuse_pipe(path: Path, expected: str = "a file") -> None:
    """Refuse a pipe or a device, whose reading may not end.

    Raises:
        QtoolError: it is one; naming it and what is ``expected``.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise QtoolError(f"{path} is a pipe or a device, expected {expected}")


def expand_home(path: str | PathLike[str]) -> Path:
    """``path`` with ``~`` replaced by the home directory, unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def require_new_path(name: str, value: object) -> Path:
    """:func:`require_path` of a new file or directory.

    A ``..`` behind a directory that is not there is resolved: else that directory had to be made.

    Raises:
        QtoolError: it has no name of its own, such as ``.``, or a long one; naming it.
    """
    path = require_path(name, value)
    if path.name in ("", ".."):
        raise QtoolError(f"{name} {str(value)!r}: the name of a new file or directory is expected")
    require_short_name(path)
    if ".." in path.parts and not path.parent.exists():
        return Path(os.path.realpath(path.parent), path.name)
    return path


def require_short_name(path: Path) -> None:
    """Refuse a new file or directory whose name leaves no room for those of the files beside it.

    Raises:
        QtoolError: naming it.
    """
    if (length := _name_bytes(path.name)) > LONGEST_NEW_NAME:
        raise QtoolError(
            f"{path}: its name has {length} bytes; at most {LONGEST_NEW_NAME} leave room for the "
            "endings of the files beside it"
        )


def require_text(name: str, value: object) -> str:
    """``value``, a text.

    Raises:
        QtoolError: it is none; naming it.
    """
    if not isinstance(value, str):
        raise QtoolError(f"{name} {in_one_line(repr(value))}: a text is expected")
    return value


def require_names(name: str, value: object) -> list[str]:
    """``value``, a name or several, as a list.

    A text may hold several with commas between, unless it is the path of a file.

    Raises:
        QtoolError: it is neither a name nor a list of names; naming it.
    """
    names: Iterable[object] = [value]
    if isinstance(value, Iterable) and not isinstance(value, str | PathLike | Mapping):
        names = value
    found: list[str] = []
    for one in names:
        if not isinstance(one, str | PathLike):
            raise QtoolError(
                f"{name} {in_one_line(repr(one))}: a name or a list of names is expected"
            )
        is_file = isinstance(one, PathLike) or os.path.exists(expand_home(one))
        parts = [str(one)] if is_file else str(one).split(",")
        found += [part.strip() for part in parts if part.strip()]
    return found


def described(found: object) -> str:
    """``float32 [8, 128]`` for a tensor, the type's name for anything else."""
    from torch import Tensor  # loads slowly

    if isinstance(found, Tensor):
        return f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
    return type(found).__name__


def in_one_line(said: object) -> str:
    """The first paragraph of the text or error ``said``, cut with dots after 300 characters."""
    text = " ".join(str(said).strip().split("\n\n")[0].split()) or type(said).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
