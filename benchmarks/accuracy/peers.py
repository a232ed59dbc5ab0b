"""The same model, calibration tokens and evaluation through qtool, llm-compressor, GPTQModel and
AutoRound.

    python benchmarks/accuracy/peers.py [--model demo] [--calib demo] [--text demo] [--rows all]
    [--write benchmarks/results/peers.json]

Makes its own virtual environment (--venv) with qtool and those peers that install beside its torch,
runs every row there as its own process, and prints a Markdown table; --write FILE keeps it as JSON,
from which benchmarks/tables.py makes the tables of the docs. A peer that does not install or run
has its reason in the table. What --work holds is reused: delete it to measure again. Options not
listed below are those of peer_run.py. Standard library only.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: first, by its exact version: the index then gives its CPU build where it has one, and no peer may
#: replace it
TORCH = "torch==2.13.0"
PEERS = ("llmcompressor", "auto-round", "gptqmodel")
#: row -> what it is, the peer that it needs
ROWS = {
    "full": ("full precision", ""),
    "qtool-w4a16-paper": ("**qtool** W4A16 g128, `paper`", ""),
    "qtool-w4a16-best": ("**qtool** W4A16 g128, `best`", ""),
    "llm-compressor-w4a16": ("llm-compressor W4A16 g128, GPTQ", "llmcompressor"),
    "gptqmodel-w4a16": ("GPTQModel W4A16 g128, GPTQ", "gptqmodel"),
    "autoround-w4a16": ("AutoRound W4A16 g128, 200 iterations", "auto-round"),
    "qtool-w8a8-best": ("**qtool** W8A8, `best`", ""),
    "llm-compressor-w8a8": ("llm-compressor W8A8, SmoothQuant + GPTQ", "llmcompressor"),
    "qtool-w4a8-lqq-best": ("**qtool** W4A8 LQQ g64 (integer scales), `best`", ""),
    "qtool-w4a8-qoq-g128-best": ("**qtool** W4A8 QoQ g128 (integer scales), `best`", ""),
    "llm-compressor-w4a8": ("llm-compressor W4A8 g128 (float scales), GPTQ", "llmcompressor"),
}
#: GPTQModel's default of half the cores is one too few for it on a machine of two
ENVIRONMENT = {"GPTQMODEL_CPU_WORKERS": "2", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=Path("out/peers-venv"))
    parser.add_argument("--work", type=Path, default=Path("out/peers"))
    parser.add_argument(
        "--rows", default="all", help=f"all, or names with commas: {', '.join(ROWS)}"
    )
    parser.add_argument("--timeout", type=int, default=7200, help="seconds a row may take")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table as JSON")
    arguments, options = parser.parse_known_args()
    arguments.work /= hashlib.sha256(" ".join(options).encode()).hexdigest()[
        :8
    ]  # other options, other results
    arguments.work.mkdir(parents=True, exist_ok=True)
    missing = installed(arguments.venv)
    rows = list(ROWS) if arguments.rows == "all" else arguments.rows.split(",")
    found = {row: measured(row, arguments, options, missing) for row in rows}
    text = table(found)
    print(text)
    if arguments.write:
        facts = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{machine(arguments.venv)}; {versions(arguments.venv)}",
            "date": time.strftime("%Y-%m-%d"),
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(facts | rows_of(found), indent=1) + "\n")


def installed(venv: Path) -> dict[str, str]:
    """Make the environment if it is not there; the peers that pip refused, with its reason."""
    record = venv / "missing.json"
    if record.exists():
        return dict(json.loads(record.read_text()))
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    (venv / "constraints.txt").write_text(TORCH + "\n")
    pip = [str(venv / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
    wanted = ["-c", str(venv / "constraints.txt"), "-e", str(HERE.parents[1])]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, *wanted], check=True)
    missing = {}
    for peer in PEERS:  # each with those before it, so that it cannot break them
        done = subprocess.run([*pip, *wanted, peer], capture_output=True, text=True)
        if done.returncode:
            missing[peer] = last_line(done.stderr)
        else:
            wanted.append(peer)
    record.write_text(json.dumps(missing))
    return missing


def measured(
    row: str, arguments: argparse.Namespace, options: list[str], missing: dict[str, str]
) -> dict[str, Any]:
    """What ``peer_run.py`` found, or ``{"error": reason}``."""
    record = arguments.work / f"{row}.json"
    if (peer := ROWS[row][1]) in missing:
        return {"error": f"does not install: {missing[peer]}"}
    if not record.exists():
        log = arguments.work / f"{row}.log"
        print(f"{row} ...", file=sys.stderr, flush=True)
        command = [
            arguments.venv / "bin/python",
            HERE / "peer_run.py",
            row,
            "--work",
            arguments.work,
            *options,
        ]
        try:
            with log.open("w") as output:
                subprocess.run(
                    [str(part) for part in command],
                    env=ENVIRONMENT | os.environ,
                    stdout=output,
                    stderr=output,
                    check=True,
                    timeout=arguments.timeout,
                )
        except subprocess.TimeoutExpired:
            return {"error": f"does not finish in {arguments.timeout} s"}
        except subprocess.CalledProcessError:
            return {"error": f"does not run: {last_line(log.read_text())}"}
    return dict(json.loads(record.read_text()))


def last_line(text: str) -> str:
    """The last line that says something, short enough for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:120].replace("|", "/") if lines else "no message"


def rows_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The table: its head, and the cells of its rows."""
    rows = []
    for row, r in found.items():
        name = ROWS[row][0]
        if "error" in r:
            rows.append([name, r["error"], "", "", "", ""])
        elif row == "full":
            rows.append([name, f"{r['perplexity']:.3f}", "-", "-", "-", "-"])
        else:
            quality = [f"{r['perplexity']:.3f}", f"{r['kl']:.5f}"]
            cost = [f"{r[key]:.0f}" for key in ("seconds", "cpu_seconds", "megabytes_peak")]
            rows.append([name, *quality, *cost])
    head = ["what", "perplexity", "KL, nats", "seconds", "CPU seconds", "peak MB"]
    return {"head": head, "rows": rows}


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown."""
    made = rows_of(found)
    lines = (f"| {' | '.join(row)} |" for row in made["rows"])
    return "\n".join([f"| {' | '.join(made['head'])} |", "|---|" + "---:|" * 5, *lines])


def machine(venv: Path) -> str:
    """What the rows were measured on."""
    code = "from qtool.bench.stored import machine; print(machine())"
    done = subprocess.run(
        [venv / "bin/python", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def versions(venv: Path) -> str:
    """The versions that were measured, with commas."""
    code = (
        "import sys, importlib.metadata as m; "
        "print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    )
    names = ["qtool", *(p for p in PEERS if p not in installed(venv)), "transformers"]
    done = subprocess.run(
        [venv / "bin/python", "-c", code, *names], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
