"""Smoothing: a factor per input channel moves the difficulty from activations to weights.

SmoothQuant (Xiao et al., 2023) with the grid search of Outlier Suppression+ (Wei et al., 2023), as
LiquidGEMM ("Offline Quantization") and QServe B.2.2 use it. For a group of linears that read X [M,
K]:

    X <- X / lambda,  W <- W lambda,   lambda_k = max|X_k|^alpha / max|W_k|^beta

SmoothQuant itself has ``beta = 1 - alpha`` and one alpha for all (``alpha: 0.5``, norms only).
Without ``alpha``, ``(alpha, beta)`` is searched so that the output error of the group is least with
the scheme's own weight *and* activation quantizers in place; lambda = 1 is in the grid. QServe
finds alpha near 0 best for the output modules (o, down); the search finds it too if it is best.

A few channels may be far larger in X than all others, and need other exponents: with ``alpha + beta
= 1`` where training or a rewrite of the model made them as small in W, smaller ones where a massive
activation passes through them at one token. ``balance`` chooses the factors of such channels first,
by the same error, so that the other channels get the factors that they would have without them.
Tokens of massive outputs count as those of median size then (:mod:`qtool.calibration.outliers`).

The factor folds into the producer of X: a norm's weight, the rows of v (shared by the query heads
of a kv head) or the rows of up.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.method import Transform
from qtool.calibration.outliers import median, to_median
from qtool.calibration.precision import tensor_cores
from qtool.calibration.rounding.rounded import arranged
from qtool.calibration.stacking import (
    by_role,
    padded,
    products,
    searched_in_turn,
    stack,
    stacked_weights,
)
from qtool.calibration.statistics import MOST_TOKENS, Inputs, collect, own_subset
from qtool.calibration.transforms.balance import balancing_factors, channels_apart
from qtool.calibration.transforms.folding import fold_factor, per_kv_head, require_groups
from qtool.calibration.transforms.shift import shift_norms, shifted
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.models.parts import Fold, LinearGroup
from qtool.schemes.base import Scheme

#: scheme and weights ``[S, N, K]`` of linears, and whether their input is rotated
Stack = tuple[Scheme, Tensor, bool]
#: with ``balance``, a token whose outputs are above so many times the median counts as the median
LARGEST_OUTPUT = 4.0


@dataclass(kw_only=True)
class Smooth(Transform):
    """Search and fold a smoothing factor for each group of linears; experts are searched together.

    Args:
        groups: the groups to smooth, named after what their factor folds into: ``norm`` (qkv, gate
            and up), ``heads`` (o), ``product`` (down).
        alpha: SmoothQuant's migration strength, 0 to 1, used without a search; None searches.
        steps: grid steps in alpha and in beta, each from 0 to 1.
        balance: first choose the factors of channels that are far larger in the inputs than others.
        shift: before that, shift the outputs of norms to zero mean (:mod:`.shift`).
        tokens: size of the random sample of inputs on which the error is measured, from the first
            65,536 tokens.
        seed: seed of the random sample.
    """

    groups: Sequence[str] = ("norm", "heads", "product")
    alpha: float | None = None
    steps: int = 5
    balance: bool = False
    shift: bool = False
    tokens: int = 512
    seed: int = 0

    name = "smooth"
    needs_data = True
    positive = ("steps", "tokens")
    most: ClassVar[dict[str, float]] = {"alpha": 1}
    after: ClassVar[dict[str, str]] = {
        "norm-fusion": "fusing a norm would fold the smoothing factor back into the weights",
        "rotate": "a rotation mixes the channels that the factor was chosen for",
    }

    def __post_init__(self) -> None:
        require_groups(self.name, self.groups)

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        chosen = self._groups(block)
        few = own_subset(batches, tokens=MOST_TOKENS)
        if self.shift:
            shift_norms(block, few, self.seed)
        inputs = collect(block, few, [group.linears[0] for group in chosen], self.tokens, self.seed)
        judged = [
            group
            for group in reversed(chosen)
            if group.linears[0] in inputs and any(name in block.schemes for name in group.linears)
        ]
        names: list[str] = []
        found: list[Tensor] = []
        # backwards, so that a factor that changes the rows of up or v is in place when the inputs
        # of up or v are smoothed
        for groups in groups_in_turn(block, judged, self.tokens):
            seen = [inputs[group.linears[0]] for group in groups]
            factors, values = search(block, groups, seen, self.grid(), self.balance)
            for group, factor in zip(groups, factors, strict=True):
                fold_factor(block, group, factor)
                names.append(group.linears[0])
            found.append(values)
        keys = ("alpha", "beta", "error", "error_unsmoothed")
        numbers = torch.cat(found).tolist() if found else []  # the only wait for the GPU
        for name, of_group in zip(names, numbers, strict=True):
            block.notes.setdefault("smooth", {})[name] = dict(zip(keys, of_group, strict=True))

    def grid(self) -> Tensor:
        """The exponents tried, ``[C, 2]`` float64."""
        if self.alpha is not None:
            return torch.tensor([[self.alpha, 1 - self.alpha]], dtype=torch.float64)
        return exponent_grid(self.steps)

    def work(self, block: BlockShape) -> Work:
        # the tries that ``balance`` makes where channels are far larger than others are left out
        candidates = len(self.grid()) + 1
        names = {name for group in self._groups(block) for name in group.linears}
        weights = candidates * sum(prod(block.quantized[n]) for n in names & block.quantized.keys())
        looks = min(1.0, MOST_TOKENS / max(1, block.tokens))
        if self.shift and shifted(block.family, block.family.block_shapes(block.config)):
            looks *= 2
        return super().work(block) * looks + Work(
            search_weights=weights,
            search_flops=2 * self.tokens * weights,
            search_tries=candidates * sum(turns for turns, _ in self._searches(block)),
        )

    def held_bytes(self, block: BlockShape) -> int:
        return block.exact_bytes + max((held for _, held in self._searches(block)), default=0)

    def _searches(self, block: BlockShape) -> list[tuple[int, int]]:
        """Turns and bytes of the search of each group; the groups of experts count as one."""
        return [block.searched(groups, self.tokens) for groups in by_role(self._groups(block))]

    def _groups(self, block: Block | BlockShape) -> list[LinearGroup]:
        return [group for group in block.family.folds() if group.fold.value in self.groups]


def groups_in_turn(
    block: Block, groups: Sequence[LinearGroup], tokens: int
) -> Iterator[Sequence[LinearGroup]]:
    """``groups`` in their order; groups of experts with one linear each are searched together.

    ``tokens`` is the largest number of tokens that a group's search uses.
    """
    for some in by_role(groups):
        if not some[0].routed or len(some[0].linears) > 1:
            yield from ([group] for group in some)
            continue
        by_name = {group.linears[0]: group for group in some}
        for names in searched_in_turn(block, by_name, tokens):
            yield [by_name[name] for name in names]


def search(
    block: Block,
    groups: Sequence[LinearGroup],
    inputs: Sequence[Inputs],
    grid: Tensor,
    balance: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`best_factors` of a group of linears, or of several groups of one linear each.

    Query heads of one kv head share a factor.
    """
    x, x_amax = padded([seen.sample for seen in inputs]), stack([seen.amax for seen in inputs])
    stacks: list[Sequence[str]] = [[group.linears[0] for group in groups]]
    if len(groups) == 1:
        stacks = list(searched_in_turn(block, groups[0].linears, x.shape[1]))
    quantized = [some for some in stacks if some[0] in block.schemes]
    largest = [
        stacked_weights(block, some).abs().amax(1).view(len(x), -1, x.shape[2]).amax(1)
        for some in quantized
    ]
    w_amax = torch.stack(largest).amax(0)
    if groups[0].fold is Fold.HEADS:
        x_amax, w_amax = (per_kv_head(amax[0], block.heads)[None] for amax in (x_amax, w_amax))
    return best_factors(
        lambda: (
            (block.schemes[some[0]], stacked_weights(block, some), some[0] in block.to_rotate)
            for some in quantized
        ),
        x,
        [len(seen.sample) for seen in inputs],
        x_amax,
        w_amax,
        grid,
        balance,
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
    balance: bool = False,
) -> tuple[Tensor, Tensor]:
    """The best factors ``lambda [K]`` of linears that read one input, with their errors.

    Args:
        weights: weights of the linears, each ``[N, K]``.
        inputs: a sample ``X [T, K]`` on which the output error is measured.
        schemes: one scheme for each weight.
        grid: pairs of exponents ``[C, 2]`` float64; None means ``exponent_grid(5)``. A single pair
            is used even if no smoothing is better.
        balance: first choose the factors of channels that are far larger in the inputs than others,
            by the same error, among :func:`.balance.balancing_factors`.

    Returns:
        ``lambda`` and ``[4]`` float64: alpha, beta, the mean squared error of the outputs with
        ``X / lambda`` and ``W lambda`` quantized, and the error without smoothing. With ``balance``
        the exponents are those of the other channels.

    Raises:
        QtoolError: other shapes, no scheme for a weight, or NaN or Inf.

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
    shapes = [list(tensor.shape) for tensor in (*weights, inputs)]
    alike = all(len(shape) == 2 and shape[1:] == shapes[-1][1:] for shape in shapes)
    if not alike or not len(inputs) or not 0 < len(weights) == len(schemes):
        raise QtoolError(
            f"smooth_factors: weights {shapes[:-1]}, inputs {shapes[-1]} and {len(schemes)} schemes"
            " are given; weights [N, K], inputs [T, K] and a scheme for each weight are expected"
        )
    inputs = inputs.float()
    x_amax = inputs.abs().amax(0)
    w_amax = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    for name, amax in (("inputs", x_amax), ("weights", w_amax)):
        if not torch.isfinite(amax).all():
            raise QtoolError(f"smooth_factors: the {name} hold NaN or Inf")
    factors, values = best_factors(
        lambda: (
            (scheme, weight[None].float(), False)
            for scheme, weight in zip(schemes, weights, strict=True)
        ),
        inputs[None],
        [len(inputs)],
        x_amax[None],
        w_amax[None],
        exponent_grid(5) if grid is None else grid,
        balance,
    )
    return factors[0], values[0]


def best_factors(
    stacks: Callable[[], Iterable[Stack]],
    x: Tensor,
    tokens: Sequence[int],
    x_amax: Tensor,
    w_amax: Tensor,
    grid: Tensor,
    balance: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`smooth_factors` for E groups: ``lambda [E, K]``, and ``[E, 4]``.

    Args:
        stacks: returns scheme and weights ``[S, N, K]`` float32 of the linears of a single group,
            or of the only linear of each of S = E groups, and whether what they read is rotated
            before it is quantized. They are read one by one, so that one is held at a time.
        x: samples ``[E, T, K]``, with zeros after the ``tokens`` of each group.
        tokens: number of tokens of each group.
        x_amax: ``[E, K]``, the largest input of each channel.
        w_amax: ``[E, K]``, the largest weight of each channel.
        grid: pairs of exponents ``[C, 2]``.
        balance: as for :func:`smooth_factors`.
    """
    starts = torch.ones_like(x_amax)[None]  # without smoothing, and with balanced channels alone
    if balance and (apart := channels_apart(x_amax)).any():
        balanced = torch.where(apart, balancing_factors(x_amax, w_amax), 1.0)
        errors = output_errors(stacks(), x, tokens, balanced, balance)
        starts = torch.cat([starts, _of_least(balanced, errors)[None]])
        x_amax, w_amax = (torch.where(apart, median(amax), amax) for amax in (x_amax, w_amax))
    grid = grid.to(x.device, non_blocking=True)
    pairs = grid.to(x_amax.dtype)[:, None]
    factors = smoothing_factor(x_amax, w_amax, pairs[..., :1], pairs[..., 1:])  # [C, E, K]
    candidates = torch.cat([starts, starts[-1] * factors])
    errors = output_errors(stacks(), x, tokens, candidates, balance)
    unsmoothed = errors[0]
    exponents = torch.cat([torch.zeros_like(grid[: len(starts)]), grid])
    if len(grid) == 1:
        candidates, errors, exponents = candidates[-1:], errors[-1:], grid
    values = exponents[errors.argmin(0)], errors.amin(0)[:, None], unsmoothed[:, None]
    return _of_least(candidates, errors), torch.cat(values, 1)


