"""The effect of a recipe's calibration windows: their text, number, and continuation by the model.

    python benchmarks/accuracy/windows.py demo DIR --calib wiki.txt --calib wiki.txt,c4.txt
    --text books.txt [--samples 64,128] [--windows given,continued] [--schemes w4a16,w4a8-lqq]

It prints the divergence from full precision of each model, on windows sampled from the model itself
and on windows of --text, which no --calib should hold. ``--write FILE`` keeps the table as JSON
after every row, for benchmarks/tables.py.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from sampled import sample
from schemes import divergence
from torch import Tensor
from transformers import PreTrainedModel

import qtool
from qtool.bench.stored import store
from qtool.data import corpora
from qtool.eval.perplexity import cut_windows

HEAD = ["model", "scheme", "calibration text", "its windows are", "windows"]


def heldout(
    model: str, base: PreTrainedModel, text: str, limit: int, length: int
) -> dict[str, Tensor]:
    """Windows ``[limit, length]`` sampled from the model itself, and windows of ``text``."""
    tokenizer = qtool.load_tokenizer(model)
    found = corpora.load(text, split=corpora.TEST).text
    ids = tokenizer(found, return_tensors="pt", verbose=False)["input_ids"][0]
    return {
        "KL, own text": sample(base, limit, length, seed=1),
        f"KL, {Path(text).name}": cut_windows(ids, length)[:limit],
    }


def names(calibration: str) -> str:
    """The names of the texts of a mix, without their folders."""
    return ", ".join(Path(part).name for part in calibration.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="directories, or demo")
    parser.add_argument("--calib", action="append", required=True, help="as qtool quantize has it")
    parser.add_argument("--text", default="demo", help="held out")
    parser.add_argument("--schemes", default="w4a16,w4a8-lqq")
    parser.add_argument("--recipe", default="best")
    parser.add_argument("--samples", default="64,128", help="calibration windows")
    parser.add_argument("--windows", default="given,continued")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--limit", type=int, default=24, help="windows evaluated, of each text")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    for model in arguments.models:
        base = qtool.load(model, dtype=torch.float32)
        texts = heldout(model, base, arguments.text, arguments.limit, arguments.length)
        head = [*HEAD, *texts]
        for scheme, calib, windows, samples in itertools.product(
            arguments.schemes.split(","),
            arguments.calib,
            arguments.windows.split(","),
            arguments.samples.split(","),
        ):
            with tempfile.TemporaryDirectory() as work:
                done = qtool.quantize(
                    model,
                    scheme,
                    recipe=arguments.recipe,
                    calibration=calib,
                    samples=int(samples),
                    seqlen=arguments.length,
                    windows=windows,
                    out=Path(work, "out"),
                )
                quantized = qtool.load(done, dtype=torch.float32)
                kl = [f"{divergence(quantized, base, ids):.5f}" for ids in texts.values()]
            rows.append([Path(model).name, f"`{scheme}`", names(calib), windows, samples, *kl])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
            if arguments.write:
                store(arguments.write, {"head": head, "rows": rows})


if __name__ == "__main__":
    main()
