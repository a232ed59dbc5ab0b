"""Where the time of search and rounding goes, method by method, on one rank or several; and whether the results agree.

    python benchmarks/quantize/detail.py DIR [--layers 6]
    torchrun --nproc-per-node 2 benchmarks/quantize/detail.py DIR [--layers 6]

Quantizes the 8B shape with random weights (made in DIR once) as ``ranks.py`` does, with a stage around each function
named below, and compares the codes with those that other numbers of ranks have left in DIR.
"""

import argparse
import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import differences

from qtool import ranks, recipes
from qtool.calibration import clip, gptq, hessian, smooth
from qtool.calibration.stages import stage
from qtool.checkpoint.source import Checkpoint
from qtool.pipeline import bench, blocks
from qtool.pipeline.quantize import quantize
from qtool.pipeline.random_checkpoint import config_of, make
from qtool.pipeline.run_record import beside
from qtool.runtime.format import LinearFormat
from qtool.schemes.base import Scheme

NAMED = (
    *((smooth, name) for name in ("collect", "search", "fold_factor", "output_error")),
    *((clip, name) for name in ("collect", "search", "block_error", "subset")),
    *((gptq, name) for name in ("sweep", "fit_groups")),
    *((gptq.Gptq, "observe"), (hessian.Factor, "__init__")),
    *((hessian.Hessian, name) for name in ("power", "turn", "complete")),
    *((blocks.BuiltBlocks, name) for name in ("__init__", "_first_inputs", "_module")),
    *((LinearFormat, "pack"), (LinearFormat, "unpack"), (Scheme, "check"), (ranks, "every")),
)


def named(owner: Any, attribute: str) -> None:
    """Let ``owner.attribute`` be a stage of its own."""
    function: Callable[..., Any] = getattr(owner, attribute)
    label = f"{owner.__name__.rpartition('.')[2]}.{attribute}"

    @functools.wraps(function)
    def staged(*arguments: Any, **options: Any) -> Any:
        with stage(label):
            return function(*arguments, **options)

    setattr(owner, attribute, staged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    chosen = parser.parse_args()
    recipe = recipes.load("w4a8-lqq", str(Path(__file__).with_name("paper-gptq.yaml")))
    for owner, attribute in NAMED:
        named(owner, attribute)
    with ranks.joined("cuda") as own:
        for layers in (1, chosen.layers):  # the first pays for the kernels' compilation
            source, out = chosen.directory / f"source-{layers}", chosen.directory / f"ranks-{ranks.size()}"
            if ranks.rank() == 0:
                if not source.exists():
                    make(config_of("llama-3-8b", layers), source)
                for old in (out, out.with_name(out.name + ".partial")):
                    shutil.rmtree(old, ignore_errors=True)
            ranks.meet()
            checkpoint = Checkpoint(source)
            samples = 128 if layers > 1 else 2 * ranks.size()
            tokens = bench.random_tokens(checkpoint.config["vocab_size"], samples, 2048)
            began = time.perf_counter()
            quantize(checkpoint, recipe, out, device=own, calibration=tokens)
            ranks.meet()
        if ranks.rank() == 0:
            report(out, chosen.layers, time.perf_counter() - began)


def report(out: Path, layers: int, seconds: float) -> None:
    """Print the stages, and what differs from other results beside ``out``."""
    record = json.loads(beside(out).read_text())
    print(f"{ranks.size()} ranks, {layers} blocks: {seconds:.2f} s on {record['device']}; device "
          f"{record['peak_device_bytes'] / 1e9:.2f} GB, host {record['peak_host_bytes'] / 1e9:.2f} GB")  # fmt: skip
    for name, spent in sorted(record["stages"].items(), key=lambda item: -item[1]):
        print(f"   {name:30s} {spent:8.3f} s   {1e3 * spent / layers:8.1f} ms a block")
    for other in sorted(out.parent.glob("ranks-?")):
        if other != out:
            codes, all_codes, others = (sum(counts) for counts in zip(*differences(other, out), strict=True))
            print(f"against {other.name}: {codes} of {all_codes} codes and {others} other values differ")


if __name__ == "__main__":
    main()
