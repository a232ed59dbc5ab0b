"""Several processes on one job: the same bytes as one, and after a failure any number go on."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import qtool
from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Transform
from qtool.cli import cli, main
from qtool.distributed import ranks, watch
from qtool.errors import QtoolError
from tests import forks
from tests.conftest import copy_tokenizer, save_model
from tests.distributed import rank_cases
from tests.forks import Ended
from tests.models.tiny import save_tiny
from tests.pipeline.test_quantize import files

ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
    "--num_processes",
    "2",
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(launcher: Sequence[str], *arguments: str) -> Ended:
    """Run ``-m arguments`` on two ranks."""
    command = [sys.executable, "-m", *launcher, "-m", *arguments]
    done = subprocess.run(
        command,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=forks.LONGEST,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def command_line(*arguments: str) -> Callable[[], None]:
    """``qtool ARGUMENTS`` as its entry point runs it."""

    def run() -> None:
        sys.argv = ["qtool", *arguments]
        main()

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in rank_cases.MODELS:
        save_model(directory / name, name, head_dim=64)
    for name in rank_cases.TINY:
        save_tiny(name, directory / name)
    return directory


@pytest.fixture(scope="module")
def alone(models: Path) -> Path:
    out = models / "alone"
    out.mkdir()
    rank_cases.make_all(models, out)
    return out


@pytest.fixture(scope="module", params=[2, 3], ids=lambda count: f"{count} ranks")
def together(request: pytest.FixtureRequest, models: Path) -> Path:
    out = models / f"ranks-{request.param}"
    out.mkdir()
    ended = forks.run_ranks(request.param, lambda: rank_cases.make_all(models, out), models)
    assert not any(rank.code for rank in ended), ended
    return out


def test_one_process_keeps_the_gpu_that_its_caller_made_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its number: to another thread a bare ``cuda`` is GPU 0."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device, expected in (("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")):
        with ranks.process_group(device) as own:
            assert own == expected


@pytest.mark.parametrize("case", [name for name in rank_cases.CASES if name != "llama-distill"])
def test_the_same_bytes_as_one_process(case: str, together: Path, alone: Path) -> None:
    assert files(together / case) == files(alone / case)


def test_distillation_ends_as_well_as_one_process(together: Path, alone: Path) -> None:
    """Its gradients are sums over ranks, and Adam's steps feel the last bits."""
    curves = [
        json.loads((d / "llama-distill" / "qtool.json").read_text())["blocks"]
        for d in (together, alone)
    ]
    for ours, theirs in zip(*curves, strict=True):
        torch.testing.assert_close(
            ours["distill"]["loss"], theirs["distill"]["loss"], rtol=0.02, atol=0
        )


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads text."""
    directory = save_model(
        tmp_path_factory.mktemp("readable"), vocab_size=4096, num_hidden_layers=4
    )
    copy_tokenizer(directory)
    return directory


def quantize(source: Path, out: Path, *options: str) -> tuple[str, ...]:
    return ("quantize", str(source), "--scheme", "w4a8-lqq", "--out", str(out), *options)


CALIBRATED = shlex.split("--recipe best --calib demo --samples 4 --seqlen 32")


def test_a_killed_rank_ends_the_run_and_others_go_on(readable: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert not CliRunner().invoke(cli, quantize(readable, whole, *CALIBRATED)).exception

    arguments = quantize(readable, cut, *CALIBRATED)
    killed = launch(TORCHRUN, "tests.distributed.killed_rank", *arguments)
    assert killed.code and "SIGKILL" in killed.stderr
    assert not cut.exists()

    resume = command_line(*arguments, "--resume")
    ended = forks.run_ranks(3, resume, tmp_path)
    assert not any(rank.code for rank in ended), ended
    assert files(cut) == files(whole)
    assert re.search(r"resuming .*: [1-4] of 6 shards are whole", ended[0].stderr)
    assert "resuming" not in ended[1].stderr + ended[2].stderr


def test_two_machines_meet(readable: Path, tmp_path: Path) -> None:
    """A torchrun on each of two machines, which here are one."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert not CliRunner().invoke(cli, quantize(readable, alone, *CALIBRATED)).exception
    torchrun = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    meet = ("--rdzv-backend", "c10d", "--rdzv-id", "q", "--rdzv-endpoint", str(tmp_path / "store"))
    where = ("--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1")  # no port, no name
    launcher = (*torchrun, *meet, *where)
    arguments = quantize(readable, together, *CALIBRATED)
    with ThreadPoolExecutor() as machines:
        started = [machines.submit(launch, launcher, "qtool", *arguments) for _ in range(2)]
    ended = [machine.result() for machine in started]
    assert not any(machine.code for machine in ended), ended
    assert files(together) == files(alone)


