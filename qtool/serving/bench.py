"""``qtool bench serve``: a checkpoint in vLLM beside vLLM's own formats of the same shape.

Each engine runs in a process of its own, one after another. A decode step is the difference of two
generations of different lengths over the same prompts, so prefill and start-up cancel. Prompts are
random ids; the baselines have random weights, since time does not depend on them.
"""

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qtool.errors import QtoolError, require_positive, suggest
from qtool.format import native_format
from qtool.io.model_directory import directory_of
from qtool.io.source import read_config
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.preflight import cache_refused
from qtool.serving.vllm.engine import answers, engine, greedy, require_vllm
from qtool.table import render
from qtool.units import whole_number

log = logging.getLogger(__name__)
#: generated tokens of the two runs whose difference is timed; every prompt is prefilled before the
#: first ends
SHORT, LONG = 64, 192
#: seconds that repetitions of one measurement may take: long runs vary by less than a per cent
PATIENCE = 8.0
PACK_QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
            },
        }
    },
}
#: the names that ``against`` takes: additions to config.json, options of vLLM
BASELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": ({}, {"quantization": "fp8"}),
    "bf16": ({}, {}),
    "w4a16": ({"quantization_config": PACK_QUANTIZED}, {}),
}


@dataclass(frozen=True)
class Served:
    """One engine at one batch size.

    Attributes:
        step_ms: one decode step of the batch.
        prefill: prompt tokens a second.
        request: generated tokens a second of whole requests, prefill included.
    """

    engine: str
    batch: int
    step_ms: float
    prefill: float
    request: float


def bench_serve(
    directory: Path,
    *,
    against: Sequence[str] = ("fp8", "bf16", "w4a16"),
    batches: Sequence[int] = (1, 16, 64, 256, 512),
    input_tokens: int = 1024,
    output_tokens: int = 512,
    memory: float | None = None,
    tensor_parallel: int = 1,
) -> Iterator[Served]:
    """Measure the checkpoint in ``directory`` and each of ``against`` in vLLM, row by row.

    Their KV caches are fp8; a checkpoint with a quantized cache keeps its own if vLLM can use it.
    Batches that do not fit in the cache are left out. A baseline that does not start is left out
    too, with a warning.

    Args:
        memory: GB (10^9 bytes) of each GPU that an engine may use; nearly all by default.
        tensor_parallel: GPUs that each engine splits its model over.

    Raises:
        QtoolError: for an unknown baseline or a model that is not native, or if the engine of the
            checkpoint stops.
    """
    for name in against:
        if name not in BASELINES:
            raise QtoolError(f"--against {name}: {suggest(name, BASELINES)}")
    config = read_config(directory)
    linears = PackedLinears(config, native_format(config))
    require_vllm(directory, tensor_parallel)
    with tempfile.TemporaryDirectory() as folder:
        engines = _engines(directory, linears, against, Path(folder), tensor_parallel)
        for name, (model, wanted) in engines.items():
            request = {
                "model": str(model),
                "options": wanted,
                "batches": list(batches),
                "input_tokens": input_tokens,
                "output_tokens": output_tokens,
                "memory": memory,
            }
            try:
                rows = _measure_elsewhere(name, request)
            except QtoolError as error:
                if name not in against:
                    raise
                log.warning("%s", error)
                continue
            yield from (Served(name, **row) for row in rows)


