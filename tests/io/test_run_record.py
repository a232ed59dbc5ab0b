"""The run record: beside the checkpoint, never in it; a resumed run adds up; a stranger's record is
not believed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.output import Output
from qtool.io.run_record import RunRecord, content_hash, read_run, record_path
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from tests.conftest import MakeModel

CPU = torch.device("cpu")


def run(source: Path, out: Path, **options: object) -> Path:
    return quantize(Checkpoint(source), recipes.load("w4a16"), out, **options)  # type: ignore[arg-type]


def job(directory: Path) -> dict[str, object]:
    return json.loads((directory / "qtool.json").read_text())["job"]


def interrupted(source: Path, out: Path) -> None:
    """A run that stops after its second shard."""

    def stop(done: int, total: int, notes: object) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, out, progress=stop)


def test_it_lies_beside_and_the_checkpoint_stays_byte_identical(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source, out, killed = make_model(), tmp_path / "out", tmp_path / "killed"
    run(source, out)
    interrupted(source, killed)
    run(source, killed, resume=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in killed.iterdir()
    }
    assert not [p.name for p in out.iterdir() if "run" in p.name]
    assert record_path(out).is_file() and record_path(killed).is_file()


def test_a_killed_runs_unfinished_record_is_removed(tmp_path: Path) -> None:
    own, other = tmp_path / "[out].run.json.1.tmp", tmp_path / "out.run.json.1.tmp"
    own.touch(), other.touch()
    RunRecord(tmp_path / "[out]", {}, CPU, continued=True).write()
    assert set(tmp_path.iterdir()) == {other, tmp_path / "[out].run.json"}


def test_a_resumed_run_adds_up(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(num_hidden_layers=8), tmp_path / "out"
    interrupted(source, out)
    first = json.loads(record_path(out).read_text())["attempts"]
    run(source, out, resume=True)
    found = read_run(out, job(out))
    assert found["attempts"][:-1] == first
    before, after = (attempt["shards"] for attempt in found["attempts"])
    # what waited for the disk when the run stopped was written, but not counted
    assert before >= 2 and after >= 1
    assert found["seconds"] == sum(attempt["seconds"] for attempt in found["attempts"]) > 0
    assert (
        found["peak_host_bytes"] >= 1e7
        and found["peak_device_bytes"] == 0
        and found["device"] == "cpu"
    )


def test_a_run_that_begins_anew_forgets_the_old_one(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "out"
    for _ in range(2):
        run(source, out, resume=True)
        assert len(read_run(out, job(out))["attempts"]) == 1
        shutil.rmtree(out)


def test_it_moves_along_beside_or_inside(make_model: MakeModel, tmp_path: Path) -> None:
    out, moved = run(make_model(), tmp_path / "out"), tmp_path / "moved"
    found = read_run(out, job(out))
    out.rename(moved)
    assert found and read_run(moved, job(moved)) == {}
    shutil.copy(record_path(out), moved / "run.json")
    assert read_run(moved, job(moved)) == found
    (moved / "run.json").rename(record_path(moved))
    assert read_run(moved, job(moved)) == found


@pytest.mark.parametrize(
    "damage", ["", "[]", "{}", "[" * 100_000, '{"format_version": 2, "job": 1}']
)
def test_a_damaged_or_foreign_record_is_none(damage: str, tmp_path: Path) -> None:
    RunRecord(tmp_path / "out", {"a": 1}, CPU, continued=False).write()
    assert read_run(tmp_path / "out", {"a": 1}) and not read_run(tmp_path / "out", {"a": 2})
    record_path(tmp_path / "out").write_text(damage)
    assert read_run(tmp_path / "out", {"a": 1}) == {}


@pytest.mark.parametrize("damage", [{"seconds": None}, {"phases": {"read": "1"}}, {"shards": []}])
def test_a_record_with_a_damaged_attempt_is_none(damage: dict[str, object], tmp_path: Path) -> None:
    RunRecord(tmp_path / "out", {}, CPU, continued=False).write()
    record = read_run(tmp_path / "out", {})
    record["attempts"][0] |= damage
    record_path(tmp_path / "out").write_text(json.dumps(record | {"format_version": 2}))
    assert read_run(tmp_path / "out", {}) == {}
    RunRecord(tmp_path / "out", {}, CPU, continued=True).write()


def test_phases_add_up_over_attempts(tmp_path: Path) -> None:
    for continued in (False, True):
        record = RunRecord(tmp_path / "out", {}, CPU, continued=continued)
        record.attempt.phases = {"read": 1.5, "round": 2.0 + continued}
        record.write()
    found = read_run(tmp_path / "out", {})
    assert found["phases"] == {"read": 3.0, "round": 5.0}
    assert [attempt["phases"]["round"] for attempt in found["attempts"]] == [2.0, 3.0]


def test_a_record_of_another_job_is_not_continued(tmp_path: Path) -> None:
    RunRecord(tmp_path / "out", {"a": 1}, CPU, continued=False).write()
    assert RunRecord(tmp_path / "out", {"a": 2}, CPU, continued=True).earlier == []
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})


def test_a_refused_run_leaves_no_record(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "out"
    Output(out, {"source model": "another"}, 4, resume=False).lock.close()
    with pytest.raises(QtoolError, match="started with another"):
        run(source, out, resume=True)
    assert not record_path(out).exists()
