"""Marlin checkpoints, dense and 2:4 sparse: the two files of the MARLIN project, fp16 only.

    marlin      ``B`` int32 [K / 16, 2 N], ``s`` fp16 [G, N]: codes and scales in the orders of
                qtool.layouts.marlin
    marlin-24   ``B_24`` int32 [K / 32, 2 N], ``B_meta`` int16 [K / 32, 2 N], ``s``: of
                qtool.layouts.marlin_24

``w = (c - 8) * s``. Codes are copied, and so are fp16 scales; bf16 scales change only outside
fp16's range. Current versions of vLLM and SGLang make this order themselves from a GPTQ or
compressed-tensors checkpoint and no longer read these files (vLLM read marlin up to 0.10.1.1 and
marlin-24 up to 0.14.1). Export them for the original kernels.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtool.exchange.export_format import VLLM_SERVE, Float16Format, Formats, float16_scale
from qtool.exchange.formats.affine import Affine, symmetric_4
from qtool.exchange.formats.gptq import gptq_config
from qtool.format import LinearFormat
from qtool.layouts.base import Layout
from qtool.layouts.marlin import MARLIN
from qtool.layouts.marlin_24 import MARLIN_24
from qtool.schemes import Params


class MarlinFile(Float16Format):
    """``marlin`` or ``marlin-24``: a layout, and the names of its tensors in the file."""

    config_copy = "quantize_config.json"

    def __init__(
        self,
        name: str,
        about: str,
        newest: str,
        scheme: str,
        layout: Layout,
        tile: tuple[int, int],
        names: Mapping[str, str],
    ) -> None:
        self.name, self.about, self.layout, self.tile, self.names = name, about, layout, tile, names
        self.expressible = {scheme: (128, None)}
        self.next_step = f"{VLLM_SERVE}  # vLLM up to {newest}"

    def tensors(
        self, linear_format: LinearFormat, codes: Tensor, params: Params
    ) -> dict[str, Tensor]:
        affine = symmetric_4(linear_format, codes, params)
        packed = self.layout.pack(affine.codes)
        stored = {self.names[part]: tensor for part, tensor in packed.items()}
        return stored | {"s": self.layout.pack_group(float16_scale(affine.scale))}

    def weight(
        self, linear_format: LinearFormat, tensors: Mapping[str, Tensor], n: int, k: int
    ) -> Tensor:
        packed = {part: tensors[name] for part, name in self.names.items()}
        codes = self.layout.unpack(packed, n, k, signed=False)
        return Affine(codes, self.layout.unpack_group(tensors["s"], n)).weight()

    def quantization_config(self, formats: Formats, kv: str | None) -> dict[str, Any]:
        config = gptq_config(formats, self.name.replace("-", "_"))
        return config | {"is_marlin_format": self.name == "marlin"}


MARLIN_FILES = (
    MarlinFile(
        "marlin",
        "the original MARLIN file, fp16: MARLIN's own kernel, old vLLM (newer ones take gptq)",
        "0.10.1.1",
        "w4a16",
        MARLIN,
        (64, 128),
        {"qweight": "B"},
    ),
    MarlinFile(
        "marlin-24",
        "the original Sparse-MARLIN file of w4a16-24, fp16: its own kernel, old vLLM",
        "0.14.1",
        "w4a16-24",
        MARLIN_24,
        (128, 128),
        {"qweight": "B_24", "metadata": "B_meta"},
    ),
)
