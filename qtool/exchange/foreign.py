"""Reading foreign 4-bit checkpoints: GPTQ, AWQ, AutoRound and compressed-tensors linears as codes,
scales, zero points.

AutoRound stores GPTQ's or AWQ's tensors under a config of its own (``quant_method: auto-round``). A
checkpoint is described once from its ``quantization_config``; what our grid cannot hold (act order,
other widths, quantized activations) is refused there, with the reason. Zero points are data: the
caller looks at them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange import awq, compressed_tensors, gptq
from qtool.exchange.affine import Affine


@dataclass(frozen=True)
class SourceFormat:
    """How the linears of a foreign checkpoint are stored.

    Attributes:
        name: of the format. weight: the tensor that marks a quantized linear.
        parts: the tensors of a linear; the optional ones end with "?".
        zeros: the tensor of zero points. scales: of scales.
        transposed: scales are ``[G, N]``, not ``[N, G]``.
        read: the linear ``(tensors, n, k)``. read_zeros: its zero points alone ``(stored, n,
            groups)``.
    """

    name: str
    weight: str
    parts: tuple[str, ...]
    zeros: str
    scales: str
    transposed: bool
    read: Callable[[Mapping[str, Tensor], int, int], Affine]
    read_zeros: Callable[[Tensor, int, int], Tensor]


def describe(config: Mapping[str, Any]) -> SourceFormat:
    """The foreign format of config.json.

    Raises:
        QtoolError: not quantized, or in a way that cannot be repacked without quantizing anew.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise QtoolError(
            "the model is not quantized: config.json has no quantization_config; use qtool quantize"
        )
    method = quantization.get("quant_method")
    if method not in _DESCRIBE:
        hint = "; it is a native checkpoint already" if method == "qtool" else ""
        raise QtoolError(
            f"quant_method {method!r} cannot be imported; known: {', '.join(_DESCRIBE)}{hint}"
        )
    return _DESCRIBE[method](quantization)


def _gptq(config: Mapping[str, Any]) -> SourceFormat:
    _expect(config, "bits", 4, "GPTQ", "w4a16 is the only weight-only scheme")
    if not config.get("sym", True):
        raise QtoolError(
            "GPTQ with sym=false has zero points; w4a16 has none: quantize the original model"
        )
    if config.get("lm_head"):
        raise QtoolError(
            "the lm_head is quantized; qtool keeps it in 16 bit: quantize the original model"
        )
    if any(
        rule.startswith("+:") or settings
        for rule, settings in (config.get("dynamic") or {}).items()
    ):
        raise QtoolError(
            "GPTQ with per-module settings (dynamic) cannot be imported; only excluded modules can"
        )
    stored = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if stored not in gptq.ZERO_OFFSET:
        raise QtoolError(
            f"GPTQ checkpoint_format {stored!r} cannot be imported; known: {', '.join(gptq.ZERO_OFFSET)}"
        )
    return SourceFormat(
        f"GPTQ ({stored})",
        "qweight",
        ("qweight", "qzeros", "scales", "g_idx?"),
        "qzeros",
        "scales",
        True,
        lambda tensors, n, k: gptq.read(tensors, n, k, stored),
        lambda zeros, n, groups: gptq.read_zeros(zeros, n, groups, stored),
    )


def _awq(config: Mapping[str, Any]) -> SourceFormat:
    bits = config.get("bits", config.get("w_bit"))
    _expect({"bits": bits}, "bits", 4, "AWQ", "w4a16 is the only weight-only scheme")
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        raise QtoolError(f"AWQ version {version!r} cannot be imported; only 'gemm' can")
    return SourceFormat(
        "AWQ",
        "qweight",
        ("qweight", "qzeros", "scales"),
        "qzeros",
        "scales",
        True,
        awq.read,
        awq.read_zeros,
    )


