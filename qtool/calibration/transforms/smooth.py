"""Smoothing: a factor per input channel moves the difficulty from activations to weights.

SmoothQuant (Xiao et al., 2023) with the grid search of Outlier Suppression+ (Wei et al., 2023), as
LiquidGEMM ("Offline Quantization") and QServe B.2.2 use it. For a group of linears that read X [M,
K]:

    X <- X / lambda,  W <- W lambda,   lambda_k = max|X_k|^alpha / max|W_k|^beta

SmoothQuant itself has ``beta = 1 - alpha`` and one alpha for all (``alpha: 0.5``, norms only). Else
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
from qtool.calibration.precision import tensor_cores
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
        alpha: SmoothQuant's migration strength, 0 to 1, taken as it is; None: search.
        steps: grid steps in alpha and in beta, each from 0 to 1.
        tokens: size of the random sample of inputs the error is measured on.
        seed: of that sample.
    """

    groups: Sequence[str] = ("norm", "heads", "product")
    alpha: float | None = None
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
        if self.alpha is not None and self.alpha > 1:
            raise QtoolError(f"smooth: alpha {self.alpha}; expected 0 to 1")

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
                factor, found[group.linears[0]] = search(block, group, seen, self.grid())
                fold_factor(block, group, factor)
        for name, values in found.items():  # only here is a GPU waited for
            keys = ("alpha", "beta", "error", "error_unsmoothed")
            block.notes.setdefault("smooth", {})[name] = dict(
                zip(keys, values.tolist(), strict=True)
            )

    def grid(self) -> Tensor:
        """The exponents tried, ``[C, 2]`` float64."""
        if self.alpha is not None:
            return torch.tensor([[self.alpha, 1 - self.alpha]], dtype=torch.float64)
        return exponent_grid(self.steps)

    def work(self, block: BlockShape) -> Work:
        candidates = len(self.grid()) + 1
        weights, linears = candidates * block.weights, candidates * len(block.quantized)
        return super().work(block) + Work(
            search_weights=weights, search_flops=2 * self.tokens * weights, search_tries=linears
        )


def search(block: Block, group: LinearGroup, inputs: Inputs, grid: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`smooth_factors` of a group of linears; query heads of one kv head share a factor."""
    weights = {name: block.weight(name) for name in group.linears}
    w_amax = torch.stack([weight.abs().amax(0) for weight in weights.values()]).amax(0).float()
    x_amax = inputs.amax
    if group.fold is Fold.HEADS:
        x_amax, w_amax = (per_kv_head(amax, block.heads) for amax in (x_amax, w_amax))
    quantized = [name for name in weights if name in block.schemes]
    return smooth_factors(
        [weights[name] for name in quantized],
        inputs.sample,
        [block.schemes[name] for name in quantized],
        grid=grid,
        x_amax=x_amax,
        w_amax=w_amax,
    )


def exponent_grid(steps: int) -> Tensor:
    """All pairs ``[C, 2]`` float64 of exponents alpha and beta from 0 to 1 in ``steps`` steps."""
    exponents = torch.arange(steps + 1, dtype=torch.float64) / steps
    return torch.cartesian_prod(exponents, exponents)


@torch.no_grad()
def smooth_factors(
    weights: Sequence[Tensor],
    inputs: Tensor,
    schemes: Sequence[Scheme],
    *,
    grid: Tensor | None = None,
    x_amax: Tensor | None = None,
    w_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best factors ``lambda [K]`` of linears that read one input, with their errors.

    Args:
        weights: of the linears, each ``[N, K]``; with ``schemes``, one each.
        inputs: a sample ``X [T, K]`` float32 that the output error is measured on.
        grid: pairs of exponents ``[C, 2]`` float64; None: ``exponent_grid(5)``. A single pair is
            taken even where no smoothing is better.
        x_amax: ``[K]`` of the formula; None: the largest of ``inputs``.
        w_amax: ``[K]`` of the formula; None: the largest of ``weights``.

    Returns:
        ``lambda`` and ``[4]`` float64: alpha, beta, the mean squared error of the outputs with
        ``X / lambda`` and ``W lambda`` quantized, and the error without.

    >>> from qtool import schemes
    >>> random = torch.Generator().manual_seed(0)
    >>> weight = torch.randn(32, 128, generator=random)
    >>> inputs = torch.randn(64, 128, generator=random)
    >>> inputs[:, 5] *= 50  # an outlier channel
    >>> scheme = schemes.get("w8a8")
    >>> factor, (alpha, beta, error, before) = smooth_factors([weight], inputs, [scheme])
    >>> int(factor.argmax()), bool(error < before / 4)
    (5, True)
    """
    grid = (exponent_grid(5) if grid is None else grid).to(inputs.device)
    if x_amax is None:
        x_amax = inputs.abs().amax(0)
    if w_amax is None:
        w_amax = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    pairs = grid.to(x_amax.dtype)
    factors = smoothing_factor(x_amax, w_amax, pairs[:, :1], pairs[:, 1:])
    problems = [(s, weight.float()) for s, weight in zip(schemes, weights, strict=True)]
    targets = [inputs @ weight.T for _, weight in problems]

    def error_of(factor: Tensor | None) -> Tensor:
        with tensor_cores():
            return output_error(inputs, problems, targets, factor)

    errors = ranks.map_scalars(error_of, [None, *factors])
    errors, start = errors[1:], errors[:1]
    least = errors.argmin(0, keepdim=True)  # of equals the first
    better = (errors[least] < start) | (len(grid) == 1)
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
    """Mean squared error ``[]`` of all outputs when ``x [T, K]`` and weights are quantized."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    smoothed = x if factor is None else x / factor
    for (scheme, weight), target in zip(problems, targets, strict=True):
        scaled = weight if factor is None else weight * factor
        params = scheme.fit_range(*scheme.range(scaled, finite=True))
        output = scheme.fake_activation(smoothed, params) @ scheme.fake_weight(scaled, params).T
        total += (output - target).square_().sum(dtype=torch.float64)
    return total / sum(target.numel() for target in targets)
