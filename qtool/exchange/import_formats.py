"""The quantized formats that can be imported, by ``quant_method``, and advice on other formats."""

from collections.abc import Callable, Mapping
from typing import Any

from qtool.errors import QtoolError
from qtool.exchange.formats import auto_round, awq, compressed_tensors, gptq
from qtool.exchange.import_format import INSTEAD, Config, ImportFormat

IMPORT_FORMATS: dict[str, Callable[[Config], ImportFormat]] = {
    "gptq": gptq.import_format,
    "awq": awq.import_format,
    "auto-round": auto_round.import_format,
    "compressed-tensors": compressed_tensors.import_format,
}


def import_format_of(config: Mapping[str, Any]) -> ImportFormat:
    """The foreign format of config.json.

    Raises:
        QtoolError: the model is not quantized, or importing it would mean quantizing it again.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise QtoolError(
            "the model is not quantized: config.json has no quantization_config; use qtool quantize"
        )
    method = quantization.get("quant_method")
    if method == "qtool":
        raise QtoolError(
            f"the model is a qtool checkpoint already, in {quantization.get('scheme')}: to quantize"
            " it otherwise pass the original model"
        )
    if str(method) not in IMPORT_FORMATS:
        raise QtoolError(
            f"quant_method {method!r} cannot be imported; known: {', '.join(IMPORT_FORMATS)};"
            f" {INSTEAD}"
        )
    try:
        return IMPORT_FORMATS[str(method)](quantization)
    except QtoolError as error:
        raise QtoolError(f"{error}; {INSTEAD}") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise QtoolError(f"quantization_config is damaged: {error!r}; {INSTEAD}") from error


def already_quantized(config: Mapping[str, Any]) -> str:
    """The reason why a quantized model cannot be quantized, and what to do instead."""
    quantization = config["quantization_config"]
    method = quantization.get("quant_method")
    found = f"the model is quantized already (quant_method {method!r})"
    try:
        known = import_format_of(config)
    except QtoolError as error:
        if method == "qtool":
            return str(error)
        return f"{found}: {error}"
    return f"{found}: pass the original checkpoint, or repack this {known.name} with `qtool import`"
