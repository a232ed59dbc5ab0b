"""compressed-tensors: the format of vLLM, SGLang and transformers.

4-bit weights are ``pack-quantized``: ``weight_packed`` int32 ``[N, K / 8]``, nibble ``k % 8`` of
word ``k // 8`` holds ``q + 8``; ``weight_scale [N, G]``; ``weight_shape`` int64 ``[N, K]``; with
zero points ``weight_zero_point`` int32 ``[N / 8, G]``, nibble ``n % 8`` of word ``n // 8`` holds
``z + 8``. The nibble is our unsigned code, the order row-major, so codes and scales are copied.
8-bit weights and activations are ``int-quantized``: ``weight`` int8 ``[N, K]``, ``weight_scale [N,
1]``.

The same codes can run with several kinds of activations. Each kind is a format of its own, so that
a user always gets the arithmetic that was chosen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange.export_format import (
    SIXTEEN_BIT,
    TOKEN_INT8,
    VLLM_SERVE,
    ExportFormat,
    Formats,
    modules_in_16_bit,
    scheme_and_group,
)
from qtool.exchange.formats import gptq
from qtool.exchange.formats.affine import (
    ASYMMETRIC_4,
    INT_8,
    SYMMETRIC_4,
    W4A16_GROUP_SIZES,
    Affine,
    Form,
    asymmetric_4,
    int_8,
    symmetric_4,
)
from qtool.exchange.import_format import Config, ImportFormat
from qtool.format import LinearFormat
from qtool.io.dequantize.compressed_tensors import transforms_online
from qtool.layouts.row_major import ROW_MAJOR
from qtool.models.joined import joined
from qtool.schemes import Params

PACKED, INT = "pack-quantized", "int-quantized"
TOKEN_FP8 = "fp8 per token"
PER_TOKEN = {"symmetric": True, "strategy": "token", "dynamic": True}
#: ``input_activations`` of a config group, by kind of activations
ACTIVATIONS: dict[str, dict[str, Any] | None] = {
    SIXTEEN_BIT: None,
    TOKEN_INT8: {"num_bits": 8, "type": "int"} | PER_TOKEN,
    TOKEN_FP8: {"num_bits": 8, "type": "float"} | PER_TOKEN,
}
FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
E4M3_MAX = 448.0
#: models whose initialization in transformers reads weights, which packed linears lack
INITIALIZED_BY_WEIGHT = {
    *("falcon", "falcon_mamba", "gpt_bigcode", "mamba", "mamba2", "modernbert-decoder"),
    *("nanochat", "recurrent_gemma", "rwkv", "xlstm"),
}
#: in the names of a mixture's routed experts
EXPERT = r"\.experts\.\d+\."


@dataclass(frozen=True)
class CompressedFormat:
    """How a scheme is stored: the form of its weights, its group sizes and its activations."""

    form: Form
    group_sizes: tuple[int | None, ...]
    activations: str

    @property
    def format(self) -> str:
        return INT if self.form is int_8 else PACKED


class CompressedTensors(ExportFormat):
    """One kind of compressed-tensors checkpoint: a :class:`CompressedFormat` by scheme."""

    next_step = VLLM_SERVE
    tile = (1, 8)
    uniform = False
    any_architecture = True
    splits_experts = True
    read_by_transformers = True

    def __init__(self, name: str, about: str, of_scheme: Mapping[str, CompressedFormat]) -> None:
        self.name, self.about, self.of_scheme = name, about, of_scheme
        self.expressible = {scheme: found.group_sizes for scheme, found in of_scheme.items()}

    def tile_of(self, scheme: str) -> tuple[int, int]:
        rows, columns = self.tile
        return (max(rows, 8) if self.of_scheme[scheme].form is asymmetric_4 else rows), columns

    def takes_gathered(self, found: LinearFormat) -> bool:
        return found.group_size is None or self.of_scheme[found.scheme].form is int_8

    def activations(self, scheme: str) -> str:
        return self.of_scheme[scheme].activations

    def refuses_experts(self, found: LinearFormat) -> str:
        stored = self.of_scheme[found.scheme]
        only_cpu = stored.format == PACKED and stored.activations == TOKEN_INT8
        return "vLLM runs 4-bit experts under int8 activations on CPUs only" if only_cpu else ""

    def not_loaded(self, config: Mapping[str, Any], formats: Formats) -> list[str]:
        found = []
        if len(_expert_kinds(formats)) > 1:
            found.append("experts: transformers loads them in one scheme and group size alone")
        elif (what := self._dequantized(config, formats)) and not self.alike(formats):
            found.append(
                f"transformers cannot load {what} beside linears of another scheme or group size"
            )
        experts = {self.of_scheme[kind[0]].form for kind in _expert_kinds(formats) if kind}
        return found + [
            f"experts: transformers cannot load them {how}; serve this export with vLLM"
            for form, how in ((int_8, "in 8 bits"), (asymmetric_4, "with zero points"))
            if form in experts
        ]

    def loads_with(self, config: Mapping[str, Any], formats: Formats) -> str:
        what = self._dequantized(config, formats)
        told = "with CompressedTensorsConfig(dequantize=True) only"
        return f"transformers loads {what} {told}" if what else ""

    def _dequantized(self, config: Mapping[str, Any], formats: Formats) -> str:
        """What transformers loads with ``dequantize=True`` alone, which needs one config group."""
        packed = any(self.of_scheme[one.scheme].format == PACKED for one in _quantized(formats))
        if packed and config["model_type"] in INITIALIZED_BY_WEIGHT:
            return f"packed linears of {config['model_type']} models"
        return "zero points" if self.has_zero_points(formats) else ""

    def has_zero_points(self, formats: Formats) -> bool:
        """Whether a linear is stored with zero points."""
        return any(self.of_scheme[one.scheme].form is asymmetric_4 for one in _quantized(formats))

    def alike(self, formats: Formats) -> bool:
        """Whether one config group describes all linears.

        With ``dequantize=True``, transformers dequantizes all linears by the first group.
        """
        groups = [self._group(found, []) for found in _quantized(formats)]
        return all(group == groups[0] for group in groups)

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        return write(self.of_scheme[linear_format.scheme].form(linear_format, codes, params))

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        return read(tensors, n, k).weight()

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        kinds = {scheme_and_group(found): found for found in formats.values() if found is not None}
        groups = {}
        for index, (kind, one) in enumerate(kinds.items()):
            named = [name for name, found in formats.items() if scheme_and_group(found) == kind]
            targets = [*named, *joined(named)] if len(kinds) > 1 else ["Linear"]
            if len(kinds) > 1 and _expert_kinds(formats) == {kind}:
                targets.append(f"re:.*{EXPERT}")  # by which transformers finds the experts' group
            groups[f"group_{index}"] = self._group(one, targets)
        used = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": used.pop() if len(used) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ["lm_head", *modules_in_16_bit(formats)],
            "kv_cache_scheme": FP8_KV if kv == "kv8" else None,
            "config_groups": groups,
        }

    def _group(self, kind: LinearFormat, targets: list[str]) -> dict[str, Any]:
        stored = self.of_scheme[kind.scheme]
        weights: dict[str, Any] = {
            "num_bits": 8 if stored.form is int_8 else 4,
            "type": "int",
            "symmetric": stored.form is not asymmetric_4,
            "dynamic": False,
        }
        if kind.group_size is None or stored.form is int_8:
            weights["strategy"] = "channel"
        else:
            weights |= {"strategy": "group", "group_size": kind.group_size}
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": ACTIVATIONS[stored.activations],
            "output_activations": None,
            "format": stored.format,
        }

    def kv_tensors(self, k_scale: Tensor, v_scale: Tensor) -> dict[str, Tensor]:
        """One fp8 scale a tensor: the calibrated maximum, 127 steps of kv8's, becomes 448."""
        to_fp8 = 127 / E4M3_MAX
        return {
            "k_scale": k_scale.max().reshape(1) * to_fp8,
            "v_scale": v_scale.max().reshape(1) * to_fp8,
        }


