"""Float scales by least squares once the codes are known.

Every scheme has one floating-point parameter, a scale its values are linear in, of shape ``[N]``
(one an output channel) or ``[N, G]`` (one a group). With ``V_G`` the values that one scale governs:

    s <- s * (1 + <V_G, (T - V) H> / <V_G H_GG, V_G>)

the minimum of ``tr (T - V) H (T - V)^T`` over that scale, one group after another.

Legend: N output channels, K input channels, G groups.
"""

import torch
from torch import Tensor

from qtool.calibration.precision import product
from qtool.schemes.base import Params, Scheme, stored_scale


def float_scale(params: Params) -> str:
    """The name of the one floating-point parameter."""
    (name,) = (name for name, t in params.items() if t.is_floating_point())
    return name


def refit(scheme: Scheme, params: Params, codes: Tensor, target: Tensor, hessian: Tensor) -> Params:
    """``params`` with the best scales for ``codes [N, K]``, ``T [N, K]`` and ``H [K, K]``."""
    name = float_scale(params)
    scale = params[name]
    values = scheme.dequantize(codes, params)
    error = target - values
    size = values.shape[1] // (scale.shape[1] if scale.dim() == 2 else 1)
    ratios = []
    for start in range(0, values.shape[1], size):
        columns = slice(start, start + size)
        value = values[:, columns]
        wanted = (product(error, hessian[:, columns]) * value).sum(1)
        power = (product(value, hessian[columns, columns]) * value).sum(1)
        ratio = torch.where(power > 0, 1 + wanted / power, 1.0).clamp(0.5, 2)
        error[:, columns] -= value * (ratio - 1)[:, None]
        ratios.append(ratio)
    better = scale.float() * torch.stack(ratios, 1).view(scale.shape)
    return params | {name: stored_scale(better.abs(), scale.dtype).copysign(scale)}
