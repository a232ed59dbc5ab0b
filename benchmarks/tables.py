"""Fill the tables of README and docs from stored results and from the package itself.

    python benchmarks/tables.py            # writes the files
    python benchmarks/tables.py --check    # exit code 1 if a file would change

A table is between ``<!-- table NAME -->`` and ``<!-- /table -->``. Measured tables come from
``benchmarks/results/``; each file there was written by the command that it names.

The output of ``qtool bench serve --json`` and ``qtool bench quantize --json`` is stored by

    python benchmarks/tables.py --keep serving --command COMMAND --machine MACHINE RUN.json ...
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from qtool import calibration, recipes
from qtool.calibration.timing import BESIDE
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.table import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.S)


def results(name: str) -> Any:
    """The stored results ``name``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def made_by(found: dict[str, Any]) -> str:
    """A text on the machine and the command with which ``found`` was measured."""
    note = f" ({found['note']})" if "note" in found else ""
    where = f"on {found['machine']}, {found['date']}{note}"
    return f"\nMeasured by `{found['command']}` {where}.\n"


def quickstart() -> str:
    """The output of ``make quickstart``."""
    return f"```text\n{(RESULTS / 'quickstart.txt').read_text()}```\n"


def schemes() -> str:
    """The schemes, with perplexity by recipe and bits a weight."""
    found = results("accuracy")
    about = {name: text for name, _, text in recipes.overview()}
    rows = []
    for scheme, group in groupby(found["rows"], key=lambda row: row["scheme"]):
        variants = list(group)
        perplexity = " / ".join(f"{row['perplexity']:.2f}" for row in variants)
        rows.append([f"`{scheme}`", about[scheme], perplexity, f"{variants[0]['bits']:.2f}"])
    full = (
        f"perplexity of the demo ({found['full']['perplexity']:.2f} in full precision): fast / "
        "paper / best"
    )
    return markdown(["scheme", "what it is", full, "bits a weight"], rows)


def methods() -> str:
    """The options of every transform and rounding, with their defaults."""
    rows = []
    for name, method in {**calibration.TRANSFORMS, **calibration.ROUNDINGS}.items():
        options = []
        for option in fields(method):
            default = option.default
            if default is MISSING:
                default = option.default_factory() if callable(option.default_factory) else ""
            options.append(f"`{option.name}` {default}")
        rows.append([f"`{name}`", ", ".join(options) or "none"])
    return markdown(["method", "options and their defaults"], rows)


def departures() -> str:
    """The departures of the recipes ``paper`` from their papers, with their effects."""
    rows = [
        [f"`{scheme}`", departure.what, departure.effect]
        for scheme, _, departure in recipes.departures()
    ]
    return markdown(["scheme", "departure", "effect"], rows)


def formats() -> str:
    """The export formats by name."""
    return markdown(
        ["format", "what it is", "what runs it"],
        [[f"`{f.name}`", f.about, f"`{f.next_step}`"] for f in EXPORT_FORMATS.values()],
    )


def accuracy(name: str = "accuracy", timed: bool = True) -> str:
    """Every scheme and recipe on one model, with CPU seconds if ``timed``."""
    found = results(name)
    rows = [["full precision", "", f"{found['full']['perplexity']:.3f}", "", "", "16", ""]]
    rows[0] += [""] * timed
    for row in found["rows"]:
        rise = f"{row['rise']:+.2%} ± {100 * row['rise_error']:.2f}"
        size = [f"{row['bits']:.3f}", f"{row['megabytes']:.2f}"]
        size += [f"{row['seconds']:.0f}"] * timed
        cells = [f"`{row['scheme']}`", row["recipe"], f"{row['perplexity']:.3f}", rise]
        kl = f"{row['kl']:.5f}"
        if "kl_error" in row:
            kl = f"{row['kl']:.6f} ± {row['kl_error']:.6f}"
        rows.append([*cells, kl, *size])
    head = ["scheme", "recipe", "perplexity", "rise", "KL, nats", "bits a weight", "MB"]
    return markdown(head + ["CPU seconds"] * timed, rows) + made_by(found)


def rotation() -> str:
    """``best`` with the Hadamard alone, and with the rotation learned from it.

    Neither rotates anything at run time.
    """
    learned = divergence_of_best() | divergences("online-hadamard")
    return compared("rotation", "Hadamard", "learned", learned)


def online_hadamard() -> str:
    """``best`` for export, and with its rotations at run time."""
    return compared("online-hadamard", "`--for-export`", "`best`", divergence_of_best())


def output_hessian() -> str:
    """``best`` by GPTQ without the output side of the Hessian, and with it."""
    return compared("output-hessian", "outputs alike", "`best`", divergence_of_best())


def divergences(name: str) -> dict[str, float]:
    """KL by scheme."""
    return {row["scheme"]: row["kl"] for row in results(name)["rows"]}


