"""eval.json: no finished task is run twice, an interruption loses one task, unlike things are not
mixed.
"""

import copy
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
from functools import partial

import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from qtool.errors import CheckFailed, QtoolError
from qtool.eval import saved
from qtool.eval.evaluate import LoadedTask, evaluate, load_tasks
from qtool.eval.results import Metric, TaskResult
from qtool.io.model_card import RESULTS
from tests.forks import end, run, start

TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times! " * 4
ROW = {"query": "a", "choices": ["b", "c"], "gold": 0}
CPU = {"device": "cpu"}


@pytest.fixture
def data_dir(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "c4.txt").write_text(TEXT)
    return tmp_path


def checkpoint(directory, shard=b"weights"):
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "a.safetensors").write_bytes(shard)
    recorded = {"shards": {"a.safetensors": hashlib.sha256(shard).hexdigest()}}
    (directory / "qtool.json").write_text(json.dumps(recorded))
    return directory


@pytest.fixture
def store(tmp_path):
    return checkpoint(tmp_path / "model")


def refuse():
    raise AssertionError("the model was loaded")


def test_the_second_time_needs_no_model_and_gives_the_same(model, tokenizer, data_dir, store):
    asked = load_tasks(["c4", "mine"], tokenizer, data_dir=data_dir, seqlen=20)
    first = saved.results(asked, store, lambda: model, store, CPU)
    assert first == evaluate(["c4", "mine"], model, tokenizer, data_dir=data_dir, seqlen=20)
    assert saved.results(asked, store, refuse, store, CPU) == first
    assert (
        saved.results(
            load_tasks(["mine"], tokenizer, data_dir=data_dir), store, refuse, store, CPU
        )["mine"]
        == first["mine"]
    )


@pytest.mark.parametrize(
    "options",
    [{"seqlen": 16}, {"limit": 2}, {"text": TEXT.upper()}, {"model": "n"}, {"on": "cuda"}],
)
def test_another_question_is_asked_anew(model, tokenizer, data_dir, store, options):
    saved.results(
        load_tasks(["c4"], tokenizer, data_dir=data_dir, seqlen=20),
        store,
        lambda: model,
        store,
        CPU,
    )
    (data_dir / "c4.txt").write_text(options.pop("text", TEXT))
    other = checkpoint(data_dir / "other", b"other weights")
    asked_of = other if options.pop("model", None) else store
    device = {"device": options.pop("on", "cpu")}
    asked = load_tasks(["c4"], tokenizer, data_dir=data_dir, **{"seqlen": 20, **options})
    with pytest.raises(AssertionError, match="the model was loaded"):
        saved.results(asked, asked_of, refuse, store, device)
    saved.results(asked, asked_of, lambda: model, store, device)
    assert len(saved.read(store)) == 2


def test_another_tokenizer_of_the_same_model_is_asked_anew(tokenizer, data_dir):
    def facts(of):
        return [task.facts for task in load_tasks(["c4", "mine"], of, data_dir=data_dir)]

    changed = copy.deepcopy(tokenizer)
    assert facts(changed) == facts(tokenizer)
    changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert all(a != b for a, b in zip(facts(changed), facts(tokenizer), strict=True))
    without_bos = copy.deepcopy(tokenizer)
    without_bos.bos_token = None  # which lm-eval puts before what has no context
    assert all(a != b for a, b in zip(facts(without_bos), facts(tokenizer), strict=True))


def test_a_tokenizer_in_python_is_told_from_another(data_dir):
    few, many = (
        load_tasks(["c4"], ByT5Tokenizer(extra_ids=count), data_dir=data_dir) for count in (1, 2)
    )
    assert few[0].facts != many[0].facts


def test_other_questions_of_a_task_of_the_same_name(tokenizer, data_dir):
    [before] = load_tasks(["mine"], tokenizer, data_dir=data_dir)
    (data_dir / "tasks" / "mine.jsonl").write_text(json.dumps(ROW | {"gold": 1}) + "\n")
    [after] = load_tasks(["mine"], tokenizer, data_dir=data_dir)
    assert before.facts["sha256"] != after.facts["sha256"]
    assert {**before.facts, "sha256": ""} == {**after.facts, "sha256": ""}


def test_an_interruption_keeps_what_is_finished(store):
    def result(_):
        return [TaskResult("one", "zero_shot", "f", 9, {"acc": Metric(0.5, 0.1, True)})]

    def interrupt(_):
        raise KeyboardInterrupt

    asked = [
        LoadedTask("one", {"task": "one"}, result),
        LoadedTask("two", {"task": "two"}, interrupt),
    ]
    with pytest.raises(KeyboardInterrupt):
        saved.results(asked, store, lambda: object(), store, CPU)
    assert saved.results(asked[:1], store, refuse, store, CPU)["one"].samples == 9


