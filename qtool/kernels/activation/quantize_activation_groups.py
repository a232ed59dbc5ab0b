"""``qtool::quantize_activation_groups``: s4 codes of a linear's input with a scale per token and
group (APEX4, COMET).

    sx[G, m] = max_{k in G} |y[m, k]| / 7 (a group of zeros: 1)      code = rne(y / sx)

In the groups that ``eight_bit`` marks (COMET's 8-bit blocks), 127 takes the place of 7. ``y`` is
what :mod:`~qtool.kernels.activation.quantize_activation` makes of x: fused, then gathered.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError, suggest
from qtool.kernels.activation.arrangement import ARRANGEMENTS, SPAN, arrange
from qtool.kernels.activation.quantize_activation import (
    DTYPES,
    FUSIONS,
    MOST_CHANNELS,
    fused,
    row_definition,
)
from qtool.kernels.build import Build, cubin
from qtool.kernels.checks import Expected, require_tensors
from qtool.kernels.launch import launch, load
from qtool.schemes.arithmetic.activation import quantize_groups

GROUP_SIZES = (32, 64, 128, 256, 512, 1024, None)


@torch.library.custom_op("qtool::quantize_activation_groups", mutates_args=())
def quantize_activation_groups(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    arrangement: str,
) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[M, K]`` and scales float32 ``[G, M4]``, M4 being M rounded up to a multiple of
    4 (padded with 1).

    Args:
        x, order, norm, fusion, epsilon: as of
            :func:`~qtool.kernels.activation.quantize_activation.quantize_activation`.
        eight_bit: uint8 ``[G]``, 1 for the groups of 8-bit codes, or ``None``: there are none.
        group_size: channels that share a scale, 32 to 1024, or ``None``: all of them.
        arrangement: ``none``, or the layout of the weight (``apex4``, ``w4ax-interleaved``) whose
            order the codes take.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """
    k = require(x, order, norm, eight_bit, fusion, group_size, arrangement)
    top: Tensor | int = 7 if eight_bit is None else torch.where(eight_bit.bool(), 127, 7)
    codes, found = quantize_groups(fused(x, order, norm, fusion, epsilon), group_size or k, top)
    scale = found.new_ones(shapes(x, k, group_size)[1])
    scale[:, : len(x)] = found.t()
    return arrange(codes, arrangement), scale


@quantize_activation_groups.register_kernel("cuda")
def _(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    arrangement: str,
) -> tuple[Tensor, Tensor]:
    k = require(x, order, norm, eight_bit, fusion, group_size, arrangement)
    codes, scale = _outputs(x, k, group_size)
    launch_groups(
        x, order, norm, eight_bit, fusion, epsilon, group_size, arrangement, codes, scale, k
    )
    return codes, scale


def launch_groups(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    arrangement: str,
    codes: Tensor,
    scale: Tensor,
    k: int,
    packed: int = 0,
) -> None:
    """Fill ``codes`` and ``scale``. All checks were made by the op."""
    m, device = len(x), x.device
    if m == 0:
        return
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise QtoolError(
                f"quantize_activation_groups: needs sm_80 or newer, {device} is sm_{major}{minor}"
            )
        source = definition(k, x.dtype, fusion, order is not None, group_size, arrangement, packed)
        tensors = (x, order, norm, eight_bit, codes, scale)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        parameters = struct.pack("<6Q2if4x", *pointers, m, k, epsilon)
        kernel = _kernel(*source[2].items(), arch=f"sm_{major}{minor}", device=device.index)
        launch(kernel, m, source[2]["THREADS"], 0, parameters, device, overlap=major >= 9)


@quantize_activation_groups.register_fake
def _(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    arrangement: str,
) -> tuple[Tensor, Tensor]:
    return _outputs(
        x, require(x, order, norm, eight_bit, fusion, group_size, arrangement), group_size
    )


@cache
def _kernel(*defines: tuple[str, int], arch: str, device: int) -> Any:
    return load(cubin(SOURCE, "", dict(defines), arch), SOURCE, 0, device)


SOURCE = "activation/quantize_activation_groups"


def definition(
    k: int,
    dtype: torch.dtype,
    fusion: str,
    gather: bool,
    group_size: int | None,
    arrangement: str,
    packed: int = 0,
) -> tuple[str, str, dict[str, int]]:
    """Source name, prologue and macros of one kernel."""
    defines = {"GROUP": group_size or 0, "ARRANGEMENT": ARRANGEMENTS[arrangement], "PACKED": packed}
    return SOURCE, "", row_definition(k, dtype, fusion, gather) | defines


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row; each kind of group and arrangement."""
    variants = ((32, "apex4"), (128, "w4ax-interleaved"), (1024, "apex4"), (None, "none"))
    for fusion, k, (group, arrangement) in product(FUSIONS, (1024, MOST_CHANNELS), variants):
        source = definition(k, torch.bfloat16, fusion, True, group, arrangement)
        yield Build(
            f"{SOURCE} {fusion} K={k} g{group}", "sm_90a", source, source[2]["THREADS"], calls=True
        )
    for arch in ("sm_80", "sm_89"):
        source = definition(4096, torch.float16, "none", False, 128, "apex4")
        yield Build(f"{SOURCE} g128", arch, source, source[2]["THREADS"], calls=True)


def shapes(x: Tensor, k: int, group_size: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the codes and of the scales."""
    return (x.shape[0], k), (k // (group_size or k), (x.shape[0] + 3) // 4 * 4)


def _outputs(x: Tensor, k: int, group_size: int | None) -> tuple[Tensor, Tensor]:
    codes, scale = shapes(x, k, group_size)
    return x.new_empty(codes, dtype=torch.int8), x.new_empty(scale, dtype=torch.float32)


def require(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    group_size: int | None,
    arrangement: str,
) -> int:
    """Refuse what the kernel cannot do; returns K."""
    for kind, value, accepted in (
        ("fusion", fusion, FUSIONS),
        ("arrangement", arrangement, ARRANGEMENTS),
    ):
        if value not in accepted:
            raise QtoolError(f"{SOURCE}: unknown {kind} {value!r}: {suggest(value, accepted)}")
    if group_size not in GROUP_SIZES:
        raise QtoolError(f"{SOURCE}: no group size {group_size}; accepted: {GROUP_SIZES}")
    if x.dim() != 2:
        raise QtoolError(f"{SOURCE}: x is {x.dim()}-D; expected [M, K]")
    m, width = x.shape
    k = width // (2 if fusion == "silu-up" else 1)
    step = max(SPAN, group_size or 0)
    if k % step or k == 0 or k > MOST_CHANNELS or (fusion == "silu-up" and width % 2):
        raise QtoolError(f"{SOURCE}: K = {k}; expected a multiple of {step} up to {MOST_CHANNELS}")
    expected: dict[str, Expected] = {
        "x": (x, (m, width), tuple(DTYPES)),
        "order": (order, None if order is None else (k,), (torch.int32,)),
        "norm": (norm, (k,) if fusion == "rms-norm" else None, (x.dtype,)),
        "eight_bit": (
            eight_bit,
            None if eight_bit is None else (k // (group_size or k),),
            (torch.uint8,),
        ),
    }
    require_tensors(SOURCE, x.device, expected)
    return k
