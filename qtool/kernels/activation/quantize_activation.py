"""``qtool::quantize_activation``: per-token s8 codes, scales and code sums of an input.

    sx[m] = max_k |y[m, k]| / 127 (a row of zeros: 1)
    code = rne(y / sx)      sum[m] = sum_k code[m, k]

``y`` is x, or what the model computes just before the linear, fused: ``RMSNorm(x) * norm`` or
``SiLU(gate) * up``; then gathered by ``order``. A fused y is rounded to x's dtype where the unfused
model rounds it. It may then be rotated, in float32
(:mod:`qtool.schemes.arithmetic.online_hadamard`).
"""

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from qtool.errors import QtoolError, suggest
from qtool.kernels.allocate import new_empty
from qtool.kernels.build import ARCHS, Build, Source, cubin
from qtool.kernels.checks import Expected, optional, require_aligned, require_tensors
from qtool.kernels.dtypes import FLOATS, NUMBERS
from qtool.kernels.launch import compute_capability, launch, load, pointers, require_ampere
from qtool.kernels.op import Launch, operator
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.arithmetic.online_hadamard import SPAN, rotate

#: what the op fuses
FUSIONS = ("none", "rms-norm", "silu-up")
#: number in csrc/activation/activation_row.cuh; the last is :mod:`~.quantize_residual_norm`'s
ROW_SOURCES = {"none": 0, "rms-norm": 1, "silu-up": 2, "residual-norm": 3}
#: the most channels that the following GEMMs take, and the most that a block holds in registers; of
#: longer rows some values lie in local memory
MOST_CHANNELS, IN_REGISTERS = 65536, 32768
#: on Hopper the blocks of a cluster share a row of more channels: up to so many tokens, how many
#: blocks (measured on an H200)
WIDE = 4096
CLUSTERS = ((32, 8), (128, 2))
#: of the kernels in csrc/activation: x, residual, their sum, other inputs, the outputs, M, K,
#: epsilon
PARAMETERS = struct.Struct("<8Q2if4x")


class QuantizeActivation(NamedTuple):
    """Codes int8 ``[M, K]``, scales float32 ``[M]`` and sums of the codes int32 ``[M]``.

    Args:
        x: ``[M, K]``, float32, float16 or bfloat16; ``silu-up``: ``[M, 2 K]``, the gate's outputs,
            then up's.
        order: int32 ``[K]``, the input channel of each code (a stored permutation), or ``None``.
        norm: RMSNorm's weight ``[K]`` in x's dtype, for ``rms-norm``.
        epsilon: RMSNorm's.
        fusion: ``none``, ``rms-norm`` or ``silu-up``.
        rotated: rotate y before it is quantized; K must then be a multiple of 64.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """

    x: Tensor
    order: Tensor | None
    norm: Tensor | None
    fusion: str
    epsilon: float
    rotated: bool = False

    @property
    def k(self) -> int:
        """Input channels of the linear."""
        return self.x.shape[1] // (2 if self.fusion == "silu-up" else 1)

    def require(self, op: str = "quantize_activation", step: int = 8) -> None:
        """Refuse an unknown fusion, tensors that do not fit, and a K that ``step`` does not divide.

        Messages begin with the name ``op``.
        """
        step = max(step, SPAN if self.rotated else 8)
        x, order, norm, fusion = self.x, self.order, self.norm, self.fusion
        if fusion not in FUSIONS:
            raise QtoolError(f"{op}: unknown fusion {fusion!r}: {suggest(fusion, FUSIONS)}")
        if x.dim() != 2:
            raise QtoolError(f"{op}: x is {x.dim()}-D; expected [M, K]")
        k, odd = self.k, fusion == "silu-up" and x.shape[1] % 2
        if k % step or k == 0 or k > MOST_CHANNELS or odd:
            raise QtoolError(f"{op}: K = {k}; expected a multiple of {step} up to {MOST_CHANNELS}")
        expected: dict[str, Expected] = {
            "x": (x, tuple(x.shape), FLOATS),
            "order": optional(order, (k,), (torch.int32,)),
            "norm": (norm, (k,) if fusion == "rms-norm" else None, (x.dtype,)),
        }
        require_tensors(op, x.device, expected)
        if norm is not None and order is None:  # eight weights are read at once
            require_aligned(op, "norm", norm)

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        x, m = self.x, self.x.shape[0]
        return (
            new_empty(x, (m, self.k), torch.int8),
            new_empty(x, (m,), torch.float32),
            new_empty(x, (m,), torch.int32),
        )

    def read(self) -> Tensor:
        """y ``[M, K]`` in x's dtype, as the unfused model computes it, before it is rotated."""
        y = self.x
        if self.fusion == "rms-norm":
            assert self.norm is not None
            y = rms_norm(y.float(), self.norm, self.epsilon)
        elif self.fusion == "silu-up":
            gate, up = y.chunk(2, dim=-1)
            y = silu(gate) * up
        return y if self.order is None else y[:, self.order.long()]

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        y = self.read()
        codes, scale = PER_TOKEN_S8.quantize(rotate(y) if self.rotated else y)
        return codes, scale[:, 0].contiguous(), codes.sum(1, dtype=torch.int32)

    def plan(self) -> Launch:
        order, device = self.order, self.x.device
        how = (self.fusion, order is not None, self.rotated)
        sources = definitions(self.k, self.x.dtype, *how, device)
        rows = RowPlan(sources, (order, self.norm), self.k, self.epsilon, device)

        def launch(call: QuantizeActivation, out: tuple[Tensor, Tensor, Tensor]) -> None:
            rows.launch(call.x.shape[0], *pointers(call.x, *out))

        return launch


