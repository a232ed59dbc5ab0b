"""A killed run goes on from the block it was at: to the same bytes, and no block is run twice."""

import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool import recipes
from qtool.calibration.forwards import propagate
from qtool.io.output import Output
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from qtool.pipeline.streaming import built_blocks, snapshots
from tests.conftest import save_model
from tests.pipeline.test_quantize import files

TOKENS = torch.arange(6 * 32).view(6, 32) * 7 % 320
GPTQ = {"gptq": {"rounds": 0, "clip_steps": 2}}
#: without and with the float model's activations beside the quantized path, and with gradients
ROUNDINGS: dict[str, Any] = {
    "one-path": "rtn",
    "two-paths": GPTQ,
    "gradients": {"gptq": GPTQ["gptq"] | {"output_hessian": True}},
}
BLOCKS = 5


def run(source: Path, out: Path, rounding: str = "two-paths", **options: Any) -> Path:
    recipe = {
        "scheme": "w4a8-lqq",
        "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"}],
        "transforms": [{"smooth": {"steps": 1}}],
        "rounding": ROUNDINGS[rounding],
    }
    data = Calibration(list(TOKENS.split(2)), {"text": "numbers"})
    return quantize(
        Checkpoint(source), recipes.parse(recipe, "test"), out, calibration=data, **options
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "llama"
    return save_model(directory, num_hidden_layers=BLOCKS, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    return files(run(source, tmp_path_factory.mktemp("whole") / "out"))


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that batches are propagated through, in order."""
    seen: list[int] = []

    def recorded(block: Any, batches: Any) -> None:
        seen.append(block.index)
        propagate(block, batches)

    monkeypatch.setattr(built_blocks, "propagate", recorded)
    monkeypatch.setattr(snapshots, "ALLOWANCE", float("inf"))
    return seen


class _Stopped(BaseException):
    pass


def stopped(source: Path, out: Path, after: int, **options: Any) -> Path:
    """A run that stops after ``after`` shards; returns the directory of its own files."""

    def stop(done: int, *_: object) -> None:
        if done == after:
            raise _Stopped

    with pytest.raises(_Stopped):
        run(source, out, progress=stop, **options)
    return out.with_name(out.name + ".partial") / ".run"


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("activations-*.safetensors"))


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_no_block_is_run_twice(
    rounding: str, place: str, source: Path, tmp_path: Path, forwarded: list[int]
) -> None:
    whole = files(run(source, tmp_path / "whole", rounding, activations=place))
    assert sorted(set(forwarded)) == [0, 1, 2, 3]
    del forwarded[:]
    stopped(source, tmp_path / "out", 5, rounding=rounding, activations=place)
    before = max(forwarded)
    del forwarded[:]
    resumed = run(source, tmp_path / "out", rounding, activations=place, resume=True)
    assert forwarded and min(forwarded) >= before  # a block may have been under way
    assert files(resumed) == whole


def test_only_the_newest_are_kept(source: Path, tmp_path: Path, forwarded: list[int]) -> None:
    directory = stopped(source, tmp_path / "out", BLOCKS + 2)  # embedding, blocks, head: all
    assert kept(directory) == [f"activations-{BLOCKS - 1:05d}-0-of-1.safetensors"]
    run(source, tmp_path / "out", resume=True)
    assert not list((tmp_path / "out").glob(".run"))


@pytest.mark.parametrize("change", ["cut", "flip", "no record"])
def test_damaged_activations_are_computed_again(
    change: str, source: Path, whole: dict[str, bytes], tmp_path: Path, forwarded: list[int]
) -> None:
    directory = stopped(source, tmp_path / "out", 5)
    for path in directory.glob("activations-*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data[:-9] if change == "cut" else data)
        if change == "no record":
            path.with_suffix(".json").unlink()
    del forwarded[:]
    assert files(run(source, tmp_path / "out", resume=True)) == whole
    assert min(forwarded) == 0


def test_a_damaged_shard_needs_earlier_activations(
    source: Path, whole: dict[str, bytes], tmp_path: Path, forwarded: list[int]
) -> None:
    stopped(source, tmp_path / "out", 5)
    next((tmp_path / "out.partial").glob("model-00002*")).unlink()
    assert files(run(source, tmp_path / "out", resume=True)) == whole


def test_activations_of_other_ranks_are_computed_again(
    source: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    forwarded: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = stopped(source, tmp_path / "out", 5)
    for path in directory.glob("activations-*"):
        path.rename(path.with_name(path.name.replace("0-of-1", "0-of-2")))
    # this run's own file, of a write that was killed
    (directory / "activations-00001-0-of-1.safetensors").touch()
    caplog.clear()
    assert files(run(source, tmp_path / "out", resume=True)) == whole
    lines = [record.message for record in caplog.records if "world size 2" in record.message]
    assert lines == [
        "the activations on disk are of world size 2, this run has 1: the finished blocks are run "
        "again"
    ]


def test_a_write_that_takes_too_long_is_given_up(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run does not wait for it, and what was not whole leaves nothing behind."""
    monkeypatch.setattr(snapshots, "ALLOWANCE", float("-inf"))
    monkeypatch.setattr(snapshots.Future, "done", lambda self: False)
    given_up = snapshots.Snapshot.tensors

    def late(self: snapshots.Snapshot) -> Iterator[Any]:
        self.given_up.wait(10)
        return given_up(self)

    monkeypatch.setattr(snapshots.Snapshot, "tensors", late)
    assert files(run(source, tmp_path / "out")) == whole


def test_a_full_disk_keeps_no_activations(
    source: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(Output, "missing_bytes", lambda self, specs: 1 << 60)
    monkeypatch.setattr("qtool.pipeline.quantize._require_space", lambda *_: None)
    assert files(run(source, tmp_path / "out")) == whole
    (said,) = (r.message for r in caplog.records if "no room on the disk" in r.message)
    assert re.fullmatch(
        r"no room on the disk for the activations \(\d+ kB\): "
        "--resume would run the finished blocks again",
        said,
    )


PACKAGE = os.sep + "qtool" + os.sep


def calls_of(function: Callable[[], object]) -> int:
    """How many functions of the package ``function`` calls."""
    calls = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and PACKAGE in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def killed_after(calls: int, function: Callable[[], object]) -> None:
    """Run ``function`` in a child process that is killed at a call of the package's functions."""
    child = os.fork()
    if not child:
        counter = count()

        def profile(frame: Any, event: str, argument: object) -> None:
            if event == "call" and PACKAGE in frame.f_code.co_filename and next(counter) == calls:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_sigkill_in_a_loop(source: Path, tmp_path: Path) -> None:
    """Whatever the moments, the run ends, at the same bytes."""
    calls = calls_of(lambda: run(source, tmp_path / "whole"))
    whole, out = files(tmp_path / "whole"), tmp_path / "out"
    moments, attempts = random.Random(1), 0
    while not out.exists():
        attempts += 1
        assert attempts < 50
        killed_after(moments.randint(calls // 4, calls // 2), lambda: run(source, out, resume=True))
    assert attempts > 2
    assert files(run(source, out, resume=True)) == whole