class W4A8Fp8(CompressedTensors):
    """4-bit groups of 128 under fp8 activations, which CUTLASS loads as fp8 weights (Hopper)."""

    tile = (128, 128)

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        """The weight that vLLM multiplies: fp8 codes times scales that are fp8 within a channel."""
        affine = read(tensors, n, k)
        scale = affine.scale.float()
        channel = scale.abs().amax(1, keepdim=True) / E4M3_MAX
        group = _e4m3(_e4m3(scale / channel) / 8)  # [N, G], of the channel scale times 8
        steps = affine.codes.unflatten(1, (scale.shape[1], -1)).float() - 8
        return _e4m3(steps * group[..., None]).mul_(8 * channel[..., None]).flatten(1)


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _quantized(formats: Formats) -> list[LinearFormat]:
    return [found for found in formats.values() if found]


def _expert_kinds(formats: Formats) -> set[tuple[str, int | None] | None]:
    """The schemes and group sizes of routed experts, None among them for 16 bits."""
    return {scheme_and_group(found) for name, found in formats.items() if re.search(EXPERT, name)}


def write(affine: Affine) -> dict[str, Tensor]:
    """The stored tensors of a weight."""
    if affine.codes.dtype == torch.int8:
        return {"weight": affine.codes, "weight_scale": affine.scale}
    tensors = {
        "weight_packed": ROW_MAJOR.pack(affine.codes)["qweight"].view(torch.int32),
        "weight_scale": affine.scale.contiguous(),
        "weight_shape": torch.tensor(
            affine.codes.shape, dtype=torch.int64, device=affine.codes.device
        ),
    }
    if affine.zero is not None:  # [N, G] as GPTQ packs a [K, N] weight, K being our N
        tensors["weight_zero_point"] = gptq.WORDS.pack(affine.zero.t().contiguous())["qweight"]
    return tensors


