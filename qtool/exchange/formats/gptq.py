"""GPTQ checkpoints: symmetric 4-bit weights, columns in their own order (``desc_act=false``).

Per linear, ``w[n, k] = (c - z) * s`` with groups ``j = k // g``:

    qweight int32 [K / 8, N]   nibble k % 8 of word k // 8 holds c
    qzeros  int32 [G, N / 8]   nibble n % 8 of word n // 8 holds z (checkpoint_format gptq_v2);
                               gptq stores these words minus 0x11111111
    scales  16-bit [G, N]      g_idx int32 [K], k // g

In an export z is 8 throughout, so ``gptq`` stores 0x77777777 and ``gptq_v2`` 0x88888888. Codes and
scales are copied, so weights are exact. Readers: vLLM, SGLang, GPTQModel, transformers (with
gptqmodel). An imported file may have any z, and any ``g_idx`` with g channels a group if it has
``desc_act=true``.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange.export_format import (
    VLLM_SERVE,
    ExportFormat,
    Formats,
    file_group_size,
    modules_in_16_bit,
    one_format,
    scale_in_16_bits,
)
from qtool.exchange.formats.affine import SYMMETRIC_4, Affine, symmetric_4
from qtool.exchange.import_format import Config, ImportFormat, require_setting
from qtool.format import LinearFormat
from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.row_major import ROW_MAJOR
from qtool.schemes import Params

#: [N, K] -> int32 [K / 8, N], eight inputs a word
WORDS = DigitLayout(
    name="gptq", n="n", k="kw byte:4 half:2", order="kw, n byte", nibble="half", dtype=torch.int32
)
#: number to add to a stored zero point, by checkpoint_format
ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


class Gptq(ExportFormat):
    """``gptq`` (v1) or ``gptq-v2``."""

    expressible = SYMMETRIC_4
    tile = (8, 8)
    next_step = VLLM_SERVE
    any_architecture = True
    config_copy = "quantize_config.json"

    def __init__(self, name: str, checkpoint_format: str, about: str) -> None:
        self.name, self.checkpoint_format, self.about = name, checkpoint_format, about

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        affine = symmetric_4(linear_format, codes, params)
        (n, k), groups = codes.shape, affine.scale.shape[1]
        zeros = 0x11 * (8 - ZERO_OFFSET[self.checkpoint_format])  # two in a byte
        stored = torch.full((groups, n // 2), zeros, dtype=torch.uint8, device=codes.device)
        return {
            "qweight": WORDS.pack(affine.codes)["qweight"],
            "qzeros": stored.view(torch.int32),
            "scales": scale_in_16_bits(affine.scale).t().contiguous(),
            "g_idx": torch.arange(k, dtype=torch.int32, device=codes.device) // (k // groups),
        }

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        return read(tensors, n, k, self.checkpoint_format).weight()

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        return gptq_config(formats, self.checkpoint_format) | {
            "pack_dtype": "int32",
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in modules_in_16_bit(formats)},
        }


def gptq_config(formats: Formats, checkpoint_format: str) -> dict[str, Any]:
    """The settings that every file with GPTQ's ``quantization_config`` has."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": file_group_size(one_format(formats).group_size),
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": checkpoint_format,
    }


def read(tensors: Mapping[str, Tensor], n: int, k: int, checkpoint_format: str) -> Affine:
    """The codes, scales and true zero points of stored ``tensors``, without ``g_idx``."""
    codes = WORDS.unpack({"qweight": tensors["qweight"]}, n, k, signed=False)
    zero = read_zeros(tensors["qzeros"], n, tensors["scales"].shape[0], checkpoint_format)
    return Affine(codes, tensors["scales"].t().contiguous(), zero)


def read_zeros(qzeros: Tensor, n: int, groups: int, checkpoint_format: str) -> Tensor:
    """The true zero points ``[n, groups]``, uint8.

    GPTQModel subtracts v1's 1 from whole words: below a zero point of 0, the next one is borrowed
    from.
    """
    words = qzeros.contiguous() + ZERO_OFFSET[checkpoint_format] * 0x11111111
    stored = ROW_MAJOR.unpack({"qweight": words.view(torch.uint8)}, groups, n, signed=False)
    return stored.t().contiguous()


def import_format(config: Config) -> ImportFormat:
    """The format of a GPTQ checkpoint's linears.

    Raises:
        QtoolError: a width, a version, quantized activations or per-module settings that cannot be
            imported.
    """
    require_setting(config, "bits", 4, "GPTQ", "w4a16 is the only weight-only scheme")
    if config.get("lm_head"):
        raise QtoolError("the lm_head is quantized, and qtool keeps it in 16 bits")
    if config.get("activation"):
        raise QtoolError(
            f"GPTQ with activation={config['activation']!r}: w4a16's activations are not quantized"
        )
    rules = (config.get("dynamic") or {}).items()
    if any(rule.startswith("+:") or settings for rule, settings in rules):
        raise QtoolError(
            "GPTQ with per-module settings (dynamic) cannot be imported; only excluded modules can"
        )
    stored = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if stored not in ZERO_OFFSET:
        raise QtoolError(
            f"GPTQ checkpoint_format {stored!r} cannot be imported; known: {', '.join(ZERO_OFFSET)}"
        )
    return ImportFormat(
        f"GPTQ ({stored})",
        "qweight",
        "scales",
        "qzeros",
        "g_idx",
        transposed=True,
        words=lambda n, k: (k // 8, n),
        read=lambda tensors, n, k: read(tensors, n, k, stored),
        read_zeros=lambda zeros, n, groups: read_zeros(zeros, n, groups, stored),
    )
