"""The output directory of a run, which never looks complete before it is.

A run works in ``OUT.partial``: shards appear there one by one, each atomically, each with a small
record (sha256, notes). After the last one, config, index and ``qtool.json`` are written and the
directory is renamed to OUT. A killed run leaves ``OUT.partial``; ``--resume`` checks that it was
the same job, trusts only shards whose bytes match their record, and makes the rest. A run that was
refused midway leaves it too, with a note, and the next run without ``--resume`` starts over. With
several ranks, the first one opens and finishes the directory, and each shard is written by one
rank; the records do not depend on ranks.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from qtool.distributed import ranks
from qtool.errors import QtoolError, require_short_name
from qtool.io.integrity import CONFIG, INDEX, RECORD, hashes_beside_shards, read_record, sha256_of
from qtool.io.model_card import model_card
from qtool.io.safetensors import Entry, copy, read_header, write, write_json, write_text
from qtool.io.source import BASE_CARD, CARD

#: the run's own files, inside the directory it works in
RUN, JOB, LOCK, REFUSED = ".run", "job.json", "lock", "refused"
#: the hash of a record in the run's own files, by which a damaged one is known
OWN_HASH = "sha256 of this record"


def require_new(directory: Path) -> None:
    """Check that ``directory`` can become a result: it does not exist, or is an empty directory.

    It must not be inside a model's directory, with which it would be uploaded and copied.

    Raises:
        QtoolError: it cannot become a result.
    """
    require_short_name(directory)
    if directory.is_symlink() or directory.is_mount():
        raise QtoolError(
            f"{directory} is a symbolic link or a mount point, which the result cannot replace: "
            "name a new directory inside it"
        )
    above = next(parent for parent in directory.absolute().parents if parent.exists())
    if not above.is_dir():
        raise QtoolError(f"{directory}: {above} is a file, where a directory is expected")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise QtoolError(f"{directory} exists already; choose another --out or remove it")
    for parent in directory.resolve().parents:
        if (parent / CONFIG).is_file() and any(parent.glob("*.safetensors")):
            raise QtoolError(
                f"{directory} lies inside the model {parent}, whose files it would be among; "
                "choose an --out outside it"
            )


def require_own(partial: Path, mark: Path) -> None:
    """Refuse a ``partial`` that no run made: what lies there would become the result.

    Args:
        mark: what a run makes there first.

    Raises:
        QtoolError: it is a link, a mount point, or holds other files and no ``mark``.
    """
    others = partial.is_dir() and any(partial.iterdir()) and not mark.exists()
    if partial.is_symlink() or partial.is_mount() or others:
        raise QtoolError(
            f"{partial} is not of an unfinished run, and the result would be made there; move "
            "it or choose another --out"
        )


def lock(path: Path, directory: Path) -> IO[str]:
    """Lock ``path`` for a run that works on ``directory``, until the returned file is closed.

    Raises:
        QtoolError: another run works on ``directory``; or its disk has no locks, and what was made
            there for the lock is removed.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise QtoolError(f"another run is working on {directory}") from None
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            path.parent.rmdir()
            directory.rmdir()
        raise QtoolError(
            f"{path} cannot be locked ({error.strerror}), so that two runs could work on "
            f"{directory}: choose an --out on another disk"
        ) from error
    return file


