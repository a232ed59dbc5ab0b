"""Value basis: each value head in the basis in which 4 bits keep it best, folded into v and o.

Attention adds values up and o reads the sum, so any invertible A of a kv head's channels may stand
between (a rotation is one, :mod:`~qtool.calibration.transforms.rotate`):

    V <- V A:    W_v <- A^T W_v, b_v <- A^T b_v    (the head's rows)
                 W_o <- W_o A^-T                   (the columns of its query heads)

A token is quantized on 15 steps between its extremes, so what o makes of the error is, to first
order, proportional to

    E[ (max vA - min vA)^2 ] * tr(A^-1 F A^-T),      F = sum over the query heads of W_o^T W_o

of which the logarithm is minimized by Adam, from the basis as it is or from its Hadamard rotation.
A head keeps its basis where the new one does not lower the error of the 4-bit quantizer itself,
seen through o, on tokens held back. A Hadamard rotation makes values nearly normal; trained models
have bases in which no token has an extreme: on the demo model 1.6 to 1.0 thousandths of a nat of KL
divergence under 4-bit values.

Legend: Hkv kv heads, D channels a head, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Transform
from qtool.calibration.statistics import collect
from qtool.calibration.transforms.hadamard import Hadamard
from qtool.errors import QtoolError
from qtool.schemes.kv import KV4


@dataclass(kw_only=True)
class ValueBasis(Transform):
    """Finds and folds a basis for each value head.

    Args:
        steps: of Adam.
        step_size: its first one, of the mean magnitude of A; falls linearly to a twentieth.
        tokens: size of the random sample of values; a quarter of it is held back.
        seed: of that sample.
    """

    steps: int = 300
    step_size: float = 0.1
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
        attention, heads = block.attention, block.heads
        owner = block.family.owner(attention.v)
        x = collect(block, batches, [owner], self.tokens, self.seed)[owner].sample
        bias = block.bias(attention.v)
        values = torch.nn.functional.linear(
            x, block.weight(attention.v).float(), None if bias is None else bias.float()
        )
        values = values.view(len(x), heads.kv, heads.dim).transpose(0, 1)  # [Hkv, T, D]
        cost = output_metric(block)
        held = len(x) // 4
        with torch.enable_grad():
            basis = fit(values[:, held:], cost, self.steps, self.step_size)
        kept = torch.eye(heads.dim, device=values.device).expand_as(basis)
        before, after = (output_error(values[:, :held], b, cost) for b in (kept, basis))
        basis = torch.where((after < before)[:, None, None], basis, kept)
        fold(block, basis.double())
        error = torch.minimum(after, before)
        block.notes["value-basis"] = {
            "error": float(error.sum()),
            "error_unsmoothed": float(before.sum()),
        }


def output_metric(block: Block) -> Tensor:
    """``F [Hkv, D, D]``: the cost at o's output of an error in a kv head's values.

    The mean of its diagonal is 1.
    """
    heads = block.heads
    weight = (
        block.weight(block.attention.o)
        .float()
        .view(-1, heads.kv, heads.query // heads.kv, heads.dim)
    )
    by_head = weight.permute(1, 0, 2, 3).flatten(1, 2)  # [Hkv, N heads, D]
    cost = by_head.mT @ by_head
    mean = cost.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return cost / torch.where(mean > 0, mean, 1.0)


def fit(values: Tensor, cost: Tensor, steps: int, step_size: float) -> Tensor:
    """The basis ``A [Hkv, D, D]`` with the least predicted error of ``values [Hkv, T, D]``.

    ``cost`` is :func:`output_metric`'s ``[Hkv, D, D]``.
    """
    unit = torch.eye(values.shape[2], device=values.device)
    starts = torch.stack([unit, Hadamard(len(unit))(unit)])[:, None].expand(-1, len(values), -1, -1)
    errors = torch.stack([predicted_error(start, values, cost) for start in starts])
    basis = (
        torch.where((errors[1] < errors[0])[:, None, None], starts[1], starts[0])
        .clone()
        .requires_grad_()
    )
    optimizer = torch.optim.Adam([basis], lr=step_size * float(basis.detach().abs().mean()))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    for _ in range(steps):
        loss = predicted_error(basis, values, cost).log().sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return basis.detach()


def predicted_error(basis: Tensor, values: Tensor, cost: Tensor) -> Tensor:
    """``E[range^2] tr(A^-1 F A^-T)`` of each kv head ``[Hkv]``, above 0."""
    mixed = values @ basis
    inverse = torch.linalg.inv_ex(basis).inverse
    spread = (mixed.amax(2) - mixed.amin(2)).square().mean(1)
    weight = ((inverse @ cost) * inverse).sum((1, 2))
    return (spread * weight).clamp_min(torch.finfo(torch.float32).tiny)


def output_error(values: Tensor, basis: Tensor, cost: Tensor) -> Tensor:
    """Mean squared error ``[Hkv]`` at o's output of ``values`` quantized to 4 bits in ``basis``."""
    mixed, quantizer = (values @ basis)[None], KV4()
    lost = (quantizer.dequantize(quantizer.quantize(mixed)) - mixed)[0] @ torch.linalg.inv_ex(
        basis
    ).inverse
    return ((lost @ cost) * lost).sum(2).mean(1)


def fold(block: Block, basis: Tensor) -> None:
    """Values of ``block`` in ``basis [Hkv, D, D]`` float64, in place.

    Raises:
        QtoolError: if a head's basis has no inverse.
    """
    attention, heads = block.attention, block.heads
    inverse, failed = torch.linalg.inv_ex(basis)
    if failed.any() or not torch.isfinite(inverse).all():
        raise QtoolError(f"value-basis: a basis of block {block.index} has no inverse")

    def rows(values: Tensor) -> Tensor:  # [Hkv D, K], or the bias [Hkv D]
        by_head = values.double().view(heads.kv, heads.dim, -1)
        return (basis.mT @ by_head).view(values.shape)

    block.change_rows(attention.v, rows)
    weight = block.weight(attention.o)
    by_head = (
        weight.double().view(len(weight), heads.kv, -1, heads.dim).transpose(0, 1)
    )  # [Hkv, N, query heads, D]
    columns = by_head.flatten(1, 2) @ inverse.mT
    weight.copy_(columns.view(by_head.shape).transpose(0, 1).reshape(weight.shape))
