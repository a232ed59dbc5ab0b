"""QQQ checkpoints: 4-bit weights under int8 activations per token, fp16 only.

Per channel, ``w = (16 q) * s_channel`` with q in -8..7 as a two's complement nibble and ``s_channel
= s / 16``: exact. In groups of 128 the weight passes through int8 once more:

    S = max_k |w| / 127    s_group = fp16(s / S)    w8 = rne((c - 8) * s_group)    w' = w8 * S

(one fused multiply-add, rounded once). The codes are kept, but the weight is rounded a second time;
every export reports that error. A single group, K = 128, is refused, because every reader takes it
as per channel. Tensors: ``B`` int32 [K / 16, 2 N] and the scale orders of qtool.layouts.qqq,
``s_channel`` float32 [1, N], and in groups ``s_group`` fp16 [K / 128, N]. Readers: the QQQ project,
GPTQModel, vLLM up to 0.10.1.1.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange.export_format import (
    TOKEN_INT8,
    Float16Format,
    Formats,
    float16_scale,
)
from qtool.exchange.formats.affine import SYMMETRIC_4, symmetric_4
from qtool.exchange.formats.gptq import gptq_config
from qtool.format import LinearFormat
from qtool.layouts.qqq import QQQ_CHANNEL, QQQ_GROUP
from qtool.schemes import Params


class Qqq(Float16Format):
    name = "qqq"
    about = (
        "w4a16 codes under int8 activations, fp16 (groups are rounded to int8 once more): QQQ, "
        "GPTQModel"
    )
    next_step = "load DIR with GPTQModel"
    expressible = dict.fromkeys(SYMMETRIC_4, (128, None))
    tile = (64, 128)
    config_copy = "quantize_config.json"

    def require(self, name: str, found: LinearFormat, n: int, k: int) -> None:
        super().require(name, found, n, k)
        if k == found.group_size:
            raise QtoolError(
                f"{name}: with K = {k} qqq reads one group of {k} as a channel; quantize it per "
                "channel"
            )

    def activations(self, scheme: str) -> str:
        return TOKEN_INT8

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        affine = symmetric_4(linear_format, codes, params)
        if linear_format.group_size is None:
            channel = affine.scale[:, 0].float() / 16
            signed = affine.codes.view(torch.int8) - 8
            return {
                "B": QQQ_CHANNEL.pack(signed)["qweight"],
                "s_channel": QQQ_CHANNEL.pack_channel(channel)[None],
            }
        channel = affine.weight().abs().amax(1) / 127  # [N]
        channel = torch.where(channel > 0, channel, 1.0)
        group = float16_scale(affine.scale.float() / channel[:, None])
        return {
            "B": QQQ_GROUP.pack(affine.codes)["qweight"],
            "s_channel": QQQ_GROUP.pack_channel(channel)[None],
            "s_group": QQQ_GROUP.pack_group(group),
        }

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        if linear_format.group_size is None:
            steps = 16 * QQQ_CHANNEL.unpack({"qweight": tensors["B"]}, n, k, signed=True).float()
            return steps.mul_(QQQ_CHANNEL.unpack_channel(tensors["s_channel"].flatten())[:, None])
        codes = QQQ_GROUP.unpack({"qweight": tensors["B"]}, n, k, signed=False)
        group = QQQ_GROUP.unpack_group(tensors["s_group"], n)  # fp16 [N, G]
        steps = (
            codes.unflatten(1, (group.shape[1], -1)).float().sub_(8).mul_(group.float()[..., None])
        )
        w8 = steps.round_().clamp_(-128, 127).flatten(1)
        return w8.mul_(QQQ_GROUP.unpack_channel(tensors["s_channel"].flatten())[:, None])

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        return gptq_config(formats, "qqq") | {"quant_method": "qqq", "wbits": 4}
