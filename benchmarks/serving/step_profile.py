"""Measures the time of a decode step of vLLM by kind of kernel, and the floor of each kind.

    python benchmarks/serving/step_profile.py DIR [--batches 1,64,256] [--input-tokens 1024]
    [--json FILE]

The floor is the time that an H200 needs to move the bytes once, or for the arithmetic. A kind
without a floor does work that a perfect step would hide in another kernel. Kernels overlap, since
the next kernel of the stream starts while the last one drains; a kernel's time begins when all
earlier ones have ended. The rest of a step's time is `idle`: the GPU waits for a launch or for the
host. Without a GPU only the floors are printed.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from qtool.bench.cuda_graphs import BANDWIDTH, HALF_OPERATIONS, OPERATIONS, floor_us
from qtool.bench.stored import store
from qtool.format import native_format
from qtool.models import Heads, family_of
from qtool.serving.bench import timed
from qtool.table import render

#: kinds of kernels by a regex on their names; the first that matches applies
KINDS = {
    "packed GEMMs": "^qtool_(mma_)?(gemm|add_splits)",
    "quantization": "^quantize_activation|quantize_residual_norm",
    "attention": "^kv_attention|^kv_combine|flash|paged_attention",
    "cache append": "^kv_append|reshape_and_cache",
    "16-bit GEMMs": "gemm|cutlass|nvjet|splitK|gemv",
    "other": "",
}
#: by cache: bytes of a token and kv head without the codes, and bytes of a code
CACHES: dict[str | None, tuple[int, float]] = {None: (0, 2), "kv8": (0, 1), "kv4": (8, 0.5)}
#: tokens of the two generations whose difference is a step's; every prompt is prefilled before the
#: shorter one's first sequence ends
SHORT, LONG = 65, 97


def floors(config: Mapping[str, Any], batch: int, tokens: int) -> dict[str, float]:
    """The least microseconds of a step of ``batch`` sequences of ``tokens`` tokens, by kind."""
    stored, model = native_format(config), family_of(config)
    settings = model.settings(config)
    found: dict[str, float] = defaultdict(float)
    for block in range(int(settings.num_hidden_layers)):
        family = model.at(settings, block)
        shapes = family.block_shapes(settings)
        for name in family.linears():
            n, k = shapes[f"{name}.weight"]
            linear = stored.of(f"{family.blocks}.{block}.{name}")
            if linear is None:
                found["16-bit GEMMs"] += floor_us(batch, n, k, 16, HALF_OPERATIONS)
                continue
            bits = 8 * linear.nbytes(n, k) / (n * k)
            integer = linear.scheme_object.activation.bits < 16
            rate = OPERATIONS if integer else HALF_OPERATIONS
            found["packed GEMMs"] += floor_us(batch, n, k, bits, rate)
        heads = Heads.of(settings)
        beside, code = CACHES[stored.kv]
        token = heads.kv * (2 * heads.dim * code + beside)
        found["attention"] += 1e6 * batch * tokens * token / BANDWIDTH
        found["cache append"] += 1e6 * batch * token / BANDWIDTH
        for group in family.groups:  # a 16-bit input is read, and its codes are written
            k = shapes[f"{group.linears[0]}.weight"][1]
            found["quantization"] += 1e6 * batch * k * 3 / BANDWIDTH
    head = floor_us(batch, settings.vocab_size, settings.hidden_size, 16, HALF_OPERATIONS)
    found["16-bit GEMMs"] += head
    return dict(found)


def kind_of(kernel: str) -> str:
    """The kind of :data:`KINDS` that a kernel's name belongs to."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def profiled(run: Callable[[int], object]) -> dict[str, dict[str, tuple[float, float]]]:
    """Launches and microseconds of a step by kind and kernel: a long generation minus a short one.

    Args:
        run: function that generates so many tokens for each sequence.
    """
    totals: list[dict[str, tuple[int, float]]] = []
    for tokens in (SHORT, LONG):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(tokens)
        events: Any = profile.events()
        ran = (e for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
        totals.append(apart((e.name, e.time_range.start, e.time_range.end) for e in ran))
    short, long = totals
    found: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for name, (count, us) in long.items():
        count_before, us_before = short.get(name, (0, 0.0))
        launches, spent = count - count_before, us - us_before
        if spent > 0:
            found[kind_of(name)][name] = launches / (LONG - SHORT), spent / (LONG - SHORT)
    return dict(found)


def apart(kernels: Iterable[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """Launches and microseconds by name of kernels, given with their start and end.

    Time in which two kernels overlap belongs to the earlier one, since the later one waits for it.
    """
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    done = -math.inf
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        count, us = found[name]
        found[name] = count + 1, us + max(0.0, end - max(start, done))
        done = max(done, end)
    return dict(found)


def measure(directory: Path, batches: list[int], tokens: int) -> dict[int, dict[str, Any]]:
    """By batch size: ``ms`` of a step, and its ``kernels`` as in :func:`profiled`."""
    from qtool.serving.vllm.engine import engine

    llm = engine(
        directory,
        max_model_len=tokens + 2 * LONG,
        max_num_batched_tokens=8192,
        max_num_seqs=max(batches),
    )
    seconds = timed(llm, tokens)
    found = {}
    for batch in batches:
        seconds(batch, 4)
        short, long = (min(seconds(batch, n) for _ in range(2)) for n in (SHORT, 2 * LONG))
        found[batch] = {
            "ms": 1000 * (long - short) / (2 * LONG - SHORT),
            "kernels": profiled(lambda generated, batch=batch: seconds(batch, generated)),
        }
    return found


def rows(
    floor: Mapping[str, float], measured: Mapping[str, Any] | None, batch: int
) -> list[tuple[str, ...]]:
    """The table's lines for a batch size."""
    kernels = measured["kernels"] if measured else {}
    lines, busy = [], 0.0
    for kind in KINDS:
        launches = sum(each[0] for each in kernels.get(kind, {}).values())
        us = sum(each[1] for each in kernels.get(kind, {}).values())
        least, busy = floor.get(kind, 0.0), busy + us
        if us or least:
            share = f"{least / us:.0%}" if us and least else "-"
            spent = (f"{launches:.0f}", f"{us:.0f}") if measured else ("-", "-")
            lines.append((str(batch), kind, *spent, f"{least:.0f}" if least else "-", share))
    if measured:
        step = 1000 * measured["ms"]
        lines.append((str(batch), "idle", "-", f"{step - busy:.0f}", "-", "-"))
        least = sum(floor.values())
        total = f"{step:.0f}", f"{least:.0f}", f"{least / step:.0%}"
        lines.append((str(batch), "step", "-", *total))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    config = json.loads((options.directory / "config.json").read_text())
    least = {batch: floors(config, batch, options.input_tokens) for batch in batches}
    found = {}
    if torch.cuda.is_available():
        found = measure(options.directory, batches, options.input_tokens)
    head = ["batch", "kernels", "launches", "us", "floor us", "floor / us"]
    lines = [line for batch in batches for line in rows(least[batch], found.get(batch), batch)]
    print(render(head, lines))
    if options.json:
        store(options.json, {"head": head, "rows": lines, "kernels": found}, device="cuda")
    print("RESULT", len(found), "of", len(batches), "batch sizes measured")


if __name__ == "__main__":
    main()
