"""Runs a native checkpoint as transformers runs its compressed-tensors export, to the bit.

The weights are the export's, in the model's dtype, multiplied by torch's linear. Activations of 8
bits are rounded as the compressed-tensors library does, in the model's dtype too. The specified
rule, which vLLM's kernels follow, takes ``max|x| / 127`` in float32 and adds integers instead:

    s = max|x| / 127.5        Q = clamp(rne(x / s), -128, 127)        x' = Q s

Keys and values of a calibrated kv8 cache are rounded to the export's fp8, with one scale for the
keys and one for the values of a block, but only where the library finds the cache: from
transformers 5.24 on it does not. If an export is loaded with
``CompressedTensorsConfig(dequantize=True)``, its weights are rounded to the dtype of its scales and
nothing else is quantized.
"""

from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool.errors import QtoolError
from qtool.exchange import export_formats
from qtool.exchange.export import all_params, keeps_kv_scales
from qtool.exchange.export_format import TOKEN_INT8, ExportFormat
from qtool.exchange.export_notes import not_loaded
from qtool.exchange.exportable import exported_formats
from qtool.exchange.formats.compressed_tensors import E4M3_MAX, CompressedTensors
from qtool.format import native_format
from qtool.io.model_directory import directory_of
from qtool.io.source import read_config
from qtool.models import family_of
from qtool.models.cache_argument import CACHE, OLDER
from qtool.models.experts import linear_of
from qtool.runtime.huggingface import quantized_linears
from qtool.runtime.kv_cache import unquantize_kv
from qtool.runtime.linear import QuantLinear
from qtool.runtime.load import load_as_stored
from qtool.runtime.packed_kv import SCALES

#: the formats that transformers runs with the compressed-tensors library
RUNS = (
    "compressed-tensors",
    "compressed-tensors-w4a16",
    "compressed-tensors-w8a8",
    "compressed-tensors-w4a8",
)


def load_as_export(
    model: str | PathLike[str],
    format: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    dequantize: bool = False,
) -> PreTrainedModel:
    """Load ``model`` as transformers runs its export in ``format``, in eval mode.

    It needs the memory of the 16-bit model and runs none of qtool's kernels.

    Args:
        model: a native checkpoint's directory or hub id.
        format: ``compressed-tensors``, or that with ``-w4a16``, ``-w8a8`` or ``-w4a8``.
        device: as in :func:`qtool.load`.
        dtype: as in :func:`qtool.load`; the result is that of transformers if it loads the export
            in the same dtype.
        dequantize: run as transformers does after a load with ``dequantize=True``, the only way in
            which it loads weights with zero points.

    Raises:
        QtoolError: ``model`` is not a native checkpoint; ``format`` is unknown, is not run by
            transformers, cannot hold this model, or holds linears that transformers does not load.
    """
    target, directory = require_runs(format), directory_of(model)
    config = read_config(directory)
    native = native_format(config)
    formats = exported_formats(target, native, config)
    if reasons := not_loaded(target, config, formats):
        raise QtoolError(reasons[0])
    dequantize |= target.has_zero_points(formats)
    if dequantize and not target.alike(formats):
        raise QtoolError(
            "transformers dequantizes all linears of an export by its first config group, and this"
            " one has several: load it without dequantize"
        )
    loaded = load_as_stored(directory, device=device, dtype=dtype)
    for name, linear in quantized_linears(loaded).items():
        loaded.set_submodule(name, _exported(linear, target, loaded.dtype, dequantize))
    if native.kv is not None:
        unquantize_kv(loaded)
    rounds_cache = CACHE == OLDER  # compressed-tensors 0.20 looks for a cache of this name alone
    family = family_of(config)
    keeps = keeps_kv_scales(target, native.kv, family, family.settings(config))
    if rounds_cache and not dequantize and keeps:
        for attention in [module for module in loaded.modules() if hasattr(module, SCALES[0])]:
            stored = target.kv_tensors(*(attention.get_buffer(scale) for scale in SCALES))
            scales = [scale.to(loaded.dtype) for scale in stored.values()]
            attention.register_forward_pre_hook(partial(_round_cache, scales), with_kwargs=True)
    return loaded


def require_runs(format: str) -> CompressedTensors:
    """The export format ``format``.

    Raises:
        QtoolError: the format is unknown, or transformers does not run it.
    """
    target = export_formats.get(format)
    if not isinstance(target, CompressedTensors) or format not in RUNS:
        raise QtoolError(
            f"transformers runs no {format} by itself; formats that it runs: {', '.join(RUNS)}"
        )
    return target


class LibraryLinear(nn.Linear):
    """A linear whose input is rounded to 8 bits as compressed-tensors does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(library_activation(x))


def library_activation(x: Tensor) -> Tensor:
    """``x [B, S, K]`` rounded to 8 bits per token by compressed-tensors' rule, in the dtype of x.

    The library gives an ``x [M, K]``, the input of OPT's MLP, one scale for all its tokens,
    whatever the export's config says.
    """
    scale = x.abs().amax((-1,) if x.dim() > 2 else (0, 1), keepdim=True) / 127.5
    scale = torch.where(scale == 0, 1, scale)
    return (x / scale).round().clamp(-128, 127) * scale


def _exported(
    linear: QuantLinear, target: ExportFormat, dtype: torch.dtype, dequantize: bool
) -> nn.Linear:
    """A linear with the weight that a loader reads from the export of ``linear``."""
    codes, params = linear.unpack()
    stored = target.tensors(linear.format, codes, all_params(linear, params))
    # loaded as a parameter
    scale = stored["weight_scale"] if dequantize else stored["weight_scale"].to(dtype)
    weight = target.weight(linear.format, stored | {"weight_scale": scale}, *codes.shape).to(
        scale.dtype
    )
    int8 = target.activations(linear.format.scheme) == TOKEN_INT8 and not dequantize
    return linear_of(weight.to(dtype), linear.bias, LibraryLinear if int8 else nn.Linear)


class _Fp8Cache:
    """Wraps a cache or None, and rounds the keys and values that enter the cache."""

    def __init__(self, cache: Any, scales: list[Tensor]) -> None:
        self.cache, self.scales = cache, scales

    def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> Any:
        """All keys and values so far, with the new ones ``[B, H, T, D]`` rounded."""
        rounded = map(_e4m3, (keys, values), self.scales)
        if self.cache is None:
            return tuple(rounded)
        return self.cache.update(*rounded, *more, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def _e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _round_cache(
    scales: list[Tensor], _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {CACHE: _Fp8Cache(kwargs.get(CACHE), scales)}
