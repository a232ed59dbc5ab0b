"""Reads checkpoints published in a floating-point format of fewer than 16 bits as plain models.

There is one file for each format, named after its ``quant_method``, which says which tensors make a
weight. A weight is computed when it is read, so that a :class:`~qtool.io.source.Checkpoint` has the
names, shapes and 16-bit dtype of the original model. Integer codes are not dequantized:
:mod:`qtool.exchange` imports them unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from qtool.errors import QtoolError
from qtool.io.dequantize import compressed_tensors, fp8, mxfp4
from qtool.io.dequantize.published import Config, FloatFormat
from qtool.io.safetensors import Entry
from qtool.models.architecture import DTYPES, named_dtype

FORMATS: dict[str, Callable[[Config], FloatFormat | None]] = {
    "fp8": fp8.published,
    "mxfp4": mxfp4.published,
    "compressed-tensors": compressed_tensors.published,
}


def published(config: Mapping[str, Any]) -> FloatFormat | None:
    """The format of the weights of a config.json; None if no format here dequantizes them.

    Raises:
        QtoolError: a known format has unknown settings.
    """
    quantization = config.get("quantization_config") or {}
    if (describe := FORMATS.get(str(quantization.get("quant_method")))) is None:
        return None
    try:
        return describe(quantization)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise QtoolError(f"quantization_config is damaged: {error!r}") from error


def dequantized(
    entries: Mapping[str, Entry], found: FloatFormat, config: Mapping[str, Any]
) -> dict[str, Entry]:
    """The tensors of the plain model: weights for codes and scales, in the dtype of ``config``.

    The dtype is bfloat16 if ``config`` names none.

    Raises:
        QtoolError: codes or scales that do not belong together.
    """
    dtype = DTYPES.get(named_dtype(config), torch.bfloat16)
    weights = {name: found.weight(name, entries, dtype) for name in entries}
    used = {part for weight in weights.values() if weight for part in weight.stored}
    plain = {}
    for name, entry in entries.items():
        if weight := weights[name]:
            if weight.name in entries and weight.name != name:
                raise QtoolError(
                    f"both {weight.name} and its codes {name} are there; one is expected"
                )
            plain[weight.name] = weight.entry
        elif name in used or name.endswith(found.unread):
            continue
        elif name.endswith(found.scales):
            raise QtoolError(f"{name}: these scales belong to no weight in {found.about}")
        else:
            plain[name] = entry
    return plain