quantize_activation = operator("quantize_activation", QuantizeActivation, rows=("x",))


def rms_norm(wide: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of float32 rows ``[M, K]`` in the dtype of its weight ``norm``.

    The normalized row is rounded, then the product: as transformers' Llama and vLLM's
    ``forward_native`` do.
    """
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return norm * (wide * inverse).to(norm.dtype)


class RowPlan:
    """The launch for the inputs of one linear; only tokens and addresses differ between calls.

    The tensors are not kept: they have to live as long as the plan.

    Args:
        sources: pairs of a number of tokens and the kernel for up to so many; the last takes any
            number.
        tensors: inputs beside the tokens: order and norm, then the map of 8-bit groups if there is
            one.
    """

    def __init__(
        self,
        sources: Sequence[tuple[float, Source]],
        tensors: tuple[Tensor | None, ...],
        k: int,
        epsilon: float,
        device: torch.device,
    ) -> None:
        self.device = device
        arch, self.overlap = require_ampere(_entry(sources[0][1][0]), device)
        #: for each kernel: most tokens, handle, blocks per row, threads per block
        self.kernels: list[tuple[float, int, int, int]] = []
        for most, (name, _, defines) in sources:
            kernel = _kernel(name, tuple(defines.items()), arch, device.index)
            self.kernels.append((most, kernel, defines["CLUSTER"], defines["THREADS"]))
        self.addresses, self.k, self.epsilon = pointers(*tensors), k, epsilon

    def launch(
        self, m: int, x: int, *out: int, residual: tuple[int, ...] = (0, 0), more: bytes = b""
    ) -> None:
        """Start the kernel for ``m`` tokens at address ``x``, with outputs at addresses ``out``.

        ``residual``: the addresses of a residual stream and of its sum with x, or zeros.
        ``more``: parameters of this kernel beyond the common ones.
        """
        if m:
            numbers = (m, self.k, self.epsilon)
            parameters = PARAMETERS.pack(x, *residual, *self.addresses, *out, *numbers) + more
            kernel, blocks, threads = next(own for most, *own in self.kernels if m <= most)
            launch(kernel, m * blocks, threads, 0, parameters, self.device, overlap=self.overlap)


def _entry(source: str) -> str:
    """The kernel in a source file: it has the file's name."""
    return source.rpartition("/")[2]


@cache
def _kernel(source: str, defines: tuple[tuple[str, int], ...], arch: str, device: int) -> int:
    return load(cubin(source, "", dict(defines), arch), _entry(source), 0, device)


def definitions(
    k: int, dtype: torch.dtype, fusion: str, gather: bool, rotated: bool, device: torch.device
) -> list[tuple[float, Source]]:
    """The kernels for ``device``, each up to so many tokens."""
    shared = CLUSTERS if k > WIDE and compute_capability(device) == (9, 0) else ()
    clusters = (*shared, (inf, 1))
    how = (fusion, gather, rotated)
    return [(most, definition(k, dtype, *how, cluster)) for most, cluster in clusters]


def definition(
    k: int, dtype: torch.dtype, fusion: str, gather: bool, rotated: bool = False, cluster: int = 1
) -> Source:
    """Source name, prologue and macros of one kernel."""
    how = (fusion, gather, rotated, cluster)
    return "activation/quantize_activation", "", row_definition(k, dtype, *how)


def row_definition(
    k: int, dtype: torch.dtype, fusion: str, gather: bool, rotated: bool = False, cluster: int = 1
) -> dict[str, int]:
    """Macros of csrc/activation/activation_row.cuh: ``cluster`` blocks hold a row in registers."""
    # few rows take the time of one thread's values; many rows need several blocks per
    # multiprocessor
    part = -(-k // cluster)
    threads = next((t for t in (128, 256, 512) if part <= 8 * t), 512 if part <= 32 * 512 else 1024)
    pieces = -(-part // (8 * threads))
    defines = {"DTYPE": NUMBERS[dtype], "FUSION": ROW_SOURCES[fusion]}
    defines |= {"GATHER": int(gather), "ROTATE": int(rotated)}
    return defines | {"THREADS": threads, "PIECES": pieces, "CLUSTER": cluster}


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row, rotated and not, on each architecture.

    On Hopper by clusters too.
    """
    both = (False, True)
    cases = [(*case, 1) for case in product(ARCHS, FUSIONS, (64, 4096, IN_REGISTERS), both)]
    sizes = [cluster for _, cluster in CLUSTERS]
    cases += product(("sm_90a",), FUSIONS, (WIDE + SPAN, IN_REGISTERS), both, sizes)
    for arch, fusion, k, rotated, cluster in cases:
        source = definition(k, torch.bfloat16, fusion, True, rotated, cluster)
        name = f"quantize_activation {fusion} K={k}" + " rotated" * rotated
        name += f" cluster={cluster}" * (cluster > 1)
        yield Build(name, arch, source, source[2]["THREADS"], calls=True)
