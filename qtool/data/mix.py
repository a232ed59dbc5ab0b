r"""A mix of calibration data: its parts, the windows of each, and one order of all windows.

| given                                      | is                                          |
|--------------------------------------------|---------------------------------------------|
| ``"wikitext2:64,c4:64,chat.jsonl:32"``     | names of corpora or files, each with a      |
|                                            | number of windows; ``\,`` is a comma of one |
| ``{"wikitext2": 64, "chat.jsonl": 32}``    | the same, with names as they are            |
| ``[(texts, 64), (ids, 32)]``               | pairs of what :func:`parse` takes, and a    |
|                                            | number                                      |
| anything else                              | one part                                    |

Without numbers (``"wikitext2,c4"``, or None in their place) the parts get equal shares of the
windows. A text that names a corpus or an existing file is that one part, whatever characters it
contains.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qtool.data import corpora
from qtool.data.calibration_input import CalibrationInput, Documents, TokenIds, parse, require_data
from qtool.data.defaults import SAMPLES
from qtool.errors import QtoolError, expand_home, plain, require_count

CalibrationMix: TypeAlias = (
    "CalibrationInput | Mapping[str, int | None] | Sequence[tuple[CalibrationInput, int | None]]"
)
#: parts as they were given, each with its number of windows if it has one
_Numbered: TypeAlias = list[tuple[Any, int | None]]


@dataclass(frozen=True)
class Part:
    """One part of a mix, and its number of windows."""

    data: Documents | TokenIds
    samples: int

    @property
    def content(self) -> str:
        """The hash of the data, whatever its name is; a corpus's name."""
        return self.data.sha256 or self.data.name


def parse_mix(
    given: CalibrationMix, samples: int | None, *, data_dir: str | Path | None = None
) -> tuple[Part, ...]:
    """The parts of ``given``; no corpus and no file is read yet.

    Args:
        samples: windows of all parts together; None takes the parts' numbers.

    Raises:
        QtoolError: as :func:`parse` and :func:`count_windows` do, or a part is given twice.
    """
    found = _split(given)
    data = [parse(one, data_dir=data_dir) for one, _ in found]
    parts = tuple(map(Part, data, _shares(found, samples)))
    seen: dict[str, str] = {}
    for part in parts:
        name = part.data.name
        if (before := seen.get(part.content)) is not None:
            same = "" if before == name else f": {before} is the same text"
            raise QtoolError(f"calibration data: {name} is a part of the mix twice{same}")
        seen[part.content] = name
    return parts


def count_windows(
    given: "CalibrationMix | None", samples: int | None, default: int = SAMPLES
) -> int:
    """The number of windows that ``given`` asks for, or ``default``; its data is not read.

    Raises:
        QtoolError: as :func:`require_data` does; or a number of windows is below one, only some
            parts have one, or their sum differs from ``samples``.
    """
    parts = _split(given)
    for data, _ in parts if given is not None else ():
        require_data(data)
    return sum(_shares(parts, samples, default))


def interleave(parts: Sequence[Tensor]) -> Tensor:
    """Windows ``[n, S]`` of all ``parts``, each ``[*, S]`` and spread evenly in its own order.

    Any sequence of consecutive windows has about the same proportions of parts as the whole.
    """
    places = [(torch.arange(len(part), dtype=torch.float64) + 0.5) / len(part) for part in parts]
    return torch.cat(list(parts))[torch.cat(places).argsort(stable=True)]


def facts(parts: Sequence[tuple[str, int, str]]) -> dict[str, Any]:
    """The record of parts with ``(name, windows, sha256)``; a single part's own if there is one.

    Its ``text`` is an argument of ``--calib``.
    """
    each = [{"text": name, "samples": n, "sha256": sha256} for name, n, sha256 in parts]
    if len(each) == 1:
        return each[0]
    text = ",".join(f"{name.replace(',', chr(92) + ',')}:{samples}" for name, samples, _ in parts)
    return {"text": text, "samples": sum(samples for _, samples, _ in parts), "parts": each}


def _split(given: Any) -> _Numbered:
    """The data of each part as it was given, and its number of windows if it has one."""
    if isinstance(given, str):
        return _names(given)
    if isinstance(given, Mapping) and "input_ids" in given:
        raise QtoolError(
            "calibration data: what a tokenizer gives is no mix: pass its input_ids, made without "
            "padding"
        )
    if isinstance(given, Mapping) and any(isinstance(of, list) for of in given.values()):
        raise QtoolError(
            "calibration data: a mapping of columns, such as a slice of a data set, is no mix: "
            "pass one column, or datasets.Dataset.select"
        )
    if isinstance(given, Mapping) and not hasattr(given, "select_columns"):
        return list(plain(given).items()) or [(given, None)]
    if isinstance(given, Sequence) and given and all(map(_is_pair, given)):
        return [(data, plain(number)) for data, number in given]
    return [(given, None)]


def _is_pair(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and type(part[0]) is not int


def _names(text: str) -> _Numbered:
    if _is_one(text):
        return [(text, None)]
    found: _Numbered = []
    for part in re.split(r"(?<!\\),", text):
        name = part.strip().replace("\\,", ",")
        numbered = None if _is_one(name) else re.fullmatch(r"(.+):(-?[0-9]+)", name, re.DOTALL)
        found.append((numbered[1], int(numbered[2])) if numbered else (name, None))
    return found


def _is_one(name: str) -> bool:
    return name in corpora.SOURCES or os.path.isfile(expand_home(name))


def _shares(parts: _Numbered, samples: int | None, default: int = SAMPLES) -> list[int]:
    """The number of windows of each part; ``default`` of all if none is given."""
    numbers = [number for _, number in parts if number is not None]
    if not numbers:
        whole, count = default if samples is None else samples, len(parts)
        if whole < count:
            raise QtoolError(
                f"--samples {whole}: at least {count} expected, one window for each part of the"
                " calibration data"
            )
        return [whole // count + (i < whole % count) for i in range(count)]
    if len(numbers) < len(parts):
        raise QtoolError(
            f"calibration data: {len(numbers)} of {len(parts)} parts have a number of windows; "
            "give one to each part or to none"
        )
    for part, number in parts:
        named = str(part) if isinstance(part, str | Path) else type(part).__name__
        require_count(f"calibration data {named}: windows", number)
    if samples not in (None, sum(numbers)):
        together = f"{sum(numbers)} window{'s' * (sum(numbers) != 1)}"
        raise QtoolError(
            f"--samples {samples}: the parts of the calibration data have {together} together; "
            "leave --samples out"
        )
    return numbers
