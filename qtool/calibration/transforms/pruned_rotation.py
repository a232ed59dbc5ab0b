"""An orthogonal matrix after which n:m pruning leaves out little.

DenoiseRotator (Gu et al., 2025, arXiv 2505.23049) rotates the residual stream before a model is
pruned, so that few weights have most of the importance: it lowers the entropy of the weights'
importance. Here the pruned importance itself is lowered. With H the second moments of the inputs,
the score of a weight in row w (as in Optimal Brain Surgeon and SparseGPT) is the error that remains
if the weight is pruned and the others compensate, and

    s_k = (w Q)_k^2 / (Q^T H^-1 Q)_kk

    minimize    mean over weights W of    sum of the m - n least s of each m inputs / sum of w H w^T

over the rows w of the weights that read the residual stream, starting from ``Q = I``, by the steps
of :mod:`.learned_rotation`. Each step determines the least scores again.

Legend: K order of Q, M rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe
from qtool.calibration.outliers import to_median
from qtool.calibration.precision import tensor_cores
from qtool.calibration.transforms.learned_rotation import descend, rows_of_step, unit_rows

#: share of the mean of H's diagonal that is added to the diagonal, as in GPTQ
DAMPING = 0.1


@dataclass(frozen=True, eq=False)
class Readers:
    """The weights that read one norm.

    Attributes:
        rows: rows ``[M, K]`` of each weight, float16, after :func:`without_outliers`.
        powers: mean of ``w H w^T`` over the rows of each weight.
        sparsities: ``(n, m)`` of each weight: n of m inputs stay.
        inverse: ``H^-1 [K, K]``, float32.
    """

    rows: Sequence[Tensor]
    powers: Sequence[Tensor]
    sparsities: Sequence[tuple[int, int]]
    inverse: Tensor


def readers_of(
    block: Block, batches: Sequence[Batch], sources: Mapping[str, str]
) -> Iterator[Readers]:
    """The readers of each norm in ``block``; the norms have the weight 1.

    Args:
        batches: inputs of the block; without any, the norms' outputs are taken as uncorrelated.
        sources: the name of the norm that a weight reads, by the weight's name.
    """
    names: dict[str, list[str]] = {}
    for name, norm in sources.items():
        names.setdefault(norm, []).append(name)
    one = torch.eye(block.config.hidden_size, device=block.device, dtype=torch.float64)
    moments = {norm: torch.zeros_like(one) for norm in names}

    def add(x: Tensor, norm: str) -> None:
        rows = unit_rows(x, block.family.layer_norm).float()
        moments[norm] += rows.T @ rows

    observe(block, batches, {norm: partial(add, norm=norm) for norm in names})
    for norm, weights in names.items():
        h = moments[norm] / moments[norm].diagonal().mean().clamp(min=1e-20) if batches else one
        rows = [without_outliers(block.weight(name).float()) for name in weights]
        powers = [((row @ h.float()) * row).sum(1).mean().clamp(min=1e-20) for row in rows]
        sparsities = [block.schemes[name].sparsity or (1, 1) for name in weights]
        inverse, _ = torch.linalg.inv_ex(h + DAMPING * one)
        yield Readers([row.half() for row in rows], powers, sparsities, inverse.float())


def without_outliers(weight: Tensor) -> Tensor:
    """``weight [M, K]`` with outlier rows scaled to the median row, and a mean square of 1.

    The reader of a large channel of keys or values may divide by the channel's size, so such a row
    matters no more than others, but would outweigh them.
    """
    rows = weight * to_median(torch.linalg.vector_norm(weight, dim=1))[:, None]
    return rows / rows.square().mean().sqrt().clamp(min=1e-20)


@torch.no_grad()
def learn_to_prune(of_norms: Sequence[Readers], steps: int, keeps_ones: bool = False) -> Tensor:
    """``Q [K, K]``, float64; ``keeps_ones`` is as in :func:`~.learned_rotation.descend`."""
    inverse = of_norms[0].inverse
    start = torch.eye(len(inverse), device=inverse.device)[None]
    found = descend(start, steps, lambda q, n: gradient(of_norms, q[0], n)[None], keeps_ones)
    return found[0]


def gradient(of_norms: Sequence[Readers], q: Tensor, step: int) -> Tensor:
    """The gradient ``[K, K]`` in ``q [K, K]`` of the scores that a step's rows lose by pruning."""
    sizes = [len(rows) for readers in of_norms for rows in readers.rows]
    shares = iter(rows_of_step(sizes, len(q), step))
    found = torch.zeros_like(q)
    for readers in of_norms:
        # with the short mantissas of tensor cores small elements of Q^T H^-1 Q would be noise
        turned_inverse = readers.inverse @ q
        cost = (q * turned_inverse).sum(0)
        of_cost = torch.zeros_like(cost)
        for whole, power, sparsity in zip(
            readers.rows, readers.powers, readers.sparsities, strict=True
        ):
            rows = whole[next(shares)].float()
            weight = 1 / (len(sizes) * max(1, len(rows)) * power)
            with tensor_cores():
                turned = rows @ q
                lost = turned * left_out(turned.square() / cost, sparsity)
                of_cost -= weight * lost.square().sum(0) / cost.square()
                found.addmm_(rows.T, lost.mul_(2 * weight / cost))
        found.addcmul_(turned_inverse, of_cost, value=2)
    return found


def left_out(score: Tensor, sparsity: tuple[int, int]) -> Tensor:
    """A boolean mask ``[M, K]`` of the elements that pruning by ``score`` leaves out."""
    n, m = sparsity
    groups = score.unflatten(-1, (-1, m))
    least = groups.topk(m - n, -1, largest=False).indices
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, least, True).flatten(-2)
