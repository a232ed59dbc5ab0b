"""The rotation of the value heads: they are balanced, then get a Hadamard or learned matrices.

Each kv head of D channels may have an orthogonal ``P [D, D]`` of its own (:mod:`.rotate` folds it).
It is learned (:mod:`.learned_rotation`) from W_o, the weight that reads the heads' sums, whose
columns of this kv head's query heads it rotates, and from W_o's inputs if these have no more bits
than W_o. A block has all that learning needs, so nothing is kept for a resumed run.

Legend: Hq query heads, Hkv kv heads, D channels a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape
from qtool.calibration.statistics import subset
from qtool.calibration.transforms import learned_rotation
from qtool.calibration.transforms.folding import fold_factor, per_kv_head
from qtool.calibration.transforms.hadamard import Hadamard, rotation
from qtool.calibration.transforms.learned_rotation import (
    BATCH,
    TOKENS,
    Dense,
    GroupedRows,
    learn,
    unit_inputs,
    unit_rows,
)
from qtool.models.parts import Heads

#: number of calibration sequences whose inputs are used
SEQUENCES = 8


@dataclass(eq=False)
class OfHeads(Dense):
    """A matrix for each kv head, ``[Hkv, D, D]``: call it on the heads ``x [..., Hq, D]``."""

    def __call__(self, x: Tensor) -> Tensor:
        by_kv_head = x.unflatten(-2, (len(self.matrix), -1))  # [..., Hkv, queries of it, D]
        turned = torch.einsum("...hqd,hde->...hqe", by_kv_head.double(), self.on(x.device))
        return turned.to(x.dtype).flatten(-3, -2)


def rotation_of(block: Block, batches: Sequence[Batch], steps: int) -> Hadamard | OfHeads:
    """The ``P`` that all heads share, or with ``steps`` the matrices learned from it."""
    name, heads = block.attention.o, block.heads
    fixed, scheme = rotation(heads.dim, seed=None), block.schemes.get(name)
    if not steps or scheme is None:
        return fixed
    values, inputs = unit_rows(block.weight(name)), list[GroupedRows]()
    k = values.shape[1]
    if scheme.coarse_inputs:
        few, size = subset(batches, SEQUENCES), scheme.activation.group_size or k
        for batch in few:
            inputs += unit_inputs(block, batch, {name: [size]}, -(-TOKENS // len(few)))
    start = fixed(torch.eye(heads.dim, dtype=torch.float64)).expand(heads.kv, -1, -1)
    rows = GroupedRows(values, scheme.group_size or k, scheme.has_zero_points)
    return OfHeads(learn([rows], start, steps, inputs))


def balance(block: Block) -> None:
    """Make each value channel as large in v's rows as in o's columns, in place.

    If several query heads read the channel, the largest of their columns counts.
    A channel that is large in v and small in o would dominate the others once the rotation mixes
    them. A channel of zeros in v or o gets the geometric mean of the other factors; with a factor
    of 1 it would stay large where the others become small.
    """
    group = block.family.group_of(block.attention.o)
    heads = block.heads
    rows = block.weight(block.attention.v).double().square().mean(1).sqrt()  # [Hkv D]
    rows = rows.view(heads.kv, 1, heads.dim).expand(-1, heads.query // heads.kv, -1).flatten()
    columns = block.weight(block.attention.o).double().square().mean(0).sqrt()  # [Hq D]
    columns = per_kv_head(columns, heads)
    alive, factor = (rows > 0) & (columns > 0), (rows / columns).sqrt()
    mean = torch.where(alive, factor.log(), 0.0).sum() / alive.sum().clamp_min(1)
    fold_factor(block, group, torch.where(alive, factor, mean.exp()))


def step_flops(block: BlockShape) -> float:
    """Operations of a step of :func:`learn` in a block."""
    heads, (_, k) = Heads.of(block.config), _weight(block)
    return learned_rotation.step_flops(heads.dim, heads.kv, k)


def learned_bytes(block: BlockShape) -> int:
    """Bytes that learning in a block holds.

    They are rows and inputs in 16 bits, and seven float32 numbers for each element of a step's
    rows.
    """
    n, k = _weight(block)
    return k * (2 * (n + TOKENS) + 28 * min(n, BATCH * Heads.of(block.config).dim))


def _weight(block: BlockShape) -> tuple[int, int]:
    """``(N, K)`` of W_o."""
    assert block.family.attention is not None
    return block.linears[block.family.attention.o]
