"""Are the mma.sync kernels of Ampere and Ada right? Part of ``check.py``; alone it is

    python benchmarks/kernels/check_mma.py [--fuzz 500] [--small]

On Hopper s4 is emulated: it is slow, but gives the same integers. int32 sums equal the reference
exactly; with unit scales so do the float totals of groups; with random scales they are within
float32 rounding of float64. The checks run every code, level-2 scale and legal offset; one-hot
tokens read out the weight; outputs are poisoned; two runs agree bit for bit.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from alone import captured, main, ulp, where
from torch import Tensor

from qtool import layouts, schemes
from qtool.bench.gemm_columns import draw
from qtool.kernels.activation.arrangement import arrange
from qtool.kernels.activation.quantize_packed_groups import pack_tokens, quantize_packed_groups
from qtool.kernels.build import compile_all
from qtool.kernels.hopper.w4a8 import beside_s1
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma import w4a8 as w4a8_mma
from qtool.kernels.mma import w4ax as w4ax_mma
from qtool.kernels.mma.gemm import TILES, MmaOperand, MmaTile, MmaWeight
from qtool.kernels.mma.w4a8 import w4a8_mma_gemm
from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.schemes.fmpq import BLOCK

W4A8: tuple[tuple[str, int | None], ...] = (
    ("w4a8-qoq-g128", 128),
    ("w4a8-qoq", None),
    ("w4a8-lqq", 64),
    ("w4a8-lqq", 32),
    ("w4a8-qoq-g128", 64),
)
#: layout, group size, dtype of the scales, whether some blocks have 8 bits
W4AX: tuple[tuple[str, int | None, torch.dtype, bool], ...] = (
    ("apex4", 128, torch.float32, False),
    ("apex4", 32, torch.float16, False),
    ("apex4", None, torch.float32, False),
    ("apex4", 256, torch.bfloat16, False),
    ("w4ax-interleaved", 128, torch.float32, True),
    ("w4ax-interleaved", 64, torch.bfloat16, False),
)


@dataclass
class Case:
    """A weight, packed and plain, under a kernel."""

    operand: MmaOperand
    weight: MmaWeight
    w8: Tensor  # [N, K] int8, as the tensor cores multiply it, zero points subtracted
    scale: Tensor  # [G, N]
    layout: str | None = None  # for s4 weights: the tokens' arrangement

    @classmethod
    def w4a8(
        cls, scheme: str, group: int | None, codes: Tensor, level2: dict[str, Tensor]
    ) -> "Case":
        """``level2``: s2 and offset or zero, ``[N, G]``; per channel only zero ``[N]``."""
        s1 = (torch.rand(len(codes), device="cuda") + 0.1) * 1e-3
        if group is None:
            w8 = codes.to(torch.int8) - level2["zero"].to(torch.int8)[:, None]
        else:
            w8 = schemes.get(scheme, group).level2(codes, {"s1": s1, **level2})  # type: ignore[attr-defined]
        stored = {name: COMPUTE_AWARE.pack_group(t) if group else t for name, t in level2.items()}
        qweight = COMPUTE_AWARE.pack(codes)["qweight"]
        given = (stored.get("s2"), stored.get("offset"), stored.get("zero"))
        packed = MmaWeight(qweight, s1, *beside_s1(scheme, *given))
        return cls(w4a8_mma.operand(scheme, group), packed, w8, s1[None])

    @classmethod
    def random_w4a8(cls, scheme: str, group: int | None, n: int, k: int) -> "Case":
        return cls.w4a8(scheme, group, *random_codes(scheme, group, n, k))

    @classmethod
    def random_w4ax(
        cls, layout: str, group: int | None, dtype: torch.dtype, mixed: bool, n: int, k: int
    ) -> "Case":
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda")
        scale = ((torch.rand(k // (group or k), n, device="cuda") + 0.1) * 1e-2).to(dtype)
        eight_bit = draw(0, 2, k // BLOCK) if mixed else None
        weight = MmaWeight(layouts.get(layout).pack(codes)["qweight"], scale, eight_bit=eight_bit)
        return cls(w4ax_mma.operand(layout, group, dtype, mixed), weight, codes, scale, layout)

    def tokens(self, m: int) -> Tensor:
        """Random codes ``[m, K]`` of 8 bits, of 4 bits, or of both by block."""
        k = self.w8.shape[1]
        wide = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
        if self.layout is None:
            return wide
        narrow = torch.randint(-8, 8, (m, k), dtype=torch.int8, device="cuda")
        blocks = self.weight.eight_bit
        return (
            narrow
            if blocks is None
            else torch.where(blocks.bool().repeat_interleave(BLOCK), wide, narrow)
        )

    def run(
        self, tile: MmaTile, x: Tensor, sx: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The output for ``x [M, K]`` in natural order and ``sx [M, G]``, in poisoned memory."""
        (m, k), n = x.shape, len(self.w8)
        out = torch.full((m + 1, n), 77, dtype=dtype, device="cuda")
        out[:-1] = 0x5A5A5A5A if dtype == torch.int32 else float("nan")
        scales = torch.full((sx.shape[1], (m + 3) // 4 * 4), float("nan"), device="cuda")
        scales[:, :m] = sx.t()
        given = (
            x
            if self.layout is None
            else pack_tokens(arrange(x, self.layout), self.weight.eight_bit)
        )
        total = x.sum(1, dtype=torch.int32)
        operand = replace(self.operand, tiles=(tile,))
        mma.run(operand, given, scales, self.weight, out[:-1], k, token_sum=total, bias=bias)
        torch.cuda.synchronize()
        assert (out[-1] == 77).all(), "wrote beyond the last token"
        return out[:-1]

    def verify(self, tile: MmaTile, m: int, dtype: torch.dtype) -> str | None:
        """The error in int32 sums, an epilogue or the totals of groups; None if there is none."""
        n, groups = len(self.w8), len(self.scale)
        x, sx = self.tokens(m), torch.rand(m, groups, device="cuda") * 0.05 + 1e-4
        bias = (
            torch.randn(n, device="cuda")
            if random.random() < 0.5 and dtype != torch.int32
            else None
        )
        got = self.run(tile, x, sx, bias, dtype)
        if not torch.equal(got, self.run(tile, x, sx, bias, dtype)):
            return "two runs differ"
        # a kernel promotes the sums of at most 128 inputs: their size bounds its rounding error
        pieces = (
            max(groups, self.w8.shape[1] // BLOCK)
            if self.operand.tiles == mma.NARROW_TILES
            else groups
        )
        parts = zip(x.double().chunk(pieces, 1), self.w8.double().chunk(pieces, 1), strict=True)
        sums = [a @ b.t() for a, b in parts]
        if dtype == torch.int32:
            return where(got.long() != sums[0].long(), got)
        scales = [(sx[:, None, g].double(), self.scale[g].double()) for g in range(groups)]
        terms = [
            s * scales[i * groups // pieces][0] * scales[i * groups // pieces][1]
            for i, s in enumerate(sums)
        ]
        want, size = sum(terms), sum(t.abs() for t in terms)
        if bias is not None:
            want, size = want + bias.double(), size + bias.abs().double()
        rounding = 2.0**-23 * (pieces + 2) * size
        return where(~((got.double() - want).abs() <= ulp(want, dtype) + rounding), got)

    def exact(self, tile: MmaTile, x: Tensor) -> str | None:
        """The place where the integer sums differ, or None: int32 sums, or a group kernel's sums
        with scales of one.
        """
        case, dtype = self, torch.int32
        if self.operand.tiles == mma.NARROW_TILES:
            case = replace(self, weight=replace(self.weight, scale1=torch.ones_like(self.scale)))
            dtype = torch.float32
        got = case.run(
            tile, x, torch.ones(len(x), len(self.scale), device="cuda"), None, dtype
        ).long()
        return where(got != (x.double() @ self.w8.double().t()).long(), got)


def offsets(scheme: str) -> range:
    """The legal offsets of w4a8-lqq, or zero points of w4a8-qoq."""
    return range(9, 248) if scheme == "w4a8-lqq" else range(16)


def legal(
    scheme: str, codes: Tensor, s2: Tensor, offset: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes and level-2 parameters of a weight, ``codes [N, K]`` clamped to the scheme's bounds.

    ``s2`` and ``offset``, which is QoQ's zero point, are uint8 ``[N, G]``.
    """
    wide, far = (t.int().repeat_interleave(codes.shape[1] // t.shape[1], 1) for t in (s2, offset))
    if scheme == "w4a8-lqq":
        found, name = torch.minimum(codes.int(), (255 - far) // wide), "offset"
    else:
        found, name = torch.clamp(codes.int(), far - 128 // wide, far + 127 // wide), "zero"
    return found.to(torch.uint8), {"s2": s2, name: offset}


def random_codes(
    scheme: str, group: int | None, n: int, k: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Random legal codes ``[n, k]`` and level-2 parameters; per channel only ``zero [n]``."""
    codes = draw(0, 16, n, k)
    if group is None:
        return codes, {"zero": draw(0, 16, n)}
    known = offsets(scheme)
    s2, offset = draw(1, 17, n, k // group), draw(known.start, known.stop, n, k // group)
    return legal(scheme, codes, s2, offset)


def every_code(scheme: str, group: int, groups: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes ``[256, groups * group]`` and level-2 parameters with all codes x scales x offsets."""
    pairs = torch.tensor(list(product(range(1, 17), offsets(scheme))), device="cuda")
    table = pairs[torch.arange(256 * groups, device="cuda") % len(pairs)].to(torch.uint8)
    s2, offset = (column.reshape(256, groups) for column in table.unbind(1))
    codes = torch.arange(16, device="cuda").repeat(256, group // 16 * groups)
    return legal(scheme, codes, s2, offset)


def every_dequantization(scheme: str, group: int, tile: MmaTile) -> str | None:
    """Check all codes x scales x legal offsets by one-hot tokens: the output is the weight."""
    groups = -(-16 * len(offsets(scheme)) // 256)
    case = Case.w4a8(scheme, group, *every_code(scheme, group, groups))
    return case.exact(tile, torch.eye(case.w8.shape[1], dtype=torch.int8, device="cuda"))


def graph_capture() -> str | None:
    """The op inside a CUDA graph, work shared between blocks, replayed on new tokens."""
    case = Case.random_w4a8("w4a8-qoq-g128", 128, 256, 4096)
    x, one = torch.zeros(5, 4096, dtype=torch.int8, device="cuda"), torch.ones(5, device="cuda")
    weight = case.weight
    level2 = (
        weight.scale1,
        weight.scale2,
        None,
        weight.offset2,
        torch.zeros(5, dtype=torch.int32, device="cuda"),
    )
    arguments = (x, one, weight.qweight, *level2, None, "w4a8-qoq-g128", 128, torch.int32)
    graph, out = captured(lambda: w4a8_mma_gemm(*arguments))
    for _ in range(3):
        x.random_(-127, 128)
        graph.replay()
        if wrong := where(out.long() != (x.double() @ case.w8.double().t()).long(), out):
            return wrong
    return None


def quantization(m: int, k: int, mixed: bool) -> str | None:
    """Check that codes and scales equal the CPU's, for both layouts, with gathered inputs."""
    x, order = torch.randn(m, k, device="cuda").bfloat16(), torch.randperm(k, device="cuda").int()
    x[m // 2, : k // 2] = 0
    eight_bit = draw(0, 2, k // BLOCK) if mixed else None
    for layout in ("apex4", "w4ax-interleaved"):
        here = [None if t is None else t.cpu() for t in (x, order, None, eight_bit)]
        want = quantize_packed_groups(*here, "none", 0.0, BLOCK, layout)
        got = quantize_packed_groups(x, order, None, eight_bit, "none", 0.0, BLOCK, layout)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)):
            return f"{layout} differs from the CPU"
    return None


def operands() -> list[MmaOperand]:
    """The operands of all kinds of W4A8 and W4Ax weights."""
    return [w4a8_mma.operand(*kind) for kind in W4A8] + [w4ax_mma.operand(*kind) for kind in W4AX]


def prepare(dtypes: tuple[torch.dtype, ...]) -> None:
    """Compile every kernel of :func:`checks` into the cache."""
    jobs = [(o, tile, dtype) for o in operands() for tile in o.tiles for dtype in dtypes]
    jobs = [job for job in jobs if job[2] != torch.int32 or job[0].tiles != mma.NARROW_TILES]
    compile_all((mma.definition(*job, (9, 0)) for job in jobs), "sm_90a")


def random_case(kind: tuple[object, ...], n: int, k: int) -> Case:
    """A random weight ``[n, k]`` of a kind of W4A8 or W4Ax."""
    return Case.random_w4a8(*kind, n, k) if kind in W4A8 else Case.random_w4ax(*kind, n, k)  # type: ignore[arg-type]


def checks(fuzz: int, small: bool) -> Iterator[tuple[str, str | None]]:
    """Each check's name, and the error or None; ``small`` has few tiny ones (compute-sanitizer)."""
    if not small:
        prepare((torch.int32, torch.bfloat16, torch.float16, torch.float32))
    for kind in (*W4A8, *W4AX):
        for tile in random_case(kind, 32, 256).operand.tiles[
            -1 if small and kind != W4A8[0] else 0 :
        ]:
            name = f"mma {kind} {tile.rows} x {tile.tokens}"
            if small:
                case = random_case(kind, 160, 384 + 128 * (256 in kind))
                yield f"{name} small", case.verify(tile, tile.tokens + 3, torch.bfloat16)
                continue
            case = random_case(kind, 416, 1280)
            exact = [case.exact(tile, case.tokens(m)) for m in (1, 7, tile.tokens, tile.tokens + 3)]
            yield f"{name} exact sums", next(filter(None, exact), None)
            yield (
                f"{name} one-hot",
                case.exact(tile, torch.eye(1280, dtype=torch.int8, device="cuda")),
            )
            wrong = [
                case.verify(tile, 2 * tile.tokens + 5, t)
                for t in (torch.bfloat16, torch.float16, torch.float32)
            ]
            yield f"{name} epilogue", next(filter(None, wrong), None)
    if small:
        return
    for (scheme, group), tile in product(W4A8, TILES):
        if group:
            name = f"mma every code x scale x offset {scheme} g{group} {tile.rows} x {tile.tokens}"
            yield name, every_dequantization(scheme, group, tile)
    for m, k, mixed in product((1, 7), (128, 4096, 14336), (False, True)):
        yield f"quantize packed groups M={m} K={k} mixed={mixed}", quantization(m, k, mixed)
    yield "mma CUDA graph", graph_capture()
    for i in range(fuzz):
        kind = random.choice((*W4A8, *W4AX))
        group = max(kind[1] or 32, 128 * (True in kind))  # type: ignore[type-var]
        step = 32 if kind in W4A8 else 8
        n, k = step * random.randint(1, 1280 // step), group * random.randint(1, 3072 // group)
        case = random_case(kind, n, k)
        tile = random.choice(case.operand.tiles)
        m = random.choice([random.randint(1, 2 * tile.tokens), random.randint(1, 300)])
        dtype = random.choice([torch.bfloat16, torch.float16, torch.float32])
        wrong = case.exact(tile, case.tokens(m)) or case.verify(tile, m, dtype)
        yield f"fuzz mma {i} {kind} M={m} N={n} K={k} {tile} {dtype}", wrong


if __name__ == "__main__":
    main(checks)
