"""A checkpoint's ``quantization_config`` as SGLang holds it: which layer gets which method."""

import logging
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from qtool.errors import QtoolError
from qtool.format import QUANT_METHOD, CheckpointFormat
from qtool.models.joined import JOINED
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.layer import PackedLinear
from qtool.serving.sglang.parameters import TYPES

log = logging.getLogger(__name__)


class QtoolLinearMethod(PackedLinear, LinearMethodBase):
    """A packed linear on SGLang's parameter classes."""

    types = TYPES


class QtoolConfig(QuantizationConfig):
    """The format of a native checkpoint, asked layer by layer."""

    def __init__(self, linears: PackedLinears, joined: dict[str, list[str]]) -> None:
        super().__init__()
        self.linears, self.packed_modules_mapping = linears, JOINED | joined

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QtoolConfig":
        """SGLang adds the model's configuration and what it joins to ``quantization_config``.

        Raises:
            QtoolError: the model is multimodal: each such model of SGLang has its own names for the
                text model's modules, and a linear that is not found would be taken for 16 bits.
        """
        model = config["hf_config"]
        if model.get_text_config() is not model:
            raise QtoolError(f"{model.model_type}: multimodal models are served by vLLM only")
        linears = PackedLinears(model.to_dict(), CheckpointFormat.from_dict(config))
        if kv := linears.format.kv:
            log.warning("The checkpoint's %s cache is not used: SGLang keeps its own.", kv)
        return cls(linears, config.get("packed_modules_mapping") or {})

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, FusedMoE):
            if any(".experts." in name for name in self.linears.formats()):
                raise QtoolError(f"{prefix}: packed experts are served by vLLM only")
            return None
        if not isinstance(layer, LinearBase):
            return None
        names = self.shards(prefix)
        linear_format = self.linears.joined(prefix, names)
        if linear_format is None:
            return UnquantizedLinearMethod()
        return QtoolLinearMethod(prefix, linear_format, names, self.linears.permuted(prefix, names))

    def shards(self, prefix: str) -> list[str]:
        """The checkpoint's names of the linears that SGLang's layer ``prefix`` joins."""
        parent, _, last = prefix.rpartition(".")
        if self.linears.of(prefix):  # joined in the checkpoint too, as in Phi-3
            return [prefix]
        return [f"{parent}.{part}" for part in self.packed_modules_mapping.get(last, [last])]
