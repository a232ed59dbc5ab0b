"""What may happen to a run: it ends with one clear sentence, and goes on to the same bytes."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qtool
from qtool import plugins, recipes
from qtool.calibration.rounding.gptq import rounding
from qtool.errors import NoSpace, QtoolError
from qtool.io import safetensors
from qtool.io.output import difference
from qtool.io.source import Checkpoint
from qtool.io.write_behind import WriteBehind
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import activation_bytes, working_bytes
from qtool.pipeline.quantize import Calibration, quantize
from qtool.pipeline.streaming import activations, shards, streamed_blocks
from qtool.pipeline.streaming.built_blocks import BuiltBlocks
from qtool.pipeline.streaming.shards import Shards
from qtool.pipeline.streaming.snapshots import Snapshots
from qtool.pipeline.summary import summarize
from tests.conftest import MakeModel, save_model
from tests.pipeline.test_quantize import files

RECIPE: dict[str, Any] = {
    "scheme": "w4a8-lqq",
    "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"}],
    "transforms": [{"smooth": {"steps": 1}}],
    "rounding": {"gptq": {"rounds": 0, "clip_steps": 2}},
}
TOKENS = torch.arange(4 * 32).view(4, 32) * 7 % 320


def run(source: Path, out: Path, recipe: dict[str, Any] = RECIPE, **options: Any) -> Path:
    calibration = Calibration(list(TOKENS.split(2)), {"text": "numbers"})
    return quantize(
        Checkpoint(source), recipes.parse(recipe, "test"), out, calibration=calibration, **options
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "llama"
    return save_model(directory, num_hidden_layers=4, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    return files(run(source, tmp_path_factory.mktemp("whole") / "out"))


class _Stopped(BaseException):
    pass


@pytest.fixture(scope="module")
def first_half(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that stops after four shards."""

    def stop(done: int, *_: object) -> None:
        if done == 4:
            raise _Stopped

    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(_Stopped):
        run(source, out, progress=stop)
    return out.with_name("out.partial")


@pytest.fixture
def partial(first_half: Path, tmp_path: Path) -> Path:
    """The directory of a run to ``tmp_path / "out"`` that stopped after four shards."""
    return shutil.copytree(first_half, tmp_path / "out.partial")


def failing_at(call: int, error: BaseException, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose ``call``-th call raises ``error``."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return function(*args, **kwargs)

    return wrapped


def test_a_source_that_changes_meanwhile_makes_no_result(source: Path, tmp_path: Path) -> None:
    """The shards before are of the model that was there, those after of another one."""
    model, out = shutil.copytree(source, tmp_path / "model"), tmp_path / "out"

    def replace(done: int, *_: object) -> None:
        if done == 4:
            os.utime(model / "model.safetensors", ns=(0, 0))

    with pytest.raises(QtoolError, match="model changed while it was read"):
        run(model, out, progress=replace)
    assert not out.exists()
    with pytest.raises(QtoolError, match="was started with another source model"):
        run(model, out, resume=True)


def test_a_tokenizer_that_is_removed_meanwhile_is_missed(source: Path, tmp_path: Path) -> None:
    """A result without it would look whole."""
    model = shutil.copytree(source, tmp_path / "model")
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text("{}")

    def removed(*_: object) -> None:
        tokenizer.unlink(missing_ok=True)

    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=tokenizer.name):
        quantize(Checkpoint(model), recipes.load("w4a16"), out, progress=removed)
    assert not out.exists()


@pytest.mark.usefixtures("partial")
def test_another_plugin_would_make_other_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "versions", lambda: {"mine": "2.0"})
    with pytest.raises(QtoolError, match="was started with another set of plugins"):
        run(source, tmp_path / "out", resume=True)


