"""Counts what a GPU would launch for a block of experts, phase by phase, without one.

    python benchmarks/quantize/launches.py [--experts 8,128] [--recipes paper,best] [--where 12]

A random Qwen3-MoE of 2 blocks, whose experts are 64 x 128, is quantized on the CPU. Counted are
the operations of the first block that compute or copy (no views, no empty tensors), called by the
thread that runs the blocks. What a GPU does in one kernel counts once, and as many experts are
looked at together as there. ``--where`` lists the lines of qtool that call most.
"""

import argparse
import functools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from qtool.calibration.rounding import group_error_triton, group_fit, rtn
from qtool.calibration.rounding.gptq import gptq
from qtool.calibration.timing import PhaseTimer
from qtool.calibration.transforms import clip, smooth
from qtool.io.source import Checkpoint
from qtool.models import experts, grouped
from qtool.pipeline.quantize import quantize
from qtool.pipeline.streaming import shards
from qtool.schemes import base
from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.lqq import LiquidQuant

#: operations that launch nothing
FREE = {
    "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "_reshape_alias",
    "_local_scalar_dense", "item", "is_same_size", "lift_fresh", "set_", "resize_", "is_nonzero",
}  # fmt: skip
#: one kernel each on a GPU
FUSED = (
    (LiquidQuant, "fit_range"),
    (LiquidQuant, "fake_weight"),
    (LiquidQuant, "weight_error"),
    (Activation, "fake"),
    (base.Scheme, "range"),
    (grouped, "_grouped"),
)
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
        found = func(*args, **(kwargs or {}))
        free = func.is_view or func._schema.name.split("::")[1] in FREE
        if not free and not getattr(found, "is_meta", False):
            self.add()
        return found

    def add(self, count: int = 1) -> None:
        if self.open:
            self.phases[self.timer._open[-1] if self.timer else "other"] += count
            self.lines[_line()] += count

    @contextmanager
    def instead(self, count: int) -> Iterator[None]:
        """What happens inside counts as ``count`` operations."""
        self.add(count)
        before, self.open = self.open, False
        try:
            yield
        finally:
            self.open = before

    def once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def one(*arguments: Any, **options: Any) -> Any:
            with self.instead(1):
                return function(*arguments, **options)

        return one


def _line() -> str:
    """The innermost lines of qtool on the stack."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        if frame.f_code.co_filename.startswith(QTOOL):
            path = frame.f_code.co_filename.removeprefix(QTOOL + "/")
            found.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def as_on_a_gpu(counted: Counted) -> Iterator[tuple[Any, str, Any]]:
    """What to put in the place of what a GPU does otherwise."""
    sweep, group_error = gptq.sweep, group_fit.group_error

    def swept(weight: Tensor, *rest: Any, panel: int = 128, **options: Any) -> Tensor:
        panels = -(-weight.shape[2] // panel)
        with counted.instead(2 * len(weight) + panels * (1 + len(weight))):
            return sweep(weight, *rest, panel=panel, **options)

    def grouped_error(groups: Tensor, importance: Tensor, grid: Any) -> Tensor:
        with counted.instead(1):
            times = len(grid.step) // len(groups)
            repeated = (t.repeat(times, 1, 1) for t in (groups, importance))
            return group_error(*repeated, grid)

    def at_once(stack: Any, hidden: Tensor, counts: Sequence[int]) -> Iterator[Any]:
        yield slice(0, sum(counts)), list(counts), 0

    def multiplied(linears: Sequence[Any], x: Tensor, counts: Sequence[int]) -> Tensor:
        parts = zip(linears, x.split(list(counts)), strict=True)
        return torch.cat([part @ own.weight.T for own, part in parts])

    yield grouped, "_grouped", multiplied
    yield grouped, "runs_grouped", lambda x, weight: True
    yield experts.SeparateExperts, "turns", at_once
    for module in (clip, smooth):
        yield module, "products", torch.matmul
    yield gptq, "sweep", swept
    yield group_error_triton, "runs_on", lambda weight: True
    yield group_error_triton, "group_error", grouped_error
    yield alike, "TOGETHER", alike.TOGETHER[1:] * 2
    yield rtn, "CHUNK_ELEMENTS", rtn.CHUNK_ELEMENTS[1:] * 2
    yield base, "SLAB", 1 << 40


def count(number: int, recipe: str, scheme: str, directory: Path) -> Counted:
    """The operations of the first block of a mixture of ``number`` experts."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": number}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = config_of("qwen3-235b-a22b", 2) | sizes | {"vocab_size": 256}
    source = directory / f"source-{number}"
    if not source.exists():
        make(config | {"torch_dtype": "float32"}, source)
    counted, own_block = Counted(), shards.Shards._block

    class Timer(PhaseTimer):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            counted.timer = self

    def block(of: Any, blocks: Any, shard: int, *rest: Any) -> None:
        counted.open = shard == 2
        own_block(of, blocks, shard, *rest)
        counted.open = False

    with ExitStack() as replaced:
        for owner, name, own in as_on_a_gpu(counted):
            replaced.enter_context(mock.patch.object(owner, name, own))
        for owner, name in FUSED:
            one = counted.once(getattr(owner, name))
            replaced.enter_context(mock.patch.object(owner, name, one))
        replaced.enter_context(mock.patch.object(shards, "PhaseTimer", Timer))
        replaced.enter_context(mock.patch.object(shards.Shards, "_block", block))
        replaced.enter_context(counted)
        out = directory / f"out-{number}-{Path(recipe).stem}"
        tokens = bench.random_tokens(config["vocab_size"], 8, 512)
        quantize(Checkpoint(source), recipes.load(scheme, recipe), out, calibration=tokens)
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
                title = f"{Path(recipe).stem}, {number} experts"
                print(f"{title}: {found.phases.total()}: {parts}", flush=True)
                for line, n in found.lines.most_common(chosen.where):
                    print(f"    {n:6d} {line}")


if __name__ == "__main__":
    main()
