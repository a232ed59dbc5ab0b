"""Is every GEMM right? One command on a Hopper GPU; prints one line a check, exits 1 on any
failure.

    python benchmarks/kernels/check.py [--fuzz 500] [--quick]

It checks that int32 sums equal the integer reference exactly (float64 products of integers are
exact), and that the fused epilogue is within one unit in the last place of a float64 reference. It
runs every code, level-2 scale and legal offset, one-hot tokens, which read out the weight's layout,
outputs that are poisoned before each run, CUDA graphs, and fuzzed shapes.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import check_kv
import check_mma
import check_w4a4
import check_w4a16
import torch
from alone import captured, ulp, unlike_the_cpu, where
from torch import Tensor

from qtool import schemes
from qtool.kernels.activation.quantize_activation import FUSIONS, quantize_activation
from qtool.kernels.build import compile_all
from qtool.kernels.hopper.gemm import Weight, definition, run
from qtool.kernels.hopper.tiles import Tile
from qtool.kernels.hopper.w4a8 import operand, packed_weight, w4a8_gemm
from qtool.kernels.hopper.w8a8 import OPERAND as W8A8
from qtool.layouts.dual_mma import DUAL_MMA

SCHEMES = [
    ("w4a8-lqq", 32),
    ("w4a8-lqq", 64),
    ("w4a8-lqq", 128),
    ("w4a8-qoq-g128", 128),
    ("w4a8-qoq-g128", 64),
    ("w4a8-qoq", None),
]
TILES = [
    Tile(8, 128, 1, 2),
    Tile(8, 128, 8, 2),
    Tile(16, 128, 4, 2),
    Tile(16, 256, 2),
    Tile(32, 256, 3),
    Tile(32),
    Tile(64, 128, 4, 2),
    Tile(64, 256, 2),
    Tile(128, 128, 2),
    Tile(128, 256, 2),
    Tile(128),
    Tile(256),
    Tile(128, 256),
    Tile(256, 128, 2),
    Tile(128, 128, 3),
    Tile(16, 128, 6, 2),
    Tile(64, 128, 1, 2),
    Tile(64, 128, 3),
    Tile(128, 256, 3),
    Tile(16, 128, 2),
    Tile(32, 128, 2, 2),
    Tile(8, 128, 2),
]
#: further kernels: ``checks(fuzz, small)`` of each yields names, each with an error or None
OTHERS = (check_w4a4, check_w4a16, check_mma, check_kv)
#: the name of a check, and the error or None
Check = tuple[str, str | None]


@dataclass
class Case:
    """A weight in two forms: as the kernel stores it, and as the exact int8 (or u4) matrix."""

    scheme: str
    group: int | None
    arguments: tuple[Tensor | None, ...]  # qweight, s1, s2, offset, zero
    w8: Tensor  # [N, K] int8; per channel, the codes minus the zero point

    @classmethod
    def make(
        cls, scheme: str, group: int | None, codes: Tensor, s1: Tensor, level2: dict[str, Tensor]
    ) -> "Case":
        pack = {name: DUAL_MMA.pack_group(t) for name, t in level2.items()} if group else level2
        arguments = (
            DUAL_MMA.pack(codes)["qweight"],
            s1,
            pack.get("s2"),
            pack.get("offset"),
            pack.get("zero"),
        )
        if group is None:
            w8 = codes.to(torch.int8) - level2["zero"].to(torch.int8)[:, None]
        else:
            w8 = schemes.get(scheme, group).level2(codes, {"s1": s1, **level2})
        return cls(scheme, group, arguments, w8)

    @classmethod
    def random(cls, scheme: str, group: int | None, n: int, k: int) -> "Case":
        codes, level2 = check_mma.random_codes(scheme, group, n, k)
        s1 = (torch.rand(n, device="cuda") + 0.1) * 1e-3
        return cls.make(scheme, group, codes, s1, level2)

    def sums(self, x: Tensor) -> Tensor:
        return (x.double() @ self.w8.double().t()).long()

    def run(
        self, tile: Tile, x: Tensor, sx: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        n = self.w8.shape[0]
        out = torch.full((x.shape[0] + 1, n), 77, dtype=dtype, device="cuda")
        out[:-1] = 0x5A5A5A5A if dtype == torch.int32 else float("nan")
        token_sum = x.sum(1, dtype=torch.int32)
        weight = packed_weight(self.scheme, *self.arguments)
        run(
            operand(self.scheme, self.group),
            tile,
            x,
            sx,
            weight,
            out[:-1],
            token_sum=token_sum,
            bias=bias,
        )
        torch.cuda.synchronize()
        assert (out[-1] == 77).all(), "wrote beyond the last token"
        return out[:-1]

    def verify(self, tile: Tile, m: int, dtype: torch.dtype, bias: bool) -> str | None:
        """The error, or None."""
        n, k = self.w8.shape
        x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
        sx = torch.rand(m, device="cuda") * 0.05 + 1e-4
        b = torch.randn(n, device="cuda") if bias else None
        return compare(self.run(tile, x, sx, b, dtype), self.sums(x), sx, self.arguments[1], b)


def compare(
    got: Tensor, sums: Tensor, sx: Tensor, scale: Tensor | None, bias: Tensor | None
) -> str | None:
    """The place where ``got`` differs from the sums (int32), or by more than one unit in the last
    place from the scaled sums with bias; None if nowhere.
    """
    if got.dtype == torch.int32:
        wrong = got.long() != sums
    else:
        assert scale is not None
        product = sums.double() * sx.double()[:, None] * scale.double()
        want = product if bias is None else product + bias.double()
        float32 = 2.0**-22 * (product.abs() + (0 if bias is None else bias.double().abs()))
        wrong = ~((got.double() - want).abs() <= ulp(want, got.dtype) + float32)
    return where(wrong, got)


def every_dequantization(scheme: str, group: int, tile: Tile) -> str | None:
    """Check all codes x scales x legal offsets by one-hot tokens: the output is the weight."""
    pairs, step = 16 * len(check_mma.offsets(scheme)), 128 // group
    groups = -(-pairs // 256 // step) * step + step  # K is a multiple of 128
    codes, level2 = check_mma.every_code(scheme, group, groups)
    case = Case.make(scheme, group, codes, torch.ones(256, device="cuda"), level2)
    x = torch.eye(case.w8.shape[1], dtype=torch.int8, device="cuda")
    got = case.run(tile, x, torch.ones(len(x), device="cuda"), None, torch.int32)
    return where(got != case.w8.t().int(), got)


def graph_capture() -> str | None:
    """The op inside a CUDA graph, replayed on new tokens."""
    case = Case.random("w4a8-lqq", 64, 512, 1024)
    qweight, s1, s2, offset, _ = case.arguments
    x = torch.zeros(5, 1024, dtype=torch.int8, device="cuda")
    sx, token_sum = torch.ones(5, device="cuda"), torch.zeros(5, dtype=torch.int32, device="cuda")
    arguments = (x, sx, qweight, s1, s2, offset, None, token_sum, None, "w4a8-lqq", 64, torch.int32)
    graph, out = captured(lambda: w4a8_gemm(*arguments))
    x.random_(-127, 128)
    token_sum.copy_(x.sum(1))
    graph.replay()
    return None if torch.equal(out.long(), case.sums(x)) else "replay differs from the reference"


def w8a8(tile: Tile, m: int, n: int, k: int, dtype: torch.dtype) -> str | None:
    """The W8A8 kernel: exact sums, or an epilogue within a unit in the last place."""
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    scale = (torch.rand(n, device="cuda") + 0.1) * 1e-3
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    sx, bias = torch.rand(m, device="cuda") * 0.05 + 1e-4, torch.randn(n, device="cuda")
    out = torch.full(
        (m, n), 0x5A5A5A5A if dtype == torch.int32 else float("nan"), dtype=dtype, device="cuda"
    )
    run(W8A8, tile, x, sx, Weight(scale, boxed=weight), out, bias=bias)
    sums = (x.double() @ weight.double().t()).long()
    return compare(out, sums, sx, scale, bias)


def quantization(
    m: int, k: int, dtype: torch.dtype, fusion: str, gather: bool, rotated: bool
) -> str | None:
    """Check that codes and scales are the CPU's, and that sums are those of the codes."""
    x = torch.randn(m, k * (2 if fusion == "silu-up" else 1), device="cuda").to(dtype)
    x[m // 2] = 0
    order = torch.randperm(k, device="cuda").int() if gather else None
    norm = torch.rand(k, device="cuda").to(dtype) if fusion == "rms-norm" else None
    got = quantize_activation(x, order, norm, fusion, 1e-5, rotated)
    here = [None if t is None else t.cpu() for t in (x, order, norm)]
    want = quantize_activation(*here, fusion, 1e-5, rotated)
    if not torch.equal(got[2], got[0].sum(1, dtype=torch.int32)):
        return "sums are not the codes' sums"
    return unlike_the_cpu(got, want, dtype, fused=fusion != "none", ulps=2)


def small() -> int:
    """Check every tile once on a ragged shape, with few enough launches for compute-sanitizer."""
    wrong = [
        Case.random("w4a8-lqq", 64, 192, 384).verify(tile, 5, torch.bfloat16, True)
        for tile in TILES
    ]
    wrong += [
        Case.random(s, g, 192, 384).verify(TILES[2], 5, torch.float32, True) for s, g in SCHEMES
    ]
    # a thread block has several tiles, the first or the last of them shared
    many = Case.random("w4a8-lqq", 64, 128 * 71, 128)
    wrong += [
        many.verify(tile, 2 * tile.tokens + 5, torch.bfloat16, False)
        for tile in TILES
        if tile.rows * tile.tokens > 16384 or tile.split == 2
    ]
    wrong += [w8a8(tile, 5, 192, 448, torch.bfloat16) for tile in TILES[::4]]
    wrong += [
        quantization(3, 128, torch.bfloat16, fusion, gather=True, rotated=rotated)
        for fusion, rotated in itertools.product(FUSIONS, (False, True))
    ]
    wrong += [found for module in OTHERS for _, found in module.checks(0, True)]
    print(f"{len(wrong)} small cases, {sum(w is not None for w in wrong)} failures")
    return int(any(wrong))


def checks_of(scheme: str, group: int | None) -> Iterator[Check]:
    """Every tile of the W4A8 GEMM of one scheme."""
    if group:
        for tile in (TILES[2], TILES[6], TILES[12]):
            wrong = every_dequantization(scheme, group, tile)
            yield f"every code x scale x offset {scheme} g{group} {tile}", wrong
    case = Case.random(scheme, group, 448, 640)
    for tile in TILES:
        sums = [
            case.verify(tile, m, torch.int32, False) for m in (1, 7, tile.tokens, tile.tokens + 3)
        ]
        yield f"int32 sums {scheme} g{group} {tile}", next(filter(None, sums), None)
        wrong = case.verify(tile, tile.tokens + 5, torch.bfloat16, True)
        yield f"epilogue {scheme} g{group} {tile}", wrong
    # some blocks have several tiles, some clusters share one
    case = Case.random(scheme, group, 128 * 71, 384)
    for tile in (t for t in TILES if t.split <= 2):
        found = [
            case.verify(tile, 2 * tile.tokens + 5, dtype, False)
            for dtype in (torch.int32, torch.bfloat16)
        ]
        yield f"many tiles {scheme} g{group} {tile}", next(filter(None, found), None)


def checks_of_w8a8() -> Iterator[Check]:
    """Every tile of the W8A8 GEMM."""
    for tile in TILES:
        for m, n, k, dtype in (
            (1, 192, 64, torch.int32),
            (tile.tokens + 3, 448, 1216, torch.int32),
            (300, 320, 640, torch.bfloat16),
            (2 * tile.tokens + 5, 128 * 71, 384, torch.int32),
        ):
            yield f"w8a8 M={m} N={n} K={k} {tile} {dtype}", w8a8(tile, m, n, k, dtype)


def checks_of_activations() -> Iterator[Check]:
    """The quantization of activations, by width, dtype and what is fused with it."""
    for k, dtype, fusion, rotated in itertools.product(
        (64, 4096, 14336, 28672),
        (torch.bfloat16, torch.float16, torch.float32),
        FUSIONS,
        (False, True),
    ):
        wrong = quantization(5, k, dtype, fusion, gather=k != 4096, rotated=rotated)
        yield f"quantize activation K={k} {dtype} {fusion}" + " rotated" * rotated, wrong


def checks_of_graphs() -> Iterator[Check]:
    """A GEMM in a CUDA graph."""
    yield "CUDA graph", graph_capture()


def fuzz(count: int, jobs: Sequence[tuple[str, int | None, Tile, torch.dtype]]) -> Iterator[Check]:
    """Check ``count`` random shapes, each by one of the compiled ``jobs``."""
    for i in range(count):
        scheme, group, tile, dtype = random.choice(jobs)
        n, k = 64 * random.randint(1, 20), (group if group == 128 else 64) * random.randint(1, 24)
        m = random.choice([random.randint(1, 2 * tile.tokens), random.randint(1, 300)])
        case = Case.random(scheme, group, n, k)
        if random.random() < 0.3:
            kind = random.choice([torch.float16, torch.bfloat16])
            case = replace(
                case, arguments=(case.arguments[0], case.arguments[1].to(kind), *case.arguments[2:])
            )  # type: ignore[union-attr]
        wrong = case.verify(tile, m, dtype, dtype != torch.int32 and random.random() < 0.5)
        yield f"fuzz {i} {scheme} g{group} M={m} N={n} K={k} {tile} {dtype}", wrong


def main() -> int:
    """Compile all kernels to check, then print each check and the number of failures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fuzz", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="LiquidQuant g64 only")
    parser.add_argument(
        "--small", action="store_true", help="one tiny shape a tile, for compute-sanitizer"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("check.py: a CUDA device is needed")
    torch.manual_seed(0)
    random.seed(0)
    if args.small:
        return small()
    chosen = [("w4a8-lqq", 64)] if args.quick else SCHEMES
    jobs = [(s, g, t, d) for s, g in chosen for t in TILES for d in (torch.int32, torch.bfloat16)]
    jobs += [(*chosen[-1], t, d) for t in TILES[::3] for d in (torch.float16, torch.float32)]
    operands = [(operand(s, g), t, d) for s, g, t, d in jobs]
    operands += [(W8A8, t, d) for t in TILES for d in (torch.int32, torch.bfloat16)]
    compile_all((definition(*job) for job in operands), "sm_90a")
    failures = 0
    for name, wrong in itertools.chain(
        *(checks_of(scheme, group) for scheme, group in chosen),
        checks_of_w8a8(),
        checks_of_activations(),
        checks_of_graphs(),
        fuzz(args.fuzz, jobs),
        *(module.checks(args.fuzz, False) for module in (() if args.quick else OTHERS)),
    ):
        failures += wrong is not None
        if wrong or not name.startswith("fuzz"):
            print("FAIL" if wrong else "ok  ", f"{name}: {wrong}" if wrong else name, flush=True)
    print(
        f"{args.fuzz} fuzzed shapes; {failures} failures; {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}"
    )
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
