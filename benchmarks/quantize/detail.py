"""Measures the time of search and rounding, method by method, and whether ranks agree.

    python benchmarks/quantize/detail.py DIR [--layers 6]
    torchrun --nproc-per-node 2 benchmarks/quantize/detail.py DIR [--layers 6]

It quantizes the 8B shape with random weights (made in DIR once) as ``ranks.py`` does, with a phase
around each function named below, and compares the codes with the codes in DIR from other numbers of
ranks. After runs with one and two ranks it prints an estimate for four from their phases.
"""

import argparse
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks import differences

from qtool import recipes
from qtool.bench import quantize as bench
from qtool.bench.random_checkpoint import SHAPES, config_of, make
from qtool.calibration.rounding.gptq import factor, gptq, hessian, rounding
from qtool.calibration.timing import PhaseTimer, phase
from qtool.calibration.transforms import clip, smooth
from qtool.distributed import ranks
from qtool.format import LinearFormat
from qtool.io.run_record import record_path
from qtool.io.source import Checkpoint
from qtool.pipeline import quantize
from qtool.pipeline.streaming import built_blocks
from qtool.schemes.base import Scheme

NAMED = (
    *((smooth, name) for name in ("collect", "search", "fold_factor", "output_error")),
    *((clip, name) for name in ("collect", "search", "block_error", "subset")),
    *((gptq, name) for name in ("sweep", "fit_groups")),
    *((rounding.Gptq, name) for name in ("moments", "moments_of_experts")),
    (factor.Factor, "__init__"),
    *((hessian.Hessian, name) for name in ("power", "step", "complete")),
    *((ranks, name) for name in ("all_gather", "all_reduce")),
    *((built_blocks.BuiltBlocks, name) for name in ("__init__", "_first_inputs", "_module")),
    *((LinearFormat, "pack"), (LinearFormat, "unpack"), (Scheme, "check")),
)
#: timers of the runs in this process
made: list[PhaseTimer] = []


def named(owner: Any, attribute: str) -> AbstractContextManager[Any]:
    """A context in which ``owner.attribute`` is a phase of its own.

    A function of ``ranks`` is a separate phase for each function that calls it.
    """
    function: Callable[..., Any] = getattr(owner, attribute)
    label = f"{owner.__name__.rpartition('.')[2]}.{attribute}"

    @functools.wraps(function)
    def staged(*arguments: Any, **options: Any) -> Any:
        with phase(f"{label} of {asking()}" if owner is ranks else label):
            return function(*arguments, **options)

    return mock.patch.object(owner, attribute, staged)


def asking() -> str:
    """The function outside of ``ranks`` that called it."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in (ranks.__name__, __name__) and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_name}"


class Kept(PhaseTimer):
    """A timer that can be read after the run, on every rank."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        made.append(self)


def main() -> None:
    """Quantize with the timers, and print the time of each named part on each rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--shape", default="llama-3-8b", choices=list(SHAPES))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    recipe = recipes.load("w4a8-lqq", str(Path(__file__).with_name("paper-gptq.yaml")))
    with ExitStack() as measured, ranks.process_group(chosen.device) as own:
        for owner, attribute in NAMED:
            measured.enter_context(named(owner, attribute))
        measured.enter_context(mock.patch.object(quantize, "PhaseTimer", Kept))
        for layers in (1, chosen.layers):  # the first run includes the kernels' compilation
            source = chosen.directory / f"source-{layers}"
            out = chosen.directory / f"ranks-{ranks.size()}"
            if ranks.rank() == 0:
                few = {"vocab_size": 1024} if layers == 1 else {}
                make(config_of(chosen.shape, layers) | few, source)
                for old in (out, out.with_name(out.name + ".partial")):
                    shutil.rmtree(old, ignore_errors=True)
            ranks.barrier()
            checkpoint = Checkpoint(source)
            samples = chosen.samples if layers > 1 else 2 * ranks.size()
            tokens = bench.random_tokens(checkpoint.config["vocab_size"], samples, chosen.seqlen)
            began = time.perf_counter()
            quantize.quantize(checkpoint, recipe, out, device=own, calibration=tokens)
            ranks.barrier()
        seconds = time.perf_counter() - began
        others = ranks.all_gather(dict(made[-1].seconds))[1:]
        if ranks.rank() == 0:
            report(out, chosen.layers, seconds, others)


def report(out: Path, layers: int, seconds: float, others: Sequence[Mapping[str, float]]) -> None:
    """Print the phases of this rank and of ``others``, and the differences from other results."""
    record = json.loads(record_path(out).read_text())
    print(
        f"{ranks.size()} ranks, {layers} blocks: {seconds:.2f} s on {record['device']}; device "
        f"{record['peak_device_bytes'] / 1e9:.2f} GB, host {record['peak_host_bytes'] / 1e9:.2f} GB"
    )
    for name, spent in sorted(record["phases"].items(), key=lambda item: -item[1]):
        each = [1e3 * phases.get(name, 0.0) / layers for phases in (record["phases"], *others)]
        print(f"   {name:45s} {spent:8.3f} s   {', '.join(f'{ms:.1f}' for ms in each)} ms a block")
    for other in sorted(out.parent.glob("ranks-?")):
        if other != out:
            codes, all_codes, values = (
                sum(counts) for counts in zip(*differences(other, out), strict=True)
            )
            print(
                f"against {other.name}: {codes} of {all_codes} codes and {values} other values "
                "differ"
            )
    one, two = (out.with_name(f"ranks-{count}.run.json") for count in (1, 2))
    if one.exists() and two.exists():
        first, second = json.loads(one.read_text()), json.loads(two.read_text())
        four = more_ranks(first["phases"], second["phases"], 4)
        print(
            f"2 ranks: {first['seconds'] / second['seconds']:.3f} times as fast as 1; 4 ranks by "
            f"their phases: {four:.1f} s, {first['seconds'] / four:.2f} times"
        )


def more_ranks(one: Mapping[str, float], two: Mapping[str, float], count: int) -> float:
    """Seconds of ``count`` ranks, estimated from the phases of one and of two ranks.

    The time that two ranks halve is divided by ``count``; the rest stays.
    """
    total = 0.0
    for name in {*one, *two}:
        if not name.endswith(bench.BESIDE):
            alone, halved = one.get(name, 0.0), two.get(name, 0.0)
            shared = min(2 * max(alone - halved, 0.0), 2 * halved)
            total += halved - shared / 2 + shared / count
    return total


if __name__ == "__main__":
    main()
