"""``qtool::quantize_activation``: per-token s8 codes, scales and code sums of a linear's input, in
one pass.

    sx[m] = max_k |y[m, k]| / 127 (a row of zeros: 1)      code = rne(y / sx)      sum[m] = sum_k code[m, k]

``y`` is x, or what the model computes just before the linear, fused: ``RMSNorm(x) * norm`` or
``SiLU(gate) * up``; then gathered by ``order``. A fused y is rounded to x's dtype where the unfused
model rounds it.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from qtool.errors import QtoolError, suggest
from qtool.kernels.build import Build, cubin
from qtool.kernels.checks import Expected, require_tensors
from qtool.kernels.launch import launch, load
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8

#: number of the fusion in csrc/activation/quantize_activation.cu
FUSIONS = {"none": 0, "rms-norm": 1, "silu-up": 2}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MOST_CHANNELS = 32768


@torch.library.custom_op("qtool::quantize_activation", mutates_args=())
def quantize_activation(
    x: Tensor, order: Tensor | None, norm: Tensor | None, fusion: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int8 ``[M, K]``, scales float32 ``[M]`` and sums of the codes int32 ``[M]``.

    Args:
        x: ``[M, K]``, float32, float16 or bfloat16; ``silu-up``: ``[M, 2 K]``, the gate's outputs,
            then up's.
        order: int32 ``[K]``, the input channel of each code (a stored permutation), or ``None``.
        norm: RMSNorm's weight ``[K]`` in x's dtype, for ``rms-norm``. epsilon: RMSNorm's.
        fusion: ``none``, ``rms-norm`` or ``silu-up``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """
    _require(x, order, norm, fusion)
    codes, scale = PER_TOKEN_S8.quantize(fused(x, order, norm, fusion, epsilon))
    return codes, scale[:, 0].contiguous(), codes.sum(1, dtype=torch.int32)


def fused(
    x: Tensor, order: Tensor | None, norm: Tensor | None, fusion: str, epsilon: float
) -> Tensor:
    """What is quantized, ``[M, K]`` in x's dtype, as the unfused model computes it."""
    y = x
    if fusion == "rms-norm":
        assert norm is not None
        wide = x.float()
        y = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    elif fusion == "silu-up":
        gate, up = x.chunk(2, dim=-1)
        y = silu(gate) * up
    return y if order is None else y[:, order.long()]


@quantize_activation.register_kernel("cuda")
def _(
    x: Tensor, order: Tensor | None, norm: Tensor | None, fusion: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    _require(x, order, norm, fusion)
    codes, scale, total = _outputs(x, fusion)
    (m, k), device = codes.shape, x.device
    if m == 0:
        return codes, scale, total
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise QtoolError(
                f"quantize_activation: needs sm_80 or newer, {device} is sm_{major}{minor}"
            )
        source = definition(k, x.dtype, fusion, order is not None)
        kernel = _kernel(k, x.dtype, fusion, order is not None, f"sm_{major}{minor}", device.index)
        tensors = (x, order, norm, codes, scale, total)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        parameters = struct.pack("<6Q2if4x", *pointers, m, k, epsilon)
        launch(kernel, m, source[2]["THREADS"], 0, parameters, device, overlap=major >= 9)
    return codes, scale, total


@quantize_activation.register_fake
def _(
    x: Tensor, order: Tensor | None, norm: Tensor | None, fusion: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    _require(x, order, norm, fusion)
    return _outputs(x, fusion)


@cache
def _kernel(k: int, dtype: torch.dtype, fusion: str, gather: bool, arch: str, device: int) -> Any:
    return load(
        cubin(*definition(k, dtype, fusion, gather), arch), "quantize_activation", 0, device
    )


def definition(
    k: int, dtype: torch.dtype, fusion: str, gather: bool
) -> tuple[str, str, dict[str, int]]:
    """Source name, prologue and macros of one kernel."""
    return "activation/quantize_activation", "", row_definition(k, dtype, fusion, gather)


def row_definition(k: int, dtype: torch.dtype, fusion: str, gather: bool) -> dict[str, int]:
    """Macros of csrc/activation/activation_row.cuh: a row's values stay in its block's registers, 8
    a piece.
    """
    threads = next(t for t in (128, 256, 512, 1024) if k <= 32 * t or t == 1024)
    pieces = -(-k // (8 * threads))
    defines = {"DTYPE": DTYPES[dtype], "FUSION": FUSIONS[fusion], "GATHER": int(gather)}
    return defines | {"THREADS": threads, "PIECES": pieces}


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row, on each architecture."""
    for arch, fusion, k in product(
        ("sm_80", "sm_89", "sm_90a"), FUSIONS, (64, 4096, MOST_CHANNELS)
    ):
        source = definition(k, torch.bfloat16, fusion, gather=True)
        yield Build(
            f"quantize_activation {fusion} K={k}", arch, source, source[2]["THREADS"], calls=True
        )


def _outputs(x: Tensor, fusion: str) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape[0], x.shape[1] // (2 if fusion == "silu-up" else 1)
    return (
        x.new_empty((m, k), dtype=torch.int8),
        x.new_empty((m,), dtype=torch.float32),
        x.new_empty((m,), dtype=torch.int32),
    )


def _require(x: Tensor, order: Tensor | None, norm: Tensor | None, fusion: str) -> None:
    if fusion not in FUSIONS:
        raise QtoolError(
            f"quantize_activation: unknown fusion {fusion!r}: {suggest(fusion, FUSIONS)}"
        )
    if x.dim() != 2:
        raise QtoolError(f"quantize_activation: x is {x.dim()}-D; expected [M, K]")
    m, width = x.shape
    k = width // (2 if fusion == "silu-up" else 1)
    if k % 8 or k == 0 or k > MOST_CHANNELS or (fusion == "silu-up" and width % 16):
        raise QtoolError(
            f"quantize_activation: K = {k}; expected a multiple of 8 up to {MOST_CHANNELS}"
        )
    expected: dict[str, Expected] = {
        "x": (x, (m, width), tuple(DTYPES)),
        "order": (order, None if order is None else (k,), (torch.int32,)),
        "norm": (norm, (k,) if fusion == "rms-norm" else None, (x.dtype,)),
    }
    require_tensors("quantize_activation", x.device, expected)
