"""A packed linear as a layer of an engine; vLLM and SGLang call the same methods of it.

An engine asks a layer's method to make parameters, loads weights into them, lets the method process
them and calls it for each forward. The parameters are of the engine's own classes, which cut out
what a rank holds of each linear; plain ones replace them before the first token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.io.finite import require_finite
from qtool.runtime.dispatch import Call, Kernel
from qtool.serving.kernel import Gemm, compile_kernels, serving_kernel
from qtool.serving.partition import Axes, axes, require_shares


@dataclass(frozen=True)
class ParameterTypes:
    """An engine's parameter classes, by how ranks and joined linears share a stored tensor.

    ``row`` is cut along the input channels, ``channel`` along the output channels, ``packed`` along
    both; ``one_per_linear`` holds a tensor of each joined linear.
    """

    row: Callable[..., Any]
    channel: Callable[..., Any]
    packed: Callable[..., Any]
    one_per_linear: Callable[..., Any]


class PackedLinear:
    """One packed linear, or several that the engine joined.

    Args:
        name: the engine's name of the layer.
        names: the checkpoint's names of the linears that it joins.
        permuted: whether each has an input permutation.

    Attributes:
        pieces: for each GEMM, the names of the layer's attributes by stored name; there is one GEMM
            unless the joined linears gather or quantize their input differently.
    """

    types: ClassVar[ParameterTypes]
    kernel: Kernel
    pieces: list[dict[str, str]]

    def __init__(
        self, name: str, linear_format: LinearFormat, names: list[str], permuted: bool
    ) -> None:
        self.name, self.format, self.names, self.permuted = name, linear_format, names, permuted

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., None],
        **extra: Any,
    ) -> None:
        k, n = input_size_per_partition, sum(output_partition_sizes)
        self.outputs, self.dtype = list(output_partition_sizes), params_dtype
        with torch.device("cpu"):  # where a cut of the input channels is tried
            require_shares(
                self.name,
                self.format,
                tuple(self.outputs),
                k,
                input_size // k,
                permuted=self.permuted,
            )
            self.axes, stored = axes(self.format, n, k), self.format.tensors(n, k)
        self.kernel = serving_kernel(self.name, self.format, n, k, params_dtype)
        if self.permuted:
            stored["permutation"] = torch.empty(k, dtype=torch.int32, device="meta")
            self.axes = self.axes | {"permutation": Axes(None, 0, Fraction(1))}
        self._require_one_part_each()
        for name, spec in stored.items():
            layer.register_parameter(
                name, self._parameter(name, spec, TrackedLoader(weight_loader))
            )

    def _require_one_part_each(self) -> None:
        """Refuse tensors of whole linears in a layer that the engine loads in other parts."""
        alone = [name for name, axis in self.axes.items() if axis.output is None]
        if alone and 1 < len(self.names) != len(self.outputs):
            raise QtoolError(
                f"{self.name}: its {alone[0]} is stored for each of {len(self.names)} linears, and "
                f"the engine loads them in {len(self.outputs)} parts: leave them in 16 bits"
            )

    def _parameter(self, name: str, spec: Tensor, loader: "TrackedLoader") -> Any:
        """The parameter; the engine narrows it to this rank's share of each linear."""
        axis, data = self.axes[name], torch.empty(spec.shape, dtype=spec.dtype)
        if axis.output is None and len(self.names) > 1:
            return self.types.one_per_linear(
                data=data.expand(len(self.names), -1).clone(), input_dim=1, weight_loader=loader
            )
        if axis.output is None:
            return self.types.row(data=data, input_dim=axis.input, weight_loader=loader)
        if axis.input is None and axis.per_output == 1:
            return self.types.channel(data=data, output_dim=axis.output, weight_loader=loader)
        return self.types.packed(
            data=data,
            output_dim=axis.output,
            input_dim=axis.input,
            packed_dim=axis.output,
            packed_factor=axis.per_output,
            weight_loader=loader,
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that everything was loaded, leave plain parameters, compile the kernels.

        Raises:
            QtoolError: for a tensor that the checkpoint did not have, or a scale of NaN or Inf.
        """
        stored, parts = {}, len(self.outputs) if len(self.names) > 1 else 1
        for name in self.axes:
            parameter = getattr(layer, name)
            parameter.weight_loader.require(f"{self.name}.{name}", parts)
            stored[name] = parameter.data
            if stored[name].is_floating_point():
                require_finite(f"{self.name}.{name}", stored[name])
            delattr(layer, name)
        self.pieces = []
        for number, tensors in enumerate(self._split(stored)):
            self.pieces.append({name: f"{name}_{number}" if number else name for name in tensors})
            for name, tensor in tensors.items():
                layer.register_parameter(
                    self.pieces[-1][name], nn.Parameter(tensor, requires_grad=False)
                )
        key = (self.format, *self.outputs, len(self.pieces), self.permuted)
        device = stored["qweight"].device
        compile_kernels(key, partial(self.apply, layer), _inputs(layer), device, self.dtype)

    def _split(self, stored: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each GEMM; one serves linears that gather and quantize alike."""
        if len(self.names) == 1:
            return [stored]
        own = [name for name, axis in self.axes.items() if axis.output is None]  # [linears, ...]
        if all(torch.equal(stored[name], stored[name][:1].expand_as(stored[name])) for name in own):
            return [stored | {name: stored[name][0] for name in own}]
        pieces: list[dict[str, Tensor]] = [{} for _ in self.outputs]
        for name, tensor in stored.items():
            axis = self.axes[name]
            if axis.output is None:
                parts = tensor.unbind()
            else:
                sizes = [int(rows / axis.per_output) for rows in self.outputs]
                parts = tensor.split(sizes, axis.output)
            for piece, part in zip(pieces, parts, strict=True):
                piece[name] = part.contiguous()
        return pieces

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[..., N]`` for ``x [..., K]``: an op that quantizes the tokens, and the GEMM."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # x may be a slice of wider rows
        if len(self.pieces) == 1:
            y = self._multiply(layer, self.pieces[0], rows, bias)
        else:
            ends = list(accumulate(self.outputs, initial=0))
            biases = [None if bias is None else bias[a:b] for a, b in pairwise(ends)]
            pairs = zip(self.pieces, biases, strict=True)
            y = torch.cat([self._multiply(layer, piece, rows, part) for piece, part in pairs], -1)
        return y.view(*x.shape[:-1], y.shape[-1])

    def gemms(self, layer: Any) -> Iterator[Gemm]:
        """The layer's products, for a check of them."""
        multiply = partial(self.apply, layer, bias=layer.bias)
        what = self.name, self.names, _inputs(layer), self.dtype
        yield Gemm(*what, multiply, self.kernel, len(self.pieces))

    def _multiply(
        self, layer: nn.Module, piece: dict[str, str], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        tensors = {name: getattr(layer, attribute) for name, attribute in piece.items()}
        permutation = tensors.pop("permutation", None)
        return self.kernel.multiply(Call(x, permutation, tensors, bias, self.format, x.dtype))


def _inputs(layer: Any) -> int:
    """Input channels on this rank; a replicated layer has all of them."""
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


class OnePerLinear:
    """A parameter ``[linears, ...]`` with a tensor of each joined linear, the same on all ranks.

    It is a base class beside an engine's parameter class.
    """

    data: Tensor

    def load_merged_column_weight(
        self, loaded_weight: Tensor, *, shard_id: int | str, **kwargs: Any
    ) -> None:
        linear = "qkv".index(shard_id) if isinstance(shard_id, str) else shard_id
        self.data[linear].copy_(loaded_weight)

    load_qkv_weight = load_merged_column_weight


class TrackedLoader:
    """A weight loader that knows which parts of a layer it has loaded.

    vLLM does not check that a quantized model was loaded whole.
    """

    def __init__(self, loader: Callable[..., None]) -> None:
        self.loader, self.shards = loader, set[Any]()

    def __call__(
        self, parameter: Tensor, loaded_weight: Tensor, *shard: Any, **options: Any
    ) -> None:
        self.loader(parameter, loaded_weight, *shard, **options)
        last = shard[-1] if shard else options.get("loaded_shard_id")
        self.shards.update(last if isinstance(last, tuple) else (last,))

    def require(self, name: str, parts: int) -> None:
        """Refuse a tensor that the checkpoint lacks for some of the layer's parts, or for all."""
        if None not in self.shards and len(self.shards) < parts:
            raise QtoolError(
                f"{name}: {len(self.shards)} of {parts} tensors were loaded; the checkpoint "
                "lacks the rest"
            )
