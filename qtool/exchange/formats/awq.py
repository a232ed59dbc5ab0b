"""AWQ checkpoints (``gemm``): 4-bit weights with a zero point a group, 16-bit activations.

Per linear, ``w[n, k] = (c - z) * s`` with groups ``j = k // g``:

    qweight int32 [K, N / 8]   qzeros int32 [G, N / 8]   scales 16-bit [G, N]

In qweight and qzeros, output 8 w + i lies in word w at nibble 0, 4, 1, 5, 2, 6, 3, 7 for i = 0..7.
Zero points are stored unchanged. w4a16 is exact (z = 8); so is w4a8-qoq per channel. w4a8-qoq-g128
keeps its codes and zero points, but its scale ``s1 * s2`` is rounded to 16 bits. The format holds
the weights of the W4A8 schemes, not their 8-bit activations. Readers: vLLM, SGLang, GPTQModel,
transformers (with gptqmodel).
"""

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
from qtool.exchange.formats.affine import ASYMMETRIC_4, Affine, asymmetric_4
from qtool.exchange.import_format import Config, ImportFormat, require_setting
from qtool.format import LinearFormat
from qtool.layouts.digit_layout import DigitLayout
from qtool.schemes import Params

#: [N, K] -> int32 [K, N / 8]: the outputs 8 w + (4 j2 + 2 j1 + j0) at nibble 4 j0 + 2 j2 + j1
WORDS = DigitLayout(
    name="awq", n="w j2:2 j1:2 j0:2", k="k", order="k, w j0 j2", nibble="j1", dtype=torch.int32
)


class Awq(ExportFormat):
    name = "awq"
    about = "4-bit weights with zero points, 16-bit activations: vLLM, SGLang, GPTQModel"
    next_step = VLLM_SERVE
    expressible = ASYMMETRIC_4
    tile = (8, 1)
    any_architecture = True

    def refuses_experts(self, found: LinearFormat) -> str:
        return "" if found.group_size else "its loaders want groups of input channels in experts"

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        affine = asymmetric_4(linear_format, codes, params)
        assert affine.zero is not None
        return {
            "qweight": WORDS.pack(affine.codes)["qweight"],
            "qzeros": WORDS.pack(affine.zero.contiguous())["qweight"],
            "scales": scale_in_16_bits(affine.scale).t().contiguous(),
        }

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        return read(tensors, n, k).weight()

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": file_group_size(one_format(formats).group_size),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head", *modules_in_16_bit(formats)],
        }


def read(tensors: Mapping[str, Tensor], n: int, k: int) -> Affine:
    """The codes, scales and zero points of stored ``tensors``."""
    codes = WORDS.unpack({"qweight": tensors["qweight"]}, n, k, signed=False)
    zero = read_zeros(tensors["qzeros"], n, tensors["scales"].shape[0])
    return Affine(codes, tensors["scales"].t().contiguous(), zero)


def read_zeros(qzeros: Tensor, n: int, groups: int) -> Tensor:
    """The zero points ``[n, groups]``, uint8."""
    return WORDS.unpack({"qweight": qzeros}, n, groups, signed=False)


def import_format(config: Config) -> ImportFormat:
    """The format of an AWQ checkpoint's linears.

    Raises:
        QtoolError: a width or a version that cannot be imported.
    """
    bits = {"bits": config.get("bits", config.get("w_bit"))}
    require_setting(bits, "bits", 4, "AWQ", "w4a16 is the only weight-only scheme")
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        raise QtoolError(f"AWQ version {version!r} cannot be imported; only 'gemm' can")
    return ImportFormat(
        "AWQ",
        "qweight",
        "scales",
        "qzeros",
        "",
        transposed=True,
        words=lambda n, k: (k, n // 8),
        read=read,
        read_zeros=read_zeros,
    )