def output_errors(
    stacks: Iterable[Stack],
    x: Tensor,
    tokens: Sequence[int],
    candidates: Tensor,
    balance: bool = False,
) -> Tensor:
    """The mean squared errors ``[C, E]`` of all outputs with each of ``candidates [C, E, K]``.

    The other arguments are those of :func:`best_factors`.
    """
    errors, outputs = torch.zeros(candidates.shape[:2], dtype=torch.float64, device=x.device), 0
    for scheme, weight, rotated in stacks:
        seen, target = x, products(x, weight.mT)
        if balance:
            sizes = torch.linalg.vector_norm(target, dim=2).view(len(x), -1, x.shape[1])
            share = to_median(torch.linalg.vector_norm(sizes, dim=1), LARGEST_OUTPUT)[..., None]
            seen, target = x * share, target.mul_(share)
        with tensor_cores():
            for number in ranks.local_items(range(len(candidates))):
                factor = candidates[number]
                errors[number] += output_error(seen, scheme, weight, target, factor, rotated)
        outputs += target.shape[0] * target.shape[2] // len(x)
    ranks.all_reduce(errors)  # each sum is a number plus zeros, hence exact
    return errors / (outputs * torch.tensor(tokens).to(x.device, non_blocking=True))


def _of_least(candidates: Tensor, errors: Tensor) -> Tensor:
    """The candidate ``[E, K]`` of the least error for each of E groups, the first of equals."""
    least = errors.argmin(0)[None, :, None].expand(1, *candidates.shape[1:])
    return candidates.gather(0, least)[0]