@pytest.mark.parametrize("call", [5, 9])
def test_out_of_memory_beside_the_forwards(call, source, whole, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out"
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "solve", failing_at(call, error, rounding.solve))
        with pytest.raises(
            QtoolError,
            match=r"cpu ran out of memory \(CUDA out of memory.*after . of 6 shards.*--resume",
        ):
            run(source, out)
    assert not out.exists()
    assert files(run(source, out, resume=True)) == whole


def test_a_run_that_was_refused_midway_gives_way_to_the_next(  # type: ignore[no-untyped-def]
    source, whole, tmp_path, monkeypatch
) -> None:
    out, refused = tmp_path / "out", QtoolError("these weights cannot be rounded")
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "solve", failing_at(9, refused, rounding.solve))
        with pytest.raises(QtoolError, match="cannot be rounded"):
            run(source, out, RECIPE | {"transforms": []})
    assert list((tmp_path / "out.partial").glob("model-*"))
    assert files(run(source, out)) == whole


def test_a_run_that_was_refused_before_its_first_shard_leaves_nothing(  # type: ignore[no-untyped-def]
    source, tmp_path, monkeypatch
) -> None:
    refused = QtoolError("no such embedding")
    monkeypatch.setattr(Shards, "make", failing_at(1, refused, Shards.make))
    with pytest.raises(QtoolError, match="no such embedding"):
        run(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_directories_above_a_refused_run_go_with_it(make_model: MakeModel, tmp_path: Path) -> None:
    bad = [[10**6] * 64]  # no token of the model
    with pytest.raises(QtoolError, match="token"):
        out = tmp_path / "new" / "deep" / "out"
        qtool.quantize(make_model(), "w4a8-lqq", calibration=bad, samples=1, out=out)
    assert not (tmp_path / "new").exists()


def test_a_refused_run_that_is_resumed_and_killed_is_kept(  # type: ignore[no-untyped-def]
    source, whole, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "out"
    for call, error in ((5, QtoolError("refused")), (1, _Stopped())):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(rounding, "solve", failing_at(call, error, rounding.solve))
            run(source, out, resume=True)
    with pytest.raises(QtoolError, match="holds an unfinished run"):
        run(source, out)
    assert files(run(source, out, resume=True)) == whole


def test_a_file_that_cannot_be_read_for_now_does_not_refuse_the_run(  # type: ignore[no-untyped-def]
    source, whole, tmp_path, monkeypatch
) -> None:
    out, error = tmp_path / "out", OSError(errno.EIO, "Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.os, "preadv", failing_at(30, error, os.preadv))
        with pytest.raises(QtoolError, match="cannot be read: Input/output error"):
            run(source, out)
    with pytest.raises(QtoolError, match="holds an unfinished run"):
        run(source, out)
    assert files(run(source, out, resume=True)) == whole


def test_out_of_memory_where_nothing_is_calibrated(source, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """There are no activations to keep elsewhere."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    monkeypatch.setattr(
        streamed_blocks, "round_to_nearest", failing_at(9, error, streamed_blocks.round_to_nearest)
    )
    with pytest.raises(QtoolError, match=r"kept: free memory, then --resume$"):
        quantize(Checkpoint(source), recipes.load("w4a16", "fast"), tmp_path / "out")


def test_the_disk_fills_up_while_blocks_are_computed(source, whole, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    out, full = tmp_path / "out", OSError(errno.ENOSPC, "No space left on device")

    def fsync(file: int) -> None:
        if "model-00003" in os.readlink(f"/proc/self/fd/{file}"):
            raise full

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.os, "fsync", fsync)
        with pytest.raises(QtoolError, match=r"no space left on the disk .*model-00003"):
            run(source, out)
    kept = sorted(path.name for path in (tmp_path / "out.partial").iterdir())
    assert "model-00002-of-00006.safetensors" in kept and not [
        name for name in kept if name.endswith(".tmp")
    ]
    assert files(run(source, out, resume=True)) == whole


def test_a_disk_that_takes_nothing_is_left_as_it_was(source, whole, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.os, "fsync", fsync)
        with pytest.raises(QtoolError, match=r"no space left on the disk .*job.json"):
            run(source, out)
        assert not list(tmp_path.iterdir())
        (partial / ".run").mkdir(parents=True)  # of a run that was killed just then
        with pytest.raises(QtoolError, match=r"no space left on the disk .*job.json"):
            run(source, out, resume=True)
    assert partial.is_dir()
    assert files(run(source, out, resume=True)) == whole


def test_every_file_is_on_the_disk_before_the_result_has_its_name(  # type: ignore[no-untyped-def]
    source, tmp_path, monkeypatch
) -> None:
    """Else a loss of power may leave an empty file in a result that looks whole."""
    stored: set[tuple[int, int]] = set()

    def fsync(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        stored.add((stat.st_ino, stat.st_size))

    monkeypatch.setattr(safetensors.os, "fsync", fsync)
    out = run(source, tmp_path / "out")
    written = {path.name: path.stat() for path in out.rglob("*") if path.is_file()}
    assert "generation_config.json" in written
    assert not [name for name, f in written.items() if (f.st_ino, f.st_size) not in stored]


def test_a_side_file_in_a_folder_that_was_written_halfway_is_removed(
    source: Path, partial: Path, tmp_path: Path
) -> None:
    unfinished = partial / "additional_chat_templates" / "a.jinja.1.tmp"
    unfinished.parent.mkdir()
    unfinished.touch()
    assert not [*run(source, tmp_path / "out", resume=True).rglob("*.tmp")]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "\x00\x00"])
@pytest.mark.parametrize("record", ["job.json", "shard-00002.json", "shard-00003.json"])
def test_a_damaged_journal(  # type: ignore[no-untyped-def]
    damage: str, record: str, source: Path, whole, partial: Path, tmp_path: Path
) -> None:
    (partial / ".run" / record).write_text(damage)
    assert files(run(source, tmp_path / "out", resume=True)) == whole


@pytest.mark.parametrize(
    ("record", "old", "new"),
    [
        ("job.json", "dual-mma", "dual-mme"),
        ("shard-00002.json", "q_proj", "p_proj"),
        ("shard-00002.json", '"bytes"', '"bytds"'),
        ("shard-00002.json", '"notes"', '"nodes"'),
    ],
)
def test_a_flipped_bit_in_a_journal(  # type: ignore[no-untyped-def]
    record: str, old: str, new: str, source: Path, whole, partial: Path, tmp_path: Path
) -> None:
    """It is JSON still, and would be believed."""
    path = partial / ".run" / record
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))
    assert path.read_text() != text
    assert files(run(source, tmp_path / "out", resume=True)) == whole


def test_a_damaged_journal_does_not_mix_two_jobs(
    source: Path, partial: Path, tmp_path: Path
) -> None:
    other = RECIPE | {"transforms": []}
    expected = files(run(source, tmp_path / "whole", other))
    (partial / ".run" / "job.json").write_text("{")
    assert files(run(source, tmp_path / "out", other, resume=True)) == expected


@pytest.mark.parametrize("change", ["cut", "flip", "gone"])
def test_a_shard_changed_behind_our_back(  # type: ignore[no-untyped-def]
    change: str, source: Path, whole, partial: Path, tmp_path: Path
) -> None:
    shard = next(partial.glob("model-00002*"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.unlink() if change == "gone" else shard.write_bytes(
        data[:-9] if change == "cut" else data
    )
    assert files(run(source, tmp_path / "out", resume=True)) == whole


@pytest.mark.usefixtures("partial")
def test_a_changed_recipe_is_refused_and_the_difference_named(source: Path, tmp_path: Path) -> None:
    changed = RECIPE | {"transforms": [{"smooth": {"steps": 2}}]}
    with pytest.raises(QtoolError, match=r"another recipe \(methods\[0\].smooth.steps: 1, now 2\)"):
        run(source, tmp_path / "out", changed, resume=True)
    with pytest.raises(QtoolError, match=r'another recipe \(kv: null, now "kv4"\)'):
        run(source, tmp_path / "out", changed | {"kv": "kv4"}, resume=True)


@pytest.mark.usefixtures("partial")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (("w4a8-lqq", "best"), 'variant: "custom", now "best"'),
        (("w4a8-qoq", "paper"), 'scheme: "w4a8-lqq", now "w4a8-qoq"'),
    ],
)
def test_another_recipe_is_refused_by_what_the_user_named(
    name: tuple[str, str], what: str, source: Path, tmp_path: Path
) -> None:
    calibration = Calibration(list(TOKENS.split(2)), {"text": "numbers"})
    with pytest.raises(QtoolError, match=re.escape(f"another recipe ({what})")):
        quantize(
            Checkpoint(source),
            recipes.load(*name),
            tmp_path / "out",
            calibration=calibration,
            resume=True,
        )


def test_a_changed_rule_is_named_and_not_what_follows_from_it(source: Path, tmp_path: Path) -> None:
    """The sentence on the linears that no rule matches differs too."""

    def stop(*_: object) -> None:
        raise _Stopped

    (rule,) = RECIPE["layers"]
    mlp, up = (RECIPE | {"layers": [rule | {"match": name}]} for name in ("mlp", "up_proj"))
    with pytest.raises(_Stopped):
        run(source, tmp_path / "out", mlp, progress=stop)
    with pytest.raises(QtoolError, match=r'\(rules\[0\].match: "mlp", now "up_proj"\)'):
        run(source, tmp_path / "out", up, resume=True)


@pytest.mark.usefixtures("partial")
def test_a_changed_source_is_refused(source: Path, tmp_path: Path) -> None:
    other = shutil.copytree(source, tmp_path / "llama")  # with its times
    os.utime(other / "model.safetensors", ns=(1, 1))
    with pytest.raises(QtoolError, match="started with another source model"):
        run(other, tmp_path / "out", resume=True)


@pytest.mark.parametrize("rounding", ["gptq", "rtn"])
def test_a_linear_of_zeros_has_no_error(
    make_model: MakeModel, tmp_path: Path, rounding: str
) -> None:
    """As in blocks that were added to a model; rounding to nearest takes any finite weight too."""
    model, zeros = make_model("llama"), "model.layers.1.mlp.down_proj"
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{zeros}.weight"].zero_()
    if rounding == "rtn":
        tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = 3e38
    save_file(tensors, path, {"format": "pt"})
    out = run(model, tmp_path / "out", RECIPE | {"transforms": [], "rounding": rounding})
    errors = summarize(out, Checkpoint(model), "llama").errors
    assert errors.pop(zeros) == 0
    assert len(errors) == 13 and all(0 < error < 1 for error in errors.values())


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_the_runs_name_that_no_run_made_is_left_alone(
    source: Path, tmp_path: Path, resume: bool
) -> None:
    out, partial, elsewhere = (tmp_path / name for name in ("out", "out.partial", "elsewhere"))

    def refused() -> None:
        with pytest.raises(QtoolError, match=r"out.partial is not of an unfinished run"):
            run(source, out, resume=resume)
        assert not out.exists()

    elsewhere.mkdir()
    partial.symlink_to(elsewhere)
    refused()
    assert not files(elsewhere)
    partial.unlink()
    partial.mkdir()
    (partial / "README.md").write_text("notes")
    (partial / "a.tmp").write_text("mine")
    before = files(partial)
    refused()
    assert files(partial) == before


def test_the_first_difference_is_named() -> None:
    assert difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a[1].b: 2, now 3"
    assert difference({"a": None}, {}) == "a: null, now null"
    assert difference({}, {"c": [1]}) == "c: null, now [1]"
    assert difference("x", "y") == '"x", now "y"'
    assert difference([1], [1, 2]) == "[1]: null, now 2"


@pytest.mark.parametrize("resumed", [False, True])
def test_activations_in_a_file_change_nothing(  # type: ignore[no-untyped-def]
    resumed: bool, source: Path, whole, tmp_path: Path, request
) -> None:
    if resumed:
        request.getfixturevalue("partial")
    assert files(run(source, tmp_path / "out", activations="disk", resume=resumed)) == whole


def test_on_a_cpu_the_host_is_the_device(source: Path, whole, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert files(run(source, tmp_path / "out", activations="host")) == whole


@pytest.mark.parametrize(("room", "waits"), [(0.0, True), (math.inf, False)])
def test_inputs_are_stored_before_outputs_are_made_where_there_is_no_room_for_both(  # type: ignore[no-untyped-def]
    room: float, waits: bool, source: Path, whole, tmp_path: Path, monkeypatch
) -> None:
    inside: list[bool] = []
    own, advance = Snapshots.settle, BuiltBlocks._before_inputs_change

    def before(blocks: BuiltBlocks) -> None:
        monkeypatch.setattr(Snapshots, "settle", lambda self: inside.append(True) or own(self))
        advance(blocks)
        monkeypatch.setattr(Snapshots, "settle", own)

    monkeypatch.setattr(BuiltBlocks, "_before_inputs_change", before)
    monkeypatch.setattr(shards, "place_for", lambda *_: ("device", room))
    assert files(run(source, tmp_path / "out")) == whole
    assert bool(inside) == waits


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, NoSpace, r"no space left on the disk .*writing activations-0-00001"),
        (errno.EIO, OSError, r"Input/output error: .*activations-0-00001"),
    ],
)
def test_no_file_for_the_activations(
    number: int,
    kind: type[Exception],
    said: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(activations.os, "posix_fallocate", failing)
    with pytest.raises(kind, match=said):
        run(source, tmp_path / "out", activations="disk")
    assert not list(tmp_path.rglob("activations-*"))


def test_activations_go_to_the_first_place_with_room(source: Path) -> None:
    job = Job.of(Checkpoint(source).config, recipes.parse(RECIPE, "test"))
    cuda, cpu, tokens = torch.device("cuda"), torch.device("cpu"), 1 << 20
    sizes = tokens, 2048, cuda
    kept, working = activation_bytes(job, *sizes), working_bytes(job, *sizes)
    assert kept == 2 * 2 * tokens * 128  # bytes; the quantized path and the float model's beside it
    memory = (kept + working) / activations.DEVICE_SHARE
    assert activations.device_room(job, *sizes, memory) == pytest.approx(kept)
    assert activations.device_room(job, *sizes, memory, beside=kept // 2) == pytest.approx(kept / 2)
    assert activations.device_room(job, *sizes, working) == 0
    assert activations.choose(job, *sizes, kept, 0) == "device"
    assert activations.choose(job, *sizes, 0, 3 * kept) == "host"
    assert activations.choose(job, *sizes, kept / 2, kept) == "both"
    assert activations.choose(job, *sizes, 0, kept) == "disk"
    assert activations.choose(job, tokens, 2048, cpu, 10 * kept, 0) == "device"
    assert activations.choose(job, tokens, 2048, cpu, kept, 9 * kept) == "disk"


def test_a_write_that_fails_stops_the_run_and_what_was_submitted_is_written() -> None:
    finished: list[int] = []
    submitted = Event()

    def fail() -> None:
        submitted.wait()
        raise QtoolError("no space left")

    with pytest.raises(QtoolError, match="no space"), WriteBehind() as writer:
        writer.submit(fail, lambda: None)
        writer.submit(lambda: finished.append(2), lambda: None)
        submitted.set()
        writer.wait()
    assert finished == [2]


def test_records_name_their_job(partial: Path) -> None:
    records = [json.loads(path.read_text()) for path in (partial / ".run").glob("shard-*.json")]
    assert len({record["job"] for record in records}) == 1