def read(tensors: Mapping[str, Tensor], n: int, k: int) -> Affine:
    """Inverse of :func:`write`."""
    scale = tensors["weight_scale"]
    if "weight" in tensors:
        return Affine(tensors["weight"], scale.reshape(n, 1))
    packed = tensors["weight_packed"].contiguous().view(torch.uint8)
    codes = ROW_MAJOR.unpack({"qweight": packed}, n, k, signed=False)
    if "weight_zero_point" not in tensors:
        return Affine(codes, scale)
    return Affine(codes, scale, read_zeros(tensors["weight_zero_point"], n, scale.shape[1]))


def read_zeros(stored: Tensor, n: int, groups: int) -> Tensor:
    """The zero points ``[n, groups]``, uint8."""
    return gptq.WORDS.unpack({"qweight": stored}, groups, n, signed=False).t().contiguous()


def _formats(
    schemes: Mapping[str, tuple[int | None, ...]], activations: str, form: Form | None = None
) -> dict[str, CompressedFormat]:
    """All schemes in ``form``, by default symmetric where possible."""
    default = {scheme: symmetric_4 if scheme in SYMMETRIC_4 else asymmetric_4 for scheme in schemes}
    return {
        scheme: CompressedFormat(form or default[scheme], sizes, activations)
        for scheme, sizes in schemes.items()
    }


COMPRESSED_TENSORS = (
    CompressedTensors(
        "compressed-tensors",
        "w4a16 and w8a8 as they are: vLLM, SGLang, transformers",
        {
            "w4a16": CompressedFormat(symmetric_4, W4A16_GROUP_SIZES, SIXTEEN_BIT),
            "w4a16-24": CompressedFormat(symmetric_4, W4A16_GROUP_SIZES, SIXTEEN_BIT),
            "w8a8": CompressedFormat(int_8, (None,), TOKEN_INT8),
        },
    ),
    CompressedTensors(
        "compressed-tensors-w4a16",
        "any 4-bit weights on one level, 16-bit activations: vLLM, SGLang, transformers",
        _formats(ASYMMETRIC_4, SIXTEEN_BIT),
    ),
    CompressedTensors(
        "compressed-tensors-w8a8",
        "w8a8, or the int8 weights inside w4a8-lqq and w4a8-qoq-g128 (twice the bytes): vLLM, "
        "SGLang, transformers",
        _formats(INT_8, TOKEN_INT8, int_8),
    ),
    CompressedTensors(
        "compressed-tensors-w4a8",
        "4-bit weights under int8 activations: vLLM with its Humming kernels",
        _formats(ASYMMETRIC_4, TOKEN_INT8),
    ),
    W4A8Fp8(
        "compressed-tensors-w4a8-fp8",
        "symmetric 4-bit weights in groups of 128 under fp8 activations: vLLM on Hopper",
        _formats({scheme: (128,) for scheme in SYMMETRIC_4}, TOKEN_FP8),
    ),
)


def import_format(config: Config) -> ImportFormat:
    """The format of a 4-bit weight-only compressed-tensors checkpoint's linears.

    Raises:
        QtoolError: another width, quantized activations, online rotations or a quantized cache.
    """
    groups = config.get("config_groups") or {}
    if not groups:
        raise QtoolError("compressed-tensors: config_groups is empty, no linear is quantized")
    for name, group in groups.items():
        weights = group.get("weights") or {}
        stored = group.get("format") or config.get("format")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if weights and (stored != PACKED or bits != 4 or kind != "int"):
            raise QtoolError(
                f"compressed-tensors {name}: {stored} with {bits}-bit {kind} weights cannot be "
                f"imported; only pack-quantized 4-bit integers can"
            )
        if group.get("input_activations") or group.get("output_activations"):
            raise QtoolError(
                f"compressed-tensors {name}: its activations are quantized, w4a16's are not"
            )
    if transforms_online(config):
        raise QtoolError(
            "compressed-tensors with a transform_config (online rotations) cannot be imported"
        )
    if config.get("kv_cache_scheme"):
        raise QtoolError(
            "compressed-tensors with a kv_cache_scheme cannot be imported: qtool has no fp8 KV "
            "cache"
        )
    return ImportFormat(
        "compressed-tensors",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        transposed=False,
        words=lambda n, k: (n, k // 8),
        read=read,
        read_zeros=read_zeros,
        always_zeros=False,
        other=("weight_shape",),
    )