def _auto_round(config: Mapping[str, Any]) -> SourceFormat:
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    _expect(
        {"data_type": config.get("data_type", "int")},
        "data_type",
        "int",
        "AutoRound",
        "only integers are read",
    )
    if int(config.get("act_bits") or 16) < 16:
        raise QtoolError(
            f"AutoRound with act_bits={config['act_bits']}: w4a16's activations are not quantized"
        )
    for name, settings in (config.get("extra_config") or {}).items():
        if int(settings.get("bits", 16)) < 16:
            raise QtoolError(
                f"AutoRound with settings of its own for {name} (extra_config) cannot be imported"
            )
    if packing not in AUTO_ROUND:
        raise QtoolError(
            f"AutoRound packing_format {packing!r} cannot be imported; known: {', '.join(AUTO_ROUND)}"
        )
    return replace(AUTO_ROUND[packing](config), name=f"AutoRound ({packing})")


def _compressed(config: Mapping[str, Any]) -> SourceFormat:
    groups = config.get("config_groups") or {}
    if not groups:
        raise QtoolError("compressed-tensors: config_groups is empty, no linear is quantized")
    for name, group in groups.items():
        weights = group.get("weights") or {}
        stored = group.get("format") or config.get("format")
        if (
            stored != compressed_tensors.PACKED
            or weights.get("num_bits") != 4
            or weights.get("type") != "int"
        ):
            raise QtoolError(
                f"compressed-tensors {name}: {stored} with {weights.get('num_bits')}-bit {weights.get('type')} weights "
                "cannot be imported; only pack-quantized 4-bit integers can"
            )
        if group.get("input_activations"):
            raise QtoolError(
                f"compressed-tensors {name}: its activations are quantized too, w4a16's are not"
            )
        if weights.get("actorder") == "group":
            raise QtoolError(
                f"compressed-tensors {name}: actorder group scatters a group's inputs: {_NEEDS_ORDER}"
            )
    if config.get("transform_config"):
        raise QtoolError(
            "compressed-tensors with a transform_config (online rotations) cannot be imported"
        )
    if config.get("kv_cache_scheme"):
        raise QtoolError(
            "compressed-tensors with a kv_cache_scheme cannot be imported: qtool has no fp8 KV cache"
        )
    return SourceFormat(
        "compressed-tensors",
        "weight_packed",
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point?", "weight_g_idx?"),
        "weight_zero_point",
        "weight_scale",
        False,
        compressed_tensors.read,
        compressed_tensors.read_zeros,
    )


_NEEDS_ORDER = "qtool's groups are consecutive inputs; quantize the original model"
#: packing_format -> whose tensors they are: zero points of auto_gptq are stored minus 1, the
#: others' as they are
AUTO_ROUND: dict[str, Callable[[Mapping[str, Any]], SourceFormat]] = {
    "auto_round:auto_gptq": _gptq,
    "auto_round:auto_awq": _awq,
    "auto_round:gptqmodel": lambda config: _gptq({**config, "checkpoint_format": "gptq_v2"}),
}
_DESCRIBE: dict[Any, Callable[[Mapping[str, Any]], SourceFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
}


def _expect(config: Mapping[str, Any], key: str, wanted: int | str, what: str, why: str) -> None:
    if config.get(key) != wanted:
        raise QtoolError(
            f"{what} with {key}={config.get(key)} cannot be imported, only {key}={wanted}: {why}"
        )


def require_consecutive(name: str, group_of: Tensor, groups: int) -> None:
    """Refuse a ``g_idx`` that is not ``k // g``: act order.

    Raises:
        QtoolError: naming the linear.
    """
    k = len(group_of)
    if k % groups or not bool(
        (group_of.long() == (group_of.new_tensor(range(k)).long() // (k // groups))).all()
    ):
        raise QtoolError(f"{name}: its columns were reordered (desc_act=true): {_NEEDS_ORDER}")


def is_quantized(foreign: SourceFormat, tensor: str) -> str | None:
    """The linear whose codes ``tensor`` holds; None if it holds none."""
    found = re.fullmatch(rf"(.+)\.{re.escape(foreign.weight)}", tensor)
    return found[1] if found else None
