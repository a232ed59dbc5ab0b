"""Which kernels vLLM's steps launch, counted in the profiles of its workers.

torch's profiler writes a kernel as an event of category ``kernel`` and the call that launched it as
one of ``cuda_runtime``; both have the same ``correlation``. Kernels that a CUDA graph replays have
the correlation of ``cudaGraphLaunch``. Every multiplication by a packed weight is one launch of
:data:`GEMMS`, so a step launches as many as the model has multiplications; fewer launches mean that
a layer ran something else.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.pipeline.verify import Verified

#: the CUDA functions of all packed GEMMs
GEMMS = ("qtool_gemm", "qtool_mma_gemm")
GRAPH = ("cudaGraphLaunch", "cuGraphLaunch")


def profiled(directory: Path) -> dict[str, Any]:
    """Options of ``vllm.LLM`` that let its workers write their profiles to ``directory``."""
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(directory.resolve()),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
        }
    }


def read_profiles(directory: Path) -> list[Mapping[str, Any]]:
    """The profiles in ``directory``, one per worker."""
    files = sorted(directory.glob("*.json.gz"))
    return [json.loads(gzip.decompress(file.read_bytes())) for file in files]


def gemm_launches(profile: Mapping[str, Any]) -> tuple[int, int]:
    """How often a packed GEMM was launched: in all, and by CUDA graphs."""
    launched, graphs = [], set()
    for event in profile["traceEvents"]:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") == "kernel" and str(event["name"]).startswith(GEMMS):
            launched.append(correlation)
        elif str(event.get("name", "")).startswith(GRAPH):
            graphs.add(correlation)
    return len(launched), sum(correlation in graphs for correlation in launched)


def replays(
    profiles: Sequence[Mapping[str, Any]], each: Sequence[int], decoded: int, *, graphs: bool
) -> Iterator[Verified]:
    """One row per worker: whether each of its steps launched a GEMM for each multiplication.

    Args:
        each: for each worker, the number of multiplications by packed weights in its share of the
            model.
        decoded: number of decode steps in the profiles, after one or more prefill steps.
        graphs: whether decode steps are replayed from CUDA graphs.
    """
    if len(profiles) != len(each):
        yield Verified("kernels", f"{len(profiles)} of {len(each)} workers wrote a profile", "")
        return
    for rank, (profile, expected) in enumerate(zip(profiles, each, strict=True)):
        launched, replayed = gemm_launches(profile)
        problem = ""
        if launched % expected or launched < expected * (decoded + 1):
            problem = (
                f"{launched} GEMMs were launched in {decoded} decode steps and the prefill; each "
                f"has {expected} multiplications by packed weights"
            )
        elif graphs and replayed < expected * decoded:
            problem = f"{replayed} of {expected * decoded} GEMMs were launched by CUDA graphs"
        how = "replayed from CUDA graphs" if graphs else "launched eagerly"
        ran = f"{expected} packed GEMMs a decode step, {how}"
        yield Verified(f"kernels of rank {rank}", problem, ran)
