"""QServe checkpoints (omniserve): w4a8-qoq per channel and w4a8-qoq-g128, fp16 only.

    qweight   int8 [N, K / 2]   the order of qtool.layouts.compute_aware
    s1_scales fp16 [N]
    s1_szeros fp16 [N]          per channel: z * s1, and w = c * s1 - s1_szeros
    s2_scales int8 [K / 128, N] in groups, permuted: w8 = c * s2 + s2_zeros, w = w8 * s1
    s2_zeros  int8 [K / 128, N] -(z * s2)

In groups the format is exact: everything but s1 is an integer. Per channel the format itself rounds
``z * s1`` to fp16, which moves a whole output channel by at most 2**-11 of its zero point. There
QServe's kernel takes the token sum of the unquantized activation (QServe equation 13), qtool's
kernel that of the quantized one.

omniserve loads ``pytorch_model.bin``. qtool writes safetensors only, never a pickle;
benchmarks/journal/formats.md has the line of Python that converts the file. With kv8
``self_attn.kv_scale_quant_orig`` holds the largest scale of k and of v.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.exchange.export_format import (
    TOKEN_INT8,
    Float16Format,
    Formats,
    as_dtype,
    file_group_size,
    float16_scale,
    one_format,
)
from qtool.exchange.formats.affine import in_model_order
from qtool.format import LinearFormat
from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.schemes import Params


class QServe(Float16Format):
    name = "qserve"
    about = "w4a8-qoq and w4a8-qoq-g128, fp16: omniserve (after one conversion to .bin), old SGLang"
    next_step = "python -m sglang.launch_server --model-path DIR  # SGLang up to 0.5.15"
    expressible: Mapping[str, tuple[int | None, ...]] = {
        "w4a8-qoq": (None,),
        "w4a8-qoq-g128": (128,),
    }
    tile = (64, 128)
    config_copy = "quant_config.json"
    tensor_parallel = False

    def tile_of(self, scheme: str) -> tuple[int, int]:
        return (128, 128) if scheme == "w4a8-qoq" else self.tile  # rows of a kernel's thread block

    def activations(self, scheme: str) -> str:
        return TOKEN_INT8

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        ordered = in_model_order(codes, params)
        stored = {
            "qweight": COMPUTE_AWARE.pack(ordered)["qweight"],
            "s1_scales": float16_scale(params["s1"]),
        }
        if linear_format.group_size is None:
            product = params["zero"].float() * stored["s1_scales"].float()
            return stored | {"s1_szeros": as_dtype(product, torch.float16, "s1_szeros")}
        s2 = params["s2"].to(torch.int16)
        zeros = -(params["zero"].to(torch.int16) * s2)  # -240..0, as a byte modulo 256
        return stored | {
            "s2_scales": COMPUTE_AWARE.pack_group(s2.to(torch.int8)),
            "s2_zeros": COMPUTE_AWARE.pack_group(zeros.to(torch.int8)),
        }

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        codes = COMPUTE_AWARE.unpack({"qweight": tensors["qweight"]}, n, k, signed=False)
        s1 = tensors["s1_scales"].float()[:, None]
        if linear_format.group_size is None:
            return codes.float().mul_(s1).sub_(tensors["s1_szeros"].float()[:, None])
        s2, zeros = (
            COMPUTE_AWARE.unpack_group(tensors[name], n) for name in ("s2_scales", "s2_zeros")
        )
        groups = codes.view(torch.int8).unflatten(1, (s2.shape[1], -1))
        w8 = groups * s2[..., None] + zeros[..., None]  # int8, wrapping as the kernel's bytes do
        return w8.flatten(1).float().mul_(s1)

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        return {
            "quant_method": "qoq",
            "wbits": 4,
            "group_size": file_group_size(one_format(formats).group_size),
        }

    def kv_tensors(self, k_scale: Tensor, v_scale: Tensor) -> dict[str, Tensor]:
        return {"kv_scale_quant_orig": torch.stack([k_scale.max(), v_scale.max()]).float()}
