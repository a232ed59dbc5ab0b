"""Float scales by least squares once the codes are known.

Every scheme has one floating-point parameter, a scale in which its values are linear, of shape
``[N]`` (one for an output channel) or ``[N, G]`` (one for a group). With ``V_G`` the values of one
scale:

    s <- s * (1 + <V_G, (T - V) H> / <V_G H_GG, V_G>)

This is the minimum of ``tr (T - V) H (T - V)^T`` over that scale; groups are updated one after
another. ``(T - V) H`` is computed for a panel of groups and updated with each change inside it.

Legend: N output channels, K input channels, G groups of a panel.
"""

import torch
from torch import Tensor

from qtool.calibration.precision import by_rows, coarse_product, product
from qtool.errors import QtoolError
from qtool.schemes.base import Params, Scheme, stored_scale
from qtool.schemes.protocol import doubled_scale, probe

#: columns of a panel, which holds at least one group
PANEL = 4096


def float_scale(params: Params) -> str:
    """The name of the one floating-point parameter.

    Raises:
        QtoolError: a scheme of a plugin has none, or several.
    """
    found = [name for name, t in params.items() if t.is_floating_point()]
    if len(found) != 1:
        raise QtoolError(
            "gptq and distill fit one floating-point parameter, a scale that all values are "
            f"proportional to; the scheme has {', '.join(found) or 'none'}: take the rounding rtn, "
            "or one of your own"
        )
    return found[0]


def require_float_scale(scheme: Scheme) -> None:
    """Check that ``scheme`` has one floating-point parameter, and that it is a scale.

    Raises:
        QtoolError: it has none, or several, or one that values are not proportional to; naming
            the scheme.
    """
    params = scheme.fit(weight := probe(scheme))
    try:
        name = float_scale(params)
    except QtoolError as error:
        raise QtoolError(f"{scheme.name}: {error}") from error
    if not doubled_scale(scheme, scheme.quantize(weight, params), params):
        raise QtoolError(
            f"{scheme.name}: gptq and distill fit a scale that all values are proportional to, and "
            f"{name} is none: take the rounding rtn, or one of your own"
        )


def refit(scheme: Scheme, params: Params, codes: Tensor, target: Tensor, hessian: Tensor) -> Params:
    """``params`` with the best scales for ``codes [N, K]``, ``T [N, K]`` and ``H [K, K]``.

    A scale changes by a factor of at most 2.
    """
    name = float_scale(params)
    scale = params[name]
    values = scheme.dequantize(codes, params)
    error = target - values
    size = values.shape[1] // (scale.shape[1] if scale.dim() == 2 else 1)
    width = size * max(1, PANEL // size)  # whole groups
    ratios = []
    for first in range(0, values.shape[1], width):
        stop = min(first + width, values.shape[1])
        panel = slice(first, stop)
        pull, power = coarse_product(error, hessian[:, panel]), _power(values, hessian, panel, size)
        for start, own_power in zip(range(first, stop, size), power.unbind(1), strict=True):
            columns, later = slice(start, start + size), slice(start + size, stop)
            value, own = values[:, columns], start - first
            wanted = (pull[:, own : own + size] * value).sum(1)
            ratio = torch.where(own_power > 0, 1 + wanted / own_power, 1.0).clamp(0.5, 2)
            change = value * (ratio - 1)[:, None]
            error[:, columns] -= change
            pull[:, own + size :].addmm_(change, hessian[columns, later], alpha=-1)
            ratios.append(ratio)
    better = scale.float() * torch.stack(ratios, 1).view(scale.shape)
    return params | {name: stored_scale(better.abs(), scale.dtype).copysign(scale)}


def _power(values: Tensor, hessian: Tensor, panel: slice, size: int) -> Tensor:
    """``<V_G H_GG, V_G> [N, G]`` of the groups of a panel."""
    if panel.stop - panel.start == size:
        own = values[:, panel]
        return (product(own, hessian[panel, panel]) * own).sum(1, keepdim=True)
    blocks = hessian[panel, panel].unflatten(0, (-1, size)).unflatten(2, (-1, size))
    own = torch.stack([blocks[g, :, g] for g in range(len(blocks))])  # [G, size, size]

    def of_rows(some: Tensor) -> Tensor:
        groups = some.unflatten(1, (-1, size)).transpose(0, 1)  # [G, N, size]
        return ((groups @ own) * groups).sum(2).T

    return by_rows(of_rows, values[:, panel])
