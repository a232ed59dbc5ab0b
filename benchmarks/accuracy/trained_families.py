"""Trains a small model of each of twenty architectures and quantizes it: is ``best`` best?

    python benchmarks/demo/tokenize_corpus.py --train TRAIN.txt --valid VALID.txt --out TOKENS
    python benchmarks/accuracy/trained_families.py --tokens TOKENS --work WORK [--write]

The models (``train.py``'s ``FAMILIES``) are trained at once, each in a process of its own, and then
quantized by ``paper`` and ``best``, with the end of the training text for calibration. A row has
the KL divergence from full precision on the held-out text, in 1/1000 nats a token; both models
compute in float32. --write keeps the rows in benchmarks/results/trained-families.json.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from schemes import window_divergence
from torch import Tensor
from train import FAMILIES

import qtool
from qtool.bench.stored import store
from qtool.eval.results import standard_error

RESULTS = Path(__file__).parents[1] / "results" / "trained-families.json"
RECIPES = "paper", "best"
#: tokens at the end of the training text that calibrate
CALIBRATION = 200_000


def tokens_of(name: str, arguments: argparse.Namespace) -> Tensor:
    """The tokens of ``train`` or ``valid``."""
    found = np.fromfile(arguments.tokens / f"{name}.bin", np.uint16)
    return torch.from_numpy(found.astype(np.int64))


def measured(family: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of ``family``, whose trained model is in ``--work``."""
    source = arguments.work / family
    base = qtool.load(source, device=arguments.device, dtype=torch.float32)
    valid = tokens_of("valid", arguments).to(arguments.device)
    rows = valid[: arguments.limit * arguments.seqlen].view(-1, arguments.seqlen)
    trained = json.loads((source / "training.json").read_text())
    row: dict[str, Any] = {name: trained[name] for name in ("parameters", "held_out_loss")}
    for scheme in arguments.schemes.split(","):
        for recipe in RECIPES:
            out = arguments.work / f"{family}-{scheme}-{recipe}"
            qtool.quantize(
                source,
                scheme,
                recipe=recipe,
                calibration=tokens_of("train", arguments)[-CALIBRATION:],
                out=out,
                device=arguments.device,
                samples=arguments.samples,
                seqlen=arguments.seqlen,
            )
            model = qtool.load(out, device=arguments.device, dtype=torch.float32)
            found = window_divergence(model, base, rows)
            row[f"{scheme} {recipe}"] = fmean(found), standard_error(found)
    return {"family": family} | row


def in_processes(
    arguments: argparse.Namespace, families: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The row of each of ``families`` once it is measured; one that fails is named.

    All are trained at once, and then all are measured at once, each in a process of its own.
    """
    accuracy = Path(__file__).parent

    def call(log: Path, *command: object) -> None:
        with log.open("w") as file:
            run = [sys.executable, *map(str, command)]
            subprocess.run(run, stdout=file, stderr=subprocess.STDOUT, check=True)

    def train(family: str) -> None:
        options = f"--minutes {arguments.minutes} --windows {arguments.windows} --no-compile"
        options += f" --device {arguments.device} --tokens"
        place, log = arguments.work / family, arguments.work / f"train-{family}.log"
        call(log, accuracy / "train.py", family, place, *options.split(), arguments.tokens)

    def row(family: str) -> dict[str, Any]:
        call(arguments.work / f"{family}.log", __file__, *sys.argv[1:], "--only", family)
        return dict(json.loads((arguments.work / f"{family}.json").read_text()))

    arguments.work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(families)) as pool:
        trained = {family: pool.submit(train, family) for family in families}
        wait(trained.values())
        running = {pool.submit(row, f): f for f, done in trained.items() if not done.exception()}
        for ended in as_completed(running):
            if not ended.exception():
                yield ended.result()
        measured = [family for ended, family in running.items() if not ended.exception()]
    for family in families:
        if family not in measured:
            print(f"{family} failed, see its logs in {arguments.work}")


def cells(row: dict[str, Any], schemes: Sequence[str]) -> list[str]:
    """The table's row: KL of ``paper`` and of ``best`` in 1/1000 nats, and their ratio."""
    found = [f"`{row['family']}`", f"{row['parameters'] / 1e6:.1f}", f"{row['held_out_loss']:.2f}"]
    for scheme in schemes:
        paper, best = (row[f"{scheme} {recipe}"][0] for recipe in RECIPES)
        found.append(f"{1e3 * paper:.3g} / {1e3 * best:.3g} ({best / paper:.2f})")
    return found


def main() -> None:
    """Print each row as soon as it is measured, and keep them where --write is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True, help="tokenize_corpus.py's folder")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--families", default=",".join(FAMILIES), help="by default all")
    parser.add_argument("--schemes", default="w8a8,w4a16,w4a8-lqq,w4a4-g128")
    parser.add_argument("--minutes", type=float, default=3, help="of training")
    parser.add_argument("--windows", type=int, default=12, help="of 1024 tokens a training step")
    parser.add_argument("--samples", type=int, default=48, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens of a window")
    parser.add_argument("--limit", type=int, default=96, help="windows that are evaluated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.only:
        row = measured(arguments.only, arguments)
        (arguments.work / f"{arguments.only}.json").write_text(json.dumps(row))
        return
    rows: list[dict[str, Any]] = []
    schemes = arguments.schemes.split(",")
    for row in in_processes(arguments, arguments.families.split(",")):
        print(*cells(row, schemes), flush=True)
        rows = sorted([*rows, row], key=lambda row: str(row["family"]))
        table = {
            "head": ["model_type", "parameters, M", "held-out loss, nats", *schemes],
            "rows": [cells(row, schemes) for row in rows],
        }
        if arguments.write:
            store(RESULTS, table | {"measured": rows}, device=arguments.device)


if __name__ == "__main__":
    main()
