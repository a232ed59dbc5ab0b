"""The quantized formats that can be imported, by ``quant_method``, and advice on others."""

from collections.abc import Callable, Mapping
from typing import Any

from qtool.errors import QtoolError
from qtool.exchange.formats import auto_round, awq, compressed_tensors, gptq
from qtool.exchange.source_format import INSTEAD, Config, SourceFormat

SOURCES: dict[str, Callable[[Config], SourceFormat]] = {
    "gptq": gptq.source_format,
    "awq": awq.source_format,
    "auto-round": auto_round.source_format,
    "compressed-tensors": compressed_tensors.source_format,
}


def describe(config: Mapping[str, Any]) -> SourceFormat:
    """The foreign format of config.json.

    Raises:
        QtoolError: not quantized, or so that it cannot be imported without quantizing anew.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise QtoolError(
            "the model is not quantized: config.json has no quantization_config; use qtool quantize"
        )
    method = quantization.get("quant_method")
    if method == "qtool":
        raise QtoolError("quant_method 'qtool': it is a native checkpoint already")
    if method not in SOURCES:
        raise QtoolError(
            f"quant_method {method!r} cannot be imported; known: {', '.join(SOURCES)}; {INSTEAD}"
        )
    return SOURCES[method](quantization)


def already_quantized(config: Mapping[str, Any]) -> str:
    """Why a quantized model cannot be quantized, and how to go on."""
    quantization = config["quantization_config"]
    method = quantization.get("quant_method")
    found = f"the model is quantized already (quant_method {method!r})"
    try:
        described = describe(config)
    except QtoolError as error:
        return f"{found}: pass the original checkpoint ({error})"
    return (
        f"{found}: pass the original checkpoint, or repack this {described.name} with "
        "`qtool import`"
    )
