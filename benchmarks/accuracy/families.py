"""Quantizes every causal and multimodal class of transformers at a tiny size and proves the result.

    python benchmarks/accuracy/families.py [smollm3 gpt_oss ...] [--write]

A random model of each class is planned, quantized by ``fast``, ``paper`` and ``best``, verified,
loaded, compared with transformers' model of the dequantized weights, and killed and resumed
(``tests/models/proof.py`` explains each proof). Each class runs in a process of its own. --write
keeps the table in benchmarks/results/families.json after every class; classes named on the command
line replace their rows there.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # tests/models, which is not installed

import qtool  # noqa: E402
from qtool.errors import QtoolError  # noqa: E402
from qtool.models.unsupported import why_unsupported  # noqa: E402
from tests.models import proof  # noqa: E402
from tests.models.tiny import save_tiny  # noqa: E402

#: causal classes by type, and wrappers of text models
CLASSES: dict[str, str] = {
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
SCHEME = "w4a16"
#: steps of the proof of a class, in order; a row has the reason why a step failed, or nothing
STEPS = "plan", *proof.RECIPES, "transforms", "resume", "export"
#: the step whose result a step reads
NEEDS = {"resume": "paper", "export": "fast"}
#: seconds that a class may take
LIMIT = 300


def proofs(
    source: Path, work: Path, row: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each step by name, with a function that raises if the step fails."""

    def plan() -> None:
        family, _ = qtool.family(source)
        row["derived"] = family.derived
        for recipe in proof.RECIPES:
            qtool.plan(source, SCHEME, recipe=recipe)

    yield "plan", plan
    for recipe in proof.RECIPES:
        yield (
            recipe,
            lambda recipe=recipe: row.update(
                proof.quantized_right(source, work / recipe, recipe, SCHEME)
            ),
        )
    yield "transforms", lambda: proof.transforms_keep_logits(source, work / "transforms", SCHEME)
    yield "resume", lambda: proof.resumes(source, work / "resumed", work / "paper")
    yield "export", lambda: proof.exported_right(work / "fast", work / "exported")


def prove(model_type: str, steps: list[str], answers: Any) -> None:
    """Send a row for ``model_type`` after each step, so that a dead process leaves the last one."""
    os.setsid()
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (as long as the process)
    torch.set_num_threads(1)
    row: dict[str, Any] = {"type": model_type, "class": CLASSES[model_type]}
    with TemporaryDirectory(prefix="qtool-families-") as work:
        try:
            source = save_tiny(model_type, Path(work) / "source")
        except Exception as error:
            answers.send(row | {"unbuilt": first_sentences(error, work)})
            return
        for step, run in proofs(source, Path(work), row):
            if step not in steps:
                continue
            if row.get(NEEDS.get(step, "")):
                row[step] = "not run"
                continue
            answers.send(row | {step: "the process died or ran out of time"})
            try:
                run()
                row[step] = ""
            except Exception as error:
                known = isinstance(error, (QtoolError, AssertionError))
                said = "" if known else f"{type(error).__name__}: "
                row[step] = said + first_sentences(error, work)
        answers.send(row)


def first_sentences(error: Exception, work: str) -> str:
    """The first line of ``error`` without the directory ``work``; at most 200 characters of it.

    It ends at a sentence, or at a word if its first sentence is longer.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(work, "")
    if len(line) <= 200:
        return line
    sentence, found, _ = line[:196].rpartition(". ")
    return f"{sentence}." if found else f"{line[:196].rpartition(' ')[0]} ..."


def row_of(model_type: str, steps: list[str]) -> dict[str, Any]:
    """The row of one class, made in a process of its own."""
    if refusal := why_unsupported(model_type):
        return {"type": model_type, "class": CLASSES[model_type], "refused": refusal}
    context = multiprocessing.get_context("fork")  # everything is imported already
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=prove, args=(model_type, steps, sender))
    began = time.monotonic()
    process.start()
    sender.close()
    row: dict[str, Any] = {}
    while receiver.poll(max(0.0, began + LIMIT - time.monotonic())):
        try:
            row = receiver.recv()
        except EOFError:
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also the run that it kills and resumes
    process.join()
    return row | {"seconds": round(time.monotonic() - began, 1)}


def passed(row: dict[str, Any], steps: list[str]) -> bool:
    """Whether none of ``steps`` failed."""
    return all(row.get(step) == "" for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="by default all")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {RESULTS.name}")
    arguments = parser.parse_args()
    if unknown := set(arguments.types) - set(CLASSES):
        parser.error(f"{min(unknown)!r} is no causal or multimodal model type of transformers")
    rows: dict[str, dict[str, Any]] = {}
    if arguments.write and arguments.types and RESULTS.exists():
        rows = {row["type"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    for model_type in arguments.types or CLASSES:
        row = rows[model_type] = row_of(model_type, arguments.steps)
        failed = [
            f"{name}: {row[name]}" for name in ("refused", "unbuilt", *STEPS) if row.get(name)
        ]
        print(f"{model_type} {row.get('seconds', 0)} s: {'; '.join(failed) or 'ok'}", flush=True)
        if arguments.write:
            facts = {
                "command": "make families",
                "note": f"transformers {transformers.__version__}",
                "machine": f"2 cores ({platform.machine()})",
                "date": time.strftime("%Y-%m-%d"),
                "scheme": SCHEME,
            }
            kept = [rows[name] for name in CLASSES if name in rows]
            RESULTS.write_text(json.dumps(facts | {"rows": kept}, indent=1) + "\n")
    steps = [step for step in arguments.steps if step != "export"]  # not every model has one
    good = sum(passed(row, steps) for row in rows.values())
    print(f"{good} of {len(rows)} passed")


if __name__ == "__main__":
    main()
