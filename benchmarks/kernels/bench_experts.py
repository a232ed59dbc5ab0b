"""Time a layer's experts beside their floor and vLLM's FP8 ones, on this GPU.

    python benchmarks/kernels/bench_experts.py [--models qwen3-30b-a3b] [--tokens 1,16,64]
    [--schemes w4a8-lqq,w8a8,w4a16] [--rotated] [--loop] [--against vllm]
    [--json benchmarks/results/experts.json]

It times the whole layer after the router: sorting, quantization or copies, both GEMMs, SiLU and the
weighted sum, by CUDA graphs, over layers that take turns, each with its own random routing.
``--rotated`` adds each scheme with the inputs of down rotated at run time. ``--loop`` adds a loop
over the experts, each with all tokens, which a captured graph needs without grouped GEMMs.
``--against vllm`` adds vLLM's ``fused_experts`` in FP8, the faster of its per-tensor and its
128 x 128 block scales. The floor is the time to read the chosen experts' weights once, in the first
scheme, or the time of the arithmetic.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from qtool.bench.cuda_graphs import BANDWIDTH, HALF_OPERATIONS, OPERATIONS, copies, graph_us
from qtool.bench.stored import machine, store
from qtool.format import LinearFormat
from qtool.kernels.build import Source, compile_all
from qtool.kernels.experts import w4a8, w4a16, w8a8
from qtool.kernels.experts.tiles import choose_experts
from qtool.kernels.hopper.gemm import Operand, definition
from qtool.kernels.hopper.tiles import Tile
from qtool.runtime.dispatch import KERNELS, Call
from qtool.runtime.experts import ExpertStack, grouped_experts
from qtool.schemes import get


@dataclass(frozen=True)
class Shape:
    """Hidden and intermediate channels, number of experts, and experts of a token."""

    hidden: int
    inter: int
    experts: int
    top: int

    @property
    def weights(self) -> int:
        """The number of weights of an expert."""
        return 3 * self.hidden * self.inter

    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of gate and up together, and of down."""
        return (2 * self.inter, self.hidden), (self.hidden, self.inter)


MODELS = {
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "qwen3-235b-a22b": Shape(4096, 1536, 128, 8),
}
TOKENS = (1, 16, 64, 128, 256, 1024)
#: by scheme, the layout and the stored bits of a weight
SCHEMES = {
    "w4a8-lqq": ("dual-mma", 4.25),
    "w4a8-qoq": ("dual-mma", 4.0),
    "w4a8-qoq-g128": ("dual-mma", 4.125),
    "w8a8": ("row-major-8", 8.0),
    "w4a16": ("marlin", 4.125),
}
#: tokens, weights and ids of one call
Routed = tuple[Tensor, Tensor, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def random_stack(scheme: str, experts: int, n: int, k: int, rotated: bool = False) -> ExpertStack:
    """Random weights of ``experts``, whose inputs may be rotated; level 2 is legal."""
    (layout, _), stored = SCHEMES[scheme], {}
    scales = "bfloat16" if scheme == "w4a16" else "float32"
    found = LinearFormat(scheme, get(scheme).group_size, layout, scales, rotated=rotated)
    for name, spec in found.tensors(n, k).items():
        shape, kind = (experts, 1, *spec.shape), {"dtype": spec.dtype, "device": "cuda"}
        low, high = {"qweight": (0, 128), "s2": (1, 9)}.get(name, (9, 16))
        if spec.dtype == torch.int32:
            low, high = -(2**31), 2**31
        stored[name] = (
            torch.rand(shape, **kind) * 1e-3
            if spec.dtype.is_floating_point
            else torch.randint(low, high, shape, **kind)
        )
    return ExpertStack(KERNELS[scheme, layout][0], found, stored)


def routed(shape: Shape, tokens: int) -> Routed:
    """Random tokens, each routed to its own random experts."""
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    scores = torch.rand(tokens, shape.experts, device="cuda")
    weights, ids = scores.softmax(-1).topk(shape.top)
    return x, weights, ids.int()


def grouped(scheme: str, shape: Shape, rotated: bool = False) -> Layer:
    """One layer's experts by grouped GEMMs; down's inputs may be rotated."""
    of_gate_up, of_down = shape.sizes()
    gate_up = random_stack(scheme, shape.experts, *of_gate_up)
    down = random_stack(scheme, shape.experts, *of_down, rotated)
    return lambda x, weights, ids: grouped_experts(x, weights, ids, None, gate_up, down)


def loop(scheme: str, shape: Shape) -> Layer:
    """One layer's experts, one after another, each with all tokens."""
    stacks = [random_stack(scheme, shape.experts, n, k) for n, k in shape.sizes()]

    def multiply(stack: ExpertStack, expert: int, x: Tensor) -> Tensor:
        stored = {name: tensor[expert, 0] for name, tensor in stack.stored.items()}
        return stack.kernel.multiply(Call(x, None, stored, None, stack.format, x.dtype))

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(shape.experts):
            gate, up = multiply(stacks[0], expert, x).chunk(2, -1)
            weight = torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True)
            y += multiply(stacks[1], expert, silu(gate) * up).float() * weight
        return y.to(x.dtype)

    return layer