@pytest.mark.parametrize(
    ("module", "function", "code"),
    [(os, "fsync", errno.ENOSPC), (fcntl, "flock", errno.ENOLCK)],
)
def test_a_result_that_the_disk_does_not_take_is_given(
    store, monkeypatch, caplog, module, function, code
):
    found = TaskResult("a", "zero_shot", "", 1, {"acc": Metric(0.5, None, True)})
    tasks = [LoadedTask(name, {"task": name}, lambda _: [found]) for name in ("a", "b")]

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, function, fail)
    assert saved.results(tasks, store, lambda: "model", store, CPU).tasks == [found, found]
    assert [line.split(":")[0] for line in caplog.messages] == [
        f"{name} is not saved in {store / saved.FILE}" for name in ("a", "b")
    ]
    assert not list(store.glob("*.lock"))


@pytest.mark.parametrize("step", range(4))
def test_an_evaluation_that_is_killed_while_it_saves_leaves_the_same_files(store, step):
    tasks = [LoadedTask("a", {"task": "a"}, lambda _: [TaskResult("a", "zero_shot", "", 1, {})])]
    (store / saved.CARD).write_text("\n".join(RESULTS))

    def evaluated():
        saved.results(tasks, store, lambda: "model", store, CPU)
        return {path.name: path.read_bytes() for path in store.iterdir()}

    def killed():
        steps = iter(range(step))

        def kill_at(event, arguments):
            writes = event in ("open", "os.rename") and str(arguments[0]).endswith(".tmp")
            if writes and next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill_at)
        evaluated()

    assert run(killed, store.with_name("killed")).code == -signal.SIGKILL
    after = evaluated()
    for name in (saved.FILE, saved.CARD):
        (store / name).unlink()
    (store / saved.CARD).write_text("\n".join(RESULTS))
    assert evaluated() == after


def test_results_are_given_though_new_file_times_are_not_taken(store, monkeypatch, caplog):
    tasks = [LoadedTask("a", {"task": "a"}, lambda _: [TaskResult("a", "zero_shot", "", 1, {})])]
    first = saved.results(tasks, store, lambda: "model", store, CPU)
    monkeypatch.setattr(saved, "files_seen", lambda _: {"touched": 1})

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    assert saved.results(tasks, store, refuse, store, CPU) == first
    assert caplog.messages[0].startswith("a is not saved in ")


def test_processes_that_save_at_once_lose_nothing(store):
    def save(model):
        for number in range(50):
            tasks = [TaskResult("t", "zero_shot", "f", 9, {"acc": Metric(0.5, 0.1, True)})]
            saved.save(store, saved.SavedResult(model, {"number": number}, tasks))

    folders = {model: store.with_name(model) for model in ("one", "two")}
    processes = [start(partial(save, model), folder) for model, folder in folders.items()]
    ended = [end(*one) for one in zip(processes, folders.values(), strict=True)]
    assert [one.code for one in ended] == [0, 0], ended
    found = {(one.model, one.facts["number"]) for one in saved.read(store)}
    assert found == {(model, number) for model in folders for number in range(50)}
    assert not list(store.glob("*.lock"))


@pytest.mark.parametrize(
    "found",
    [
        "",
        "[]",
        '{"answers": [{}]}',
        '{"answers": [{"model": "m", "facts": {}, "tasks": [{"task": "c4"}]}]}',
        '{"answers": [{"model": "m", "facts": {}, "tasks": [{"metrics": [], "details": {}}]}]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_named(found, store):
    (store / saved.FILE).write_text(found)
    with pytest.raises(QtoolError, match=r"eval.json is damaged .*: remove it"):
        saved.read(store)


def test_identity_survives_a_copy_and_tells_other_bytes(store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    assert saved.identity(copy) == saved.identity(store)
    other = checkpoint(tmp_path / "other", b"other weights")
    assert saved.identity(other) != saved.identity(store)


def test_a_changed_shard_is_noticed_and_a_copy_keeps_its_results(store, tmp_path, monkeypatch):
    """Whether it is of another size or only of another time; hashes are checked once."""
    result = TaskResult("one", "zero_shot", "f", 9, {"acc": Metric(0.5, 0.1, True)})
    asked = [LoadedTask("one", {"task": "one"}, lambda _: [result])]
    shard = store / "a.safetensors"
    shard.write_bytes(b"changed")
    with pytest.raises(CheckFailed, match=r"a\.safetensors: the file's sha256"):  # none saved yet
        saved.results(asked, store, refuse, store, CPU)
    shard.write_bytes(b"weights")
    saved.results(asked, store, lambda: object(), store, CPU)
    for wrong in (b"changed", b"longer than it was"):
        shard.write_bytes(wrong)
        os.utime(shard, ns=(1, len(wrong)))
        with pytest.raises(CheckFailed, match=r"a\.safetensors: the file's sha256"):
            saved.results(asked, store, refuse, store, CPU)
    shard.write_bytes(b"weights")
    os.utime(shard, ns=(1, 1))
    assert saved.results(asked, store, refuse, store, CPU)["one"] == result
    monkeypatch.setattr(saved, "require_intact", None)
    assert saved.results(asked, store, refuse, store, CPU)["one"] == result
    assert len(saved.read(store)) == 1
