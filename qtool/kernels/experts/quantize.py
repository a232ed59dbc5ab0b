"""``qtool::quantize_expert_rows``: codes of tokens that are sorted by expert.

As :mod:`qtool.kernels.activation.quantize_activation`, but a token's codes go to the rows that it
has with its experts, and rows that no expert has are neither read nor written.
"""

import struct
from collections.abc import Iterator
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError, suggest
from qtool.kernels.activation.quantize_activation import (
    QuantizeActivation,
    RowPlan,
    definition,
)
from qtool.kernels.build import Build, Source
from qtool.kernels.checks import Expected, require_tensors
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import pointers
from qtool.kernels.op import operator

FUSIONS = ("none", "silu-up")
#: what the kernel of csrc/activation/quantize_activation.cu reads beyond the others' parameters
ROWS = struct.Struct("<2Qi4x")


class QuantizeExpertRows(NamedTuple):
    """Codes int8 ``[P, K]``, scales float32 ``[P]`` and sums of the codes int32 ``[P]``.

    Args:
        x: ``[T, K]``, float32, float16 or bfloat16; ``silu-up``: ``[T, 2 K]``, the gate's outputs,
            then up's.
        place: int32 ``[T, k]``, the rows of a token's codes, as :func:`route_experts` gives them,
            P = T k; None: each row has its own place, P = T.
        expert_offsets: int32 ``[E + 1]``; its last is how many rows there are, the rest of the
            output is left as it is.
        fusion: ``none`` or ``silu-up``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    x: Tensor
    place: Tensor | None
    expert_offsets: Tensor
    fusion: str

    @property
    def all_rows(self) -> QuantizeActivation:
        """The op on x as it is."""
        return QuantizeActivation(self.x, None, None, self.fusion, 0.0)

    def require(self) -> None:
        op, x, place, offsets = "quantize_expert_rows", self.x, self.place, self.expert_offsets
        if self.fusion not in FUSIONS:
            raise QtoolError(
                f"{op}: unknown fusion {self.fusion!r}: {suggest(self.fusion, FUSIONS)}"
            )
        self.all_rows.require(op)
        expected: dict[str, Expected] = {
            "place": (place, None if place is None else (len(x), top_of(place)), (torch.int32,)),
            "expert_offsets": (offsets, (offsets.numel(),), (torch.int32,)),
        }
        require_tensors(op, x.device, expected)

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        x, rows = self.x, self.x.shape[0] * (1 if self.place is None else top_of(self.place))
        return (
            x.new_empty((rows, self.all_rows.k), dtype=torch.int8),
            x.new_empty((rows,), dtype=torch.float32),
            x.new_empty((rows,), dtype=torch.int32),
        )

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, out, place = int(self.expert_offsets[-1]), self.empty(), self.place
        for whole, part in zip(out, self.all_rows.reference(), strict=True):
            whole.zero_()
            if place is None:
                whole[:rows] = part[:rows]
                continue
            tokens, choices = (place >= 0).nonzero(as_tuple=True)
            whole[place[tokens, choices].long()] = part[tokens]
        return out

    def launch(self, out: tuple[Tensor, Tensor, Tensor]) -> None:
        device, k = self.x.device, self.all_rows.k
        require_hopper(device)
        sources = [(inf, sorted_definition(k, self.x.dtype, self.fusion))]
        last = self.expert_offsets.data_ptr() + 4 * (len(self.expert_offsets) - 1)
        top = 1 if self.place is None else top_of(self.place)
        plan = RowPlan(sources, (None, None), k, 0.0, device)
        more = ROWS.pack(*pointers(self.place), last, top)
        plan.launch(len(self.x), *pointers(self.x, *out), more=more)


quantize_expert_rows = operator("quantize_expert_rows", QuantizeExpertRows)


def top_of(place: Tensor) -> int:
    """Choices of a token."""
    return place.shape[-1]


def sorted_definition(k: int, dtype: torch.dtype, fusion: str) -> Source:
    """Source name, prologue and macros of one kernel."""
    name, prologue, defines = definition(k, dtype, fusion, gather=False)
    return name, prologue, defines | {"SORTED": 1}


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row."""
    for fusion, k in product(FUSIONS, (64, 4096)):
        source = sorted_definition(k, torch.bfloat16, fusion)
        name = f"quantize_expert_rows {fusion} K={k}"
        yield Build(name, "sm_90a", source, source[2]["THREADS"], calls=True)
