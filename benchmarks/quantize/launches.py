"""Counts torch's operations on a block of experts, phase by phase: what a GPU would launch.

    python benchmarks/quantize/launches.py [--experts 8,128] [--recipes paper,best] [--where 12]

A random Qwen3-MoE of 2 blocks, whose experts are 64 x 128, is quantized on the CPU. Counted are
the operations of the second block that compute or copy (no views, no empty tensors), called by the
thread that runs the blocks. Experts are multiplied together as on a GPU, one operation a role; the
operations inside another one do not count. ``--where`` lists the lines of qtool that call most.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qtool import recipes
from qtool.bench import quantize as bench
from qtool.bench.random_checkpoint import config_of, make
from qtool.calibration import alike
from qtool.calibration.timing import PhaseTimer
from qtool.calibration.transforms import clip, smooth
from qtool.io.source import Checkpoint
from qtool.models import experts, grouped
from qtool.pipeline.quantize import quantize
from qtool.pipeline.streaming import shards
from qtool.schemes import base

#: operations that launch nothing
FREE = {
    "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "_reshape_alias",
    "_local_scalar_dense", "item", "is_same_size", "lift_fresh", "set_", "resize_", "is_nonzero",
}  # fmt: skip
QTOOL = str(Path(experts.__file__).parents[1])


class Counted(TorchDispatchMode):
    """Counts operations by phase and by the line of qtool that called, while ``open``."""

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self.timer: PhaseTimer | None = None
        self.phases: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.open and not func.is_view and func._schema.name.split("::")[1] not in FREE:
            self.phases[self.timer._open[-1] if self.timer else "other"] += 1
            self.lines[_line()] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def one(self) -> Iterator[None]:
        """What happens inside is one operation."""
        before, self.open = self.open, False
        try:
            yield
        finally:
            self.open = before
            self.phases["forward"] += before


def _line() -> str:
    """The innermost line of qtool on the stack, and the one that called its function."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        if frame.f_code.co_filename.startswith(QTOOL):
            path = frame.f_code.co_filename.removeprefix(QTOOL + "/")
            found.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def count(count: int, recipe: str, scheme: str, directory: Path) -> Counted:
    """The operations of the second block of a mixture of ``count`` experts."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": count}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = config_of("qwen3-235b-a22b", 2) | sizes | {"vocab_size": 256}
    source = directory / f"source-{count}"
    if not source.exists():
        make(config | {"torch_dtype": "float32"}, source)
    counted = Counted()

    class Timer(PhaseTimer):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            counted.timer = self

    def block(shards_: Any, blocks: Any, shard: int, *rest: Any) -> None:
        counted.open = shard == 2
        own_block(shards_, blocks, shard, *rest)
        counted.open = False

    own_block = shards.Shards._block
    plain_turns = lambda self, hidden, counts: iter([(slice(0, sum(counts)), list(counts), 0)])  # noqa: E731

    def multiplied(linears: Sequence[Any], x: Tensor, counts: Sequence[int]) -> Tensor:
        with counted.one():
            parts = zip(linears, x.split(list(counts)), strict=True)
            return torch.cat([part @ own.weight.T for own, part in parts])

    with ExitStack() as stack:
        for target, name, stub in (
            (shards, "PhaseTimer", Timer),
            (shards.Shards, "_block", block),
            (experts.SeparateExperts, "turns", plain_turns),
            (grouped, "runs_grouped", lambda x, weight: True),
            (grouped, "_grouped", multiplied),
            *((module, "products", torch.matmul) for module in (clip, smooth)),
            (alike, "TOGETHER", alike.TOGETHER[1:] * 2),
            (base, "SLAB", 1 << 40),
        ):
            stack.enter_context(mock.patch.object(target, name, stub))
        stack.enter_context(counted)
        chosen = recipes.load(scheme, recipe)
        tokens = bench.random_tokens(256, 8, 512)
        quantize(
            Checkpoint(source), chosen, directory / f"out-{count}-{Path(recipe).stem}",
            calibration=tokens,
        )  # fmt: skip
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", default="8,128")
    parser.add_argument("--recipes", default="paper,best")
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--where", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for recipe in chosen.recipes.split(","):
            for number in map(int, chosen.experts.split(",")):
                found = count(number, recipe, chosen.scheme, Path(directory))
                parts = ", ".join(f"{name} {n}" for name, n in found.phases.most_common())
                print(f"{recipe}, {number} experts: {found.phases.total()}: {parts}", flush=True)
                for line, n in found.lines.most_common(chosen.where):
                    print(f"    {n:6d} {line}")


if __name__ == "__main__":
    main()
