"""A checkpoint's ``quantization_config`` as vLLM holds it: which layer gets which method."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.models.utils import WeightsMapper

from qtool import __version__
from qtool.errors import QtoolError
from qtool.format import QUANT_METHOD, CheckpointFormat
from qtool.io.integrity import INDEX, read_record, recorded_transforms
from qtool.io.source import SINGLE, Checkpoint, read_config
from qtool.models.joined import JOINED
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.stored import require_stored
from qtool.serving.vllm import fusion
from qtool.serving.vllm.kv import KVMethod, cache_tensors, choose_cache
from qtool.serving.vllm.linear import QtoolLinearMethod
from qtool.serving.vllm.moe import QtoolExpertsMethod

logger = init_logger(__name__)

#: what vLLM puts before the names of a draft model's layers
DRAFT = "draft_model."


class QtoolConfig(QuantizationConfig):
    """The format of a native checkpoint, asked layer by layer.

    vLLM fuses linears (``packed_modules_mapping``) and renames modules; rules match the
    checkpoint's names.

    Attributes:
        keeps_cache: whether keys and values are quantized as in the checkpoint; None before the
            first layer.
        of_transformers: whether vLLM runs transformers' model.
        transforms: those that changed the source's weights.
        stored: the checkpoint's names of linears, by vLLM's.
        asked: the checkpoint's names of linears that vLLM has layers for.
    """

    def __init__(self, checkpoint_format: CheckpointFormat | None = None) -> None:
        super().__init__()
        if checkpoint_format is None:  # vLLM was told to, by a flag
            raise QtoolError(
                "the model is no checkpoint of qtool's: quantize it first (qtool quantize), and "
                "leave --quantization out"
            )
        self.format = checkpoint_format
        self.linears: PackedLinears | None = None
        self.keeps_cache: bool | None = None
        self.of_transformers = False
        self.transforms: list[str] = []
        self.stored: dict[str, str] = {}
        self.asked: set[str] = set()

    def __repr__(self) -> str:
        return f"QtoolConfig({self.format.scheme})"

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QtoolConfig":
        return cls(CheckpointFormat.from_dict(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Find the model's family; check the checkpoint if its files are at hand.

        qtool's version is written into ``hf_config``, the only place where a plugin can change the
        key of vLLM's compile cache.
        """
        directory = Path(model_name)
        # vLLM's own classes of configs leave settings out
        config = read_config(directory) if directory.is_dir() else hf_config.to_dict()
        self.transforms = list(recorded_transforms(read_record(directory)))
        self.linears = PackedLinears(config, self.format)
        self.linears.refuse_mamba_1()
        names, published = list(self.linears.linears()), self.published
        # vLLM's layers of Mamba 2 say "mixer" where the model says "mamba"
        self.stored = {name.replace(".mamba.", ".mixer."): name for name in names}
        self.stored |= {published.get(name, name): name for name in names}
        self.stored |= {name: name for name in names}
        hf_config.quantization_config = {
            **hf_config.quantization_config,
            "qtool_version": __version__,
        }
        if (directory / INDEX).is_file() or (directory / SINGLE).is_file():
            require_stored(Checkpoint(directory), self.linears)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Add the names that a loader gives the linears; each part of a model may have a loader."""
        end = ".weight"
        for name, stored in list(self.stored.items()):
            renamed = hf_to_vllm_mapper.apply_list([name + end])
            self.stored |= {new.removesuffix(end): stored for new in renamed}

    def get_cache_scale_mapper(self) -> WeightsMapper:
        self.require_asked()  # vLLM's loader comes here when all layers are made
        names = {} if self.of_transformers else self.published
        renamed = {
            re.compile(rf"^(?!{re.escape(name)}(\.|$)){re.escape(own)}(?=\.|$)"): name
            for own, name in names.items()  # a name that is renamed is not renamed again
        }
        cache = cache_tensors(self.packed_linears, bool(self.keeps_cache))
        return WeightsMapper(orig_to_new_regex=renamed) | cache

    @property
    def published(self) -> dict[str, str]:
        """The names in a published checkpoint of modules and tensors that have others.

        A native checkpoint has transformers' names. vLLM's loaders take the published ones, except
        where vLLM runs transformers' model. A module with more names before it there
        (``language_model.lm_head``) is left to vLLM: the loader of the inner model has the rest of
        its name, and renames it too.
        """
        names = self.packed_linears.family.disk_names
        return {
            own.removesuffix(".weight"): disk.removesuffix(".weight")
            for own, disk in sorted(names.items(), key=lambda pair: -len(pair[0]))
            if not disk.endswith(f".{own}")
        }

    def require_asked(self) -> None:
        """Refuse packed linears for which vLLM has no layer, or one that takes only 16 bits."""
        place = self.packed_linears.family.place
        blocks = {place(name)[0] for name in self.asked}  # another rank may have the others
        for name in self.packed_linears.formats():
            if name not in self.asked and (not self.asked or place(name)[0] in blocks):
                raise QtoolError(
                    f"{name}: this vLLM has no layer that takes it packed; quantize with a rule "
                    "that leaves it in 16 bits"
                )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        prefix = prefix.removeprefix(DRAFT)
        if (config := get_current_vllm_config_or_none()) is not None:
            fusion.switch_on(config)
            if self.keeps_cache is None:
                self._begin(config)
        if isinstance(layer, LinearBase):
            return self._linear(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, Attention) and self.keeps_cache and self.format.kv:
            return KVMethod(self, prefix, self.format.kv)
        return None  # embeddings and heads: 16 bits; other attention: vLLM's own cache

    def _begin(self, config: VllmConfig) -> None:
        """Choose the KV cache and warn of LoRA adapters, before the first layer is made."""
        self.keeps_cache = choose_cache(config, self.packed_linears)
        self.of_transformers = config.model_config.using_transformers_backend()
        if config.lora_config and self.transforms:
            logger.warning_once(
                "The checkpoint's recipe changed the source's weights (%s), so that LoRA "
                "adapters that were trained for the source give wrong outputs with it.",
                ", ".join(self.transforms),
            )

    def _linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        names = self.shards(prefix)
        linear_format = self.packed_linears.joined(prefix, names)
        if linear_format is None:
            return UnquantizedLinearMethod()
        if type(layer) is ColumnParallelLinear and prefix.endswith(".mixer.in_proj"):
            self._require_one_rank(prefix)
        if isinstance(layer, QKVParallelLinear):
            self.packed_linears.require_heads(names[0])
        permuted = self.packed_linears.permuted(prefix, names)
        return QtoolLinearMethod(prefix, linear_format, names, permuted)

    def shards(self, prefix: str) -> list[str]:
        """The checkpoint's names of the linears that vLLM's layer ``prefix`` joins."""
        parent, _, last = prefix.rpartition(".")
        joined = {**JOINED, **self.packed_modules_mapping}
        parts = [last] if prefix in self.stored else joined.get(last, [last])
        return self._ask([f"{parent}.{part}" for part in parts])

    def _require_one_rank(self, prefix: str) -> None:
        """Refuse a mixer of Mamba 2 on several ranks: vLLM copies groups of 16-bit weights only."""
        if (ranks := get_tensor_model_parallel_world_size()) > 1:
            raise QtoolError(
                f"{prefix}: {ranks} ranks would share a group, and vLLM copies groups of 16-bit "
                "weights only; use a tensor-parallel size that divides the number of groups"
            )

    def _ask(self, names: list[str]) -> list[str]:
        """The checkpoint's names of vLLM's ``names``."""
        stored = [self.stored.get(name, name) for name in names]
        self.asked.update(stored)
        return stored

    @property
    def packed_linears(self) -> PackedLinears:
        """The model's packed linears."""
        if self.linears is None:
            raise QtoolError("the model's configuration was not given to the qtool plugin")
        return self.linears

    def _experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        parent = prefix.removesuffix(".routed_experts")
        roles = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        each = range(layer.global_num_experts)
        gate_up = self._ask([f"{parent}.{expert}.{role}" for expert in each for role in roles[:2]])
        down = self._ask([f"{parent}.{expert}.{roles[2]}" for expert in each])
        formats = self.packed_linears.experts(prefix, gate_up, down)
        if formats is None:
            return None
        names = {"w13": gate_up, "w2": down}
        return QtoolExpertsMethod(prefix, layer, dict(zip(names, formats, strict=True)), names)
