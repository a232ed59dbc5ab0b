"""The list of faults fits the tree, and a sample of them is caught."""

import json
import os
import subprocess
import sys
from collections import Counter

from tests import faults
from tests.faults import FAULTS, ROOT


def test_every_fault_can_be_injected() -> None:
    assert [problem for fault in FAULTS if (problem := faults.misplaced(fault))] == []
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS) >= 60


def test_the_counts_are_those_of_the_list() -> None:
    """``python tests/faults.py FILE --write`` brings the counts of a file up to date."""
    stored = json.loads(faults.STORED.read_text())
    assert {file: entry["faults"] for file, entry in stored.items()} == Counter(
        fault.file for fault in FAULTS
    )


def test_a_sample_is_caught() -> None:
    """In a process of its own: qtool is imported anew for each fault."""
    command = [sys.executable, str(ROOT / "tests" / "faults.py"), "--sample", "3"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 caught, 0 missed, 0 error"
