"""Float scales by least squares once the codes are known: the codes stay, the grid moves under them.

Every floating-point parameter of a scheme is a scale its values are linear in, of shape ``[N]`` (one
an output channel) or ``[N, G]`` (one a group). With R the error, ``V_G`` the values of one group:

    s <- s * (1 + <V_G, (T - V) H> / <V_G H_GG, V_G>)

the minimum of ``tr (T - V) H (T - V)^T`` over that scale, one group after another.

Legend: N output channels, K input channels, G groups.
"""

import torch
from torch import Tensor

from qtool.schemes.base import Params, Scheme, stored_scale


def refit(scheme: Scheme, params: Params, codes: Tensor, target: Tensor, hessian: Tensor) -> Params:
    """``params`` with better float scales for ``codes [N, K]``, target ``T [N, K]`` and ``H [K, K]``."""
    params, values = dict(params), scheme.dequantize(codes, params)
    error = target - values
    for name, scale in params.items():
        if not scale.is_floating_point() or name in scheme.shared_params:
            continue
        ratios = []
        for value, columns in zip(*split(values, scale), strict=True):
            wanted = (error @ hessian[:, columns] * value).sum(1)
            power = (value @ hessian[columns, columns] * value).sum(1)
            ratio = torch.where(power > 0, 1 + wanted / power, 1.0).clamp(0.5, 2)
            error[:, columns] -= value * (ratio - 1)[:, None]
            ratios.append(ratio)
        better = scale.float() * torch.stack(ratios, 1).view(scale.shape)
        params[name] = stored_scale(better, scale.dtype)
        values = scheme.dequantize(codes, params)
        error = target - values
    return params


def split(values: Tensor, scale: Tensor) -> tuple[list[Tensor], list[slice]]:
    """The columns of ``values [N, K]`` that each of ``scale``'s entries of a row scales."""
    groups = scale.shape[1] if scale.dim() == 2 else 1
    size = values.shape[1] // groups
    columns = [slice(start, start + size) for start in range(0, values.shape[1], size)]
    return [values[:, c] for c in columns], columns
