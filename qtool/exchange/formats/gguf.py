"""GGUF, llama.cpp's file format: ``Q4_0`` and ``Q8_0`` blocks of 32 inputs of an output channel.

    Q4_0    fp16 d, 16 bytes    byte j = q[j] + 16 q[j + 16]    w = (q - 8) d
    Q8_0    fp16 d, 32 int8     w = q d

w4a16's codes are Q4_0's and w8a8's are Q8_0's. A scale of more than 32 inputs is repeated for each
block. A scale that float16 does not hold exactly is refused, so every weight is exact. llama.cpp
multiplies with activations of 8 bits in blocks of 32, whatever activations the scheme has.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.errors import CheckFailed, QtoolError
from qtool.exchange.export_format import ExportFormat, Formats
from qtool.exchange.formats.affine import W4A16_GROUP_SIZES, Affine, int_8, symmetric_4
from qtool.exchange.gguf import architectures
from qtool.exchange.gguf.write import FILE
from qtool.format import LinearFormat
from qtool.schemes import Params

BLOCK = 32


class Gguf(ExportFormat):
    """``gguf``: a packed linear's only tensor is ``weight`` uint8 ``[N, K / 32 * bytes]``."""

    name = "gguf"
    about = "w4a16 as Q4_0 and w8a8 as Q8_0, in one file: llama.cpp"
    next_step = f"llama-server -m DIR/{FILE}"
    expressible: Mapping[str, tuple[int | None, ...]] = {
        "w4a16": W4A16_GROUP_SIZES,
        "w4a16-24": W4A16_GROUP_SIZES,
        "w8a8": (None,),
    }
    tile = (1, BLOCK)
    uniform = False
    tensor_parallel = False
    one_file = True
    any_architecture = True  # :meth:`require_model` refuses those it does not know

    def require_model(self, config: Mapping[str, Any]) -> None:
        architectures.require(config)

    def require(self, name: str, found: LinearFormat, n: int, k: int) -> None:
        super().require(name, found, n, k)
        if found.scale_dtype == "float32":
            raise QtoolError(
                f"{name}: its scales are in float32, and GGUF stores float16, which does not hold"
                " them exactly: quantize the model with --dtype float16 or bfloat16"
            )

    def activations(self, scheme: str) -> str:
        return f"int8 per token and group of {BLOCK}"

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        form = int_8 if linear_format.scheme == "w8a8" else symmetric_4
        affine = form(linear_format, codes, params)
        blocks = affine.codes.unflatten(1, (-1, BLOCK))  # [N, K / 32, 32]
        scale = _exact_half(affine.scale)
        scale = scale.repeat_interleave(blocks.shape[1] // scale.shape[1], 1)
        if affine.codes.dtype == torch.uint8:
            low, high = blocks.chunk(2, -1)
            blocks = low | high << 4
        stored = [scale[..., None].contiguous().view(torch.uint8), blocks.view(torch.uint8)]
        return {"weight": torch.cat(stored, -1).flatten(1)}

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        blocks = tensors["weight"].view(n, k // BLOCK, -1)
        scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
        codes = blocks[..., 2:]
        if linear_format.scheme == "w8a8":
            return Affine(codes.contiguous().view(torch.int8).flatten(1), scale).weight()
        return Affine(torch.cat([codes & 15, codes >> 4], -1).flatten(1), scale).weight()

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        return {}


def _exact_half(scale: Tensor) -> Tensor:
    """``scale`` in float16, with equal values.

    Raises:
        CheckFailed: float16 does not hold it exactly.
    """
    half = scale.to(torch.float16)
    if not half.is_meta and (lost := int((half.float() != scale.float()).sum())):
        raise CheckFailed(
            f"{lost} of {scale.numel()} scales are not exact in float16, which GGUF stores; "
            "quantize the model with --dtype float16, or export to another format"
        )
    return half
