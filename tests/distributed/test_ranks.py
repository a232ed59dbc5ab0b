"""Several processes on one job: the same bytes as one, and after a failure any number go on."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from qtool.cli import cli
from qtool.distributed import ranks
from tests.conftest import save_model
from tests.distributed import rank_cases
from tests.pipeline.test_quantize import files

ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
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
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(count: int, *arguments: object, by: tuple[str, ...] = TORCHRUN) -> subprocess.Popen[str]:
    """``torchrun -m arguments`` on ``count`` ranks."""
    command = [sys.executable, "-m", *by, str(count), "-m", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )


def errors_of(process: subprocess.Popen[str]) -> str:
    """What it printed to stderr until it ended."""
    try:
        return process.communicate(timeout=1800)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in rank_cases.MODELS:
        save_model(directory / name, name, head_dim=64)
    return directory


@pytest.fixture(scope="module")
def alone(models: Path) -> Path:
    rank_cases.make_all(models, models / "alone")
    return models / "alone"


@pytest.fixture(scope="module", params=[2, 3], ids=lambda count: f"{count} ranks")
def together(request: pytest.FixtureRequest, models: Path) -> Path:
    out = models / f"ranks-{request.param}"
    process = launch(request.param, "tests.distributed.rank_cases", models, out)
    errors = errors_of(process)
    assert process.returncode == 0, errors
    return out


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


def quantize(source: str | Path, out: Path, *options: str) -> tuple[str, ...]:
    return (
        "qtool",
        "quantize",
        str(source),
        "--scheme",
        "w4a8-lqq",
        "--recipe",
        "best",
        "--calib",
        "demo",
        "--samples",
        "8",
        "--seqlen",
        "128",
        "--out",
        str(out),
        *options,
    )


def test_a_killed_rank_ends_the_run_and_others_go_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert not CliRunner().invoke(cli, quantize("demo", whole)[1:]).exception

    process = launch(2, *quantize("demo", cut))
    assert process.stderr
    line = ""
    while not line.startswith("shard 4/"):
        line = process.stderr.readline()
        assert line, "it ended too early"
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    assert "SIGKILL" in errors_of(process)
    assert process.returncode
    assert not cut.exists()

    resumed = launch(3, *quantize("demo", cut, "--resume"), by=ACCELERATE)
    errors = errors_of(resumed)
    assert resumed.returncode == 0, errors
    assert files(cut) == files(whole)
    assert errors.count("shard 8/8") == 1


def rank_process(launcher: int, rank: int) -> int:
    """The process that the launcher started as ``rank``."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"no rank {rank} below {launcher}")


def test_an_error_of_one_rank_is_told_once(tmp_path: Path) -> None:
    """Rank 1 alone reads the damaged block: rank 0 must not wait for it."""
    from safetensors.torch import load_file, save_file

    source = save_model(tmp_path / "damaged")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    process = launch(
        2, "qtool", "quantize", source, "--scheme", "w4a8-lqq", "--out", tmp_path / "out"
    )
    errors = errors_of(process)
    assert process.returncode
    (message,) = re.findall(r"qtool: .*", errors)
    assert "model.layers.1.mlp.up_proj.weight: holds 1 NaN" in message
    assert errors.count("holds 1 NaN") == 1


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
