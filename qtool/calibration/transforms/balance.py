"""Factors of channels that are far larger than others in the inputs of linears, for smoothing.

A massive activation (Sun et al., 2024, arXiv 2402.17762) is large in one channel at one token;
training or a rewrite of a model may also have made a few channels large for all tokens. Exponents
that suit such channels do not suit the others, so :mod:`.smooth` chooses their factors apart.
"""

import torch
from torch import Tensor

from qtool.calibration.outliers import OUTLIER_RATIO, median

#: steps of the exponent alpha from 0 to 1, where beta is 1 - alpha
STEPS = 8


def channels_apart(x_amax: Tensor) -> Tensor:
    """Mask ``[..., K]`` of the channels far larger than others; ``x_amax`` are largest inputs."""
    return x_amax > OUTLIER_RATIO * median(x_amax)


def balancing_factors(x_amax: Tensor, w_amax: Tensor) -> Tensor:
    """Factors ``[C, ..., K]``, at least 1, of channels that differ from others in X, in W, or both.

    With ``x`` and ``w`` in medians of all channels they are ``x^alpha / w^(1 - alpha)``: from one
    that leaves a small channel of W at the median to one that leaves the channel of X there.
    """
    x, w = (amax / median(amax) for amax in (x_amax, w_amax))
    alpha = torch.arange(STEPS + 1, device=x.device) / STEPS
    factors = torch.stack([x**one / w ** (1 - one) for one in alpha])
    return torch.where(factors.isfinite(), factors, 1.0).clamp(1, 1e4)