def divergence_of_best() -> dict[str, float]:
    """KL by scheme, from the table of all schemes."""
    best = (row for row in results("accuracy")["rows"] if row["recipe"] == "best")
    return {row["scheme"]: row["kl"] for row in best}


def compared(name: str, before: str, after: str, changed: Mapping[str, float]) -> str:
    """The divergences of ``name`` beside those of another recipe."""
    rows = [
        [f"`{scheme}`", f"{kl:.5f}", f"{changed[scheme]:.5f}", f"{changed[scheme] / kl - 1:+.0%}"]
        for scheme, kl in divergences(name).items()
    ]
    return markdown(["scheme", before, after, "change"], rows) + made_by(results(name))


def kernels(name: str = "kernels", others: Sequence[str] = ("bf16", "fp8", "int8")) -> str:
    """Microseconds of a layer's linears by model and tokens, beside the floor and torch's own."""
    found = results(name)
    columns = list(found["rows"][0]["floor_us"])
    head = ["model", "tokens", "floor", *(f"`{column}`" for column in columns)]
    head += [*(f"torch {kind}" for kind in others), f"fp8 over `{columns[0]}`"]
    rows = []
    for row in found["rows"]:
        us = row["us"]
        cells = [f"{us[column]:.1f}" if column in us else "-" for column in columns]
        cells += [f"{us[f'torch {kind}']:.1f}" for kind in others]
        floor, gain = row["floor_us"][columns[0]], us["torch fp8"] / us[columns[0]]
        rows.append([row["model"], str(row["m"]), f"{floor:.0f}", *cells, f"{gain:.2f}"])
    return markdown(head, rows) + made_by(found)


def experts() -> str:
    """Microseconds of a layer's experts by model and tokens, beside the floor and vLLM's FP8."""
    found = results("experts")
    names = list(found["rows"][0]["us"])
    theirs = [name for name in names if name.startswith("vLLM")]
    head = ["model", "tokens", "floor", *names, f"best of vLLM over {names[0]}"]
    rows = []
    for row in found["rows"]:
        us = row["us"]
        gain = min(us[name] for name in theirs) / us[names[0]]
        cells = [f"{row['floor_us']:.0f}", *(f"{us[name]:.0f}" for name in names)]
        rows.append([row["model"], str(row["tokens"]), *cells, f"{gain:.2f}"])
    return markdown(head, rows) + made_by(found)


def experts_rotated() -> str:
    """Microseconds of a layer's experts with and without a rotation of down's inputs."""
    found = results("experts-rotated")
    schemes = [name for name in found["rows"][0]["us"] if not name.endswith(" rotated")]
    rows = []
    for row in found["rows"]:
        cells = [row["model"], str(row["tokens"])]
        for scheme in schemes:
            plain, rotated = (row["us"][f"{scheme}{suffix}"] for suffix in ("", " rotated"))
            cells += [f"{plain:.1f}", f"{rotated:.1f}", f"{100 * (rotated / plain - 1):+.1f}%"]
        rows.append(cells)
    head = ["model", "tokens"]
    for scheme in schemes:
        head += [scheme, f"{scheme} rotated", "change"]
    return markdown(head, rows) + made_by(found)


def serving() -> str:
    """Decode steps and prefill in vLLM, by run, batch and engine: rows of ``qtool bench serve``."""
    found = results("serving")
    parts = []
    for run in found["runs"]:
        rows = []
        for row in sorted(run["rows"], key=lambda row: row["batch"]):
            rates = [f"{row[rate]:,.0f}" for rate in ("prefill", "request")]
            rows.append([row["engine"], str(row["batch"]), f"{row['step_ms']:.2f}", *rates])
        head = ["engine", "batch", "ms a decode step"]
        head += ["prefill, tokens a second", "whole requests, new tokens a second"]
        parts.append(f"**{run['title']}**\n\n" + markdown(head, rows))
    return "\n".join(parts) + made_by(found)


def serving_steps() -> str:
    """Milliseconds a decode step of each engine in the first run, a column for each batch."""
    steps: dict[str, dict[int, str]] = {}
    for row in results("serving")["runs"][0]["rows"]:
        steps.setdefault(row["engine"], {})[row["batch"]] = f"{row['step_ms']:.2f}"
    batches = list(next(iter(steps.values())))
    head = ["sequences at once", *map(str, batches)]
    return markdown(head, [[engine, *of.values()] for engine, of in steps.items()])


