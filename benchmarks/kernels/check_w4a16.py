"""The 16-bit GEMMs (marlin, marlin-24) on this GPU against float64: part of ``check.py``, and
alone.

    python benchmarks/kernels/check_w4a16.py [--fuzz 500] [--small]

One-hot tokens read out the weight, scale included, exactly; outputs are poisoned; shapes are
fuzzed. Random sums may be off by :data:`TOLERANCE` of the sum of their terms' magnitudes, and by
the rounding of the output. If wgmma multiplies rounded weights, the reference does so too.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from alone import captured, main, where
from torch import Tensor

from qtool.kernels.build import ARCHITECTURES, Source, compile_all
from qtool.kernels.dtypes import HALF
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.tiles import Tile
from qtool.kernels.hopper.w4a16 import EXACT_TOKENS, operand, packed_weight
from qtool.kernels.mma.half_gemm import HalfWeight, Variant, definition, run
from qtool.kernels.mma.half_tiles import HalfTile
from qtool.kernels.mma.w4a16 import w4a16_24_gemm, w4a16_gemm
from qtool.layouts.marlin import MARLIN
from qtool.layouts.marlin_24 import MARLIN_24

#: share of sum |x| |w|: tensor cores truncate up to 128 terms, then groups are added in float32; if
#: wgmma adds all of K, it holds for up to 2048 terms, and in proportion beyond
TOLERANCE = 2.0**-20
TILES = [
    HalfTile(8, 4, teams=2, split=4, blocks_per_sm=2),
    HalfTile(16, 4, teams=2, split=4, blocks_per_sm=2),
    HalfTile(16, 2, teams=4, split=3, blocks_per_sm=2),
    HalfTile(16, 4, teams=4),
    HalfTile(8, 1, teams=8, split=8),
    HalfTile(32, 2, token_warps=4),
    HalfTile(32, 2, token_warps=2, teams=2, split=2),
    HalfTile(32, 4, teams=2),
    HalfTile(16, 1, teams=16),
    HalfTile(16, 2, token_warps=2, teams=2, split=2),
    HalfTile(8, 1, teams=8, split=2, blocks_per_sm=3),
    HalfTile(16, 1, teams=4, split=2, blocks_per_sm=3),
    HalfTile(16, 1, teams=8, split=2, blocks_per_sm=2),
]
WGMMA_TILES = [
    Tile(32, split=4, blocks_per_sm=2),
    Tile(32, split=3),
    Tile(64, split=2, blocks_per_sm=2),
    Tile(64, split=3),
    Tile(128),
    Tile(128, split=3),
    Tile(256),
    Tile(256, split=2),
]
GROUPS = (32, 64, 128, 0)
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAPABILITY = (9, 0)
BF16 = torch.bfloat16
AnyTile: TypeAlias = HalfTile | Tile
Kernel: TypeAlias = tuple[Variant, AnyTile, bool]  # whether an mma tile uses what only Hopper has
MOST_FUZZED_KERNELS = 120  # random variants to compile; their shapes are drawn in each run


@dataclass
class Case:
    """A weight in two forms: packed, and as the exact float64 matrix ``[N, K]``."""

    weight: HalfWeight
    exact: Tensor

    @classmethod
    def make(cls, codes: Tensor, scale: Tensor, sparse: bool) -> "Case":
        layout = MARLIN_24 if sparse else MARLIN
        packed = layout.pack(codes)
        weight = HalfWeight(
            packed["qweight"], layout.pack_group(scale).contiguous(), packed.get("metadata")
        )
        wide = scale.double().repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        return cls(weight, (codes.double() - 8) * wide)

    @classmethod
    def random(cls, sparse: bool, group: int, n: int, k: int, dtype: torch.dtype) -> "Case":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scale = (torch.rand(n, k // group if group else 1, device="cuda") + 0.1).mul(0.01).to(dtype)
        return cls.make(prune(codes) if sparse else codes, scale, sparse)

    def multiplied(self, tile: AnyTile, dtype: torch.dtype) -> Tensor:
        """The weight by which tokens of ``dtype`` are multiplied, in float64."""
        weight = self.weight
        alike = weight.group > 0 and weight.scale.dtype == dtype
        if isinstance(tile, Tile) and tile.tokens > EXACT_TOKENS and alike:
            return self.exact.to(dtype).double()  # rounded to 16 bits with its scales
        return self.exact

    def run(
        self, tile: AnyTile, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype, hopper: bool
    ) -> Tensor:
        out = torch.full((len(x) + 1, len(self.exact)), 77.0, dtype=out_dtype, device="cuda")
        out[:-1] = float("nan")
        launch(tile, x, self.weight, out[:-1], bias, hopper=hopper)
        assert (out[-1] == 77).all(), "wrote beyond the last token"
        return out[:-1]

    def verify(
        self,
        tile: AnyTile,
        m: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        bias: bool,
        hopper: bool,
    ) -> str | None:
        """The error, or None."""
        n, k = self.exact.shape
        x = torch.randn(m, k, device="cuda").to(dtype)
        b = torch.randn(n, device="cuda").to(dtype) if bias else None
        got = self.run(tile, x, b, out_dtype, hopper)
        weight = self.multiplied(tile, dtype)
        want = x.double() @ weight.t() + (0 if b is None else b.double())
        terms = x.double().abs() @ weight.abs().t() + (0 if b is None else b.double().abs())
        tolerance = TOLERANCE * max(1, k / 2048 if isinstance(tile, Tile) else 1)
        wrong = ~(
            (got.double() - want).abs()
            <= tolerance * terms + torch.finfo(out_dtype).eps * want.abs()
        )
        if not torch.equal(got, self.run(tile, x, b, out_dtype, hopper)):
            return "a second run differs"
        return where(wrong, got)


def prune(codes: Tensor) -> Tensor:
    """Two random codes of each four set to 8."""
    noise = torch.rand(codes.shape[0], codes.shape[1] // 4, 4, device=codes.device)
    dropped = noise.argsort(-1)[..., :2]
    return codes.view(noise.shape).scatter(-1, dropped, 8).view(codes.shape)


def one_hot(variant: Variant, tile: AnyTile) -> str | None:
    """Check every code with many scales by one-hot tokens: the output is the weight itself."""
    (n, k), group = (384, 1024), variant.group
    scale = torch.exp2(torch.randint(-8, 3, (n, k // group if group else 1), device="cuda").float())
    scale = (scale * torch.randint(128, 256, scale.shape, device="cuda") / 128).to(variant.scale)
    codes = (torch.arange(n, device="cuda")[:, None] * 5 + torch.arange(k, device="cuda") * 3) % 16
    if variant.sparse:
        # every pair of positions
        pairs = torch.tensor(list(itertools.combinations(range(4), 2)), device="cuda")
        kept = pairs[torch.randint(0, len(pairs), (n, k // 4), device="cuda")]
        codes = (
            torch.full((n, k // 4, 4), 8, device="cuda")
            .scatter(-1, kept, codes.view(n, -1, 4)[..., :2])
            .view(n, k)
        )
    case = Case.make(codes.to(torch.uint8), scale, variant.sparse)
    got = case.run(tile, torch.eye(k, dtype=variant.x, device="cuda"), None, torch.float32, True)
    return where(got.double() != case.multiplied(tile, variant.x).t(), got)


def op_over_tokens(m: int, group: int, sparse: bool) -> str | None:
    """The op with the tile that it chooses; each weight may have been rounded to bfloat16."""
    case = Case.random(sparse, group, 640 if sparse else 448, 1280, torch.bfloat16)
    x, w = torch.randn(m, 1280, device="cuda").bfloat16(), case.weight
    if sparse:
        got = w4a16_24_gemm(x, w.qweight, w.metadata, w.scale, None, torch.float32)
    else:
        got = w4a16_gemm(x, w.qweight, w.scale, None, torch.float32)
    want, terms = x.double() @ case.exact.t(), x.double().abs() @ case.exact.abs().t()
    return where(~((got.double() - want).abs() <= 2.0**-8 * terms), got)


def op_under_graph_and_compile(sparse: bool) -> str | None:
    """The op inside a CUDA graph replayed on new tokens, under torch.compile, and checked by
    opcheck.
    """
    case = Case.random(sparse, 128, 256, 512, torch.bfloat16)
    w = case.weight
    op = w4a16_24_gemm if sparse else w4a16_gemm
    packed = (w.qweight, w.metadata) if sparse else (w.qweight,)

    def call(x: Tensor) -> Tensor:
        return op(x, *packed, w.scale, None, torch.float32)

    x = torch.randn(3, 512, device="cuda").bfloat16()
    graph, out = captured(lambda: call(x))
    x.normal_()
    graph.replay()
    torch.library.opcheck(op, (x, *packed, w.scale, None, torch.float32))
    if not torch.equal(out, call(x)):
        return "replay differs from a plain call"
    same = torch.equal(torch.compile(call, fullgraph=True)(x), out)
    return None if same else "compiled differs from a plain call"


def source(variant: Variant, tile: AnyTile, hopper: bool) -> Source:
    """The kernel of a tile."""
    if isinstance(tile, Tile):
        kernel = operand(
            variant.group, variant.x, variant.scale, tile.tokens, sparse=variant.sparse
        )
        return gemm.definition(kernel, tile, variant.out)
    return definition(variant, tile, CAPABILITY, hopper=hopper)


def launch(
    tile: AnyTile, x: Tensor, weight: HalfWeight, out: Tensor, bias: Tensor | None, hopper: bool
) -> None:
    """Launch the kernel of a tile."""
    if isinstance(tile, Tile):
        sparse = weight.metadata is not None
        kernel = operand(weight.group, x.dtype, weight.scale.dtype, tile.tokens, sparse=sparse)
        gemm.run(kernel, tile, x, None, packed_weight(weight), out, bias=bias)
    else:
        run(tile, x, weight, out, bias, hopper=hopper)


def runs(variant: Variant, tile: AnyTile) -> bool:
    """Whether the kernel exists: a wgmma tile that scales sums needs registers for two sets."""
    if not isinstance(tile, Tile):
        return True
    rounded = variant.group == 0 or variant.scale == variant.x
    room = tile.tokens <= 128 and (tile.tokens < 64 or tile.blocks_per_sm == 1)
    return rounded or room


def checks(fuzz: int, small: bool) -> Iterator[tuple[str, str | None]]:
    """Each check's name, and the error or None; ``small`` has a few launches, for
    compute-sanitizer.
    """
    if small:
        yield from small_checks()
        return
    rng = random.Random(0)
    kernels = random_kernels(rng, min(fuzz, MOST_FUZZED_KERNELS))
    fuzzed = [rng.choice(kernels) for _ in range(fuzz)]
    one_hots = one_hot_kernels()
    compile_all(
        (source(*job) for job in (*one_hots, *kernels_of_sums(), *fuzzed)),
        ARCHITECTURES[CAPABILITY][0],
    )
    for variant, tile, _ in one_hots:
        name = f"one-hot sparse={variant.sparse} g{variant.group} x {variant.x}"
        yield f"{name} scale {variant.scale} {tile}", one_hot(variant, tile)
    yield from checks_of_sums()
    for m, group, sparse in itertools.product(
        (1, 16, 17, 33, 64, 65, 129, 300, 1100), GROUPS, (False, True)
    ):
        yield f"op M={m} g{group} sparse={sparse}", op_over_tokens(m, group, sparse)
    for sparse in (False, True):
        wrong = op_under_graph_and_compile(sparse)
        yield f"CUDA graph, torch.compile, opcheck sparse={sparse}", wrong
    for i, kernel in enumerate(fuzzed):
        name, wrong = fuzzed_shape(rng, *kernel)
        yield f"fuzz {i} {name}", wrong


def small_checks() -> Iterator[tuple[str, str | None]]:
    """Every mma tile once on a shape in which some teams get a step of K and some none."""
    for tile, sparse in itertools.product(TILES, (False, True)):
        case = Case.random(sparse, 128, 256, 640, BF16)
        wrong = case.verify(tile, 5, BF16, BF16, True, tile.teams != 2)
        yield f"small sparse={sparse} {tile}", wrong


def random_kernels(rng: random.Random, count: int) -> list[Kernel]:
    """Random variants, each with a tile that has it."""
    found = []
    for _ in range(count):
        variant = Variant(
            rng.random() < 0.3,
            rng.choice(GROUPS),
            rng.choice(HALF),
            rng.choice(SCALE_DTYPES),
            rng.choice((*HALF, torch.float32)),
        )
        tiles = [tile for tile in (*TILES, *WGMMA_TILES) if runs(variant, tile)]
        found.append((variant, rng.choice(tiles), rng.random() < 0.7))
    return found


def one_hot_kernels() -> list[Kernel]:
    """The kernels whose weights one-hot tokens read out."""
    options = itertools.product((False, True), GROUPS, HALF, SCALE_DTYPES)
    variants = [Variant(*option, torch.float32) for option in options]
    tiles = (*TILES[1:6:4], *WGMMA_TILES)
    return [(v, tile, True) for v in variants for tile in tiles if runs(v, tile)]


def kernels_of_sums() -> list[Kernel]:
    """The kernels of :func:`checks_of_sums`: each tile, an mma tile with and without Hopper."""
    tiles = [*itertools.product(TILES, (False, True)), *((tile, True) for tile in WGMMA_TILES)]
    variants = [Variant(sparse, 128, BF16, BF16, BF16) for sparse in (False, True)]
    return [(variant, *tile) for variant in variants for tile in tiles]


def checks_of_sums() -> Iterator[tuple[str, str | None]]:
    """Random sums with every tile, for less than a tile of tokens, a whole one and more."""
    for tile, sparse, hopper in itertools.product(TILES, (False, True), (True, False)):
        case = Case.random(sparse, 128, 640 if sparse else 448, 1280, BF16)
        for m in (1, tile.block_tokens, tile.block_tokens + 3):
            wrong = case.verify(tile, m, BF16, BF16, True, hopper)
            yield f"sums M={m} sparse={sparse} hopper={hopper} {tile}", wrong
    for tile, sparse in itertools.product(WGMMA_TILES, (False, True)):
        case = Case.random(sparse, 128, 640 if sparse else 448, 1280, BF16)
        for m in (1, tile.tokens, tile.tokens + 3, 300):
            wrong = case.verify(tile, m, BF16, BF16, True, True)
            yield f"sums M={m} sparse={sparse} {tile}", wrong


def fuzzed_shape(
    rng: random.Random, variant: Variant, tile: AnyTile, hopper: bool
) -> tuple[str, str | None]:
    """The name of a random shape under a kernel, and its error or None."""
    n, k = (128 if variant.sparse else 64) * rng.randint(1, 12), 128 * rng.randint(1, 24)
    width = tile.tokens if isinstance(tile, Tile) else tile.block_tokens
    m = rng.choice([rng.randint(1, 2 * width), rng.randint(1, 300)])
    case = Case.random(variant.sparse, variant.group, n, k, variant.scale)
    wrong = case.verify(tile, m, variant.x, variant.out, rng.random() < 0.5, hopper)
    return f"M={m} N={n} K={k} hopper={hopper} {variant} {tile}", wrong


if __name__ == "__main__":
    main(checks)
