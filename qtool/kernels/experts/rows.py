"""Which tokens go to which rows of a grouped GEMM's input."""

from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError, suggest
from qtool.kernels.activation.quantize_activation import QuantizeActivation
from qtool.kernels.checks import Expected, optional, require_tensors
from qtool.kernels.launch import pointers

FUSIONS = ("none", "silu-up")


class ExpertRows(NamedTuple):
    """The arguments of :func:`quantize_expert_rows` and :func:`gather_expert_rows`.

    Args:
        x: ``[T, K]``, float32, float16 or bfloat16; ``silu-up``: ``[T, 2 K]``, the gate's outputs,
            then up's.
        place: int32 ``[T, k]``, the rows that a token goes to, as :func:`route_experts` gives them,
            P = T k; None: each row has its own place, P = T.
        expert_offsets: int32 ``[E + 1]``; the last one is the number of rows; the rest of the
            output is not written.
        fusion: ``none`` or ``silu-up``.
        rotated: rotate the fused values; K must then be a multiple of 64.
    """

    x: Tensor
    place: Tensor | None
    expert_offsets: Tensor
    fusion: str
    rotated: bool = False

    @property
    def quantized(self) -> QuantizeActivation:
        """The op that quantizes all tokens in their order, with the same fusion."""
        return QuantizeActivation(self.x, None, None, self.fusion, 0.0, self.rotated)

    @property
    def top(self) -> int:
        """Choices of a token."""
        return 1 if self.place is None else self.place.shape[-1:].numel()

    def require_rows(self, op: str) -> None:
        """Refuse arguments that neither operator takes, by a QtoolError that begins with ``op``."""
        x, place, offsets = self.x, self.place, self.expert_offsets
        if self.fusion not in FUSIONS:
            raise QtoolError(
                f"{op}: unknown fusion {self.fusion!r}: {suggest(self.fusion, FUSIONS)}"
            )
        self.quantized.require(op)
        expected: dict[str, Expected] = {
            "place": optional(place, (len(x), self.top), (torch.int32,)),
            "expert_offsets": (offsets, (max(2, offsets.numel()),), (torch.int32,)),
        }
        require_tensors(op, x.device, expected)

    def new_rows(self, *columns: int, dtype: torch.dtype) -> Tensor:
        """``[P, *columns]``, not filled."""
        return self.x.new_empty((len(self.x) * self.top, *columns), dtype=dtype)

    def placed(self, values: Tensor) -> Tensor:
        """``values [T, ...]`` of all tokens at their rows, ``[P, ...]``; 0 beyond."""
        out = self.new_rows(*values.shape[1:], dtype=values.dtype).zero_()
        if self.place is None:
            rows = int(self.expert_offsets[-1])
            out[:rows] = values[:rows]
        else:
            tokens, choices = (self.place >= 0).nonzero(as_tuple=True)
            out[self.place[tokens, choices].long()] = values[tokens]
        return out

    def pointers(self) -> tuple[int, ...]:
        """The addresses of the places and of the number of rows."""
        last = self.expert_offsets.data_ptr() + 4 * (len(self.expert_offsets) - 1)
        return *pointers(self.place), last
