"""A block's experts at once and one by one: seconds of a forward, and of observing their inputs.

    python benchmarks/quantize/mixture.py [--shape 2048x768x128x8] [--tokens 4096] [--device cuda]

The experts of one block have random weights, rounded to nearest, and random routing, in bf16 on a
GPU and float32 elsewhere. There are four rows, each with the least CPU time (on a GPU the least
time) of several runs: forwards with the experts one by one and all at once, and Hessians by a hook
on each expert and by one observer of all. Qwen3-30B-A3B is 2048x768x128x8, Qwen3-235B-A22B
4096x1536x128x8, DeepSeek-V3 7168x2048x256x8.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.rounded import SimulatedLinear
from qtool.calibration.rounding.rtn import round_to_nearest
from qtool.models.experts import SeparateExperts
from qtool.models.grouped import segments
from qtool.models.parts import Experts
from qtool.schemes import get
from qtool.schemes.base import Scheme


class OneAfterAnother(SeparateExperts):
    """Computes one expert at a time on every device."""

    def turns(
        self, hidden: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[slice, list[int], int]]:
        for number, (start, stop) in enumerate(pairwise([0, *accumulate(counts)])):
            if start < stop:
                yield slice(start, stop), [stop - start], number


class AtOnce(SeparateExperts):
    """Computes all experts at once on every device."""

    def turns(
        self, hidden: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[slice, list[int], int]]:
        yield slice(0, sum(counts)), list(counts), 0


def seconds(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """The least seconds of several runs; CPU time if no GPU runs them."""
    cuda, least = device.type == "cuda", float("inf")
    clock = time.perf_counter if cuda else time.process_time
    for _ in range(times + 1):  # the first run includes work that is done once
        if cuda:
            torch.cuda.synchronize()
        started = clock()
        run()
        if cuda:
            torch.cuda.synchronize()
        least = min(least, clock() - started)
    return least


def rounded_experts(
    kind: type[SeparateExperts], stacked: Qwen3MoeExperts, scheme: Scheme
) -> SeparateExperts:
    """The experts of ``stacked`` with every down projection rounded to nearest."""
    experts = kind(stacked, Experts())
    for expert in experts:
        linear: nn.Linear = expert.down_proj  # type: ignore[union-attr, assignment]
        rounded = round_to_nearest(scheme, linear.weight)
        weight = scheme.dequantize(rounded.codes, rounded.params).to(linear.weight.dtype)
        expert.down_proj = SimulatedLinear(linear, scheme, rounded, weight)
    return experts


def hessians_by_hooks(
    experts: SeparateExperts, given: Sequence[Tensor], hessians: list[Hessian], scheme: Scheme
) -> float:
    """Seconds of a forward in which a hook on each down projection adds to its Hessian."""
    handles = [
        expert.down_proj.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _, inputs, hessian=hessian: hessian.add(scheme.activation.fake(inputs[0]))
        )
        for expert, hessian in zip(experts, hessians, strict=True)
    ]
    took = seconds(lambda: experts(*given), given[0].device)
    for handle in handles:
        handle.remove()
    return took


def hessians_by_observer(
    experts: SeparateExperts, given: Sequence[Tensor], hessians: list[Hessian], scheme: Scheme
) -> float:
    """Seconds of a forward that ends after one observer has added to all Hessians."""

    class Seen(Exception):
        pass

    def observe(inputs: Tensor, counts: Sequence[int]) -> None:
        parts = segments(scheme.activation.fake(inputs), counts)
        for hessian, part in zip(hessians, parts, strict=True):
            if len(part):
                hessian.add(part)
        raise Seen

    def look() -> None:
        with suppress(Seen):
            experts(*given)

    experts.observers["down_proj"] = observe
    return seconds(look, given[0].device)


@torch.no_grad()
def main() -> None:
    """Print the time of a forward and of Hessians, for experts one by one and all at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", default="256x128x128x8", help="H x I x experts x experts a token"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    device, scheme = torch.device(chosen.device), get(chosen.scheme)
    hidden, width, count, active = map(int, chosen.shape.split("x"))
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": count}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stacked = Qwen3MoeExperts(Qwen3MoeConfig(**sizes)).to(device, dtype)
    for parameter in stacked.parameters():
        parameter.normal_(std=0.02)
    torch.manual_seed(0)
    x = torch.randn(chosen.tokens, hidden, device=device, dtype=dtype)
    index = torch.rand(chosen.tokens, count, device=device).topk(active).indices
    weights = torch.rand(chosen.tokens, active, device=device, dtype=dtype)
    given = (x, index, weights)
    apart, together = (rounded_experts(kind, stacked, scheme) for kind in (OneAfterAnother, AtOnce))
    print(f"{chosen.shape}, {chosen.tokens} tokens, {device}, {dtype}")
    for name, experts in (("one after another", apart), ("at once", together)):
        took = seconds(partial(experts, *given), device)
        print(f"forward, {name}: {1e3 * took:.1f} ms", flush=True)
    hessians = [Hessian(width, device) for _ in range(count)]
    took = hessians_by_hooks(apart, given, hessians, scheme)
    print(f"Hessians of down, by hooks: {1e3 * took:.1f} ms", flush=True)
    took = hessians_by_observer(together, given, hessians, scheme)
    print(f"Hessians of down, by one observer: {1e3 * took:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
