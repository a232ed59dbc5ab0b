"""Are the W4A4 and W4Ax GEMM and the activation quantization by groups right? Part of ``check.py``;
alone it is

    python benchmarks/kernels/check_w4a4.py [--fuzz 500] [--small]

Sums of whole channels equal the integers exactly; with unit scales so do the float totals of
groups; with random scales they are within float32 rounding of float64 and, if no blocks share a
tile, equal to the reference's to the bit. One-hot tokens read out the weight; outputs are poisoned;
two runs agree bit for bit.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from alone import captured, main, ulp, unlike_the_cpu, where
from torch import Tensor

from qtool import layouts
from qtool.kernels.activation.arrangement import ARRANGEMENTS, arrange
from qtool.kernels.activation.quantize_activation import FUSIONS
from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
from qtool.kernels.build import compile_all
from qtool.kernels.hopper.gemm import Weight, definition, run
from qtool.kernels.hopper.tiles import Tile
from qtool.kernels.hopper.w4ax import operand, w4ax_gemm
from qtool.schemes.arithmetic.products import group_matmul

#: layout, group size, dtype of the scales
KINDS = [
    ("apex4", 128, torch.float32),
    ("apex4", 32, torch.float16),
    ("apex4", 512, torch.bfloat16),
    ("apex4", None, torch.float32),
    ("w4ax-interleaved", 128, torch.bfloat16),
    ("w4ax-interleaved", 64, torch.float32),
]
TILES = [
    Tile(8, 128, 8),
    Tile(8, 128, 1, 2),
    Tile(16, 128, 4),
    Tile(16, 128, 2),
    Tile(32, 128, 1, 2),
    Tile(32, 128, 3),
    Tile(64, 128, 1),
    Tile(64, 128, 4),
    Tile(128, 128, 1),
    Tile(128, 128, 3),
    Tile(128, 128, 2),
]
#: tiles for whole channels only: groups leave no registers for them
WIDE = [Tile(128, 256), Tile(128, 256, 2), Tile(256), Tile(256, 128, 2)]
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Case:
    """A random weight, packed and plain."""

    layout: str
    group: int | None
    codes: Tensor  # [N, K] int8
    scale: Tensor  # [G, N]

    @classmethod
    def random(cls, layout: str, group: int | None, dtype: torch.dtype, n: int, k: int) -> "Case":
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda")
        scale = (torch.rand(k // (group or k), n, device="cuda") + 0.1) * 1e-2
        return cls(layout, group, codes, scale.to(dtype))

    def run(
        self,
        tile: Tile,
        x: Tensor,
        sx: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The output for ``x [M, K]`` in natural order and ``sx [M, G]``, in poisoned memory."""
        m, n = len(x), len(self.codes)
        out = torch.full((m + 1, n), 77, dtype=dtype, device="cuda")
        out[:-1] = 0x5A5A5A5A if dtype == torch.int32 else float("nan")
        scales = torch.full((sx.shape[1], (m + 3) // 4 * 4), float("nan"), device="cuda")
        scales[:, :m] = sx.t()
        qweight = layouts.get(self.layout).pack(self.codes)["qweight"]
        weight = Weight(scale, boxed=qweight.flatten(1))
        kernel = operand(self.layout, self.group, scale.dtype)
        run(kernel, tile, arrange(x, self.layout), scales, weight, out[:-1], bias=bias)
        torch.cuda.synchronize()
        assert (out[-1] == 77).all(), "wrote beyond the last token"
        return out[:-1]

    def sums(self, x: Tensor) -> Tensor:
        """``[M, N]`` float64."""
        return x.double() @ self.codes.double().t()

    def exact(self, tile: Tile, x: Tensor) -> str | None:
        """The integers themselves: float totals under unit scales, or int32 sums."""
        ones = torch.ones(len(x), len(self.scale), device="cuda")
        dtype = torch.float32 if self.group else torch.int32
        got = self.run(tile, x, ones, torch.ones_like(self.scale), None, dtype)
        return where(got.double() != self.sums(x), got)

    def rounded(self, tile: Tile, m: int, dtype: torch.dtype, bias: bool) -> str | None:
        """Check that two runs give the same scaled totals, and that these are exact or within a
        unit in the last place and float32 rounding of float64.
        """
        n, k = self.codes.shape
        x, groups = tokens(m, k), len(self.scale)
        sx = torch.rand(m, groups, device="cuda") * 0.05 + 1e-4
        b = torch.randn(n, device="cuda") if bias else None
        got = self.run(tile, x, sx, self.scale, b, dtype)
        span = min(self.group, 128) if self.group else k  # inputs that are scaled at a time
        parts = torch.einsum(
            "mgk,ngk->gmn", *(t.double().unflatten(1, (-1, span)) for t in (x, self.codes))
        )
        scales = sx.double().t()[:, :, None] * self.scale.double()[:, None]
        parts *= scales.repeat_interleave(k // span // groups, 0)
        want, size = parts.sum(0), parts.abs().sum(0)
        if b is not None:
            want, size = want + b.double(), size + b.double().abs()
        # each part is rounded twice, the total once a part; then the sums of a cluster and the bias
        rounding = (len(parts) + 8) * 2.0**-24 * size
        wrong = where(~((got.double() - want).abs() <= ulp(want, dtype) + rounding), got)
        if (tile.split == 1 or not self.group) and wrong is None:
            exactly = group_matmul(x, sx, self.codes, self.scale.float().t(), self.group, b).to(
                dtype
            )
            wrong = where(got != exactly, got)
        if wrong is None and not torch.equal(got, self.run(tile, x, sx, self.scale, b, dtype)):
            return "two runs differ"
        return wrong


def tiles(kind: tuple[str, int | None, torch.dtype]) -> list[Tile]:
    """The tiles of a kind."""
    return TILES if kind[1] else TILES + WIDE


def tokens(m: int, k: int) -> Tensor:
    """Codes of 8-bit blocks, which include the codes of 4-bit blocks."""
    return torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")


def quantization(
    m: int,
    k: int,
    dtype: torch.dtype,
    fusion: str,
    group: int | None,
    arrangement: str,
    mixed: bool,
) -> str | None:
    """Check that codes and scales are the CPU's."""
    x = torch.randn(m, k * (2 if fusion == "silu-up" else 1), device="cuda").to(dtype)
    x[m // 2] = 0
    order = torch.randperm(k, device="cuda").int() if mixed else None
    norm = torch.rand(k, device="cuda").to(dtype) if fusion == "rms-norm" else None
    blocks = (
        torch.randint(0, 2, (k // (group or k),), dtype=torch.uint8, device="cuda")
        if mixed
        else None
    )
    given = (x, order, norm, blocks)
    got = quantize_activation_groups(*given, fusion, 1e-5, group, arrangement)
    here = [None if t is None else t.cpu() for t in given]
    want = quantize_activation_groups(*here, fusion, 1e-5, group, arrangement)  # type: ignore[arg-type]
    ulps = 8 if dtype == torch.float32 else 2
    return unlike_the_cpu(got, want, dtype, fused=fusion != "none", ulps=ulps)


def graph_capture() -> str | None:
    """Both ops inside a CUDA graph, replayed on new activations."""
    case = Case.random("apex4", 128, torch.float32, 512, 1024)
    qweight = layouts.get("apex4").pack(case.codes)["qweight"]
    x = torch.zeros(5, 1024, device="cuda")

    def forward() -> Tensor:
        codes, sx = quantize_activation_groups(x, None, None, None, "none", 0.0, 128, "apex4")
        return w4ax_gemm(codes, sx, qweight, case.scale, None, "apex4", 128, torch.float32)

    graph, out = captured(forward)
    x.normal_()
    graph.replay()
    return None if torch.equal(out, forward()) and out.any() else "replay differs"


def checks(fuzz: int, small: bool) -> Iterator[tuple[str, str | None]]:
    """Each check's name, and the error or None; ``small`` has few launches (compute-sanitizer)."""
    if small:
        yield from small_checks()
        return
    jobs = [(kind, tile, dtype) for kind in KINDS for tile in tiles(kind) for dtype in DTYPES]
    sums = [(kind, tile, torch.int32) for kind in KINDS if kind[1] is None for tile in tiles(kind)]
    compile_all((definition(operand(*kind), *job) for kind, *job in jobs + sums), "sm_90a")
    for kind in KINDS:
        yield from checks_of(kind)
    sizes = ((4096, 128, True), (14336, 32, False), (1024, 512, True), (11008, None, False))
    for dtype, fusion, arrangement, (k, group, mixed) in itertools.product(
        (torch.bfloat16, torch.float32), FUSIONS, ARRANGEMENTS, sizes
    ):
        name = f"quantize groups K={k} g{group} {dtype} {fusion} {arrangement}"
        yield name, quantization(5, k, dtype, fusion, group, arrangement, mixed)
    yield "CUDA graph w4ax", graph_capture()
    for i in range(fuzz):
        kind, tile, dtype = random.choice(jobs)
        step = max(64, kind[1] or 0)
        n, k = 64 * random.randint(1, 20), step * random.randint(1, 1536 // step)
        m = random.choice([random.randint(1, 2 * tile.tokens), random.randint(1, 300)])
        case = Case.random(*kind, n, k)
        name = f"fuzz {i} {kind} M={m} N={n} K={k} {tile} {dtype}"
        wrong = case.rounded(tile, m, dtype, random.random() < 0.5)
        yield name, wrong or (case.exact(tile, tokens(m, k)) if dtype == torch.float32 else None)


def small_checks() -> Iterator[tuple[str, str | None]]:
    """Every third tile of each kind once, and the quantization with each fusion."""
    for kind in KINDS:
        for tile in tiles(kind)[::3]:
            case = Case.random(*kind, 192, 1024)
            yield f"w4ax {kind} {tile}", case.rounded(tile, 5, torch.bfloat16, True)
    for fusion in FUSIONS:
        wrong = quantization(3, 256, torch.bfloat16, fusion, 32, "apex4", True)
        yield f"quantize groups {fusion}", wrong


def checks_of(kind: tuple[str, int | None, torch.dtype]) -> Iterator[tuple[str, str | None]]:
    """Every tile of the GEMM of one kind."""
    for tile in tiles(kind):
        case = Case.random(*kind, 448, 1024 if kind[1] == 512 else 640)
        found = [
            case.exact(tile, tokens(m, case.codes.shape[1]))
            for m in (1, 7, tile.tokens, tile.tokens + 3)
        ]
        yield f"exact {kind} {tile}", next(filter(None, found), None)
        yield f"scaled {kind} {tile}", case.rounded(tile, tile.tokens + 5, torch.bfloat16, True)
    # some blocks have several tiles, some clusters share the last
    case = Case.random(*kind, 128 * 71, 1024)
    for tile in (t for t in tiles(kind) if t.split <= 2):
        wrong = case.rounded(tile, 2 * tile.tokens + 5, torch.bfloat16, True)
        yield f"many tiles {kind} {tile}", wrong
    case = Case.random(*kind, 256, 1024)
    eye = torch.eye(1024, dtype=torch.int8, device="cuda")
    yield f"one-hot tokens {kind}", case.exact(TILES[-3], eye)


if __name__ == "__main__":
    main(checks)
