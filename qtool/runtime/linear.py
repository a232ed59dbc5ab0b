"""A linear layer that runs its packed weight: the bytes of the checkpoint are its only weight."""

from collections.abc import Callable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qtool.format import LinearFormat
from qtool.models.auto import running
from qtool.runtime.deterministic import bit_exact
from qtool.runtime.dispatch import Call, Kernel, kernel_for
from qtool.schemes.arithmetic.activation import UNQUANTIZED
from qtool.schemes.arithmetic.online_hadamard import rotate

if TYPE_CHECKING:
    from qtool.kernels.hopper.prepared import PreparedLinear
    from qtool.runtime.merge import MergedLinears


def keep_dtypes(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Undo a cast of buffers that hold stored tensors; they stay on the device they were moved to.

    Args:
        stored: the buffers of ``module`` before it was cast, by name.
    """
    for name, tensor in stored.items():
        if (moved := module.get_buffer(name)).dtype != tensor.dtype:
            setattr(module, name, tensor.to(moved.device))


Prepared = tuple["PreparedLinear | None", tuple[Tensor | None, ...]]


class QuantLinear(nn.Module):
    """``y = x W^T + bias`` by the scheme's own arithmetic, such as int8 x int8 with int32 sums.

    Args:
        in_features: K.
        out_features: N.
        format: scheme, layout and scale dtype of the stored tensors.
        bias: whether there is a bias.
        permuted: whether the input is gathered first.
        dtype: dtype of bias and output.
    """

    bias: Tensor | None
    permutation: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: LinearFormat,
        *,
        bias: bool,
        permuted: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = in_features, out_features, format
        self.reads_floats = format.scheme_object.input_quantizer == UNQUANTIZED
        self.stored_names = []
        for name, spec in format.tensors(out_features, in_features).items():
            self.register_buffer(name, torch.empty(spec.shape, dtype=spec.dtype, device=device))
            self.stored_names.append(name)
        order = torch.empty(in_features, dtype=torch.int32, device=device) if permuted else None
        self.register_buffer("permutation", order)
        self.register_buffer(
            "bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None
        )
        #: the weight and epsilon of an RMSNorm that the kernel computes too
        self.norm: tuple[Tensor, float] | None = None
        #: the linears that read the same input, if they are multiplied as one
        self.merged: MergedLinears | None = None
        self._kernels: dict[tuple[torch.device, torch.dtype], Kernel | None] = {}
        #: prepared launches and the buffers they are for, by dtypes of input and output
        self._prepared: dict[tuple[torch.dtype, torch.dtype], Prepared] = {}

    def stored(self) -> dict[str, Tensor]:
        """The packed tensors, by the names they have in the checkpoint."""
        return {name: getattr(self, name) for name in self.stored_names}

    def unpack(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Codes ``[N, K]`` and scheme parameters."""
        return self.format.unpack(self.stored(), self.out_features, self.in_features)

    @torch.compiler.disable  # bit arithmetic on views, which torch's compiler gets wrong
    def dequantize(self) -> Tensor:
        """The float32 weight ``[N, K]``, for inputs in the model's order.

        Rotation and permutation are undone.
        """
        return self.weight_of(*self.unpack())

    def weight_of(self, codes: Tensor, params: dict[str, Tensor]) -> Tensor:
        """:meth:`dequantize` of what :meth:`unpack` returned."""
        weight = self.format.scheme_object.dequantize(codes, params)
        if self.format.rotated:
            weight = rotate(weight)
        if self.permutation is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.permutation.long(), weight)
        return weight

    def kernel(self, device: torch.device, dtype: torch.dtype) -> Kernel | None:
        """The kernel for inputs of ``dtype`` on ``device``; None is the scheme's reference."""
        key = device, dtype
        if key not in self._kernels:
            shape = (self.out_features, self.in_features)
            self._kernels[key] = kernel_for(self.format, *shape, device, dtype)
        return self._kernels[key]

    def bfloat16_kernel(self) -> Kernel | None:
        """The kernel for bfloat16 inputs on the weight's device."""
        return self.kernel(self.get_buffer("qweight").device, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_floats and not torch.compiler.is_compiling() and is_in_torch_dispatch_mode():
            return self.plain(x)  # a kernel's sums would depend on the device
        if self.merged is not None and self.merged.serves(self, x):
            return self.merged.product(self, x)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """``[..., N]`` for ``x [..., K]``, by this linear alone."""
        if x.is_cuda and (prepared := self.prepared(x, x.dtype)):
            return prepared(x)
        kernel = self.kernel(x.device, x.dtype)
        if kernel is None and self.reads_floats:
            return self.plain(x)
        rows = x.reshape(-1, self.in_features)  # [M, K]
        if kernel is None:
            with torch.autocast(x.device.type, enabled=False):  # would round the integers' sums
                y = self.reference(rows)
        else:
            y = self.multiply(rows, kernel, x.dtype)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def prepared(self, x: Tensor, out_dtype: torch.dtype) -> "PreparedLinear | None":
        """An object that launches the kernels for ``x [..., K]`` without the operator, or None.

        None while operators are recorded.
        """
        if torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_contiguous():
            return None
        key = x.dtype, out_dtype
        prepared, buffers = self._prepared.get(key, (None, ()))
        if not all(map(is_, buffers, self._buffers.values())) or not buffers:
            kernel, prepared = self.kernel(x.device, x.dtype), None
            if kernel is not None and kernel.prepare is not None:
                with running(fails=f"prepare of the kernel {kernel.name} fails"):
                    prepared = kernel.prepare(self._call(x, out_dtype))
            self._prepared[key] = prepared, tuple(self._buffers.values())
        return prepared

    def plain(self, x: Tensor) -> Tensor:
        """``[..., N]`` for ``x [..., K]`` unquantized, by torch's linear.

        The weight is rounded to ``x``'s dtype. The result equals that of transformers for an export
        to the last bit.
        """
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.dequantize().to(x.dtype), bias)

    def multiply(self, x: Tensor, kernel: Kernel, out_dtype: torch.dtype) -> Tensor:
        """``[M, N]`` of ``out_dtype`` for ``x [M, K]`` by ``kernel``.

        An exact kernel gives its bare sums as int32.
        """
        x = x.contiguous()
        if x.is_cuda and (prepared := self.prepared(x, out_dtype)):
            return prepared(x)
        with running(fails=f"the kernel {kernel.name} fails"):
            return kernel.multiply(self._call(x, out_dtype))

    def _call(self, x: Tensor, out_dtype: torch.dtype) -> Call:
        how = (self.format, out_dtype, *(self.norm or (None, 0.0)))
        return Call(x, self.permutation, self.stored(), self.bias, *how)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        stored = self.stored()
        super()._apply(fn, recurse)
        keep_dtypes(self, stored)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy, without launches that were prepared for these tensors."""
        return self.__dict__ | {"_prepared": {}, "merged": None}

    @torch.compiler.disable
    @torch.no_grad()
    @bit_exact
    def reference(self, x: Tensor) -> Tensor:
        """``[M, N]`` float32 for ``x [M, K]`` by the scheme's reference arithmetic."""
        codes, params = self.unpack()
        scheme = self.format.scheme_object
        with running(fails=f"matmul of the scheme {scheme.name} fails"):  # one of another package
            return scheme.matmul(self.arranged(x), codes, params, self.bias)

    def arranged(self, x: Tensor) -> Tensor:
        """``x [..., K]`` as the stored columns need it: gathered, then rotated (to float32)."""
        if self.permutation is not None:
            x = x[..., self.permutation.long()]
        return rotate(x) if self.format.rotated else x

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} -> {self.out_features}, {self.format.scheme}, {self.format.layout}"
        )
