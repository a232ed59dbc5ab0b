"""The kernels of the GEMM table: their random weights and their launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from qtool.bench.cuda_graphs import HALF_OPERATIONS, OPERATIONS, copies
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
from qtool.kernels.build import Source
from qtool.kernels.hopper import gemm, w4a8, w4a16, w4ax, w8a8
from qtool.kernels.hopper.gemm import Operand, Weight, run
from qtool.kernels.hopper.tiles import Tile, choose, choose_half, choose_s4
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma import half_gemm
from qtool.kernels.mma import w4a8 as w4a8_mma
from qtool.kernels.mma import w4a16 as half
from qtool.kernels.mma.gemm import MmaWeight
from qtool.kernels.mma.half_gemm import HalfWeight, Variant
from qtool.kernels.mma.half_tiles import choose as choose_mma

#: the stored layout of schemes with s4 weights and s4 tokens
S4_LAYOUTS = {"w4a4": "apex4", "w4ax-fmpq": "w4ax-interleaved"}


def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Random integers of ``low`` to ``high - 1`` on the GPU."""
    return torch.randint(low, high, shape, dtype=dtype, device="cuda")


@dataclass(frozen=True)
class Column:
    """A kernel in the table: scheme, group size, and stored bits of a weight, scales included."""

    scheme: str
    group_size: int | None
    bits: float
    operations: ClassVar[float] = OPERATIONS

    def operand(self) -> Operand:
        """The operand that the kernel is compiled for."""
        if self.scheme in S4_LAYOUTS:
            return w4ax.operand(S4_LAYOUTS[self.scheme], self.group_size, torch.bfloat16)
        return w8a8.OPERAND if self.scheme == "w8a8" else w4a8.operand(self.scheme, self.group_size)

    def tile(self, m: int, n: int, k: int) -> Tile:
        """The tile that the op would choose."""
        return choose_s4(m, n, k, self.group_size) if self.scheme in S4_LAYOUTS else choose(m, n, k)

    def source(self, m: int, n: int, k: int) -> Source:
        """The arguments of :func:`qtool.kernels.build.cubin` for a shape, on Hopper."""
        return gemm.definition(self.operand(), self.tile(m, n, k), torch.bfloat16)

    def weights(self, n: int, k: int) -> list[Weight]:
        """Random weights ``[n, k]``, one for each rotated copy; level 2 is legal."""
        size = n * k / (1 if self.scheme == "w8a8" else 2)
        return [self._weight(n, k) for _ in range(copies(size))]

    def _weight(self, n: int, k: int) -> Weight:
        if self.scheme in S4_LAYOUTS:
            scale = (torch.rand(k // (self.group_size or k), n, device="cuda") * 1e-3).bfloat16()
            shape = w4ax.stored_shape(S4_LAYOUTS[self.scheme], n, k)
            return Weight(scale, boxed=draw(0, 256, *shape).flatten(1))
        scale = torch.rand(n, device="cuda") * 1e-3
        if self.scheme == "w8a8":
            return Weight(scale, boxed=draw(-127, 128, n, k, dtype=torch.int8))
        qweight = draw(0, 256, n // 64, k // 64, 2048)
        if self.group_size is None:
            return Weight(scale, qweight=qweight, zero1=draw(0, 16, n))
        level2 = (n // 64, k // self.group_size, 64)
        offset = draw(9, 130, *level2) if self.scheme == "w4a8-lqq" else draw(0, 16, *level2)
        return Weight(scale, qweight=qweight, scale2=draw(1, 9, *level2), offset2=offset)

    def calls(
        self,
        weights: Sequence[Weight],
        m: int,
        n: int,
        k: int,
        tile: Tile | None = None,
        overlap: bool = True,
    ) -> list[Callable[[], object]]:
        """One launch per weight, for ``m`` random tokens and a bf16 output."""
        x = draw(-127, 128, m, k, dtype=torch.int8)
        # [G, M4]
        sx = torch.rand(max(1, weights[0].scale1.numel() // n), (m + 3) // 4 * 4, device="cuda")
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        tile, token_sum = tile or self.tile(m, n, k), x.sum(1, dtype=torch.int32)
        launch = partial(
            run, self.operand(), tile, x, sx, out=out, token_sum=token_sum, overlap=overlap
        )
        return [partial(launch, weight=weight) for weight in weights]


@dataclass(frozen=True)
class HalfColumn:
    """A column with bf16 tokens and scales: W4A16, dense or 2:4 sparse."""

    sparse: bool
    group_size: int | None
    bits: float
    operations: ClassVar[float] = HALF_OPERATIONS

    def source(self, m: int, n: int, k: int) -> Source:
        bf16, group = torch.bfloat16, self.group_size or 0
        if half.by_wgmma(m, half.HOPPER):
            tile = choose_half(m, n, k, sparse=self.sparse)
            kernel = w4a16.operand(group, bf16, bf16, tile.tokens, sparse=self.sparse)
            return gemm.definition(kernel, tile, bf16)
        variant = Variant(self.sparse, group, bf16, bf16, bf16)
        small = choose_mma(m, n, half.HOPPER)
        return half_gemm.definition(variant, small, half.HOPPER, hopper=True)

    def weights(self, n: int, k: int) -> list[HalfWeight]:
        inputs = 32 if self.sparse else 16

        def random_weight() -> HalfWeight:
            qweight = draw(-(2**31), 2**31, k // inputs, 2 * n, dtype=torch.int32)
            scale = (torch.rand(k // (self.group_size or k), n, device="cuda") * 1e-2).bfloat16()
            # elements 2 and 3 of each four stay
            positions = torch.full((k // 32, 2 * n), -0x1112, dtype=torch.int16, device="cuda")
            return HalfWeight(qweight, scale, positions if self.sparse else None)

        return [random_weight() for _ in range(copies(n * k * self.bits / 8))]

    def calls(
        self, weights: Sequence[HalfWeight], m: int, n: int, k: int
    ) -> list[Callable[[], object]]:
        x = torch.randn(m, k, device="cuda").bfloat16()
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        calls = [self._call(x, weight) for weight in weights]
        return [partial(call.plan(), call, out) for call in calls]

    def _call(self, x: Tensor, weight: HalfWeight) -> half.W4A16Gemm | half.W4A16SparseGemm:
        codes, more = weight.qweight, (weight.scale, None, torch.bfloat16)
        if weight.metadata is None:
            return half.W4A16Gemm(x, codes, *more)
        return half.W4A16SparseGemm(x, codes, weight.metadata, *more)


@dataclass(frozen=True)
class MmaColumn:
    """A column with W4A8 in the compute-aware layout, by mma.sync."""

    scheme: str
    group_size: int | None
    bits: float
    operations: ClassVar[float] = OPERATIONS

    def source(self, m: int, n: int, k: int) -> Source:
        tile = mma.choose(
            mma.TILES, m, n, torch.cuda.get_device_properties(0).multi_processor_count
        )
        return mma.definition(
            w4a8_mma.operand(self.scheme, self.group_size), tile, torch.bfloat16, (9, 0)
        )

    def weights(self, n: int, k: int) -> list[MmaWeight]:
        def random_weight() -> MmaWeight:
            qweight = draw(0, 256, n, k // 2).view(torch.int8)
            scale = torch.rand(n, device="cuda") * 1e-3
            if self.group_size is None:
                return MmaWeight(qweight, scale, zero1=draw(0, 16, n))
            level2 = (k // self.group_size, n)
            return MmaWeight(
                qweight, scale, scale2=draw(1, 9, *level2), offset2=draw(0, 16, *level2)
            )

        return [random_weight() for _ in range(copies(n * k / 2))]

    def calls(
        self, weights: Sequence[MmaWeight], m: int, n: int, k: int
    ) -> list[Callable[[], object]]:
        x = draw(-127, 128, m, k, dtype=torch.int8)
        sx, token_sum = torch.rand(m, device="cuda"), x.sum(1, dtype=torch.int32)
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        operand = w4a8_mma.operand(self.scheme, self.group_size)
        return [
            partial(mma.run, operand, x, sx, weight, out, k, token_sum=token_sum)
            for weight in weights
        ]


COLUMNS: dict[str, Column | HalfColumn | MmaColumn] = {
    "w4a8-lqq-g64": Column("w4a8-lqq", 64, 4.25),
    "w4a8-qoq-g128": Column("w4a8-qoq-g128", 128, 4.125),
    "w4a8-qoq": Column("w4a8-qoq", None, 4.0),
    "w8a8": Column("w8a8", None, 8.0),
    "w4a4-g128": Column("w4a4", 128, 4.125),
    "w4a4-g32": Column("w4a4", 32, 4.5),
    "w4a4": Column("w4a4", None, 4.0),
    "w4ax-fmpq": Column("w4ax-fmpq", 128, 4.125),
    "w4a8-qoq-g128-mma": MmaColumn("w4a8-qoq-g128", 128, 4.125),
    "w4a8-qoq-mma": MmaColumn("w4a8-qoq", None, 4.0),
    "w4a16-g128": HalfColumn(False, 128, 4.125),
    "w4a16": HalfColumn(False, None, 4.0),
    "w4a16-24-g128": HalfColumn(True, 128, 3.125),
}

DEFAULT_COLUMNS = ("w4a8-lqq-g64", "w4a8-qoq-g128", "w4a8-qoq", "w8a8")


def quantize_call(
    column: Column | HalfColumn | MmaColumn, m: int, k: int
) -> Callable[[], object] | None:
    """The quantization of a random input for a column; None under 16-bit activations."""
    if isinstance(column, HalfColumn):
        return None
    x = torch.randn(m, k, device="cuda").bfloat16()
    if column.scheme not in S4_LAYOUTS:
        return lambda: quantize_activation(x, None, None, "none", 0.0)
    layout = S4_LAYOUTS[column.scheme]
    blocks = (
        (torch.arange(k // 128, device="cuda") % 8 == 0).to(torch.uint8)
        if column.scheme == "w4ax-fmpq"
        else None
    )
    return lambda: quantize_activation_groups(
        x, None, None, blocks, "none", 0.0, column.group_size, layout
    )
