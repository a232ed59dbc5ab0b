"""The choice of the kernel that multiplies a packed linear on a GPU.

Without a kernel the scheme's reference runs, or torch's linear if activations have 16 bits.

A kernel reads the stored bytes as they are; nothing is repacked at load. The module of a kernel is
imported by its first call, so never on a CPU. A new kernel is added to :data:`KERNELS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.kernels.dtypes import FLOATS, HALF
from qtool.runtime.packed_linears import PackedLinears
from qtool.schemes.arithmetic.online_hadamard import rotate

if TYPE_CHECKING:
    from qtool.kernels.hopper.gemm import Operand, Weight
    from qtool.kernels.hopper.prepared import PreparedLinear


@dataclass(frozen=True)
class Call:
    """One multiplication of a packed linear.

    ``x [M, K]`` is contiguous. ``permutation [K]``, if not None, gathers its channels, which are
    then rotated if ``format.rotated``. ``norm [K]``, if not None, and ``epsilon`` are the weight
    and the epsilon of an RMSNorm of ``x`` that is computed along with it.
    """

    x: Tensor
    permutation: Tensor | None
    stored: Mapping[str, Tensor]
    bias: Tensor | None
    format: LinearFormat
    out_dtype: torch.dtype
    norm: Tensor | None = None
    epsilon: float = 0.0


@dataclass(frozen=True)
class ExpertsCall:
    """One multiplication by the packed linears of E experts, each of its own tokens.

    ``x``, ``place``, ``expert_offsets`` and ``fusion`` give the tokens of each expert, as in
    :class:`~qtool.kernels.experts.rows.ExpertRows`. Each tensor of ``stored`` is a stack
    ``[E, J, ...]`` of J linears per expert, whose outputs follow one another.
    """

    x: Tensor
    place: Tensor | None
    expert_offsets: Tensor
    fusion: str
    stored: Mapping[str, Tensor]
    format: LinearFormat
    out_dtype: torch.dtype


@dataclass(frozen=True)
class Kernel:
    """A GEMM on a packed weight, its activation quantization included.

    Attributes:
        name: its name in reports.
        precision: how it multiplies and adds, for reports.
        capabilities: compute capabilities ``(major, minor)`` of the GPUs it runs on.
        multiply: gives ``[M, N]`` of ``out_dtype`` by torch operators, which can be traced.
        prepare: gives an object that multiplies like ``multiply``, without torch's dispatcher, for
            CUDA tensors of the dtype and device of the call's ``x``. None: there is only
            ``multiply``.
        experts: gives ``[P, N]`` for the experts of a mixture in one launch. None: ``multiply``
            runs once for each expert.
        n: N must be a multiple of it.
        k: K must be a multiple of it.
        dtypes: dtypes of x that it takes; all of :data:`FLOATS` are possible as ``out_dtype``.
        exact: ``out_dtype=torch.int32`` gives the bare integer sums, equal to the reference's.
        tolerance: relative distance (Frobenius) of float32 outputs from the scheme's float64
            arithmetic.
    """

    name: str
    precision: str
    capabilities: frozenset[tuple[int, int]]
    multiply: Callable[[Call], Tensor]
    n: int = 64
    k: int = 64
    dtypes: tuple[torch.dtype, ...] = FLOATS
    exact: bool = True
    tolerance: float = 1e-5
    prepare: "Callable[[Call], PreparedLinear] | None" = None
    experts: Callable[[ExpertsCall], Tensor] | None = None

    def accepts(self, n: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
        """Whether a weight ``[n, k]`` and inputs of ``dtype`` can run on ``capability``."""
        return (
            capability in self.capabilities
            and dtype in self.dtypes
            and n % self.n == 0
            and k % self.k == 0
        )


def _quantized(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    from qtool.kernels.activation.quantize_activation import quantize_activation

    fusion = "none" if call.norm is None else "rms-norm"
    how = (fusion, call.epsilon, call.format.rotated)
    return quantize_activation(call.x, call.permutation, call.norm, *how)


def _w4a8(call: Call) -> Tensor:
    from qtool.kernels.hopper.w4a8 import w4a8_gemm
    from qtool.kernels.mma.w4a8 import w4a8_mma_gemm

    gemm = w4a8_mma_gemm if call.format.layout == "compute-aware" else w4a8_gemm
    codes, scale, token_sum = _quantized(call)
    qweight, s1, s2, offset, zero = _w4a8_tensors(call.stored)
    how = (call.format.scheme, call.format.group_size, call.out_dtype)
    return gemm(codes, scale, qweight, s1, s2, offset, zero, token_sum, call.bias, *how)


def _w4a8_experts(call: ExpertsCall) -> Tensor:
    from qtool.kernels.experts.w4a8 import w4a8_experts_gemm

    codes, scale, token_sum = _quantized_rows(call)
    tensors = _w4a8_tensors(_by_rows(call))
    how = (call.format.scheme, call.format.group_size, call.out_dtype)
    return w4a8_experts_gemm(codes, scale, call.expert_offsets, *tensors, token_sum, *how)


def _quantized_rows(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor]:
    from qtool.kernels.experts.quantize import quantize_expert_rows

    return quantize_expert_rows(*_rows(call))


def _rows(call: ExpertsCall) -> tuple[Tensor, Tensor | None, Tensor, str, bool]:
    """The arguments of the operator that quantizes or copies the tokens."""
    return call.x, call.place, call.expert_offsets, call.fusion, call.format.rotated


def _by_rows(call: ExpertsCall) -> dict[str, Tensor]:
    """The stored tensors as ``[E, ...]``, the J linears of an expert joined along their rows."""
    return {name: tensor.flatten(1, 2) for name, tensor in call.stored.items()}


def _w4a8_tensors(
    stored: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """qweight, s1, s2, offset and zero."""
    s2, offset, zero = (stored.get(name) for name in ("s2", "offset", "zero"))
    return stored["qweight"], stored["s1"], s2, offset, zero


def _w4a8_prepared(call: Call) -> "PreparedLinear":
    from qtool.kernels.hopper.w4a8 import operand, packed_weight

    weight = packed_weight(call.format.scheme, *_w4a8_tensors(call.stored))
    kernel = operand(call.format.scheme, call.format.group_size)
    return _prepared(kernel, weight, call)


def _w8a8(call: Call) -> Tensor:
    from qtool.kernels.hopper.w8a8 import w8a8_gemm

    codes, scale, _ = _quantized(call)
    qweight = call.stored["qweight"].view(torch.int8)
    return w8a8_gemm(codes, scale, qweight, call.stored["scale"][:, 0], call.bias, call.out_dtype)


def _w8a8_experts(call: ExpertsCall) -> Tensor:
    from qtool.kernels.experts.w8a8 import w8a8_experts_gemm

    codes, token_scale, _ = _quantized_rows(call)
    stored = _by_rows(call)
    weight, scale = stored["qweight"].view(torch.int8), stored["scale"][..., 0]
    return w8a8_experts_gemm(codes, token_scale, call.expert_offsets, weight, scale, call.out_dtype)


def _w8a8_prepared(call: Call) -> "PreparedLinear":
    from qtool.kernels.hopper.gemm import Weight
    from qtool.kernels.hopper.w8a8 import OPERAND

    codes = call.stored["qweight"].view(torch.int8)
    return _prepared(OPERAND, Weight(call.stored["scale"][:, 0], boxed=codes), call)


def _prepared(operand: "Operand", weight: "Weight", call: Call) -> "PreparedLinear":
    from qtool.kernels.hopper.prepared import PreparedLinear

    shape = (len(weight.scale1), call.x.shape[-1])
    dtypes = (call.x.dtype, call.out_dtype)
    norm = (call.norm, call.epsilon)
    order, rotated = call.permutation, call.format.rotated
    return PreparedLinear(operand, weight, call.bias, order, norm, shape, *dtypes, rotated=rotated)


def _w4ax(call: Call) -> Tensor:
    from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
    from qtool.kernels.hopper.w4ax import w4ax_gemm

    codes, scale = quantize_activation_groups(*_groups(call))
    qweight, weight_scale = call.stored["qweight"], call.stored["scale"]
    how = (call.format.layout, call.format.group_size, call.out_dtype)
    return w4ax_gemm(codes, scale, qweight, weight_scale, call.bias, *how)


def _w4ax_mma(call: Call) -> Tensor:
    from qtool.kernels.activation.quantize_packed_groups import quantize_packed_groups
    from qtool.kernels.mma.w4ax import w4ax_mma_gemm

    codes, scale = quantize_packed_groups(*_groups(call))
    qweight, weight_scale = call.stored["qweight"], call.stored["scale"]
    how = (call.bias, call.format.layout, call.format.group_size, call.out_dtype)
    return w4ax_mma_gemm(codes, scale, qweight, weight_scale, call.stored.get("eight_bit"), *how)


def _groups(
    call: Call,
) -> tuple[Tensor, Tensor | None, None, Tensor | None, str, float, int | None, str, bool]:
    """The arguments of the operators that quantize tokens in groups for s4 weights."""
    x, blocks, own = call.x, call.stored.get("eight_bit"), call.format
    how = ("none", 0.0, own.group_size, own.layout, own.rotated)
    return x, call.permutation, None, blocks, *how


def _w4a16(call: Call) -> Tensor:
    from qtool.kernels.mma.w4a16 import w4a16_24_gemm, w4a16_gemm

    x = call.x if call.permutation is None else call.x[:, call.permutation.long()]
    if call.format.rotated:
        x = rotate(x).to(x.dtype)  # the kernel takes only 16 bits
    qweight, scale = call.stored["qweight"], call.stored["scale"]
    if "metadata" in call.stored:
        return w4a16_24_gemm(x, qweight, call.stored["metadata"], scale, call.bias, call.out_dtype)
    return w4a16_gemm(x, qweight, scale, call.bias, call.out_dtype)


def _w4a16_experts(call: ExpertsCall) -> Tensor:
    from qtool.kernels.experts.gather import gather_expert_rows
    from qtool.kernels.experts.w4a16 import w4a16_experts_gemm

    offsets, qweight, scale = call.expert_offsets, call.stored["qweight"], call.stored["scale"]
    x = gather_expert_rows(*_rows(call))
    return w4a16_experts_gemm(x, offsets, qweight, scale, call.out_dtype)


HOPPER = frozenset({(9, 0)})
AMPERE_AND_ADA = frozenset({(8, 0), (8, 6), (8, 9)})
#: Blackwell has neither Hopper's wgmma nor s4 tensor cores
BLACKWELL = frozenset({(10, 0), (10, 3), (12, 0), (12, 1)})
ALL_GPUS = AMPERE_AND_ADA | HOPPER | BLACKWELL
S8 = "int8 x int8 wgmma, int32 sums"
W4A8 = Kernel("w4a8_gemm", S8, HOPPER, _w4a8, prepare=_w4a8_prepared, experts=_w4a8_experts)
W8A8 = Kernel("w8a8_gemm", S8, HOPPER, _w8a8, prepare=_w8a8_prepared, experts=_w8a8_experts)
W4AX = Kernel("w4ax_gemm", "int4 as int8 x int8 wgmma, int32 sums by group", HOPPER, _w4ax)
W4A8_MMA = Kernel("w4a8_mma_gemm", "int8 x int8 mma, int32 sums", ALL_GPUS, _w4a8, 32, 32)
W4AX_MMA = Kernel(
    "w4ax_mma_gemm",
    "int4 x int4 and int8 mma, int32 sums by group",
    AMPERE_AND_ADA,
    _w4ax_mma,
    8,
    32,
)
HALF_MMA = "int4 x 16-bit mma, exact products, float32 sums scaled by group"
HALF_ROUNDED = "weights of groups rounded to 16 bits above 32 tokens"
W4A16 = Kernel("w4a16_gemm", HALF_MMA, ALL_GPUS, _w4a16, k=128, dtypes=HALF, exact=False)
W4A16_HOPPER = replace(
    W4A16,
    precision=f"{HALF_MMA}; {HALF_ROUNDED}",
    capabilities=HOPPER,
    experts=_w4a16_experts,
)
W4A16_24 = Kernel(
    "w4a16_24_gemm",
    f"2:4 sparse {HALF_MMA}; on Hopper {HALF_ROUNDED}",
    ALL_GPUS,
    _w4a16,
    128,
    128,
    HALF,
    exact=False,
)

#: kernels by scheme and layout; the first one that accepts the weight and the GPU is used
KERNELS: dict[tuple[str, str], tuple[Kernel, ...]] = {
    ("w4a8-lqq", "dual-mma"): (W4A8,),
    ("w4a8-qoq", "dual-mma"): (W4A8,),
    ("w4a8-qoq-g128", "dual-mma"): (W4A8,),
    ("w4a8-lqq", "compute-aware"): (W4A8_MMA,),
    ("w4a8-qoq", "compute-aware"): (W4A8_MMA,),
    ("w4a8-qoq-g128", "compute-aware"): (W4A8_MMA,),
    ("w8a8", "row-major-8"): (W8A8,),
    ("w4a16", "marlin"): (W4A16_HOPPER, W4A16),
    ("w4a16-24", "marlin-24"): (W4A16_24,),
    ("w4a4", "apex4"): (W4AX, W4AX_MMA),
    ("w4a4", "w4ax-interleaved"): (W4AX, W4AX_MMA),
    ("w4ax-fmpq", "apex4"): (W4AX, W4AX_MMA),
    ("w4ax-fmpq", "w4ax-interleaved"): (W4AX, W4AX_MMA),
}


def not_served(linears: PackedLinears) -> dict[str, str]:
    """The entry of qtool.json that says why no engine can serve a checkpoint; empty if one can."""
    formats = [rule.format for rule in linears.format.rules if rule.format]
    found = [f"{f.scheme} in {f.layout}" for f in formats if not KERNELS.get((f.scheme, f.layout))]
    if found:
        return {"not served": f"qtool has no kernel for {', '.join(dict.fromkeys(found))}"}
    try:
        linears.require_joined()
    except QtoolError as error:
        return {"not served": str(error)}
    return {}


def serving_notes(linears: PackedLinears) -> list[str]:
    """A sentence that says why vLLM cannot serve a checkpoint; none if it can."""
    return [f"vLLM cannot serve it: {reason}" for reason in not_served(linears).values()]


def kernel_for(
    linear_format: LinearFormat, n: int, k: int, device: torch.device, dtype: torch.dtype
) -> Kernel | None:
    """The kernel for a weight ``[n, k]`` and inputs of ``dtype`` on ``device``, or None."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    kernels = KERNELS.get((linear_format.scheme, linear_format.layout), ())
    return next((kernel for kernel in kernels if kernel.accepts(n, k, dtype, capability)), None)
