"""The protocol of an export format: pure functions from codes to another loader's tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtool.errors import CheckFailed, QtoolError
from qtool.format import LinearFormat
from qtool.models.architecture import dtype_name
from qtool.models.joined import joined
from qtool.schemes import Params
from qtool.units import group_size_text

#: the format of each linear by full name; None if it stays in 16 bits
Formats = Mapping[str, LinearFormat | None]
#: kinds of activations
SIXTEEN_BIT, TOKEN_INT8 = "16-bit", "int8 per token"
#: the ``next_step`` of formats that vLLM serves
VLLM_SERVE = "vllm serve DIR"


class ExportFormat(ABC):
    """One format of one family of serving stacks.

    A format states which schemes and shapes it holds, its tensors (:meth:`tensors`), the weight
    that a loader reads from them (:meth:`weight`) and its entry in config.json. An export compares
    this weight with the native one for every linear and reports the difference.
    """

    #: the name of the format on the command line
    name: str
    #: one line of help
    about: str
    #: scheme -> group sizes (None: per channel) the format can express
    expressible: Mapping[str, tuple[int | None, ...]]
    #: N and K of a linear (of one tensor-parallel rank) are multiples of these two
    tile: tuple[int, int]
    #: the command that serves an export in ``DIR``, or what else runs it; "": none is named
    next_step: str = ""
    #: all linears of the model must have the same scheme and group size
    uniform: ClassVar[bool] = True
    #: a linear may stay in 16 bits
    leaves_16_bit: ClassVar[bool] = True
    #: the dtype of the whole model if the format's kernels know only one; else None
    dtype: ClassVar[torch.dtype | None] = None
    #: the format's loaders take every architecture, linear by linear
    any_architecture: ClassVar[bool] = False
    #: vLLM loads single experts in this format although the model is published with them stacked
    splits_experts: ClassVar[bool] = False
    #: transformers itself loads the format: it looks modules up by its own names, and it drops
    #: 16-bit weights if it converts the weights of the model
    read_by_transformers: ClassVar[bool] = False
    #: the export is one file, written by :mod:`qtool.exchange.gguf.write`
    one_file: ClassVar[bool] = False
    #: the loader can split linears over several GPUs
    tensor_parallel: ClassVar[bool] = True
    #: a file beside config.json in which the loaders want ``quantization_config`` too; "": none
    config_copy: ClassVar[str] = ""

    def require_model(self, config: Mapping[str, Any]) -> None:  # noqa: B027  (most take all)
        """Refuse, before any work, a model that the format's loaders would run in another way.

        Raises:
            QtoolError: names the setting that the loaders do not know.
        """

    def require(self, name: str, found: LinearFormat, n: int, k: int) -> None:
        """Refuse, before any work, a linear whose shape ``[n, k]`` (on one rank) does not fit.

        Raises:
            QtoolError: names the linear, its shape and the shapes that are accepted.
        """
        rows, columns = self.tile_of(found.scheme)
        if n % rows or k % columns or k % (found.group_size or 1):
            sizes = {"N": rows, "K": max(columns, found.group_size or 1)}
            needed = [f"{side} a multiple of {size}" for side, size in sizes.items() if size > 1]
            raise QtoolError(
                f"{name}: {self.name} needs a weight [N, K] with {' and '.join(needed)}, "
                f"found [{n}, {k}]"
            )

    def tile_of(self, scheme: str) -> tuple[int, int]:
        """The tile for ``scheme``: :attr:`tile`, unless the format overrides this method."""
        return self.tile

    def refuses_experts(self, found: LinearFormat) -> str:
        """The reason why loaders cannot run routed experts in this format; empty if they can."""
        return ""

    def not_loaded(self, config: Mapping[str, Any], formats: Formats) -> list[str]:
        """A sentence for each reason why transformers does not load such linears of a model."""
        return []

    def loads_with(self, config: Mapping[str, Any], formats: Formats) -> str:
        """What transformers must be told to load such linears of a model; empty if nothing."""
        return ""

    def takes_gathered(self, found: LinearFormat) -> bool:
        """Whether a permuted linear can be put back in order: if it has one scale a channel."""
        return found.group_size is None

    def activations(self, scheme: str) -> str:
        """The activations under which a loader runs the weights of ``scheme``.

        A text such as :data:`TOKEN_INT8`; an export notes where :func:`native_activations` differs.
        """
        return SIXTEEN_BIT

    @abstractmethod
    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        """The tensors of one linear, by their name after the module path. Runs on ``meta`` too.

        ``params`` holds the scheme's parameters, and a ``permutation`` int ``[K]`` if the linear
        gathers its input.
        """

    @abstractmethod
    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        """The float32 weight ``[n, k]`` that a loader of ``tensors`` computes with.

        ``tensors`` are written after this, so they stay as they are.
        """

    @abstractmethod
    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        """The ``quantization_config`` of config.json; a format None is a linear in 16 bits."""

    def kv_tensors(self, k_scale: Tensor, v_scale: Tensor) -> dict[str, Tensor]:
        """The attention tensors for kv8's scales ``[H, D]``; none if the format has none."""
        return {}


