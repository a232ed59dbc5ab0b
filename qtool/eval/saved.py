"""``eval.json``: saved results of evaluations, beside the model.

A saved result is reused only if everything is equal: the model (:func:`identity`), the questions
and the arithmetic (:class:`qtool.eval.evaluate.LoadedTask`), the kind of device and the versions of
the software. If sizes or times of the shards differ from those of the saved result, as after a
copy, the shards are hashed first. The file is written after each task, so an interrupted evaluation
continues where it stopped. A baseline's results are saved in the file of the model that is compared
with it; the baseline's own directory is never written. The model card shows the model's results.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import qtool
from qtool import plugins
from qtool.errors import NoSpace, QtoolError, refuse_pipe
from qtool.eval.compare import table
from qtool.eval.engine import Engine, Model
from qtool.eval.evaluate import LoadedTask
from qtool.eval.results import Results, TaskResult, from_plain
from qtool.io.integrity import recorded_hashes, require_intact
from qtool.io.model_card import with_results
from qtool.io.safetensors import write_atomic, write_json
from qtool.io.source import CARD, Checkpoint
from qtool.strict_json import json_safe

log = logging.getLogger(__name__)

FILE = "eval.json"
#: the key of the list of results in eval.json
RESULTS = "answers"
#: facts that the model card shows
SHOWN = ("device", "engine", "kv", "dtype", "deterministic", "seqlen", "limit", "qtool")


@dataclass(frozen=True)
class SavedResult:
    """Results ``tasks`` of the model with identity ``model``, computed under ``facts``.

    ``files`` is the :func:`files_seen` of the model's directory when its hashes were last checked.
    """

    model: str
    facts: dict[str, Any]
    tasks: list[TaskResult]
    files: str = ""


def identity(directory: Path) -> str:
    """A hash that tells a model from others and survives a copy.

    For a checkpoint that qtool wrote it is the hash of its files' recorded hashes. For any other
    model it is :meth:`Checkpoint.fingerprint`, which qtool.json names as the source.
    """
    recorded, config = recorded_hashes(directory), directory / "config.json"
    if not recorded or not config.is_file():
        return Checkpoint(directory).fingerprint()
    hashes = json.dumps(recorded, sort_keys=True).encode()
    return hashlib.sha256(config.read_bytes() + hashes).hexdigest()


def files_seen(directory: Path) -> str:
    """A hash of the names, sizes and modification times of the shards; it reads none of them."""
    shards = [(path.name, path.stat()) for path in sorted(directory.glob("*.safetensors"))]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in shards]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def environment(
    device: str, kv: str | None = None, dtype: str | None = None, engine: type[Engine] | None = None
) -> dict[str, str]:
    """Facts that change a result: kind of device, versions, a given KV quantizer, dtype, engine.

    The versions include those of packages that have plugins. The number of GPUs of an engine is
    left out: like the batch size, it only changes the last digits.
    """
    versions = sorted(plugins.versions().items())
    facts = {
        "device": "cuda" if engine else device.partition(":")[0],
        "qtool": qtool.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "kv": kv,
        "dtype": dtype,
        "engine": engine.version() if engine else None,
        "plugins": ", ".join(f"{name} {found}" for name, found in versions),
    }
    return {name: fact for name, fact in facts.items() if fact}


def read(directory: Path) -> list[SavedResult]:
    """The saved results in ``directory``; none if it has no ``eval.json``.

    Raises:
        QtoolError: the file is damaged, or a pipe or a device.
    """
    path = directory / FILE
    refuse_pipe(path)
    if not path.exists():
        return []
    try:
        return _parsed(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QtoolError(f"{path} is damaged ({error!r}): remove it and evaluate again") from None


def _parsed(content: dict[str, Any]) -> list[SavedResult]:
    return [
        SavedResult(s["model"], s["facts"], list(map(from_plain, s["tasks"])), s.get("files", ""))
        for s in content[RESULTS]
    ]


def save(directory: Path, saved: SavedResult) -> None:
    """Add ``saved`` to the file; it replaces an earlier result of the same model and facts.

    A lock lets one process at a time do so. The model card is written first: a process that is
    killed before the file is written computes the result again, and then writes both.
    """
    path = directory / f"{FILE}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a disk without locks
            path.unlink(missing_ok=True)
            raise
        if not os.fstat(lock.fileno()).st_nlink:  # the process that held it has removed the file
            return save(directory, saved)
        try:
            others = [
                s for s in read(directory) if (s.model, s.facts) != (saved.model, saved.facts)
            ]
            content = json_safe({RESULTS: [asdict(s) for s in [*others, saved]]})
            for name in (FILE, CARD):
                for unfinished in directory.glob(f"{name}.*.tmp"):
                    unfinished.unlink()  # a killed process left it
            _show(directory, _parsed(content))
            write_json(directory / FILE, content)
        finally:
            path.unlink(missing_ok=True)


def _show(directory: Path, results: Sequence[SavedResult]) -> None:
    """Write those ``results`` that are of the model in ``directory`` into its card, if ours."""
    path = directory / CARD
    if not path.is_file():
        return
    model = identity(directory)
    tables: dict[str, list[TaskResult]] = {}
    for saved in results:
        if saved.model == model:
            for task in saved.tasks:
                facts = saved.facts | task.details  # the details hold the true window length
                shown = (f"{key} {facts[key]}" for key in SHOWN if facts.get(key))
                tables.setdefault(", ".join(shown), []).append(task)
    text = "\n\n".join(
        f"On {title}:\n\n```text\n{table(Results(tasks))}\n```" for title, tasks in tables.items()
    )
    before = path.read_bytes().decode(errors="surrogateescape")  # keeps bytes that others wrote
    if (card := with_results(before, text)) != before:
        write_atomic(path, lambda file: file.write(card.encode(errors="surrogateescape")))


def results(
    tasks: Sequence[LoadedTask],
    directory: Path,
    load: Callable[[], Model],
    store: Path,
    environment: dict[str, str],
) -> Results:
    """The results of ``tasks`` on the model in ``directory``.

    The model is loaded only if a result is not saved in ``store``. A result that the disk does not
    take is returned too, and the log says that it is not saved.

    Raises:
        QtoolError: ``store`` cannot be written, or holds a damaged file.
        CheckFailed: a shard has changed since qtool wrote it.
    """
    if not os.access(store, os.W_OK):
        raise QtoolError(
            f"{store} is not writable: results cannot be kept in its {FILE}; "
            "evaluate without --save"
        )
    model, files = identity(directory), files_seen(directory)
    known = [s for s in read(store) if s.model == model]
    if all(s.files != files for s in known):
        require_intact(directory)
        for one in known:
            names = ", ".join(found.task for found in one.tasks)
            _save_if_possible(store, replace(one, files=files), names)
    loaded, found = None, []
    for task in tasks:
        facts = task.facts | environment
        saved = next((s for s in known if s.facts == facts), None)
        if saved is None:
            loaded = loaded or load()
            saved = SavedResult(model, facts, task.evaluate(loaded), files)
            _save_if_possible(store, saved, task.name)
        found += saved.tasks
    return Results(found)


def _save_if_possible(store: Path, saved: SavedResult, task: str) -> None:
    """:func:`save`; the log says if the disk does not take the results of ``task``."""
    try:
        save(store, saved)
    except (OSError, NoSpace) as error:
        log.error("%s is not saved in %s: %s", task, store / FILE, error)