def smoothing_factor(
    x_amax: Tensor, w_amax: Tensor, alpha: Tensor | float, beta: Tensor | float
) -> Tensor:
    """``lambda [K]`` centred on 1, or ``[C, E, K]`` for E groups and C exponents ``[C, 1, 1]``.

    A channel of zeros in X or in W gets the geometric mean of the other factors. Otherwise, if the
    others shrink, a column that no calibration token uses would set the quantization step.
    """
    factor = x_amax**alpha / w_amax**beta
    alive = (x_amax > 0) & (w_amax > 0)
    largest = torch.where(alive, factor, 0.0).amax(-1, keepdim=True)
    least = torch.where(alive, factor, torch.inf).amin(-1, keepdim=True)
    count = alive.sum(-1, keepdim=True)
    mean = (torch.where(alive, factor.log(), 0.0).sum(-1, keepdim=True) / count).exp()
    found = torch.where(alive, factor, mean) / (largest * least).sqrt()
    return torch.where(count > 0, found, 1.0).clamp(1e-4, 1e4)


def output_error(
    x: Tensor, scheme: Scheme, weight: Tensor, target: Tensor, factor: Tensor, rotated: bool
) -> Tensor:
    """Squared errors ``[E]`` of the outputs ``target [S, T, N]`` of linears ``[S, N, K]``.

    The linears' inputs ``x [E, T, K]`` and weights are smoothed by ``factor [E, K]``, rotated if
    they will be at run time, then quantized.
    """
    smoothed, scaled = (
        arranged(t, None, rotated) for t in (x / factor[:, None], weight * factor[:, None])
    )
    rows = scaled.flatten(0, 1)
    params = scheme.fit(rows, finite=True)
    rounded = scheme.fake_weight(rows, params).view_as(scaled)
    output = products(scheme.fake_activation(smoothed, params), rounded.mT)
    squares = (output - target).square_().flatten(1).sum(1, dtype=torch.float64)  # [S]
    return squares.view(len(x), -1).sum(1)
