"""The same model, calibration tokens and evaluation through qtool, llm-compressor, GPTQModel,
AutoRound and Quark.

    python benchmarks/accuracy/peers.py [--model demo] [--calib demo] [--samples 128] [--text demo]
    [--limit 32] [--tasks piqa,arc_easy --items 300] [--rows all] [--device cuda:0] [--jobs 8]
    [--write benchmarks/results/peers.json]

It makes a virtual environment for every tool under --venvs, runs every row as a process of its own,
and prints a Markdown table; --write FILE keeps it as JSON, from which benchmarks/tables.py makes
the tables of the docs. If a tool does not install or run, the table has the reason. Results in
--work are reused: delete them to measure again. Environments in --venvs are reused too; one of your
own there, with an empty refused.txt, is used unchanged. Options not listed below are those of
peer_run.py. The script uses the standard library only.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
#: installed first, by its exact version: the index then gives its CPU build if it has one, and no
#: tool may replace it
TORCH = "torch==2.13.0"
OURS = "qtool"


class Row(NamedTuple):
    """The facts of a row.

    Attributes:
        scheme: the scheme; its first row is qtool's, with which the others are compared.
        label: the tool and its methods.
        tool: package of the tool.
        bits: bits of a weight with its scale, a scale counted as 16 bits, and of an activation.
    """

    scheme: str
    label: str
    tool: str
    bits: str


W4A16, W4A8, W8A8, W4A4 = "4.125 / 16", "4.125 / 8", "8.052 / 8", "4.125 / 4"
LLM, GPTQMODEL, AUTOROUND, QUARK = "llmcompressor", "gptqmodel", "auto-round", "amd-quark"
ROWS = {
    "full": Row("", "full precision", OURS, "16 / 16"),
    "qtool-w4a16-best": Row("W4A16", "**qtool** `best`", OURS, W4A16),
    "qtool-w4a16-given": Row("W4A16", "**qtool** `best`, `--windows given`", OURS, W4A16),
    "qtool-w4a16-paper": Row("W4A16", "**qtool** `paper`", OURS, W4A16),
    "llm-compressor-w4a16": Row("W4A16", "llm-compressor, GPTQ", LLM, W4A16),
    "llm-compressor-w4a16-best": Row("W4A16", "llm-compressor, GPTQ, observer `mse`", LLM, W4A16),
    "gptqmodel-w4a16": Row("W4A16", "GPTQModel, GPTQ", GPTQMODEL, W4A16),
    "gptqmodel-w4a16-best": Row("W4A16", "GPTQModel, GPTQ, `mse=2.4`", GPTQMODEL, W4A16),
    "autoround-w4a16": Row("W4A16", "AutoRound, 200 iterations", AUTOROUND, W4A16),
    "autoround-w4a16-best": Row("W4A16", "AutoRound, 1000 iterations", AUTOROUND, W4A16),
    "quark-w4a16": Row("W4A16", "Quark, rotation + Qronos", QUARK, W4A16),
    "qtool-w8a8-best": Row("W8A8", "**qtool** `best`", OURS, W8A8),
    "llm-compressor-w8a8": Row("W8A8", "llm-compressor, SmoothQuant + GPTQ", LLM, W8A8),
    "autoround-w8a8": Row("W8A8", "AutoRound, 200 iterations", AUTOROUND, W8A8),
    "quark-w8a8": Row("W8A8", "Quark, rotation + Qronos", QUARK, W8A8),
    "qtool-w4a8-qoq-g128-best": Row("W4A8", "**qtool** QoQ, `best`", OURS, "4.177 / 8"),
    "qtool-w4a8-lqq-best": Row("W4A8", "**qtool** LQQ, `best`", OURS, "4.302 / 8"),
    "llm-compressor-w4a8": Row("W4A8", "llm-compressor, GPTQ", LLM, W4A8),
    "llm-compressor-w4a8-best": Row("W4A8", "llm-compressor, GPTQ, observer `mse`", LLM, W4A8),
    "llm-compressor-w4a8-g64": Row(
        "W4A8", "llm-compressor, GPTQ, observer `mse`, groups of 64", LLM, "4.250 / 8"
    ),
    "autoround-w4a8": Row("W4A8", "AutoRound, 200 iterations", AUTOROUND, W4A8),
    "quark-w4a8": Row("W4A8", "Quark, rotation + Qronos", QUARK, W4A8),
    "qtool-w4a4-everywhere": Row("W4A4", "**qtool** methods of `best` everywhere", OURS, W4A4),
    "qtool-w4a4-best": Row("W4A4", "**qtool** `best`, down in W4A8", OURS, "4.130 / 4, down 8"),
    "llm-compressor-w4a4": Row("W4A4", "llm-compressor, GPTQ, observer `mse`", LLM, W4A4),
    "llm-compressor-w4a4-best": Row("W4A4", "llm-compressor, SpinQuant with R4 + GPTQ", LLM, W4A4),
    "autoround-w4a4": Row("W4A4", "AutoRound, 200 iterations", AUTOROUND, W4A4),
    "quark-w4a4": Row("W4A4", "Quark, rotation with R4 + Qronos", QUARK, W4A4),
}
HEAD = ["", "what", "bits", "perplexity", "rise", "KL, nats", "KL beside ours"]
#: GPTQModel's default of half the cores is one too few for it on a machine of two
ENVIRONMENT = {"GPTQMODEL_CPU_WORKERS": "2", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venvs", type=Path, default=Path("out/peers-venvs"))
    parser.add_argument("--work", type=Path, default=Path("out/peers"))
    parser.add_argument(
        "--rows", default="all", help=f"all, or names with commas: {', '.join(ROWS)}"
    )
    parser.add_argument("--timeout", type=int, default=7200, help="seconds a row may take")
    parser.add_argument("--total", type=int, help="seconds that all rows may take")
    parser.add_argument("--jobs", type=int, default=1, help="rows that are measured at once")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table as JSON")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0, of every tool")
    arguments, options = parser.parse_known_args()
    options += ["--device", arguments.device] if arguments.device != "cpu" else []
    # results depend on these options
    arguments.work /= hashlib.sha256(" ".join(options).encode()).hexdigest()[:8]
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = list(ROWS) if arguments.rows == "all" else arguments.rows.split(",")
    arguments.deadline = time.monotonic() + (arguments.total or math.inf)
    missing = [row for row in rows if not (arguments.work / f"{row}.json").exists()]
    for tool in dict.fromkeys(ROWS[row].tool for row in missing):
        refused(arguments.venvs, tool)  # before rows that run at once want the same one
    with ThreadPoolExecutor(arguments.jobs) as pool:
        slow_first = sorted(rows, key=lambda row: not row.startswith("autoround"))
        runs = {row: pool.submit(measured, row, arguments, options) for row in slow_first}
    found = {row: runs[row].result() for row in rows}
    head, lines = table(found)
    cells = [head, ["---", "---", *["---:"] * (len(head) - 2)], *lines]
    print("\n".join(f"| {' | '.join(row)} |" for row in cells))
    if arguments.write:
        tools = list(dict.fromkeys(ROWS[row].tool for row in rows if "error" not in found[row]))
        facts = {
            "command": "python " + " ".join(Path(a).name if a[:1] == "/" else a for a in sys.argv),
            "machine": "; ".join(
                [
                    said(arguments.venvs, OURS, MACHINE, arguments.device),
                    *versions(arguments, tools),
                ]
            ),
            "date": time.strftime("%Y-%m-%d"),
        }
        made = {"head": head, "rows": lines}
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(facts | made, indent=1, ensure_ascii=False) + "\n")


def refused(venvs: Path, tool: str) -> str:
    """Make the environment of ``tool`` if it is not there; returns pip's refusal, or nothing."""
    venv = venvs / tool
    record = venv / "refused.txt"
    if not record.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        constraints = venv / "constraints.txt"
        constraints.write_text(TORCH + "\n")
        pip = [str(venv / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        wanted = ["-c", str(constraints), "-e", str(HERE.parents[1])]
        wanted += [tool] * (tool != OURS)
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True)
        record.write_text(last_line(done.stderr) if done.returncode else "")
    return record.read_text()


def measured(row: str, arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """The results of ``peer_run.py``, or ``{"error": reason}``."""
    record = arguments.work / f"{row}.json"
    if record.exists():
        return dict(json.loads(record.read_text()))
    tool = ROWS[row].tool
    if reason := refused(arguments.venvs, tool):
        return {"error": f"does not install: {reason}"}
    limit = max(min(arguments.timeout, arguments.deadline - time.monotonic()), 0)
    log = arguments.work / f"{row}.log"
    print(f"{row} ...", file=sys.stderr, flush=True)
    python = arguments.venvs / tool / "bin/python"
    command = [python, HERE / "peer_run.py", row, "--work", arguments.work, *options]
    try:
        with log.open("w") as output:
            subprocess.run(
                [str(part) for part in command],
                env=ENVIRONMENT | os.environ,
                stdout=output,
                stderr=output,
                check=True,
                timeout=limit,
            )
    except subprocess.TimeoutExpired:
        failed = f"does not finish in {limit:.0f} s"
    except subprocess.CalledProcessError:
        failed = f"does not run: {last_line(log.read_text())}"
    if record.exists():  # it has no zero-shot tasks if only these failed
        return dict(json.loads(record.read_text()))
    return {"error": failed}


def last_line(text: str) -> str:
    """The last line with content, shortened for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:120].replace("|", "/") if lines else "no message"


def table(found: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the rows; errors are over windows or items, differences paired by window.

    Bits that depend on the width of the model are those of qtool's checkpoint, if it was measured.
    """
    rows, ours = [], dict[str, dict[str, Any]]()
    measured = [r for r in found.values() if "error" not in r]
    tasks = list(dict.fromkeys(task for r in measured for task in r.get("tasks", {})))
    on_gpu = any(r.get("device", "cpu") != "cpu" for r in measured)
    head = [*HEAD, *tasks, *(("seconds", "GPU MB") if on_gpu else ("CPU seconds", "MB"))]
    for name, r in found.items():
        scheme, label, tool, bits = ROWS[name]
        first = ours.get(scheme, r) if "error" in r else ours.setdefault(scheme, r)
        stored = r if tool == OURS else first if bits == W8A8 else {}
        if "bits" in stored:
            bits = f"{stored['bits']:.3f} / {bits.partition(' / ')[2]}"
        if "error" in r:
            rows.append([scheme, label, bits, r["error"], *[""] * (len(head) - 4)])
            continue
        cells = [scheme, label, bits, f"{r['perplexity']:.3f}"]
        if name == "full":
            cells += [""] * 3
        else:
            cells.append(rise(r, found["full"]) if "full" in found else "")
            cells.append(f"{fmean(r['window_kl']):.5f} ± {error(r['window_kl']):.5f}")
            cells.append("" if first is r else beside(r["window_kl"], first["window_kl"]))
        cells += [share(*r["tasks"][task]) if "tasks" in r else "" for task in tasks]
        spent = [f"{r['seconds']:.0f}", f"{r['megabytes_peak']:.0f}"]
        rows.append(cells + (["", ""] if name == "full" else spent))
    return head, rows


def share(accuracy: float, error: float) -> str:
    """An accuracy and its error as text in percent."""
    return f"{100 * accuracy:.1f} ± {100 * error:.1f}"


def rise(found: dict[str, Any], full: dict[str, Any]) -> str:
    """The rise of perplexity as text, as in the table of all schemes."""
    apart = [a - b for a, b in zip(found["window_nll"], full["window_nll"], strict=True)]
    ratio = found["perplexity"] / full["perplexity"]
    return f"{100 * (ratio - 1):+.2f} ± {100 * ratio * error(apart):.2f} %"


def beside(theirs: list[float], ours: list[float]) -> str:
    """The relative difference of a tool's divergences from qtool's, as text."""
    apart, mean = [a - b for a, b in zip(theirs, ours, strict=True)], fmean(ours)
    return f"{100 * fmean(apart) / mean:+.0f} ± {100 * error(apart) / mean:.0f} %"


def error(values: list[float]) -> float:
    """The standard error of the mean; 0 for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


MACHINE = "import sys; from qtool.bench.stored import machine; print(machine(sys.argv[1]))"
VERSION = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"


def said(venvs: Path, tool: str, *command: str) -> str:
    """The output of a line of Python in the environment of ``tool``."""
    done = subprocess.run(
        [venvs / tool / "bin/python", "-c", *command], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def versions(arguments: argparse.Namespace, tools: list[str]) -> list[str]:
    """The version of every tool and of its transformers."""
    return [
        "{} {} (transformers {})".format(
            tool, *said(arguments.venvs, tool, VERSION, tool, "transformers").split()
        )
        for tool in tools
    ]


if __name__ == "__main__":
    main()