FIRST_SERVED = "W4A8 LiquidQuant with its 4-bit cache beside vLLM's online FP8"
#: by shape: the title of our run within 80 GB, and the tokens a second within 80 GB of LiquidServe
#: and QServe on an H800 (LiquidGEMM, table 1) and of QServe on an A100 (QServe, table 5)
PAPERS = {
    "Llama-2-7B": ("Llama-2-7B in 80 GB", 6721, 5402, 2908),
    "Llama-2-13B": ("Llama-2-13B in 80 GB", 4105, 3311, 1741),
    "Llama-2-70B": ("Llama-2-70B in 80 GB", 3695, 871, 419),
    "Llama-3-8B": (FIRST_SERVED, 16694, 5240, 3005),
}


def serving_papers() -> str:
    """Our best row of a shape within 80 GB, beside the numbers of two papers."""
    runs = {run["title"]: run["rows"] for run in results("serving")["runs"]}
    rows = []
    for shape, (title, *theirs) in PAPERS.items():
        ours = [row for row in runs[title] if row["engine"].startswith("qtool")]
        best = max(ours, key=lambda row: row["request"])
        rates = 1000 * best["batch"] / best["step_ms"], best["request"], *theirs
        rows.append([shape, str(best["batch"]), *(f"{rate:,.0f}" for rate in rates)])
    head = ["shape", "sequences", "decoding alone", "whole requests"]
    head += ["LiquidServe, H800", "QServe, H800", "QServe, A100"]
    return markdown(head, rows)


def runtime() -> str:
    """Milliseconds a decode step of our own runtime, from runtime_speed.py."""
    found = results("runtime")
    head = ["batch", "CUDA graphs", "static cache, eager", "dynamic cache, eager", "bf16 model"]
    rows = []
    for key, steps in found.items():
        if batch := re.fullmatch(r"step B=(\d+)", key):
            ways = [steps[way] for way in ("graphs", "static, eager", "dynamic, eager")]
            times = [*ways, found["bf16"][f"B={batch[1]}"]]
            rows.append([batch[1], *(f"{ms:.2f}" for ms in times)])
    return markdown(head, rows) + made_by(found)


def quantize() -> str:
    """Runs of ``qtool bench quantize``, their phases beside the floors."""
    found = results("quantize")
    phases = ("windows", "forward", "search", "rounding", "Hessian")
    head = ["run", "seconds", "device GB", "host GB"]
    head += [f"{phase} (floor), s" for phase in phases] + ["writing beside, s"]
    rows = []
    for run in found["runs"]:
        record, floors = run["found"]["record"], run["found"]["floors"]
        spent = record["phases"]
        rows.append([
            run["title"], f"{record['seconds']:.1f}",
            f"{record['peak_device_bytes'] / 1e9:.1f}", f"{record['peak_host_bytes'] / 1e9:.1f}",
            *(f"{spent[phase]:.1f} ({floors.get(phase, 0):.1f})" if phase in spent else "-"
              for phase in phases),
            f"{spent.get(f'write{BESIDE}', 0):.1f}",
        ])  # fmt: skip
    return markdown(head, rows) + made_by(found)


def sensitivity() -> str:
    """Points of the curve of ``qtool sensitivity``, beside uniform schemes of as many bits."""
    stored = results("sensitivity")
    found = stored["runs"][0]["found"]
    uniform = sorted((p["bits"], p["measured"], name) for name, p in found["uniform"].items())
    rows = [[f"{bits:.3f}", f"{kl:.5f}", f"`{name}`", ""] for bits, kl, name in uniform]
    mixed = [p for p in found["curve"] if p not in found["uniform"].values()]
    for point in (p for p in mixed if p["measured"] is not None):
        for (left, high, _), (right, low, _) in pairwise(uniform):
            if left < point["bits"] <= right:
                between = high + (low - high) * (point["bits"] - left) / (right - left)
                rows.append([f"{point['bits']:.3f}", f"{point['measured']:.5f}", "mixed",
                             f"{point['measured'] / between - 1:+.0%}"])  # fmt: skip
    head = ["bits a weight", "KL, nats", "schemes", "against the line between uniform ones"]
    return markdown(head, sorted(rows, key=lambda row: (float(row[0]), row))) + made_by(stored)


#: steps of the proof of each class, in order; an export follows
FAMILY_STEPS = "plan", "fast", "paper", "best", "transforms", "resume"


def families() -> str:
    """Every causal class of transformers with its proved steps, or the reason why one failed."""
    found = results("families")
    rows, right = [], 0
    for row in found["rows"]:
        failed = [f"{step}: {row[step]}" for step in FAMILY_STEPS if row.get(step)]
        reasons = [row[key] for key in ("refused", "unbuilt") if key in row] + failed[:1]
        right += not reasons
        kept = "; ".join(f"`{name}`: {why}" for name, why in row.get("kept", {}).items())
        passed = [step for step in FAMILY_STEPS if row.get(step) == ""]
        # the type is in the row, and the other families are in the table
        reasons = [re.sub("unsupported architecture .*?: |; declared .*", "", r) for r in reasons]
        said = "yes" if not reasons else f"no: {reasons[0]}"
        if reasons and passed:
            said += f" (right: {', '.join(passed)})"
        by = {True: "derived", False: "declared"}.get(row.get("derived"), "-")
        exported = {"": "yes", None: "-"}.get(row.get("export"), f"no: {row.get('export')}")
        cells = [f"`{row['type']}`", by, said, exported, str(row.get("quantized", "-"))]
        cells.append(kept or "-")
        rows.append([cell.replace("|", "\\|") for cell in cells])
    head = ["`model_type`", "family", "every step right", "export", "linears", "left in 16 bits"]
    counted = f"{right} of {len(rows)} types pass every step.\n\n"
    return counted + markdown(head, rows) + made_by(found)


