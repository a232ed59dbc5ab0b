"""What every scheme promises of its functions, and a weight that shows it.

Of a weight W with its parameters and codes Q, a group's step s and what grid has nearest to W:

    |dequantize(Q) - grid.value(Q)| <= 128e-5 s
    |dequantize(Q) - W| <= |grid.value(grid.nearest(W)) - W| + 0.501 s

Rounding twice may miss the nearest code, by no more than half a step. Each clip of ``fit_range``
lowers steps. Where there are zero points, ``with_clip_bounds(params, clip_bounds(params))`` gives
the same values, and ``clip_bounds`` the same bounds at twice the float scale, in whose units they
are. Of inputs X with outputs Y:

    |matmul(X) - fake_activation(X) dequantize(Q)^T| <= 1e-4 max |Y|
"""

from math import lcm

import torch
from torch import Tensor

from qtool.errors import CheckFailed, checking
from qtool.plugins import require_like, require_returned
from qtool.schemes.arithmetic.grid import Grid
from qtool.schemes.base import Params, Scheme, require


def channels(scheme: Scheme) -> int:
    """The least K from 1024 on that the groups of the weight and those of the inputs divide."""
    unit = lcm(scheme.group_size or 1, scheme.activation.group_size or 1)
    return unit * -(-1024 // unit)


def probe(scheme: Scheme) -> Tensor:
    """A weight ``[5, K]``: plain, with outliers, zeros, and values of one sign, K at least 1024."""
    k = channels(scheme)
    size = scheme.group_size or k
    random = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    random[1] *= 0.01
    random[1, ::size] = 100.0
    random[2] = 0
    random[3] = random[3].abs() + 1
    random[4] = -random[4].abs() - 1
    return random


@torch.no_grad()
def require_sound(scheme: Scheme, weight: Tensor) -> None:
    """Hold the functions of ``scheme`` against each other on ``weight [N, K]``.

    Raises:
        QtoolError: one returns no tensors, or no grid.
        CheckFailed: naming those that disagree, and where.
    """
    before = weight.clone()
    params = require_returned(scheme, "fit_range", scheme.fit(weight), dict[str, Tensor])
    groups = scheme.groups(weight)
    shapes = {(len(weight),), tuple(groups.shape[:2])}
    for name, param in params.items():
        if not name.isidentifier():
            raise CheckFailed(
                f"fit_range gives a parameter {name!r}; a name of letters, digits and _ is expected"
            )
        if name not in scheme.shared_params and tuple(param.shape) not in shapes:
            raise CheckFailed(
                f"fit_range gives {name} {list(param.shape)}; [N] or [N, G], which is one of"
                f" {sorted(map(list, shapes))}, is expected"
            )
    require_like("round_groups", scheme.round_groups(groups, params), groups)
    codes = scheme.quantize(weight, params)
    require(weight == before, "fit and quantize leave the weight as it is")
    require_like("quantize", codes, torch.empty_like(weight, dtype=scheme.code_dtype))
    grid = require_returned(scheme, "grid", scheme.grid(params), Grid)
    step = groups[..., 0]
    for name, like in {"step": step, "offset": step, "low": step.int(), "high": step.int()}.items():
        require_like(f"grid's {name}", getattr(grid, name), like)
    with checking("codes of round_groups"):
        scheme.check(codes, params)
    values = scheme.dequantize(codes, params)
    require_like("dequantize", values, weight)

    held = scheme.groups(scheme.prune(weight.float()))
    step, values = grid.step[..., None], scheme.groups(values)
    on_grid = grid.value(scheme.groups(codes.float()))
    require((on_grid - values).abs() <= 128e-5 * step, "dequantize(codes) = grid.value(codes)")
    nearest = grid.value(grid.nearest(held))
    excess = (values.double() - held).abs() - (nearest.double() - held).abs()
    require(excess <= 0.501 * step, "round_groups gives codes as near as grid.nearest")
    _require_inverse(scheme, codes, params)
    _require_product(scheme, codes, params)


@torch.no_grad()
def require_clips(scheme: Scheme) -> None:
    """Check that ``fit_range`` of ``scheme`` uses both clips, which a clipping search chooses.

    Raises:
        CheckFailed: naming the one that lowers no step of the :func:`probe`.
    """
    weight = probe(scheme)
    step = scheme.grid(scheme.fit(weight)).step
    clipped = {
        "clip": scheme.fit(weight, clip=torch.full_like(step[:, 0], 0.5)),
        "group_clip": scheme.fit(weight, group_clip=torch.full_like(step, 0.5)),
    }
    for clip, params in clipped.items():
        if not (scheme.grid(params).step < step).any():
            raise CheckFailed(f"fit_range lowers no step at a {clip} of 0.5, as if it ignored it")


def doubled_scale(scheme: Scheme, codes: Tensor, params: Params) -> Params | None:
    """``params`` with twice their float scale.

    None if they have no one floating-point parameter, or the values of ``codes`` are not
    proportional to it.
    """
    twice = {
        name: (2 * t.float()).to(t.dtype) for name, t in params.items() if t.is_floating_point()
    }
    if len(twice) != 1:
        return None
    values, doubled = (scheme.dequantize(codes, p) for p in (params, params | twice))
    return params | twice if torch.equal(doubled, 2 * values) else None


def _require_inverse(scheme: Scheme, codes: Tensor, params: Params) -> None:
    """Hold ``with_clip_bounds`` of ``scheme`` against its inverse, if it has zero points."""
    bounds, grid = scheme.clip_bounds(params), scheme.grid(params)
    step, zero = grid.step, grid.offset / grid.step
    doubled = doubled_scale(scheme, codes, params)
    if bounds is None:
        if doubled:
            same = (zero - zero[0, 0]).abs() <= 128e-5
            require(same, "one zero point for all groups, as there are no clip_bounds,")
        return
    require_like("clip_bounds", bounds, torch.stack([step, step]))
    if doubled:
        same = torch.as_tensor(scheme.clip_bounds(doubled) == bounds)
        require(same, "clip_bounds, in units of the float scale, stays if that is doubled")
    again = scheme.with_clip_bounds(params, bounds)
    require_returned(scheme, "with_clip_bounds", again, dict[str, Tensor])
    for name, param in params.items():
        require_like(f"with_clip_bounds, for {name},", again.get(name), param)
    values, found = (scheme.groups(scheme.dequantize(codes, p)) for p in (params, again))
    near = (found - values).abs() <= 128e-5 * step[..., None]
    require(near, "with_clip_bounds is the inverse of clip_bounds")


def _require_product(scheme: Scheme, codes: Tensor, params: Params) -> None:
    """Hold ``matmul`` and ``fake_activation`` of ``scheme`` against the dequantized weight."""
    x = torch.randn(3, codes.shape[1], generator=torch.Generator().manual_seed(1))
    bias, before = torch.arange(len(codes)) * x.new_ones(()), x.clone()
    for given in (x.bfloat16(), x):
        seen = scheme.fake_activation(given, params)
        require_like("fake_activation", seen, given)
    y = scheme.matmul(x, codes, params, bias)
    require(x == before, "fake_activation and matmul leave the input as it is")
    exact = seen.double() @ scheme.dequantize(codes, params).double().t() + bias
    require_like("matmul", y, exact.float())
    near = (y - exact).abs() <= 1e-4 * exact.abs().amax()
    require(near, "matmul(x) = fake_activation(x) dequantize(codes)^T + bias")
