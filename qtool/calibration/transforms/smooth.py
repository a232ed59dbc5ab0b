"""Smoothing: a factor per input channel moves quantization difficulty between activation and
weight.

SmoothQuant (Xiao et al., 2023) with the grid search of Outlier Suppression+ (Wei et al., 2023), as
LiquidGEMM ("Offline Quantization") and QServe B.2.2 use it. For a group of linears that read X [M,
K]:

    X <- X / lambda,  W <- W lambda,   lambda_k = max|X_k|^alpha / max|W_k|^beta

``(alpha, beta)`` is searched so that the output error of the group is least with the scheme's own
weight *and* activation quantizers in place; lambda = 1 is in the grid. QServe finds alpha near 0
best for the output modules (o, down); the search finds that by itself where it is so.

The factor folds into what makes X: a norm's weight, the rows of v (shared by the query heads of a
kv head) or the rows of up.
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
from qtool.calibration.rounding.gptq.tensor_cores import tensor_cores
from qtool.calibration.statistics import Inputs, collect
from qtool.calibration.transforms.folding import fold_factor, per_kv_head
from qtool.distributed import ranks
from qtool.errors import QtoolError, suggest
from qtool.models.parts import Fold, LinearGroup
from qtool.schemes.base import Scheme

FOLDS = {fold.value: fold for fold in (Fold.NORM, Fold.HEADS, Fold.PRODUCT)}


@dataclass(kw_only=True)
class Smooth(Transform):
    """Search and fold a smoothing factor for each group of linears.

    Args:
        groups: which groups by what their factor folds into: ``norm`` (qkv, gate and up),
            ``heads`` (o), ``product`` (down).
        steps: grid steps in alpha and in beta, each from 0 to 1.
        tokens: size of the random sample of inputs the error is measured on.
        seed: of that sample.
    """

    groups: Sequence[str] = ("norm", "heads", "product")
    steps: int = 5
    tokens: int = 512
    seed: int = 0

    name = "smooth"
    needs_data = True
    positive = ("steps", "tokens")
    after: ClassVar[dict[str, str]] = {
        "norm-fusion": "fusing a norm would fold the smoothing factor back into the weights",
        "rotate": "a rotation mixes the channels that the factor was chosen for",
    }

    def __post_init__(self) -> None:
        for group in self.groups:
            if group not in FOLDS:
                raise QtoolError(f"smooth: unknown group {group!r}; {suggest(group, FOLDS)}")

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        chosen = [group for group in block.family.folds() if group.fold.value in self.groups]
        inputs = collect(
            block, batches, [group.linears[0] for group in chosen], self.tokens, self.seed
        )
        found: dict[str, Tensor] = {}
        # backwards: a factor that changes the rows of up or v is in place when their inputs are
        # smoothed
        for group in reversed(chosen):
            seen = inputs.get(group.linears[0])
            if seen is not None and any(name in block.schemes for name in group.linears):
                factor, found[group.linears[0]] = search(block, group, seen, self.steps)
                fold_factor(block, group, factor)
        for name, values in found.items():  # only here is a GPU waited for
            keys = ("alpha", "beta", "error", "error_unsmoothed")
            block.notes.setdefault("smooth", {})[name] = dict(
                zip(keys, values.tolist(), strict=True)
            )

    def work(self, block: BlockShape) -> Work:
        candidates = (self.steps + 1) ** 2 + 1
        weights, linears = candidates * block.weights, candidates * len(block.quantized)
        return super().work(block) + Work(
            search_weights=weights, search_flops=2 * self.tokens * weights, search_tries=linears
        )


def search(block: Block, group: LinearGroup, inputs: Inputs, steps: int) -> tuple[Tensor, Tensor]:
    """The best ``lambda [K]`` of the grid, and what was found: alpha, beta, its error and that
    without, float64.
    """
    share = per_kv_head if group.fold is Fold.HEADS else lambda amax, heads: amax
    weight_amax = (
        torch.stack([block.weight(name).abs().amax(0) for name in group.linears]).amax(0).float()
    )
    x_amax, w_amax = share(inputs.amax, block.heads), share(weight_amax, block.heads)
    problems = [
        (block.schemes[name], block.weight(name).float())
        for name in group.linears
        if name in block.schemes
    ]
    targets = [inputs.sample @ weight.T for _, weight in problems]
    exponents = torch.arange(steps + 1, dtype=torch.float64, device=x_amax.device) / steps
    grid = torch.cartesian_prod(exponents, exponents)  # [C, 2]
    pairs = grid.to(x_amax.dtype)
    factors = smoothing_factor(x_amax, w_amax, pairs[:, :1], pairs[:, 1:])

    def error_of(factor: Tensor | None) -> Tensor:
        with tensor_cores():
            return output_error(inputs.sample, problems, targets, factor)

    errors = ranks.map_scalars(error_of, [None, *factors])
    errors, start = errors[1:], errors[:1]
    least = errors.argmin(0, keepdim=True)  # of equals the first
    better = errors[least] < start
    factor = torch.where(better, factors[least], 1.0)[0]
    choice = torch.where(better, grid[least], 0.0)[0]
    return factor, torch.cat([choice, torch.where(better, errors[least], start), start])


def smoothing_factor(
    x_amax: Tensor, w_amax: Tensor, alpha: Tensor | float, beta: Tensor | float
) -> Tensor:
    """``lambda [K]``, centred on 1; channels that are all zeros on either side keep 1.

    ``[C, K]`` for C candidates, with ``alpha`` and ``beta [C, 1]``.
    """
    factor = x_amax**alpha / w_amax**beta
    alive = (x_amax > 0) & (w_amax > 0)
    largest = torch.where(alive, factor, 0.0).amax(-1, keepdim=True)
    least = torch.where(alive, factor, torch.inf).amin(-1, keepdim=True)
    return torch.where(alive, factor / (largest * least).sqrt(), 1.0).clamp(1e-4, 1e4)


def output_error(
    x: Tensor,
    problems: Sequence[tuple[Scheme, Tensor]],
    targets: Sequence[Tensor],
    factor: Tensor | None,
) -> Tensor:
    """Mean squared error ``[]`` of the group's outputs when ``x [T, K]`` and the weights ``[N, K]``
    are quantized.
    """
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    smoothed = x if factor is None else x / factor
    for (scheme, weight), target in zip(problems, targets, strict=True):
        scaled = weight if factor is None else weight * factor
        params = scheme.fit_range(*scheme.range(scaled, finite=True))
        output = scheme.fake_activation(smoothed, params) @ scheme.fake_weight(scaled, params).T
        total += (output - target).square_().sum(dtype=torch.float64)
    return total / sum(target.numel() for target in targets)