def trained(*shapes: str) -> str:
    """The models that benchmarks/accuracy/train.py made."""
    rows, commands = [], []
    for shape in shapes:
        found = results(f"training-{shape}")
        millions = [f"{found[name] / 1e6:.1f}" for name in ("parameters", "train_tokens", "tokens")]
        spent = [f"{found['held_out_loss']:.3f}", f"{found['seconds']:.0f}"]
        rows.append([shape, *millions, *spent])
        commands.append(f"`{found['command']}`")
    head = ["model", "parameters, M", "text, M tokens", "read, M tokens", "held-out loss, nats"]
    where = f"{found['device']}, torch {found['torch']}, transformers {found['transformers']}"
    made = f"\nTrained by {' and '.join(commands)} on {where}.\n"
    return markdown([*head, "seconds"], rows) + made


def printed(name: str) -> Callable[[], str]:
    """A table stored as ``head`` and ``rows`` of text, as the command printed it."""

    def table() -> str:
        found = results(name)
        title = f"**{found['title']}**\n\n" if "title" in found else ""
        return title + markdown(found["head"], found["rows"]) + made_by(found)

    return table


TABLES: dict[str, Callable[[], str]] = {
    "quickstart": quickstart,
    "schemes": schemes,
    "methods": methods,
    "departures": departures,
    "formats": formats,
    "accuracy": accuracy,
    "accuracy-small": lambda: accuracy("accuracy-small", timed=False),
    "rotation": rotation,
    "online-hadamard": online_hadamard,
    "output-hessian": output_hessian,
    "kernels": kernels,
    "kernels-others": lambda: kernels("kernels-others", ("bf16", "fp8")),
    "kernels-w4a16": lambda: kernels("kernels-w4a16", ("bf16", "fp8")),
    "experts": experts,
    "experts-rotated": experts_rotated,
    "serving": serving,
    "serving-steps": serving_steps,
    "serving-papers": serving_papers,
    "runtime": runtime,
    "quantize": quantize,
    "families": families,
    "trained": lambda: trained("dense", "mixture"),
    "trained-small": lambda: trained("small"),
    "sensitivity": sensitivity,
    **{
        name: printed(name)
        for name in (
            "agreement",
            "agreement-books",
            "agreement-kv",
            "kv",
            "outliers",
            "outliers-demo",
            "peers",
            "peers-c4",
            "peers-dense",
            "peers-mixture",
            "quantize-ranks",
            "quantize-llm-compressor",
            "quantize-autoround",
            "step-profile",
            "tasks",
            "trained-families",
            "windows",
        )
    },
}


def documents() -> Iterator[Path]:
    """The files that hold tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "benchmarks" / "journal").glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def keep(name: str, files: Sequence[Path], command: str, machine: str) -> None:
    """Store the output of runs of ``qtool bench serve --json`` or ``bench quantize --json``.

    A run's title is its file's name.
    """
    runs: list[dict[str, Any]] = []
    for file in files:
        found = json.loads(file.read_text())
        runs.append({"title": file.stem, "rows" if isinstance(found, list) else "found": found})
    facts = {"command": command, "machine": machine, "date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(facts | {"runs": runs}, indent=1) + "\n")


def main() -> None:
    """Write the tables, or check that they are written; with ``--keep``, store runs first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    parser.add_argument("--keep", metavar="NAME", help="store runs in benchmarks/results/NAME.json")
    parser.add_argument("--command", help="of --keep: what made the runs")
    parser.add_argument("--machine", help="of --keep: where")
    parser.add_argument("runs", type=Path, nargs="*", help="of --keep: their JSON; titles by name")
    arguments = parser.parse_args()
    if arguments.keep:
        if not (arguments.runs and arguments.command and arguments.machine):
            parser.error("--keep needs --command, --machine and the files of the runs")
        keep(arguments.keep, arguments.runs, arguments.command, arguments.machine)
    stale = []
    for path in documents():
        before = path.read_text()
        after = BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", before)
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(after)
    print("\n".join(stale) or "all tables are up to date")
    sys.exit(1 if arguments.check and stale else 0)


if __name__ == "__main__":
    main()
