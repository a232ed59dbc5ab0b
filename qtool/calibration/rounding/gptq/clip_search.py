"""Fits each group's parameters by a clipping search weighted with the Hessian's diagonal.

MARLIN (arXiv 2408.11743) section 3.5: each group gets the ratio r of a grid that has the least

    sum_k H_kk (w_k - nearest_r(w_k))^2

Legend: E weights of one shape, N output channels, K input channels, G groups, g channels of a
group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.calibration.rounding.gptq import group_error_triton
from qtool.schemes.arithmetic.grid import Grid
from qtool.schemes.arithmetic.launch_triton import triton_runs_on
from qtool.schemes.base import ClipRatio, Params, Scheme, require_finite

#: most groups, over all candidates, in one kernel launch on a GPU: a launch for each candidate
#: would take longer than its work
AT_ONCE = 1 << 24


def fit_groups(
    scheme: Scheme,
    weight: Tensor,
    importance: Tensor,
    ratios: Sequence[float],
    *,
    clip: ClipRatio = 1.0,
    group_clip: ClipRatio = 1.0,
) -> Params:
    """Parameters for ``weight [E N, K]`` float32 with the best of ``ratios`` in each group.

    The ratios multiply ``group_clip``.

    Args:
        importance: ``diag H`` of each weight ``[E, K]``, or ``[K]`` for a single weight.
        ratios: candidates; the first of equal ones wins. A negative ratio fits a negative scale.
        clip: as in ``Scheme.fit``.
        group_clip: as in ``Scheme.fit``.
    """
    low, high = scheme.range(weight, finite=True)
    groups = scheme.groups(weight)  # [E N, G, g]
    importance = scheme.groups(importance.view(-1, weight.shape[1]))  # [E, G, g]
    # a group of channels that were never active is rounded to nearest, as in Factor
    importance = torch.where(importance.sum(-1, keepdim=True) > 0, importance, 1.0)
    error_of, many = group_error, 1
    if triton_runs_on(weight):
        error_of, many = group_error_triton.group_error, max(1, AT_ONCE // low.numel())
    best = torch.full_like(low, torch.inf)
    ratio = torch.ones_like(low)
    # all ratios are copied at once: each copy waits for the device
    for tried in ratio.new_tensor(ratios).split(many):
        rows = len(tried) * len(low)  # the weight's rows, once for each candidate
        by_group = (group_clip * tried[:, None, None]).expand(-1, *low.shape).reshape(rows, -1)
        by_row = clip.repeat(len(tried)) if isinstance(clip, Tensor) and clip.dim() else clip
        ranges = (bound.repeat(len(tried), 1) for bound in (low, high))
        params = scheme.fit_range(*ranges, clip=by_row, group_clip=by_group)
        errors = error_of(groups, importance, scheme.grid(params))
        error, which = errors.view(len(tried), *low.shape).min(0)
        ratio = torch.where(error < best, tried[which], ratio)
        best = torch.minimum(error, best)
    require_finite(low, high, scheme.name)  # the only wait for the GPU
    return scheme.fit_range(low, high, clip=clip, group_clip=group_clip * ratio)


def group_error(groups: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    """Weighted rounding error ``sum_k H_kk (w_k - nearest(w_k))^2 [E N, G]`` of each group.

    ``groups`` is ``[E N, G, g]``, ``importance`` the diagonals of H as ``[E, G, g]``.
    """
    lost = (grid.value(grid.nearest(groups)) - groups).square_()
    return lost.unflatten(0, (len(importance), -1)).mul_(importance[:, None]).sum(-1).flatten(0, 1)
