"""The cost of a tied head in ``best``: KL with the head untied in 16 and 8 bits, and kept tied.

    python benchmarks/accuracy/tied.py MODEL

MODEL is a model that ties embedding and head. Its calibration and evaluation text is sampled from
itself, by default 24 windows of 256 tokens each. The table has the KL divergence from full
precision in 1/1000 nats a token; the number in brackets is the change against the untied head in 16
bits, paired by window, with its 95 % interval.
"""

import argparse
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from schemes import window_divergence
from torch import Tensor
from transformers import PreTrainedModel

from qtool import recipes
from qtool.data.continuation import continued
from qtool.io.model_directory import directory_of
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load

SCHEMES = ("w8a8", "w4a16", "w4a8-lqq", "w4a8-qoq", "w4ax-fmpq", "w4a4-g128")
WINDOWS, TOKENS, BATCH = 24, 256, 8


def divergence(model: PreTrainedModel, base: PreTrainedModel, windows: Tensor) -> Tensor:
    """KL(base || model) of each window, 1/1000 nats a token."""
    return 1e3 * torch.tensor(window_divergence(model, base, windows), dtype=torch.float64)


def rounded_head(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with its head rounded to 8 bits, with a scale for each row."""
    weight = model.get_output_embeddings().weight.data
    scale = weight.abs().amax(1, keepdim=True) / 127
    weight.copy_((weight / scale).round() * scale)
    return model


def measured(
    source: Checkpoint, windows: Tensor, schemes: Iterable[str], work: Path
) -> Iterator[str]:
    """A line for each scheme; half of the windows calibrate, the other half are evaluated."""
    calibrated, evaluated = windows.tensor_split(2)
    base = load(source.directory, dtype=torch.float32)
    calibration = Calibration(list(calibrated.split(BATCH)), {"text": "the model's own"})
    for scheme in schemes:
        best = replace(recipes.load(scheme, "best"), windows="given")
        tied = Job.of(source.config, best).recipe
        found = {}
        for name, recipe in (("untied", replace(best, variant="custom")), ("tied", tied)):
            row_major = "row-major-8" if scheme == "w8a8" else "row-major"
            out = quantize(
                source, recipe.with_layout(row_major), work / name, calibration=calibration
            )
            model = load(out, dtype=torch.float32)
            found[name] = divergence(model, base, evaluated)
            if name == "untied":
                found["8 bits"] = divergence(rounded_head(model), base, evaluated)
            shutil.rmtree(out)
        cells = [f"{found['untied'].mean():.2f}"]
        for name in ("8 bits", "tied"):
            change = found[name] - found["untied"]
            error = 1.96 * float(change.std()) / len(change) ** 0.5
            cells.append(f"{found[name].mean():.2f} ({change.mean():+.2f} ± {error:.2f})")
        yield f"| {scheme} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="with commas")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of each text")
    parser.add_argument("--length", type=int, default=TOKENS, help="tokens of a window")
    arguments = parser.parse_args()
    source = Checkpoint(directory_of(arguments.model))
    start = torch.full((2 * arguments.windows, 1), source.config["bos_token_id"] or 0)
    base = load(source.directory, dtype=torch.float32)
    windows = continued(base, start, arguments.length, seed=0, batch_size=len(start))
    print("| scheme | untied, 16 bits | untied, 8 bits | tied |\n|---|---:|---:|---:|")
    with TemporaryDirectory() as work:
        for line in measured(source, windows, arguments.schemes.split(","), Path(work)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
