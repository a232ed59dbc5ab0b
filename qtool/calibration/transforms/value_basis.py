"""Value basis: each value head is rotated so that a KV cache of 4 bits holds it better.

Attention sums values and o reads the sum, so that v and o absorb an orthogonal matrix for each kv
head (:mod:`~qtool.calibration.transforms.rotate` says how). The matrix is learned in equal parts
from the values that the cache gets and from W_o, the weight that reads their sums
(:mod:`~qtool.calibration.transforms.learned_rotation`). A basis for the values alone would add more
error to the rounded W_o than it takes from the cache.

Legend: Hkv kv heads, D channels a head, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.method import Transform
from qtool.calibration.statistics import collect
from qtool.calibration.transforms import value_heads
from qtool.calibration.transforms.learned_rotation import STEP_TRIES, GroupedRows, learn, unit_rows
from qtool.calibration.transforms.rotate import rotate_inputs, rotate_outputs
from qtool.calibration.transforms.value_heads import OfHeads
from qtool.schemes.kv import KV4


@dataclass(kw_only=True)
class ValueBasis(Transform):
    """Learns and folds a rotation of each value head.

    Args:
        steps: number of steps of Adam.
        tokens: size of the random sample of values.
        seed: seed of the random sample.
    """

    steps: int = 100
    tokens: int = 8192
    seed: int = 0

    name = "value-basis"
    needs_data = True
    positive = ("steps", "tokens")
    after: ClassVar[dict[str, str]] = {
        "norm-fusion": "the values are observed as the fused norm's linears make them",
        "rotate": "a rotation of the value heads would leave the basis",
        "smooth": "a factor on the values' channels would leave the basis",
    }

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        if block.family.attention is None:
            return
        name, heads = block.attention.o, block.heads
        values, weight = self.values(block, batches), block.weight(name)
        scheme = block.schemes.get(name)
        size = scheme.group_size or weight.shape[1] if scheme else heads.dim
        start = torch.eye(heads.dim, dtype=torch.float64).expand(heads.kv, -1, -1)
        unit = values / values.square().mean().sqrt().clamp_min(1e-20)
        rows = GroupedRows(unit_rows(weight), size, scheme is not None and scheme.has_zero_points)
        of_values = GroupedRows(unit.half(), heads.dim, ranges=True)
        found = OfHeads(learn([rows], start, self.steps, [of_values]))
        rotate_outputs(block, block.attention.v, found)
        rotate_inputs(block, name, found)
        by_head = values.unflatten(1, (heads.kv, -1))
        block.notes["value-basis"] = {
            "error": cached_error(found(by_head)),
            "error_unsmoothed": cached_error(by_head),
        }

    def values(self, block: Block, batches: Sequence[Batch]) -> Tensor:
        """A sample ``[T, Hkv D]`` of the block's values."""
        name = block.attention.v
        owner, bias = block.family.owner(name), block.bias(name)
        x = collect(block, batches, [owner], self.tokens, self.seed)[owner].sample
        bias = None if bias is None else bias.float()
        return torch.nn.functional.linear(x, block.weight(name).float(), bias)

    def work(self, block: BlockShape) -> Work:
        if block.family.attention is None:
            return Work()
        flops = self.steps * value_heads.step_flops(block)
        return super().work(block) + Work(search_flops=flops, search_tries=self.steps * STEP_TRIES)

    def held_bytes(self, block: BlockShape) -> int:
        attends = block.family.attention is not None
        return super().held_bytes(block) + (value_heads.learned_bytes(block) if attends else 0)


def cached_error(values: Tensor) -> float:
    """Mean squared error of 4-bit ``values [T, Hkv, D]``."""
    quantizer, x = KV4(), values.transpose(0, 1)[None]
    return float((quantizer.dequantize(quantizer.quantize(x)) - x).square().mean())
