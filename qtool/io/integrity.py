"""Checks that a checkpoint's shards still have the hashes in qtool.json.

``verify`` reports every difference; loading calls :func:`require_intact` first, and a conversion
:func:`require_file_intact` before each shard. Shards are hashed in parallel, at the rate of the
disk or of SHA-256, and a hashed shard is in the page cache when it is loaded.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qtool.errors import CheckFailed, DamagedFile, refuse_pipe

RECORD, CONFIG, INDEX = "qtool.json", "config.json", "model.safetensors.index.json"
#: files that decide which token ids a text has
TOKENIZER = (
    *("tokenizer.*", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json"),
)
#: fields of qtool.json that are objects
OBJECTS = "source", "recipe", "calibration", "job", "shards", "tokenizer", "dtype", "versions"
#: transforms that keep every weight of the source, or are undone when it is dequantized
KEEPS_WEIGHTS = ("clip", "online-hadamard")
CHANGED = "the file's sha256 is not the one recorded when it was written"
UNREADABLE = "missing or damaged: the shards' hashes cannot be checked"


def require_intact(directory: Path) -> None:
    """Check that all shards in ``directory`` have their recorded hashes.

    A model without a qtool.json has no recorded hashes and passes.

    Raises:
        CheckFailed: names the first shard that is missing or has changed, or a qtool.json that
            cannot be read.
    """
    if not (directory / RECORD).exists():
        return
    for name, problem in damaged_shards(directory):
        raise CheckFailed(f"{directory / name}: {problem}")


def read_record(directory: Path) -> dict[str, Any]:
    """The content of the qtool.json in ``directory``; empty if it is missing or damaged.

    It is damaged, too, if a field that it has is not of the field's kind.

    Raises:
        QtoolError: it is a pipe or a device.
    """
    refuse_pipe(directory / RECORD)
    try:
        found = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if _is_record(found) else {}


def _is_record(found: Any) -> bool:
    """Whether ``found`` is an object in which the fields that others read into are whole."""
    if not isinstance(found, dict):
        return False
    blocks = found.get("blocks", [])
    objects = [found[key] for key in OBJECTS if key in found]
    objects += blocks if isinstance(blocks, list) else [blocks]
    recipe = found.get("recipe")
    methods = recipe.get("methods", []) if isinstance(recipe, dict) else []
    objects += methods if isinstance(methods, list) else [methods]
    return all(isinstance(value, dict) for value in objects)


def recorded_transforms(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each transform of the recorded recipe that changed the source's weights."""
    *transforms, _ = record.get("recipe", {}).get("methods") or [{}]
    every = {name: options for one in transforms for name, options in one.items()}
    return {name: options for name, options in every.items() if name not in KEEPS_WEIGHTS}


def recorded_hashes(directory: Path) -> dict[str, str]:
    """The recorded sha256 of each shard, by name; empty if there is no record."""
    return read_record(directory).get("shards", {})


def hashes_to_check(directory: Path) -> dict[str, str]:
    """:func:`recorded_hashes` of a checkpoint that is to be converted.

    Raises:
        CheckFailed: qtool.json cannot be read.
    """
    found = recorded_hashes(directory)
    if not found and (directory / RECORD).exists():
        raise CheckFailed(f"{directory / RECORD}: {UNREADABLE}")
    return found


def require_file_intact(path: Path, recorded: str | None) -> None:
    """Check that the file ``path`` has the sha256 ``recorded``; None is not checked.

    Raises:
        DamagedFile: names the file.
    """
    if recorded is not None and sha256_of(path) != recorded:
        raise DamagedFile(
            f"{path}: its sha256 is not the one that qtool.json recorded when it was written; "
            "the file is damaged: quantize again, or copy it again from where it is whole"
        )


def damaged_shards(directory: Path) -> Iterator[tuple[str, str]]:
    """``(file, problem)`` for each shard whose sha256 is not the recorded one, in order."""
    recorded = recorded_hashes(directory)
    if not recorded:
        yield RECORD, UNREADABLE
        return
    yield from _changed(directory, recorded)


def _changed(directory: Path, recorded: dict[str, str]) -> Iterator[tuple[str, str]]:
    """``(file, problem)`` for each file whose sha256 is not the ``recorded`` one, in order."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(sha256_of, (directory / Path(name).name for name in recorded))
        for (name, expected), digest in zip(recorded.items(), found, strict=True):
            if digest is None:
                yield name, "the file is missing"
            elif digest != expected:
                yield name, CHANGED


def hashes_beside_shards(directory: Path) -> dict[str, Any]:
    """The sha256 of config.json and of the index; under ``tokenizer`` those of its files."""
    tokenizer = sorted({path.name for pattern in TOKENIZER for path in directory.glob(pattern)})
    hashes: dict[str, Any] = {name: sha256_of(directory / name) for name in (CONFIG, INDEX)}
    return hashes | {"tokenizer": {name: sha256_of(directory / name) for name in tokenizer}}


def changed_beside_shards(directory: Path) -> Iterator[tuple[str, str]]:
    """``(file, problem)`` for each of :func:`hashes_beside_shards` that is not the recorded one.

    Loading accepts a change, which may be on purpose: an entry of config.json lengthens the
    context.
    """
    recorded = read_record(directory)
    hashes = {name: recorded[name] for name in (CONFIG, INDEX) if name in recorded}
    yield from _changed(directory, hashes | recorded.get("tokenizer", {}))


def sha256_of(path: Path) -> str | None:
    """sha256 of the file ``path``; None if there is no such file.

    Raises:
        QtoolError: it is a pipe or a device.
    """
    refuse_pipe(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
