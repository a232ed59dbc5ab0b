"""Stored results: measurements with their command, machine and date.

``benchmarks/tables.py`` makes the tables of README and docs from such files.
"""

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from qtool.io.safetensors import write_text


def machine(device: str = "cpu") -> str:
    """The processor of ``device`` and the software versions; it names no host."""
    import torch

    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{_processor()}, {threads} thread{'s' * (threads > 1)}"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def store(path: Path, found: dict[str, Any], *, device: str = "cpu") -> None:
    """Write ``found`` to ``path`` as JSON, with this run's command, the machine and the date."""
    facts = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(device),
        "date": time.strftime("%Y-%m-%d"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(facts | found, indent=1, ensure_ascii=False) + "\n")


def _processor() -> str:
    """The model name of this machine's CPU."""
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text().splitlines() if listed.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