def test_accelerate_starts_ranks(readable: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert not CliRunner().invoke(cli, quantize(readable, alone)).exception
    ended = launch(ACCELERATE, "qtool", *quantize(readable, together))
    assert not ended.code, ended.stderr
    assert files(together) == files(alone)
    assert ended.stderr.count("shard 6/6") == 1


def test_an_error_of_one_rank_is_told_once(tmp_path: Path) -> None:
    """Rank 1 alone reads the damaged block: rank 0 must not wait for it."""
    from safetensors.torch import load_file, save_file

    source = save_model(tmp_path / "damaged")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ended = forks.run_ranks(2, command_line(*quantize(source, tmp_path / "out")), tmp_path)
    assert [rank.code for rank in ended] == [2, 2]
    (message,) = re.findall(r"qtool: .*", "".join(rank.stderr for rank in ended))
    assert "model.layers.1.mlp.up_proj.weight: holds 1 NaN" in message


def test_what_a_method_finds_in_its_own_batches_alone_is_refused(
    readable: Path, tmp_path: Path
) -> None:
    @dataclass
    class Mine(Transform):
        name = "mine"
        needs_data = True

        def apply(self, block: Block, batches: Sequence[Batch]) -> None:
            block.weight("mlp.up_proj").mul_(sum(float(b.hidden.abs().max()) for b in batches))

    def run() -> None:
        qtool.register_method(Mine)
        out = "--out", str(tmp_path / "out")
        command_line("quantize", str(readable), *CALIBRATED, "--recipe", str(recipe), *out)()

    recipe = tmp_path / "mine.yaml"
    layers = "[{match: '.*', scheme: w4a16}]"
    recipe.write_text(f"{{scheme: mine, layers: {layers}, transforms: [mine], rounding: rtn}}")
    ended = forks.run_ranks(2, run, tmp_path)
    assert [rank.code for rank in ended] == [2, 2]
    (message,) = re.findall(r"qtool: .*", "".join(rank.stderr for rank in ended))
    assert "mine: apply gives mlp.up_proj.weight of block 0 other values on another rank" in message


@pytest.mark.parametrize(
    ("count", "size", "unit"),
    [(10, 3, 1), (4096, 3, 512), (6144, 4, 512), (700, 2, 512), (1, 2, 1)],
)
def test_rows_are_shared_in_whole_units(
    count: int, size: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for number in range(size):
        monkeypatch.setattr(ranks, "_world", ranks.World(number, size))
        shares.append(ranks.local_rows(count, unit))
    assert [row for share in shares for row in range(count)[share]] == list(range(count))
    if count >= unit * size:
        assert all(share.start % unit == 0 and share.start < share.stop for share in shares)


@pytest.mark.parametrize(("said", "local"), [("2", 2), ("8", 4), ("", 4), ("0", 4), ("x", 4)])
def test_processes_on_this_machine(said: str, local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_world", ranks.World(0, 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert ranks.local_size() == local


def test_alone_there_is_one_rank_and_nothing_to_wait_for() -> None:
    assert (ranks.rank(), ranks.size()) == (0, 1)
    assert ranks.all_gather(3) == [3] and ranks.broadcast("a") == "a"
    assert (
        ranks.local_items([1, 2, 3])
        == ranks.all_gather_batches([1, 2, 3])
        == list(ranks.lockstep([1, 2, 3]))
        == [1, 2, 3]
    )
    assert ranks.map_items(lambda x: x * x, [1, 2, 3]) == [1, 4, 9]
    assert ranks.map_scalars(lambda x: torch.tensor(x * 0.5), [1, 2, 3]).tolist() == [
        0.5,
        1.0,
        1.5,
    ]
    total = ranks.OrderedSum(3, torch.device("cpu"))
    total.tensor.add_(1)
    total.step()
    assert torch.equal(total.result(), torch.ones(3))


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "x"}, {"WORLD_SIZE": "2", "RANK": "a"}])
def test_refuses_an_environment_that_no_launcher_makes(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(QtoolError, match=r"^WORLD_SIZE is set, but .* unset it$"),
        ranks.process_group("cpu"),
    ):
        pass
    assert watch.is_first_rank()  # which prints the error
