"""One rank of ``ranks.sh``: quantize a random checkpoint of a known shape and time it; or compare
two results.

    torchrun --nproc-per-node 2 benchmarks/quantize/ranks.py run DIR --layers 16
    python benchmarks/quantize/ranks.py compare DIR 1 2

``run`` quantizes ``DIR/source`` (made by ``make``) to ``DIR/ranks-R`` and writes the times to
``DIR/ranks-R.json``. A first run of one block, which is not timed, compiles the kernels and starts
the GPU.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from qtool import recipes
from qtool.bench.quantize import random_tokens
from qtool.bench.random_checkpoint import SHAPES, config_of, make
from qtool.bench.stored import store
from qtool.distributed import ranks
from qtool.io.safetensors import read_header
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize


def run(directory: Path, recipe: str, samples: int, seqlen: int, device: str) -> None:
    """Quantize ``DIR/warm`` and then, timed, ``DIR/source``; rank 0 writes the seconds."""
    chosen = recipes.load("w4a8-lqq", recipe)
    with ranks.process_group(device) as own:
        warm, source = Checkpoint(directory / "warm"), Checkpoint(directory / "source")
        quantize(
            warm,
            chosen,
            directory / f"warm-{ranks.size()}",
            device=own,
            calibration=random_tokens(warm.config["vocab_size"], 2 * ranks.size(), seqlen),
        )
        if own.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        tokens = random_tokens(source.config["vocab_size"], samples, seqlen)
        ranks.barrier()
        began = time.perf_counter()
        quantize(
            source, chosen, directory / f"ranks-{ranks.size()}", device=own, calibration=tokens
        )
        ranks.barrier()
        seconds = time.perf_counter() - began
        peaks = ranks.all_gather(torch.cuda.max_memory_allocated() if own.startswith("cuda") else 0)
        if ranks.rank() == 0:
            record = json.loads((directory / f"ranks-{ranks.size()}.run.json").read_text())
            found = {
                "ranks": ranks.size(),
                "blocks": source.config["num_hidden_layers"],
                "seconds": seconds,
                "peak_device_bytes": peaks,
                "phases": record["phases"],
            }
            (directory / f"ranks-{ranks.size()}.json").write_text(json.dumps(found))
            print(json.dumps(found), flush=True)


def compare(
    directory: Path, counts: list[int], layers: int, keep: Path | None, device: str
) -> None:
    """Print the speed-ups, and the differences of codes and of errors from the result of the first
    count.

    ``keep`` is a file for the speed-ups.
    """
    rows = []
    times = {n: json.loads((directory / f"ranks-{n}.json").read_text()) for n in counts}
    first = counts[0]
    for n in counts:
        seconds, blocks = times[n]["seconds"], times[n]["blocks"]
        peak = max(times[n]["peak_device_bytes"]) / 1e9
        faster = f"{times[first]['seconds'] / seconds:.2f}x"
        rows.append([str(n), str(blocks), f"{seconds:.2f}", faster, f"{peak:.2f}"])
        print(
            f"{n} ranks: {seconds:.2f} s for {blocks} of {layers} blocks, "
            f"{faster}, peak {peak:.2f} GB on each GPU"
        )
        print(
            "   "
            + ", ".join(
                f"{k} {v:.2f}" for k, v in sorted(times[n]["phases"].items(), key=lambda x: -x[1])
            )
        )
    if keep:
        head = ("ranks", "blocks", "s", "times as fast", "GB on each GPU")
        store(keep, {"head": head, "rows": rows}, device=device)
    errors = {n: errors_of(directory / f"ranks-{n}") for n in counts}
    for n in counts[1:]:
        shards = differences(directory / f"ranks-{first}", directory / f"ranks-{n}")
        different, codes, others = (sum(counts) for counts in zip(*shards, strict=True))
        pairs = list(zip(errors[n], errors[first], strict=True))
        worst = max((abs(a / b - 1) for a, b in pairs if b), default=0.0)
        mean = sum(errors[n]) / sum(errors[first]) - 1 if sum(errors[first]) else 0.0
        print(
            f"{n} ranks against {first}: {different} of {codes} codes differ "
            f"({100 * different / codes:.4f} %)"
        )
        print(
            f"   and {others} other values; layer errors: mean {100 * mean:+.4f} %, most "
            f"{100 * worst:.4f} %"
        )
        print("   codes by block: " + " ".join(str(shard[0]) for shard in shards[1:-1]))


def differences(a: Path, b: Path) -> list[tuple[int, int, int]]:
    """The numbers of different four-bit codes, of all codes, and of other different values, by
    shard. Equal shards are recognized by their hashes.
    """
    found = []
    hashes = [json.loads((directory / "qtool.json").read_text())["shards"] for directory in (a, b)]
    for path in sorted(a.glob("*.safetensors")):
        different = codes = others = 0
        if hashes[0][path.name] == hashes[1][path.name]:
            sizes = [
                math.prod(entry.shape) * entry.dtype.itemsize
                for name, entry in read_header(path).items()
                if name.endswith("qweight")
            ]
            found.append((0, 2 * sum(sizes), 0))
            continue
        one, two = load_file(path), load_file(b / path.name)
        for name, tensor in one.items():
            if name.endswith("qweight"):
                xor = tensor.flatten().view(torch.uint8) ^ two[name].flatten().view(torch.uint8)
                different += int((xor & 15 != 0).sum() + (xor >> 4 != 0).sum())
                codes += 2 * xor.numel()
            else:
                others += int((tensor != two[name]).sum())
        found.append((different, codes, others))
    return found


def errors_of(directory: Path) -> list[float]:
    """The relative output error of every linear."""
    blocks = json.loads((directory / "qtool.json").read_text())["blocks"]
    return [note["error"] for block in blocks for note in block.get("gptq", {}).values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make", "run", "compare"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("counts", type=int, nargs="*")
    parser.add_argument("--shape", default="llama-3-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--recipe", default=str(Path(__file__).with_name("paper-gptq.yaml")))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="of compare: keep the speed-ups here")
    chosen = parser.parse_args()
    if chosen.what == "make":
        for name, config in (
            ("warm", config_of(chosen.shape, 1) | {"vocab_size": 1024}),
            ("source", config_of(chosen.shape, chosen.layers)),
        ):
            shutil.rmtree(chosen.directory / name, ignore_errors=True)
            make(config, chosen.directory / name)
    elif chosen.what == "run":
        run(chosen.directory, chosen.recipe, chosen.samples, chosen.seqlen, chosen.device)
    else:
        layers = config_of(chosen.shape)["num_hidden_layers"]
        compare(chosen.directory, chosen.counts, layers, chosen.json, chosen.device)


if __name__ == "__main__":
    main()