class Float16Format(ExportFormat):
    """A format of kernels for float16 alone: dense models of which every linear is quantized."""

    leaves_16_bit = False
    dtype = torch.float16

    def refuses_experts(self, found: LinearFormat) -> str:
        return "its loaders know no mixture of experts"


def file_group_size(group_size: int | None) -> int:
    """A group size as GPTQ, AWQ, Marlin, QQQ and QServe write it: -1 for the whole channel."""
    return -1 if group_size is None else group_size


def native_activations(linear_format: LinearFormat) -> str:
    """The activations of qtool's own kernels, in the words of :meth:`ExportFormat.activations`."""
    kind = linear_format.scheme_object.activation
    if kind.bits == 16:
        return SIXTEEN_BIT
    group = f" and group of {kind.group_size}" if kind.group_size else ""
    return f"int{kind.bits} per token{group}"


def one_format(formats: Formats) -> LinearFormat:
    """The native format that all linears share under a uniform export format."""
    return next(found for found in formats.values() if found is not None)


def scheme_and_group(found: LinearFormat | None) -> tuple[str, int | None] | None:
    """Scheme and group size of a linear; a foreign file shows nothing else of its format."""
    return (found.scheme, found.group_size) if found else None


def modules_in_16_bit(formats: Formats) -> list[str]:
    """Names of the linears that are not quantized, and of the modules that engines join them in.

    vLLM asks for each linear of such a module, SGLang for the module alone (in compressed-tensors
    where the model's class does not say what it joins).
    """
    plain = [name for name, found in formats.items() if found is None]
    experts = [f"{name.partition('.experts.')[0]}.experts" for name in plain if ".experts." in name]
    return list(dict.fromkeys([*plain, *joined(plain), *experts]))


def as_dtype(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """``tensor`` rounded to ``dtype``.

    Raises:
        CheckFailed: a value does not fit.
    """
    cast = tensor.to(dtype)
    if not cast.is_meta and (lost := int((~torch.isfinite(cast)).sum())):
        raise CheckFailed(f"{what}: values that do not fit {dtype_name(dtype)}: {lost}")
    return cast


def float16_scale(scale: Tensor) -> Tensor:
    """A scale rounded to float16, where none may vanish.

    Raises:
        CheckFailed: a scale overflowed or became zero.
    """
    cast = as_dtype(scale, torch.float16, "scales")
    if not cast.is_meta and (lost := int((cast == 0).sum())):
        raise CheckFailed(f"scales: {lost} are too small for float16")
    return cast


def scale_in_16_bits(scale: Tensor) -> Tensor:
    """A scale in 16 bits: as it is if it has them, else in float16."""
    return scale if scale.dtype.itemsize == 2 else float16_scale(scale)


def fused_shards_agree(formats: Formats, fused: Sequence[str]) -> None:
    """Refuse linears that run as one (q, k, v; gate, up; experts) but are stored differently.

    Raises:
        QtoolError: naming two that differ.
    """
    first = formats[fused[0]]
    for name in fused[1:]:
        if scheme_and_group(formats[name]) != scheme_and_group(first):
            raise QtoolError(
                f"{name} is {_described(formats[name])}, {fused[0]} is {_described(first)}: "
                "serving stacks run the two as one linear, so they must be stored alike; use one "
                "rule for both in the recipe"
            )


def _described(found: LinearFormat | None) -> str:
    if found is None:
        return "in 16 bits"
    return f"{found.scheme} with group size {group_size_text(found.group_size)}"
