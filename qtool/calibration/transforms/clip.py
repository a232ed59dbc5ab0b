"""Clipping search: the ratio of each range that leaves the least output error.

QServe B.2.4, AWQ (Lin et al., 2024). With Q(W; r) the weight rounded by its scheme on ranges shrunk
by r:

    layer output     r[n]    = argmin || X (w_n - Q(w_n; r)) ||^2      per output channel (level 1)
                     r[n, G] = argmin || X_G (w_nG - Q(w_nG; r)) ||^2          per group (level 2)
    block output     r       = argmin || Block(X; W) - Block(X; Q(W; r)) ||^2  for q_proj and k_proj

X is the input after its quantizer. Both errors of a row are quadratic forms of the weight error, so
all rows and groups are searched at once. The ratio 1 is always in the grid, and a row keeps its
group ratios only if they lower the error of the whole row too.

Legend: T tokens, N output channels, K input channels, G groups of g.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.forwards import run
from qtool.calibration.method import Transform
from qtool.calibration.precision import tensor_cores
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.stacking import padded, products, searched_in_turn, stacked_weights
from qtool.calibration.statistics import collect, subset
from qtool.distributed import ranks
from qtool.schemes.base import ClipRatio, Scheme

#: fixed cost of the search of a linear (a few hundred kernel launches), as a number of weights
FIXED_COST = 5_000_000


@dataclass(kw_only=True)
class Clip(Transform):
    """Chooses ``block.clips`` for all linears.

    Args:
        lowest: smallest ratio tried.
        steps: number of equal steps from the ratio 1 down to ``lowest``.
        tokens: size of the random sample of inputs on which the layer error is measured.
        sequences: number of calibration sequences on which the block error is measured; 0 treats
            q_proj and k_proj like the others.
        seed: seed of the random sample.
    """

    lowest: float = 0.6
    steps: int = 10
    tokens: int = 1024
    sequences: int = 8
    seed: int = 0

    name = "clip"
    needs_data = True
    positive = ("steps", "tokens")
    most: ClassVar[dict[str, float]] = {"lowest": 1}
    after: ClassVar[dict[str, str]] = {
        method: "clipping ratios belong to the weights as they will be rounded"
        for method in (
            "norm-fusion",
            "rotate",
            "smooth",
            "smooth-attention",
            "value-basis",
            "reorder",
            "gather-outliers",
            "online-hadamard",
        )
    }

    @property
    def ratios(self) -> list[float]:
        """The grid, from 1 down."""
        return [1 - (1 - self.lowest) * i / self.steps for i in range(self.steps + 1)]

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        self._choose_by_layer(block, batches)
        if self.sequences and block.family.attention is not None:
            self._choose_by_block(block, subset(batches, self.sequences))

    def _choose_by_layer(self, block: Block, batches: Sequence[Batch]) -> None:
        """Choose the clips of all linears by the errors of their own outputs."""
        # in a permuted group only quantized linears read their input in the new order
        first = {
            name: next(
                other for other in block.family.group_of(name).linears if other in block.schemes
            )
            for name in block.schemes
        }
        inputs = collect(block, batches, dict.fromkeys(first.values()), self.tokens, self.seed)

        def searched(names: Sequence[str]) -> Sequence[tuple[tuple[ClipRatio, ClipRatio], Tensor]]:
            scheme, weight = block.schemes[names[0]], stacked_weights(block, names)
            x = padded([inputs[first[name]].sample for name in names])
            params = scheme.fit(weight[0], finite=True)
            return search(scheme, weight, scheme.fake_activation(x, params), self.ratios)

        judged = [name for name in block.schemes if first[name] in inputs]
        turns = list(searched_in_turn(block, judged, self.tokens))
        found = ranks.map_items(
            searched,
            turns,
            cost=lambda names: FIXED_COST + len(names) * block.weight(names[0]).numel(),
        )
        clips = dict(zip(chain(*turns), chain(*found), strict=True))
        errors = torch.stack([clips[name][1] for name in judged]).tolist() if judged else []
        for name, (least, unclipped) in zip(judged, errors, strict=True):
            block.clips[name] = clips[name][0]
            block.notes.setdefault("clip", {})[name] = {
                "error": least,
                "error_unclipped": unclipped,
            }

    def _choose_by_block(self, block: Block, batches: Sequence[Batch]) -> None:
        """Choose the clips of q_proj and k_proj by the block's output error.

        The candidates are the layer's own choice and one ratio for all rows.
        """
        owners = dict.fromkeys(
            block.family.owner(x) for x in (block.attention.q, block.attention.k)
        )
        names = [name for name in owners if name in block.schemes]
        if not names:
            return
        options: list[dict[str, tuple[ClipRatio, ClipRatio]]] = [
            {name: (r, 1.0) for name in names} for r in self.ratios
        ]
        options.append({name: block.clips.get(name, (1.0, 1.0)) for name in names})
        exact = [run(block, batch) for batch in batches]
        errors = ranks.map_scalars(
            lambda option: block_error(block, batches, exact, option), options
        ).tolist()
        best = min(range(len(options)), key=errors.__getitem__)
        block.clips.update(options[best])
        choice = "by layer" if best == len(self.ratios) else self.ratios[best]
        for name in names:
            block.notes["clip"][name] = {
                "ratio": choice,
                "error": errors[best],
                "error_unclipped": errors[0],
            }

    def work(self, block: BlockShape) -> Work:
        ratios = len(self.ratios)
        tried, judged = 2 * ratios + 1, ratios + 1  # errors of single groups need no outputs
        attends = block.family.attention is not None
        few = attends * min(1.0, self.sequences / block.samples)
        return super().work(block) + Work(
            forward_flops=few * (ratios + 2) * block.forward_flops(),
            search_weights=tried * block.weights,
            search_flops=2 * self.tokens * judged * block.weights,
            search_tries=tried * block.searched(block.family.groups, self.tokens)[0],
        )

    def held_bytes(self, block: BlockShape) -> int:
        return block.exact_bytes + block.searched(block.family.groups, self.tokens)[1]


def search(
    scheme: Scheme, weight: Tensor, x: Tensor, ratios: Sequence[float]
) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The ``clip [N]`` and ``group_clip [N, G]`` with the least output error, and that error.

    Args:
        weight: finite weights ``[S, N, K]`` of S linears.
        x: inputs ``[S, T, K]`` of the linears.
        ratios: candidates; the first is 1.

    Returns:
        For each linear both clips, and ``[2]`` on the device: the errors with and without them.
    """
    rows = weight.flatten(0, 1)
    low, high = scheme.range(rows, finite=True)
    groups = low.shape[1]

    def difference(clip: ClipRatio, group_clip: ClipRatio) -> Tensor:
        params = scheme.fit_range(low, high, clip=clip, group_clip=group_clip)
        return scheme.weight_error(rows, params).view_as(weight)

    clip = torch.ones(len(rows), device=weight.device)
    group_clip = torch.ones(len(rows), groups, device=weight.device)
    start = best = row_error(difference(clip, group_clip), x)
    if groups == 1 or two_levels(scheme, groups):
        for ratio in ratios[1:]:
            error = row_error(difference(ratio, group_clip), x)
            clip = torch.where(error < best, ratio, clip)
            best = torch.minimum(error, best)
    if groups > 1:
        moments = x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)  # [S, G, g, T]
        moments = moments @ moments.mT  # [S, G, g, g]
        chosen, least = group_clip, group_error(difference(clip, group_clip), moments)
        for ratio in ratios[1:]:
            error = group_error(difference(clip, ratio), moments)
            chosen = torch.where(error < least, ratio, chosen)
            least = torch.minimum(error, least)
        error = row_error(difference(clip, chosen), x)
        group_clip = torch.where((error < best)[:, None], chosen, group_clip)
        best = torch.minimum(error, best)
    linears = len(weight)
    both = zip(clip.view(linears, -1), group_clip.view(linears, -1, groups), strict=True)
    errors = torch.stack([best.view(linears, -1).sum(1), start.view(linears, -1).sum(1)], 1)
    return list(zip(both, errors, strict=True))


