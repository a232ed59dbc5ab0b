"""A packed checkpoint of a known model's shape, to measure serving: seconds instead of a
quantization.

    python benchmarks/serving/random_packed.py llama-3-8b w4a8-lqq OUT [--layers N] [--kv kv4]

For each width, 256 rows of a random weight are quantized, and every linear of that width repeats
them. The bytes are legal (scales, offsets, sums that do not overflow), and a GPU does the same work
as for a trained model.
"""

import argparse
from dataclasses import replace
from functools import cache
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from qtool.bench.random_checkpoint import config_of
from qtool.format import SLAB_ROWS, LinearFormat
from qtool.io.integrity import INDEX
from qtool.io.safetensors import write, write_json
from qtool.pipeline.job import Job
from qtool.recipes import load
from qtool.runtime.packed_kv import NEUTRAL, SCALES
from qtool.serving.partition import axes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cache
def slab(linear_format: LinearFormat, rows: int, k: int) -> dict[str, Tensor]:
    """The stored tensors of ``rows`` random rows."""
    scheme = linear_format.scheme_object
    weight = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).mul_(0.02).to(DEVICE)
    params = scheme.fit(scheme.prune(weight))
    stored = linear_format.pack(scheme.quantize(scheme.prune(weight), params), params)
    return {name: tensor.cpu() for name, tensor in stored.items()}


@cache
def linear(linear_format: LinearFormat, n: int, k: int) -> dict[str, Tensor]:
    """The stored tensors of a weight ``[n, k]``."""
    rows = gcd(n, SLAB_ROWS)
    found = axes(linear_format, rows, k)
    return {
        name: tensor
        if found[name].output is None
        else torch.cat([tensor] * (n // rows), found[name].output)
        for name, tensor in slab(linear_format, rows, k).items()
    }


def value(job: Job, name: str, spec: Tensor) -> Tensor:
    """The content of one tensor of the checkpoint."""
    owner, _, part = name.rpartition(".")
    if part in NEUTRAL or part in SCALES:  # a scale of the KV cache; keys and values are about 1
        return torch.full(spec.shape, NEUTRAL.get(part, 0.05), dtype=spec.dtype)
    linear_format = job.format.of(owner)
    within = owner.removeprefix(f"{job.family.blocks}.").partition(".")
    if linear_format is not None and part not in ("weight", "bias") and within[0].isdigit():
        if part == "permutation":
            return torch.arange(len(spec), dtype=torch.int32)
        n, k = job.block_family(int(within[0])).shape(f"{within[2]}.weight", job.namespace)
        return linear(linear_format, n, k)[part]
    if spec.dim() == 1:
        return torch.ones(spec.shape, dtype=spec.dtype)
    random = torch.Generator(DEVICE).manual_seed(len(name))
    return (
        torch.empty(spec.shape, dtype=spec.dtype, device=DEVICE)
        .normal_(std=0.02, generator=random)
        .cpu()
    )


def make(
    shape: str, scheme: str, out: Path, layers: int | None = None, kv: str | None = None
) -> Path:
    """Write the checkpoint of ``shape`` in the recipe ``fast`` of ``scheme``."""
    job = Job.of(config_of(shape, layers), replace(load(scheme, "fast"), kv=kv))
    out.mkdir(parents=True)
    weight_map = {}
    for number, specs in enumerate(job.shards()):
        file = f"model-{number:05d}.safetensors"
        write(out / file, specs, ((name, value(job, name, spec)) for name, spec in specs.items()))
        weight_map.update(dict.fromkeys(specs, file))
    write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map})
    write_json(out / "config.json", job.config | {"quantization_config": job.format.to_dict()})
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("scheme")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kv", help="of the cache: kv4, kv8; 16 bits by default")
    options = parser.parse_args()
    print(make(options.shape, options.scheme, options.out, options.layers, options.kv))
