"""Calibration activations on the device, in host memory and on disk: the results are the same
bytes, and each place has its cost.

    python benchmarks/quantize/spill.py DIR [--layers 2]

The model has the 8B shape and random weights, and is calibrated on 128 x 2048 random tokens. A
first run compiles the kernels.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from qtool import recipes
from qtool.bench import quantize as bench
from qtool.bench.random_checkpoint import config_of, make


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("spill.py: a CUDA device is needed")
    config = config_of("llama-3-8b", chosen.layers)
    source = make(config, chosen.directory / f"source-{chosen.layers}")
    recipe = recipes.load("w4a8-lqq", str(Path(__file__).with_name("paper-gptq.yaml")))
    first = None
    for place in ("device", "device", "host", "disk"):
        out = chosen.directory / place
        found = bench.run(
            source, recipe, out, samples=128, seqlen=2048, device="cuda", activations=place
        )
        digests, record = json.loads((out / "qtool.json").read_text())["shards"], found.record
        first = first or digests
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record["phases"].items())
        print(
            f"{place}: {record['seconds']:.2f} s ({phases}); device "
            f"{record['peak_device_bytes'] / 1e9:.2f} GB, host "
            f"{record['peak_host_bytes'] / 1e9:.2f} GB; same bytes: {digests == first}",
            flush=True,
        )


if __name__ == "__main__":
    main()
