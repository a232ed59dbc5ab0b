"""``qtool::quantize_activation_groups``: codes of an input, one scale per token and group.

The codes are s4, or s8 in blocks of 8 bits (APEX4, COMET).

    sx[G, m] = max_{k in G} |y[m, k]| / 7 (a group of zeros: 1)      code = rne(y / sx)

In the groups that ``eight_bit`` marks (COMET's 8-bit blocks), 127 takes the place of 7. ``y`` is x
after fusion, gather and rotation, as in :mod:`~qtool.kernels.activation.quantize_activation`.
"""

from collections.abc import Iterator
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError, suggest
from qtool.kernels.activation.arrangement import ARRANGEMENTS, SPAN, arrange
from qtool.kernels.activation.quantize_activation import (
    FUSIONS,
    IN_REGISTERS,
    QuantizeActivation,
    RowPlan,
    row_definition,
)
from qtool.kernels.build import Build, Source
from qtool.kernels.checks import optional, require_tensors
from qtool.kernels.launch import pointers
from qtool.kernels.op import operator
from qtool.schemes.arithmetic.activation import quantize_groups
from qtool.schemes.arithmetic.online_hadamard import rotate

OP = "quantize_activation_groups"
SOURCE = f"activation/{OP}"
GROUP_SIZES = (32, 64, 128, 256, 512, 1024, None)


def scale_shape(groups: int, tokens: int) -> tuple[int, int]:
    """``[G, M4]``: the GEMMs copy a group's scales in pieces of 16 bytes, so M is rounded up."""
    return groups, (tokens + 3) // 4 * 4


class QuantizeActivationGroups(NamedTuple):
    """Codes int8 ``[M, K]`` and scales float32 ``[G, M4]`` of an input.

    M4 is M rounded up to a multiple of 4, padded with 1. ``x``, ``order``, ``norm``, ``fusion``,
    ``epsilon`` and ``rotated`` are those of
    :func:`~qtool.kernels.activation.quantize_activation.quantize_activation`.

    Args:
        eight_bit: uint8 ``[G]``, 1 for the groups of 8-bit codes, or ``None``: there are none.
        group_size: channels that share a scale, 32 to 1024, or ``None``: all of them.
        arrangement: ``none``, or the layout of the weight (``apex4``, ``w4ax-interleaved``) whose
            order the codes take.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """

    x: Tensor
    order: Tensor | None
    norm: Tensor | None
    eight_bit: Tensor | None
    fusion: str
    epsilon: float
    group_size: int | None
    arrangement: str
    rotated: bool = False

    @property
    def k(self) -> int:
        """Input channels of the linear."""
        return self.by_token.k

    @property
    def by_token(self) -> QuantizeActivation:
        """The op with one scale a token."""
        given = self.x, self.order, self.norm, self.fusion, self.epsilon
        return QuantizeActivation(*given, self.rotated)

    def require(self, op: str = OP) -> None:
        group_size = self.group_size
        if self.arrangement not in ARRANGEMENTS:
            known = suggest(self.arrangement, ARRANGEMENTS)
            raise QtoolError(f"{op}: unknown arrangement {self.arrangement!r}: {known}")
        if group_size not in GROUP_SIZES:
            raise QtoolError(f"{op}: no group size {group_size}; accepted: {GROUP_SIZES}")
        self.by_token.require(op, max(SPAN, group_size or 0))
        groups = self.k // (group_size or self.k)
        eight_bit = optional(self.eight_bit, (groups,), (torch.uint8,))
        require_tensors(op, self.x.device, {"eight_bit": eight_bit})

    def empty(self) -> tuple[Tensor, Tensor]:
        codes = self.x.new_empty((self.x.shape[0], self.k), dtype=torch.int8)
        return codes, self.empty_scale()

    def empty_scale(self) -> Tensor:
        """Float32 ``[G, M4]``."""
        shape = scale_shape(self.k // (self.group_size or self.k), self.x.shape[0])
        return self.x.new_empty(shape, dtype=torch.float32)

    def reference(self) -> tuple[Tensor, Tensor]:
        blocks = self.eight_bit
        top: Tensor | int = 7 if blocks is None else torch.where(blocks.bool(), 127, 7)
        y = self.by_token.read()
        y = rotate(y) if self.rotated else y
        codes, found = quantize_groups(y, self.group_size or self.k, top)
        scale = self.empty_scale().fill_(1.0)
        scale[:, : len(found)] = found.t()
        return arrange(codes, self.arrangement), scale

    def launch(self, out: tuple[Tensor, Tensor]) -> None:
        self.launch_packed(out, 0)

    def launch_packed(self, out: tuple[Tensor, Tensor], packed: int) -> None:
        """Launch the kernel that fills codes and scales.

        ``packed``: 0 stores a byte a code, 1 nibbles, 2 nibbles except in 8-bit blocks.
        """
        x, how = self.x, (self.group_size, self.arrangement, packed, self.rotated)
        source = definition(self.k, x.dtype, self.fusion, self.order is not None, *how)
        tensors = (self.order, self.norm, self.eight_bit)
        plan = RowPlan([(inf, source)], tensors, self.k, self.epsilon, x.device)
        plan.launch(len(x), *pointers(x, *out))


quantize_activation_groups = operator(OP, QuantizeActivationGroups)


def definition(
    k: int,
    dtype: torch.dtype,
    fusion: str,
    gather: bool,
    group_size: int | None,
    arrangement: str,
    packed: int = 0,
    rotated: bool = False,
) -> Source:
    """Source name, prologue and macros of one kernel."""
    defines = {"GROUP": group_size or 0, "ARRANGEMENT": ARRANGEMENTS[arrangement], "PACKED": packed}
    return SOURCE, "", row_definition(k, dtype, fusion, gather, rotated) | defines


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row; each kind of group and arrangement; rotated ones."""
    plain = ((32, "apex4"), (128, "w4ax-interleaved"), (1024, "apex4"), (None, "none"))
    variants = [(*kind, False) for kind in plain] + [(128, "w4ax-interleaved", True)]
    for fusion, k, variant in product(FUSIONS, (1024, IN_REGISTERS), variants):
        group, arrangement, rotated = variant
        how = (group, arrangement, 0, rotated)
        source = definition(k, torch.bfloat16, fusion, True, *how)
        name = f"{SOURCE} {fusion} K={k} g{group}" + " rotated" * rotated
        yield Build(name, "sm_90a", source, source[2]["THREADS"], calls=True)
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        source = definition(4096, torch.float16, "none", False, 128, "apex4")
        yield Build(f"{SOURCE} g128", arch, source, source[2]["THREADS"], calls=True)
