"""Progress of a run: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from qtool.pipeline.run_record import peak_host_bytes
from qtool.report.data import NOTED


class Progress:
    """Called after each shard with (done, total, notes); shows ETA, the block's error and peak
    memory, or is silent.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.silent = silent
        self.bar: Any = None
        self.started = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, done: int, total: int, notes: Mapping[str, Any]) -> None:
        if self.silent:
            return
        peak = f"{peak_host_bytes() / 1e9:.2f} GB"
        errors = [
            linear[key]
            for method, (_, key) in NOTED.items()
            for linear in notes.get(method, {}).values()
            if key in linear
        ]
        facts = f"peak {peak}" + (f", largest error {max(errors):.4f}" if errors else "")
        if sys.stderr.isatty():
            self.bar = self.bar or tqdm(total=total, unit="shard", desc="quantize")
            self.bar.set_postfix_str(facts, refresh=False)
            self.bar.update(done - self.bar.n)
        else:
            elapsed = time.monotonic() - self.started
            left = elapsed / done * (total - done)
            print(
                f"shard {done}/{total}, {elapsed:.0f} s, {left:.0f} s left, {facts}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.close()
