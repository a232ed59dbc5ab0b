"""compressed-tensors: what vLLM, SGLang and transformers load.

Weight-only 4 bit is ``pack-quantized``: ``weight_packed`` int32 ``[N, K / 8]``, nibble ``k % 8`` of word
``k // 8`` holds ``q + 8``; ``weight_scale [N, G]``; ``weight_shape`` int64 ``[N, K]``. That nibble is the code
of w4a16 and that order is row-major, so the export is exact. 8-bit weights and activations are
``int-quantized``: ``weight`` int8 ``[N, K]``, ``weight_scale [N, 1]``, activations dynamic per token.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtool.checkpoint.target import Target
from qtool.layouts.row_major import ROW_MAJOR
from qtool.runtime.format import LinearFormat
from qtool.schemes import Params

PACKED, INT = "pack-quantized", "int-quantized"
FORMAT_OF = {"w4a16": PACKED, "w8a8": INT}
TOKEN_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedTensors(Target):
    """w4a16 as pack-quantized, w8a8 as int-quantized, mixed by layer if need be."""

    name = "compressed-tensors"
    expressible: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"w4a16": (32, 64, 128, None), "w8a8": (None,)}

    def tensors(self, linear_format: LinearFormat, codes: Tensor, params: Params) -> dict[str, Tensor]:
        (scale,) = params.values()
        scale = scale.reshape(len(codes), -1)  # [N, G]; [N, 1] per channel
        if FORMAT_OF[linear_format.scheme] == INT:
            return {"weight": codes, "weight_scale": scale}
        shape = torch.tensor(codes.shape, dtype=torch.int64, device=codes.device)
        packed = ROW_MAJOR.pack(codes)["qweight"].view(torch.int32)
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}

    def quantization_config(self, formats: Mapping[str, LinearFormat]) -> dict[str, Any]:
        kinds = dict.fromkeys(formats.values())
        groups = {}
        for index, kind in enumerate(kinds):
            targets = ["Linear"] if len(kinds) == 1 else [name for name, f in formats.items() if f == kind]
            groups[f"group_{index}"] = _group(kind, targets)
        used = {FORMAT_OF[kind.scheme] for kind in kinds}
        return {
            "quant_method": self.name,
            "format": used.pop() if len(used) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "config_groups": groups,
        }


def _group(kind: LinearFormat, targets: list[str]) -> dict[str, Any]:
    bits = kind.scheme_object.code_bits
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    if kind.group_size is None:
        weights["strategy"] = "channel"
    else:
        weights |= {"strategy": "group", "group_size": kind.group_size}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": TOKEN_ACTIVATIONS if kind.scheme == "w8a8" else None,
        "output_activations": None,
        "format": FORMAT_OF[kind.scheme],
    }
