"""Compares round-to-nearest of a large random checkpoint with reading, converting and writing the
same bytes.

    python benchmarks/quantize/stream.py DIR [--gigabytes 4] [--scheme w4a8-lqq]

It makes a random Llama checkpoint in DIR (kept for the next run), copies it tensor by tensor (read,
to float32 and back, write), quantizes it in a fresh process, and prints both times, their ratio and
the peak resident memory.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qtool.bench.random_checkpoint import UNTOUCHED, make
from qtool.io.safetensors import write
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.recipes import parse

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
}


def of_size(gigabytes: float, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with as many blocks as make about ``gigabytes``."""
    job = Job.of(config | {"num_hidden_layers": 1}, parse(UNTOUCHED, "none"))
    outside = 4 * config["vocab_size"] * config["hidden_size"]
    blocks = round((gigabytes * 1e9 - outside) / job.block_bytes(0))
    return config | {"num_hidden_layers": max(1, blocks)}


def copy(source: Path, out: Path) -> float:
    """Seconds to read, convert to float32 and back, and write every tensor."""
    started = time.perf_counter()
    checkpoint = Checkpoint(source)
    out.mkdir()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in checkpoint.entries:
            yield name, checkpoint.read(name).float().bfloat16()

    specs = {
        n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in checkpoint.entries.items()
    }
    write(out / "model.safetensors", specs, tensors())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--tiny", action="store_true", help="one small block, to try the script")
    arguments = parser.parse_args()
    gigabytes = 0.0 if arguments.tiny else arguments.gigabytes
    config = of_size(gigabytes, CONFIG | (TINY if arguments.tiny else {}))
    source = make(config, arguments.directory / "source")
    for name in ("copy", "quantized", "quantized.partial"):
        shutil.rmtree(arguments.directory / name, ignore_errors=True)
    copied = copy(source, arguments.directory / "copy")
    command = [sys.executable, "-m", "qtool", "quantize", str(source), "--scheme", arguments.scheme]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--out", str(arguments.directory / "quantized")],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    quantized = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    size = sum(p.stat().st_size for p in source.glob("*.safetensors")) / 1e9
    found = {
        "scheme": arguments.scheme,
        "checkpoint GB": round(size, 2),
        "copy s": round(copied, 1),
    }
    found |= {
        "quantize s": round(quantized, 1),
        "ratio": round(quantized / copied, 2),
        "peak GB": round(peak, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
