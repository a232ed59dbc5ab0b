"""Activations are kept on the device up to its room, the others in host memory that ranks share."""

from pathlib import Path

import pytest
import torch

from qtool import recipes
from qtool.bench.random_checkpoint import config_of
from qtool.calibration.batch import Batch
from qtool.distributed import ranks
from qtool.pipeline import free_memory
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import working_bytes
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.streaming import activations
from qtool.pipeline.streaming.activations import Activations, place_for

HIDDEN = torch.randn(2, 8, 4)


class OnHost(Batch):
    """Stands for pinned memory, which takes CUDA."""


@pytest.mark.parametrize(("place", "on_host"), [("device", 0), ("both", 3), ("host", 5)])
def test_what_the_device_has_no_room_for_is_on_the_host(
    place: str, on_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "HostBatch", OnHost)
    kept = Activations(place, HIDDEN.dtype, tmp_path, room=2.5 * HIDDEN.nbytes)
    batches = [kept.batch({"hidden": HIDDEN}, []) for _ in range(5)]
    assert [isinstance(batch, OnHost) for batch in batches] == [False] * (5 - on_host) + [
        True
    ] * on_host
    assert all(torch.equal(batch.hidden, HIDDEN) for batch in batches)


def test_a_run_on_a_cpu_names_the_place_that_its_plan_names() -> None:
    job = Job.of(config_of("llama-tiny", 1), recipes.load("w4a16", "paper"))
    planned = plan(job, 2, 32, device="cpu")
    said = activations.described(job, 64, 32, torch.device("cpu"), "device")
    assert planned.place == "host" and f"{said}; disk" in str(planned)


def test_what_is_kept_in_16_bits_takes_half_the_room(tmp_path: Path) -> None:
    kept = Activations("both", torch.bfloat16, tmp_path, room=HIDDEN.nbytes)
    batches = [kept.batch({"hidden": HIDDEN}, []) for _ in range(2)]
    assert kept.room == 0 and all(batch.hidden.dtype == torch.bfloat16 for batch in batches)


@pytest.mark.parametrize("on_host", [2, 8])
def test_ranks_share_a_host_as_the_plan_has_it(
    on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of several machines has its own one's memory, shared by the ranks that are there."""
    job = Job.of(config_of("llama-3-8b"), recipes.load("w4a8-lqq", "best"))
    monkeypatch.setattr(ranks, "_world", ranks.World(0, 8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_host))
    monkeypatch.setattr(activations, "gpu_memory", lambda _: (24e9, 24e9))
    monkeypatch.setattr(activations, "host_memory", lambda: (64e9, 64e9))
    place, _ = place_for(job, 512 * 2048, 2048, torch.device("cuda"))
    whole = 64e9 * 8 / on_host  # of all hosts
    planned = plan(job, 8 * 512, 2048, device_memory=24e9, host_memory=whole, gpus=8)
    assert place == planned.place == {2: "both", 8: "disk"}[on_host]


def test_a_long_window_is_a_batch_of_its_own() -> None:
    job = Job.of(config_of("llama-3-8b"), recipes.load("w4a8-lqq"))
    shorter, short, long = (
        working_bytes(job, 1 << 20, window, torch.device("cpu")) for window in (2048, 4096, 8192)
    )
    assert shorter == short < long
    widest = max(n + k for n, k in job.linears(0).values())
    assert long - short == 4096 * 3 * widest * 4


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_its_limit_less_what_it_holds(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the group of the process and those above it; what it holds of files counts as free."""
    files = {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n",
        "proc/self/cgroup": ["4:memory:/pod/own\n1:cpu:/other\n", "0::/pod/own\n"][version - 1],
    }
    prefix = ["total_", ""][version - 1]
    for group, limit in (("pod/own", ["9223372036854771712", "max"][version - 1]), ("pod", "600")):
        folder = f"sys/fs/cgroup/{['memory/', ''][version - 1]}{group}"
        names = [("limit_in_bytes", "usage_in_bytes"), ("max", "current")][version - 1]
        numbers = zip(names, (limit, "500"), strict=True)
        files |= {f"{folder}/memory.{name}": f"{number}\n" for name, number in numbers}
        files[f"{folder}/memory.stat"] = f"{prefix}inactive_file 90\n{prefix}active_file 7\n"
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(free_memory, "ROOT", tmp_path)
    assert free_memory.host_memory() == (600, 600 - 500 + 97)
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_memory.host_memory()[1] == 800 * 1024
