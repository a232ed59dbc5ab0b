"""``eval.json``: finished evaluations beside the model, to be used again and shown in a report.

An answer is used again only where everything is equal: the model (:func:`identity`), what was asked
and in which arithmetic (:class:`qtool.eval.evaluate.Asked`), the kind of device and the versions
that computed it. The file
is written after every task, so an interrupted evaluation goes on where it was. The baseline's
answers are kept in the file of the model that is compared with it: a baseline's own directory is
never written.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import qtool
from qtool.errors import QtoolError
from qtool.eval.evaluate import Asked
from qtool.eval.results import Results, TaskResult, finite, from_json
from qtool.io.safetensors import write_json
from qtool.io.source import Checkpoint

FILE = "eval.json"


@dataclass(frozen=True)
class Answer:
    """``tasks`` answer ``facts``, asked of the model with identity ``model``."""

    model: str
    facts: dict[str, Any]
    tasks: list[TaskResult]


def identity(directory: Path) -> str:
    """What tells a model from another and survives a copy.

    Of a checkpoint that qtool wrote it is the hash of its files' recorded hashes; of any other
    model :meth:`Checkpoint.fingerprint`, which qtool.json names as the source.
    """
    try:
        recorded = json.loads((directory / "qtool.json").read_text())["shards"]
        config = (directory / "config.json").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return Checkpoint(directory).fingerprint()
    return hashlib.sha256(config + json.dumps(recorded, sort_keys=True).encode()).hexdigest()


def environment(device: str, kv: str | None = None, dtype: str | None = None) -> dict[str, str]:
    """What moves a result: the kind of device, versions, and a KV quantizer or dtype given."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    asked = {name: value for name, value in (("kv", kv), ("dtype", dtype)) if value}
    return {"device": device.partition(":")[0], "qtool": qtool.__version__} | versions | asked


def read(directory: Path) -> list[Answer]:
    """The answers in ``directory``; none if it has no ``eval.json``.

    Raises:
        QtoolError: the file is damaged.
    """
    path = directory / FILE
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())["answers"]
        return [
            Answer(a["model"], a["facts"], from_json(json.dumps({"tasks": a["tasks"]})).tasks)
            for a in found
        ]
    except (OSError, ValueError, KeyError, TypeError, QtoolError) as error:
        raise QtoolError(f"{path} is damaged ({error}): remove it and evaluate again") from None


def keep(directory: Path, answer: Answer) -> None:
    """Add ``answer`` to the file, instead of an earlier one to the same question."""
    others = [a for a in read(directory) if (a.model, a.facts) != (answer.model, answer.facts)]
    write_json(directory / FILE, finite({"answers": [asdict(a) for a in [*others, answer]]}))


def answers(
    asked: Sequence[Asked],
    model: str,
    load: Callable[[], PreTrainedModel],
    store: Path,
    environment: dict[str, str],
) -> Results:
    """The results of ``asked`` on the model with identity ``model``.

    The model is loaded only if an answer is not in ``store``.

    Raises:
        QtoolError: ``store`` cannot be written, or holds a damaged file.
    """
    if not os.access(store, os.W_OK):
        raise QtoolError(
            f"{store} is not writable: results cannot be kept in its {FILE}; "
            "evaluate without --save"
        )
    known, loaded, results = read(store), None, []
    for one in asked:
        facts = one.facts | environment
        answer = next((a for a in known if (a.model, a.facts) == (model, facts)), None)
        if answer is None:
            loaded = loaded or load()
            answer = Answer(model, facts, one.answer(loaded))
            keep(store, answer)
        results += answer.tasks
    return Results(results)