def two_levels(scheme: Scheme, groups: int) -> bool:
    """Whether clipping a channel of ``groups`` differs from clipping all of its groups."""
    high = torch.linspace(1, 2, groups)[None]
    channel = scheme.fit_range(-high, high, clip=0.5)
    group = scheme.fit_range(-high, high, group_clip=0.5)
    return any(not torch.equal(channel[name], group[name]) for name in channel)


def row_error(difference: Tensor, x: Tensor) -> Tensor:
    """``|| x d_n ||^2 [S N]`` for the weight errors ``difference [S, N, K]``; ``x [S, T, K]``."""
    with tensor_cores():
        return products(x, difference.mT).square().sum(1).flatten()


def group_error(difference: Tensor, moments: Tensor) -> Tensor:
    """``|| x_G d_nG ||^2 [S N, G]`` with ``moments [S, G, g, g]``, the x_G^T x_G."""
    by_group = difference.unflatten(2, (moments.shape[1], -1)).transpose(1, 2)  # [S, G, N, g]
    return ((by_group @ moments) * by_group).sum(-1).mT.flatten(0, 1)


def block_error(
    block: Block,
    batches: Sequence[Batch],
    exact: Sequence[Tensor],
    clips: dict[str, tuple[ClipRatio, ClipRatio]],
) -> Tensor:
    """Squared error ``[]`` of the block's output with only the linears of ``clips`` rounded."""
    linears = {name: block.get(name) for name in clips}
    rounded = {}
    for name, (clip, group_clip) in clips.items():
        scheme, weight = block.schemes[name], block.weight(name)
        params = scheme.fit(weight, clip=clip, group_clip=group_clip, finite=True)
        rounded[name] = Rounded(scheme.quantize(weight, params), params)
    block.install(rounded)
    try:
        pairs = zip(batches, exact, strict=True)
        return torch.stack(
            [(run(block, b) - e).float().square_().sum(dtype=torch.float64) for b, e in pairs]
        ).sum()
    finally:
        for name, linear in linears.items():
            block.module.set_submodule(name, linear)
