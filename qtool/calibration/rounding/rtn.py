"""Round to nearest: each weight to the closest code its scheme allows, without data.

Works on chunks of output channels, so that the float32 temporaries stay in cache and the peak
memory is the stored weight plus its codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.method import Rounding
from qtool.calibration.rounding.rounded import Rounded
from qtool.distributed import ranks
from qtool.schemes.base import Clip, Params, Scheme

#: of a chunk on CPU and on a GPU
CHUNK_ELEMENTS = 1 << 20, 1 << 26


@dataclass
class RoundToNearest(Rounding):
    """``codes = scheme.quantize(weight, scheme.fit(weight))``."""

    name = "rtn"
    needs_data = False

    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        def nearest(name: str) -> Rounded:
            return round_to_nearest(
                block.schemes[name], block.weight(name), *block.clips.get(name, (1.0, 1.0))
            )

        names = list(block.schemes)
        found = ranks.map_items(nearest, names, cost=lambda name: block.weight(name).numel())
        for name, rounded in zip(names, found, strict=True):
            block.notes.setdefault(self.name, {})[name] = {"weight_error": rounded.weight_error}
        return dict(zip(names, found, strict=True))

    def work(self, block: BlockShape) -> Work:
        return Work(rounding_weights=block.weights)

    def held_bytes(self, block: BlockShape) -> int:
        return block.exact_bytes + 16 * min(block.largest, CHUNK_ELEMENTS[1])


def round_to_nearest(
    scheme: Scheme, weight: Tensor, clip: Clip = 1.0, group_clip: Clip = 1.0
) -> Rounded:
    """Fit, quantize and check ``weight [N, K]``, a chunk of rows at a time.

    Raises:
        CheckFailed: if an invariant of the scheme broke.
    """
    n, k = weight.shape
    step = max(1, CHUNK_ELEMENTS[weight.device.type == "cuda"] // k)
    codes, parts = torch.empty(n, k, dtype=scheme.code_dtype, device=weight.device), []
    lost = power = 0.0
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        params = scheme.fit(
            weight[rows], clip=_rows(clip, rows), group_clip=_rows(group_clip, rows)
        )
        codes[rows] = scheme.quantize(weight[rows], params)
        scheme.check(codes[rows], params)
        exact = weight[rows].float()
        power += _square(exact)
        lost += _square(exact - scheme.dequantize(codes[rows], params))
        parts.append(params)
    return Rounded(codes, _concatenate(scheme, parts), (lost / power) ** 0.5 if power else 0.0)


def _square(x: Tensor) -> float:
    """The sum of squares of ``x [n, K]``, with the same bits for any number of threads."""
    return float(torch.linalg.vector_norm(x, dim=1).double().square().sum())


def _rows(clip: Clip, rows: slice) -> Clip:
    return clip[rows] if isinstance(clip, Tensor) and clip.dim() else clip


def _concatenate(scheme: Scheme, parts: list[Params]) -> Params:
    return {
        name: first if name in scheme.shared_params else torch.cat([part[name] for part in parts])
        for name, first in parts[0].items()
    }
