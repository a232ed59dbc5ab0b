"""``benchmarks/quantize``: the scripts run as they are documented, at a tiny size."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "quantize"


def test_detail_names_where_the_time_goes(tmp_path: Path) -> None:
    sizes = [
        "--shape",
        "llama-tiny",
        "--layers",
        "2",
        "--samples",
        "2",
        "--seqlen",
        "16",
        "--device",
        "cpu",
    ]
    command = [sys.executable, str(BENCHMARKS / "detail.py"), str(tmp_path), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 ranks, 2 blocks: ")
    for name in (
        "gptq.sweep",
        "Factor.__init__",
        "Gptq.moments",
        "Hessian.complete",
        "clip.search",
    ):
        assert f"   {name} " in done.stdout