class Output:
    """Shards ``1..n`` of one run, in ``OUT.partial`` until :meth:`finish`.

    Args:
        directory: OUT.
        identity: facts by name that must be the same for a run to be resumed.
        shards: number of shards.
        resume: continue an unfinished run.

    Attributes:
        records: records of the shards that are written.
        finished: OUT is already complete.
        continued: OUT.partial was there.

    Raises:
        QtoolError: OUT exists or is a link or a mount point, an unfinished run is there and
            ``resume`` is off, or it was another job, or another process works on it.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], shards: int, *, resume: bool
    ) -> None:
        self.directory, self.shards = directory, shards
        self.partial = directory.with_name(directory.name + ".partial")
        self.run = self.partial / RUN  # the run's own files
        self.records: dict[int, dict[str, Any]] = {}
        self.identity = json.loads(json.dumps(identity))
        self.lock: IO[str] | None = None
        self.made: list[Path] = []  # directories above OUT, the innermost first
        self.finished = resume and read_record(directory).get("job") == self.identity
        self.continued = os.path.exists(self.partial)  # False for a name too long
        if ranks.rank() == 0:
            if self.finished:
                # killed after the directory took its name
                shutil.rmtree(directory / RUN, ignore_errors=True)
            else:
                try:
                    self._open(resume)
                except Exception:
                    self.close()
                    raise
        self.finished, self.continued, self.records = ranks.broadcast(
            (self.finished, self.continued, self.records)
        )

    def _open(self, resume: bool) -> None:
        """Make or take over the directory, lock it and find its complete shards."""
        directory = self.directory
        require_new(directory)
        require_own(self.partial, self.run)
        if self.partial.exists() and not resume:
            self._remove_refused()
        self.made = [parent for parent in directory.parents if not parent.exists()]
        self.run.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.run / LOCK, self.partial)
        for unfinished in [*self.partial.rglob("*.tmp")]:
            unfinished.unlink()  # a killed run left it
        try:
            self._record_or_check_job()
        except Exception:
            if not self.continued:
                self.discard_empty()
            raise
        (self.run / REFUSED).unlink(missing_ok=True)
        for shard in range(1, self.shards + 1):
            if record := self._intact(self.path(shard), self._record_path(shard)):
                self.records[shard] = record

    def _remove_refused(self) -> None:
        """Remove the files of a refused run; those of an unfinished run are kept."""
        with contextlib.ExitStack() as locked:
            with contextlib.suppress(OSError):  # no lock file: a run was killed at its start
                locked.enter_context(lock(self.run / LOCK, self.partial))
            if not (self.run / REFUSED).exists():
                raise QtoolError(
                    f"{self.partial} holds an unfinished run; continue it with --resume or remove"
                    " it"
                )
            ranks.log(f"{self.partial} is of a run that was refused, and is removed")
            shutil.rmtree(self.partial)
        self.continued = False

    def _record_or_check_job(self) -> None:
        """Record this run's identity, or check that the unfinished run had the same."""
        path = self.run / JOB
        if path.exists():
            try:
                before = _read(path)
            except ValueError:
                before = self.identity  # it is damaged, but each shard's record names its job
            for key, value in self.identity.items():
                if before.get(key) != value:
                    since = ", or its files were written since" * (key == "source model")
                    raise QtoolError(
                        f"{self.partial} was started with another {key}{since} "
                        f"({difference(before.get(key), value)}); remove it or run as before"
                    )
        _write(path, self.identity)

    def name(self, shard: int) -> str:
        """File name of shard ``shard``."""
        return f"model-{shard:05d}-of-{self.shards:05d}.safetensors"

    def _record_path(self, shard: int) -> Path:
        return self.run / f"shard-{shard:05d}.json"

    def _intact(self, path: Path, record_path: Path) -> dict[str, Any] | None:
        """The record of a file of this job if its bytes match the record; else None."""
        try:
            record = _read(record_path)
            if record["job"] != content_hash(self.identity):
                return None
            return record if record["sha256"] == sha256_of(path) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def is_written_here(self, shard: int) -> bool:
        """Whether this rank writes shard ``shard``."""
        return shard % ranks.size() == ranks.rank()

    def path(self, shard: int) -> Path:
        """The current path of shard ``shard``."""
        return self.partial / self.name(shard)

    def missing_bytes(self, specs: Sequence[Mapping[str, Tensor]]) -> int:
        """Bytes that the missing shards among ``specs`` will take on the disk."""
        missing = (spec for shard, spec in enumerate(specs, 1) if shard not in self.records)
        return sum(tensor.nbytes for spec in missing for tensor in spec.values())

    def write_shard(
        self,
        shard: int,
        specs: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        notes: Mapping[str, Any],
    ) -> None:
        """Write shard ``shard``, then its record; ``notes`` may be filled meanwhile."""
        self._record_path(shard).unlink(missing_ok=True)
        digest = write(self.path(shard), specs, tensors)
        self.records[shard] = {
            "sha256": digest,
            "tensors": list(specs),
            "bytes": sum(spec.nbytes for spec in specs.values()),
            "notes": dict(notes),
            "job": content_hash(self.identity),
        }
        _write(self._record_path(shard), self.records[shard])

    def keep(
        self,
        name: str,
        specs: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        facts: Mapping[str, Any],
        *,
        sync: bool = True,
    ) -> None:
        """Store tensors that a resumed run needs, then their record.

        They are removed when the run is finished. ``sync`` is as in
        :func:`qtool.io.safetensors.write`.
        """
        path, record = self._kept_paths(name)
        record.unlink(missing_ok=True)
        digest = write(path, specs, tensors, sync=sync)
        content = {"sha256": digest, "job": content_hash(self.identity), "facts": dict(facts)}
        _write(record, content, sync=sync)

    def kept(self, name: str) -> tuple[dict[str, Entry], dict[str, Any]] | None:
        """Tensors and facts that :meth:`keep` wrote in this job, if they are intact."""
        path, record_path = self._kept_paths(name)
        record = self._intact(path, record_path)
        return None if record is None else (read_header(path), record["facts"])

    def kept_entries(self, name: str) -> dict[str, Entry]:
        """Tensors that :meth:`keep` wrote, or :meth:`kept` found intact; empty if dropped."""
        path = self._kept_paths(name)[0]
        return read_header(path) if path.exists() else {}

    def drop(self, name: str) -> None:
        """Remove the tensors that :meth:`keep` wrote as ``name``, if they are there."""
        for path in reversed(self._kept_paths(name)):
            path.unlink(missing_ok=True)

    def kept_names(self, prefix: str) -> list[str]:
        """The names beginning with ``prefix`` that :meth:`keep` has written."""
        return sorted(path.stem for path in self.run.glob(f"{prefix}*.safetensors"))

    def _kept_paths(self, name: str) -> tuple[Path, Path]:
        """The file of the tensors that :meth:`keep` writes as ``name``, and their record."""
        return self.run / f"{name}.safetensors", self.run / f"{name}.json"

    def discard_empty(self) -> None:
        """Remove the directory of a run that failed before it had anything to keep."""
        if ranks.rank() > 0 or self.records:
            return
        if {path.name for path in self.run.iterdir()} <= {JOB, LOCK, REFUSED}:
            for path in self.run.iterdir():
                path.unlink()
            with contextlib.suppress(OSError):  # another rank has just written to it
                self.run.rmdir()
                self.partial.rmdir()

    def note_refusal(self) -> None:
        """Let the next run start over, since this one would end for the same reason again."""
        with contextlib.suppress(FileNotFoundError):  # another rank has just discarded it
            (self.run / REFUSED).touch()

    def finish(
        self, config: dict[str, Any], provenance: dict[str, Any], side_files: Mapping[str, Path]
    ) -> None:
        """Write all files but the weights, and rename the directory to OUT.

        They are index, config, provenance, the ``side_files`` under their names, and a model card.

        The notes of all shards but the first (the embedding) and the last (the head) are the
        provenance's ``blocks``, unless it has its own.
        """
        for own in ranks.all_gather(self.records):
            self.records |= own
        if ranks.rank() > 0:
            return
        weight_map = {
            name: self.name(s) for s, r in sorted(self.records.items()) for name in r["tensors"]
        }
        total = sum(record["bytes"] for record in self.records.values())
        write_json(
            self.partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
        for name, path in side_files.items():
            (self.partial / name).parent.mkdir(exist_ok=True)
            copy(path, self.partial / name)
        write_text(self.partial / CARD, model_card(provenance, self.partial / BASE_CARD))
        provenance["job"] = self.identity
        provenance["shards"] = {self.name(s): r["sha256"] for s, r in sorted(self.records.items())}
        provenance.setdefault(
            "blocks", [self.records[shard]["notes"] for shard in range(2, self.shards)]
        )
        write_json(self.partial / CONFIG, config)
        provenance |= hashes_beside_shards(self.partial)
        write_json(self.partial / RECORD, provenance)
        if self.directory.exists():
            self.directory.rmdir()  # it is empty: checked at the start
        self.partial.rename(self.directory)
        self.close()  # NFS keeps the directory of an open file
        with contextlib.suppress(FileNotFoundError):  # the same run, begun again, removes it too
            shutil.rmtree(self.directory / RUN)

    def close(self) -> None:
        """Release the directory for another run; directories made above it go if they are empty."""
        if self.lock is not None:
            self.lock.close()
        with contextlib.suppress(OSError):  # not empty
            for parent in self.made:
                parent.rmdir()


def _write(path: Path, record: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write ``record`` with a hash of its own."""
    record = json.loads(json.dumps(record))
    write_json(path, {**record, OWN_HASH: content_hash(record)}, sync=sync)


def _read(path: Path) -> dict[str, Any]:
    """The record that :func:`_write` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.pop(OWN_HASH, None) != content_hash(found):
        raise ValueError(f"{path}: damaged")
    return found


def content_hash(facts: Mapping[str, Any]) -> str:
    """sha256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def difference(before: Any, now: Any, where: str = "") -> str:
    """The first place where two values of plain data differ, and both values.

    For example ``methods[0].smooth: {}, now 3``.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in (*before, *now):
            if before.get(key) != now.get(key) or (key in before) != (key in now):
                return difference(before.get(key), now.get(key), f"{where}.{key}".removeprefix("."))
    if isinstance(before, list) and isinstance(now, list):
        for i, (old, new) in enumerate(zip_longest(before, now)):
            if old != new:
                return difference(old, new, f"{where}[{i}]")
    return f"{where}: {_short(before)}, now {_short(now)}".removeprefix(": ")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