def in_vllm(block: list[int] | None, shape: Shape) -> Layer:
    """vLLM's FP8 experts, with a scale for each block of weights or for each expert."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    stacks, scales = [], []
    for n, k in shape.sizes():
        size = (shape.experts, n, k)
        drawn = torch.randint(-100, 100, size, dtype=torch.int8, device="cuda")
        stacks.append(drawn.view(torch.uint8).bitwise_and_(0xBF).view(torch.float8_e4m3fn))
        of = (shape.experts, -(-n // 128), -(-k // 128)) if block else (shape.experts,)
        scales.append(torch.rand(of, device="cuda") * 1e-3)
    config = fp8_w8a8_moe_quant_config(*scales, block_shape=block)

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return fused_experts(x, *stacks, weights, ids, quant_config=config)

    return layer


def times(
    make: Callable[[Shape], Layer], shape: Shape, bits: float, sizes: list[int]
) -> list[float]:
    """Microseconds of a layer, for each number of tokens."""
    layers = [make(shape) for _ in range(copies(shape.experts * shape.weights * bits / 8))]
    found = []
    for tokens in sizes:
        torch.manual_seed(tokens)
        found.append(graph_us([partial(layer, *routed(shape, tokens)) for layer in layers]))
    return found


def floor_us(shape: Shape, tokens: int, scheme: str) -> float:
    """The least time for the bytes of the experts of random tokens, or for their arithmetic."""
    bits, rate = SCHEMES[scheme][1], HALF_OPERATIONS if scheme == "w4a16" else OPERATIONS
    chosen = shape.experts * (1 - (1 - shape.top / shape.experts) ** tokens)
    operations = 2 * tokens * shape.top * shape.weights
    return 1e6 * max(chosen * shape.weights * bits / 8 / BANDWIDTH, operations / rate)


def columns(
    schemes: list[str], rotated: bool, with_loop: bool, against: bool
) -> Iterator[tuple[str, Any, float]]:
    """Name, maker and bits of a weight of each layer that is timed."""
    for scheme in schemes:
        yield scheme, partial(grouped, scheme), SCHEMES[scheme][1]
        if rotated:
            yield f"{scheme} rotated", partial(grouped, scheme, rotated=True), SCHEMES[scheme][1]
    if with_loop:
        yield f"{schemes[0]} one by one", partial(loop, schemes[0]), SCHEMES[schemes[0]][1]
    if against:
        yield "vLLM fp8", partial(in_vllm, None), 8
        yield "vLLM fp8, blocks", partial(in_vllm, [128, 128]), 8


def sources(schemes: list[str], shapes: list[Shape], sizes: list[int]) -> Iterator[Source]:
    """The grouped GEMMs that will be timed."""
    for scheme, shape, tokens in product(schemes, shapes, sizes):
        for n, k in shape.sizes():
            tile = chosen(scheme, tokens * shape.top, shape.experts, n, k)
            yield definition(operand(scheme, tile), tile, torch.bfloat16)


def operand(scheme: str, tile: Tile) -> Operand:
    """The operand of a scheme's grouped GEMM."""
    group = get(scheme).group_size
    if scheme == "w4a16":
        return w4a16.operand(group, torch.bfloat16, torch.bfloat16, tile.tokens)
    return w8a8.OPERAND if scheme == "w8a8" else w4a8.operand(scheme, group)


def chosen(scheme: str, *sizes: int) -> Tile:
    """The tile that the op would choose for rows, experts, N and K."""
    if scheme == "w4a16":
        return w4a16.choose(*sizes, get(scheme).group_size, torch.bfloat16, torch.bfloat16)
    return choose_experts(*sizes, operand(scheme, Tile(8)).stage_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--schemes", default="w4a8-lqq,w8a8,w4a16")
    parser.add_argument("--rotated", action="store_true")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--against", choices=["vllm"])
    parser.add_argument("--json", type=Path, help="keep the rows here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_experts.py: a CUDA device is needed")
    sizes, schemes = list(map(int, arguments.tokens.split(","))), arguments.schemes.split(",")
    models = arguments.models.split(",")
    compile_all(sources(schemes, [MODELS[model] for model in models], sizes), "sm_90a")
    rows = []
    for model in models:
        shape = MODELS[model]
        us: list[dict[str, float]] = [{} for _ in sizes]
        wanted = columns(schemes, arguments.rotated, arguments.loop, arguments.against is not None)
        for name, make, each in wanted:
            for row, found in zip(us, times(make, shape, each, sizes), strict=True):
                row[name] = round(found, 1)
            torch.cuda.empty_cache()
        for tokens, row in zip(sizes, us, strict=True):
            floor = round(floor_us(shape, tokens, schemes[0]), 1)
            rows.append({"model": model, "tokens": tokens, "us": row, "floor_us": floor})
            print(f"{model} {tokens}: floor {floor}, {row}", flush=True)
    print(machine("cuda"))
    if arguments.json:
        store(arguments.json, {"rows": rows}, device="cuda")


if __name__ == "__main__":
    main()