def _engines(
    directory: Path,
    linears: PackedLinears,
    against: Sequence[str],
    folder: Path,
    tensor_parallel: int,
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The checkpoint and each baseline by name: its directory, and options of vLLM.

    The directory of a baseline, in ``folder``, holds only a config.json.
    """
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    common = {"kv_cache_dtype": "fp8", "tensor_parallel_size": tensor_parallel}
    ours, kv = f"qtool {linears.format.scheme}", linears.format.kv
    engines = {ours: (directory, common)}
    if kv and not cache_refused(linears):  # vLLM uses it unless told otherwise
        engines = {f"{ours} {kv}": (directory, common | {"kv_cache_dtype": "auto"})}
    for name in dict.fromkeys(against):
        added, own = BASELINES[name]
        shape = folder / name
        shape.mkdir()
        (shape / "config.json").write_text(json.dumps(config | added))
        engines[name] = (shape, common | own | {"load_format": "dummy"})
    return engines


def bench_model(
    model: str,
    *,
    against: Sequence[str],
    batches: Sequence[str],
    memory: float | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], str]:
    """:func:`bench_serve` of a native checkpoint by its name: as data, and as a table.

    Args:
        batches: as texts.
        memory: in GB.

    Raises:
        QtoolError: as :func:`bench_serve`, or a batch or a memory that is no positive number.
    """
    sizes = [size for batch in batches if (size := whole_number(batch))]
    if len(sizes) < len(batches):
        raise QtoolError(
            f"bench serve: --batches {','.join(batches)!r}: positive numbers separated by commas"
            " are expected"
        )
    if memory is not None:
        require_positive("bench serve: --memory", memory)
    rows = list(
        bench_serve(directory_of(model), against=against, batches=sizes, memory=memory, **options)
    )
    if not rows:
        raise QtoolError(
            f"bench serve: --batches {','.join(batches)}: no engine has room for any of them"
        )
    return [asdict(row) for row in rows], table(rows)


def table(rows: Sequence[Served]) -> str:
    """Rows by batch and engine, with each step's time over the first engine's."""
    first = {row.batch: row.step_ms for row in reversed(rows) if row.engine == rows[0].engine}
    lines = [
        (row.engine, str(row.batch), f"{row.step_ms:.2f}", _over(row, first),
         f"{row.prefill:,.0f}", f"{row.request:,.0f}")
        for row in sorted(rows, key=lambda row: row.batch)
    ]  # fmt: skip
    head = (
        "engine",
        "batch",
        "ms a step",
        f"over {rows[0].engine}",
        "prefill tok/s",
        "request tok/s",
    )
    return render(head, lines)


def _over(row: Served, first: dict[int, float]) -> str:
    """The step's time over the first engine's; that one may have had no room for the batch."""
    return f"{row.step_ms / first[row.batch]:.2f}" if row.batch in first else "-"


def _measure_elsewhere(name: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "qtool.serving.bench", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise QtoolError(
            f"{name}: vLLM stopped with status {done.returncode}; its messages above say why"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def timed(llm: Any, input_tokens: int) -> Callable[[int, int], float]:
    """A function of sequences and tokens: the seconds that ``llm`` takes to generate these tokens.

    Each sequence has a prompt of ``input_tokens`` random ids, another one at each call.
    """
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    random = torch.Generator().manual_seed(0)

    def seconds(sequences: int, tokens: int) -> float:
        shape = sequences, input_tokens
        prompts = torch.randint(3, vocabulary, shape, generator=random).tolist()
        start = time.perf_counter()
        answers(llm, prompts, greedy(tokens))
        return time.perf_counter() - start

    return seconds


def least(run: Callable[[], float], times: int) -> float:
    """The seconds of the fastest of ``times`` runs; none begins after ``PATIENCE`` seconds."""
    found: list[float] = []
    while len(found) < times and sum(found) < PATIENCE:
        found.append(run())
    return min(found)


def measure(
    model: str,
    options: dict[str, Any],
    batches: list[int],
    input_tokens: int,
    output_tokens: int,
    memory: float | None = None,
) -> list[dict[str, Any]]:
    """The figures of one engine at each batch size that fits, measured in this process."""
    length = input_tokens + max(LONG, output_tokens) + 1
    settings: dict[str, Any] = {
        "max_model_len": length,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": max(batches),
    }
    if memory:
        settings["gpu_memory_utilization"] = memory * 1e9 / torch.cuda.mem_get_info()[1]
    llm = engine(model, **(settings | options))
    cache = llm.llm_engine.vllm_config.cache_config
    room = cache.num_gpu_blocks * cache.block_size // length
    seconds = timed(llm, input_tokens)
    rows = []
    for batch in batches:
        if batch > room:
            print(f"batch {batch} left out: the cache holds a batch of {room}", file=sys.stderr)
            continue
        seconds(batch, 4)  # compiles and allocates
        prefill, short, long = (
            least(partial(seconds, batch, tokens), times)
            for tokens, times in ((1, 5), (SHORT, 4), (LONG, 4))
        )
        step = (long - short) / (LONG - SHORT)
        rows.append({
            "batch": batch,
            "step_ms": 1000 * step,
            "prefill": batch * input_tokens / prefill,
            "request": batch * output_tokens / (prefill + (output_tokens - 1) * step),
        })  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    measured = measure(**json.loads(sys.argv[1]))
    print()
    print(json.dumps(measured))
