"""A step that lacks a packed GEMM is seen in its profile, wherever the GEMM was launched."""

import gzip
import json
from pathlib import Path
from typing import Any

from qtool.serving.replay import gemm_launches, profiled, read_profiles, replays


def profile(prefill: int, steps: list[int], launch: str = "cudaGraphLaunch") -> dict[str, Any]:
    """What torch writes of a prefill and of decode steps with so many GEMMs each."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for step, gemms in enumerate([prefill, *steps]):
        kind = launch if step else "cuLaunchKernelEx"
        own = {"correlation": 100 + step}
        events.append({"cat": "cuda_runtime", "name": kind, "args": own})
        names = ["qtool_gemm"] * gemms + ["quantize_activation", "flash_fwd_kernel"]
        events += [{"cat": "kernel", "name": name, "args": own} for name in names]
    return {"traceEvents": events}


def test_every_step_has_all_gemms() -> None:
    [row] = replays([profile(8, [8, 8, 8, 8])], [8], 4, graphs=True)
    assert not row.problem
    assert row.ran == "8 packed GEMMs a decode step, replayed from CUDA graphs"
    assert gemm_launches(profile(8, [8, 8])) == (24, 16)


def test_a_missing_gemm_is_a_problem() -> None:
    for steps in ([8, 8, 7, 8], [7, 7, 7, 7], [4, 4, 4, 4], [0, 0, 0, 0]):
        [row] = replays([profile(steps[0], steps)], [8], 4, graphs=True)
        assert "8 multiplications by packed weights" in row.problem


def test_what_runs_beside_the_graphs_is_a_problem_where_graphs_are_wanted() -> None:
    eager = profile(8, [8, 8, 8, 8], launch="cudaLaunchKernelExC")
    [row] = replays([eager], [8], 4, graphs=True)
    assert row.problem == "0 of 32 GEMMs were launched by CUDA graphs"
    [row] = replays([eager], [8], 4, graphs=False)
    assert not row.problem and row.ran.endswith("launched eagerly")


def test_every_worker_is_asked(tmp_path: Path) -> None:
    whole, broken = profile(8, [8]), profile(8, [6])
    rows = list(replays([whole, broken], [8, 8], 1, graphs=True))
    assert [bool(row.problem) for row in rows] == [False, True]
    [row] = replays([whole], [8, 8], 1, graphs=True)
    assert row.problem == "1 of 2 workers wrote a profile"
    assert profiled(tmp_path)["profiler_config"]["torch_profiler_dir"] == str(tmp_path)
    for rank, found in enumerate((whole, broken)):
        file = tmp_path / f"rank{rank}.pt.trace.json.gz"
        file.write_bytes(gzip.compress(json.dumps(found).encode()))
    assert read_profiles(tmp_path) == [whole, broken]
