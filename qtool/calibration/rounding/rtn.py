"""Round to nearest: each weight to the closest code its scheme allows, without data.

It works on chunks of output channels, so that the float32 temporaries stay in cache and the peak
memory is the stored weight plus its codes. A chunk may hold several linears.

Legend: S linears of one shape, N output channels, K input channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.method import Rounding
from qtool.calibration.rounding.rounded import Rounded, weight_errors
from qtool.calibration.stacking import by_kind, clips_of, in_turn, stacked_weights
from qtool.distributed import ranks
from qtool.schemes.base import ClipRatio, Params, Scheme

#: elements of a chunk on a CPU and on a GPU
CHUNK_ELEMENTS = 1 << 20, 1 << 26


@dataclass
class RoundToNearest(Rounding):
    """``codes = scheme.quantize(weight, scheme.fit(weight))``."""

    name = "rtn"
    needs_data = False

    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        def nearest(names: Sequence[str]) -> list[Rounded]:
            weights = stacked_weights(block, names)
            return round_together(block.schemes[names[0]], weights, *clips_of(block, names))

        most = CHUNK_ELEMENTS[block.device.type == "cuda"]
        turns = [
            names
            for same in by_kind(block, block.schemes)
            for names in in_turn(same, max(1, most // block.weight(same[0]).numel()))
        ]
        found = ranks.map_items(
            nearest, turns, cost=lambda names: len(names) * block.weight(names[0]).numel()
        )
        by_name = dict(zip(chain(*turns), chain(*found), strict=True))
        rounded = {name: by_name[name] for name in block.schemes}
        for name, note in weight_errors(rounded).items():
            block.notes.setdefault(self.name, {})[name] = note
        return rounded

    def work(self, block: BlockShape) -> Work:
        return Work(rounding_weights=block.weights)

    def held_bytes(self, block: BlockShape) -> int:
        codes = block.weights
        return block.exact_bytes + codes + chunk_bytes(block.weights)


def chunk_bytes(weights: int) -> int:
    """Bytes of temporaries while a GPU rounds ``weights`` numbers, a chunk at a time."""
    return 20 * min(weights, CHUNK_ELEMENTS[1])


def round_to_nearest(scheme: Scheme, weight: Tensor) -> Rounded:
    """:func:`round_together` of a single ``weight [N, K]`` without clips."""
    return round_together(scheme, weight[None])[0]


def round_together(
    scheme: Scheme, weights: Tensor, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
) -> list[Rounded]:
    """Fit and quantize ``weights [S, N, K]``, a chunk of linears or of rows at a time.

    The clips are those of all ``S N`` channels.
    """
    count, n, k = weights.shape
    most = CHUNK_ELEMENTS[weights.device.type == "cuda"]
    linears, rows = max(1, most // (n * k)), min(n, max(1, most // k))
    codes = torch.empty(count, n, k, dtype=scheme.code_dtype, device=weights.device)
    parts: list[Params] = []
    lost, power = torch.zeros(2, count, dtype=torch.float64, device=weights.device)
    for first in range(0, count, linears):
        own = slice(first, first + linears)
        for start in range(0, n, rows):
            weight = weights[own, start : start + rows]
            size = weight.shape[:2]
            weight = weight.flatten(0, 1)
            at = slice(first * n + start, first * n + start + len(weight))
            params = scheme.fit(weight, clip=_rows(clip, at), group_clip=_rows(group_clip, at))
            found = scheme.quantize(weight, params)
            codes[own, start : start + rows] = found.view(*size, k)
            exact = weight.float()
            power[own] += _squares(exact).view(size).sum(1)
            lost[own] += _squares(exact - scheme.dequantize(found, params)).view(size).sum(1)
            parts.append(params)
    errors = [
        (a / b) ** 0.5 if b else 0.0 for a, b in zip(lost.tolist(), power.tolist(), strict=True)
    ]
    by_linear = scheme.split_params(scheme.stacked_params(parts), count)
    return [Rounded(*found) for found in zip(codes, by_linear, errors, strict=True)]


def _squares(x: Tensor) -> Tensor:
    """Sums of squares ``[n]`` float64 of ``x [n, K]``, the same for any number of threads."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()


def _rows(clip: ClipRatio, rows: slice) -> ClipRatio:
    return clip[rows] if isinstance(clip, Tensor) and clip.dim() else clip
