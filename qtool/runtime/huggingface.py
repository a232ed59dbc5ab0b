"""Registers qtool with transformers, so that ``from_pretrained`` runs packed weights.

A native checkpoint's config.json holds :data:`qtool.format.NOTICE` where transformers looks for the
name of the weight file. A transformers without this module therefore refuses the checkpoint with
that notice; with it the quantizer takes the notice away before the files are looked for.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qtool import plugins
from qtool.errors import QtoolError
from qtool.format import QUANT_METHOD, WEIGHTS_FIELD, CheckpointFormat
from qtool.io.integrity import require_intact
from qtool.models import family_of
from qtool.models.conv1d import replace_conv1d
from qtool.models.experts import SeparateExperts, linear_of, separate_experts
from qtool.runtime.kv_cache import quantize_kv, require_scales
from qtool.runtime.linear import QuantLinear
from qtool.runtime.packed_linears import PackedLinears


@register_quantization_config(QUANT_METHOD)
class QtoolConfig(QuantizationConfigMixin):
    """``quantization_config`` of a native checkpoint, in the class that transformers asks for."""

    def __init__(self, **config: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        config.setdefault("quant_method", QUANT_METHOD)
        self.format = CheckpointFormat.from_dict(config)

    def to_dict(self) -> dict[str, Any]:
        return self.format.to_dict()


@register_quantizer(QUANT_METHOD)
class QtoolQuantizer(HfQuantizer):
    """Replaces the linears that the format quantizes by :class:`QuantLinear` before weights load.

    If the format quantizes the KV cache, the model's cache holds quantized keys and values. Shards
    whose hashes are not the recorded ones are refused.
    """

    requires_calibration = True
    quantization_config: QtoolConfig
    own_names = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugins.load()  # before transformers makes a model on meta, where its tensors would be

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for directory in {Path(file).parent for file in kwargs.get("checkpoint_files") or ()}:
            require_intact(directory)
        replace_conv1d(model)
        separate_experts(model)
        family = family_of(model.config)
        self.own_names = family.derived or family.experts is not None
        replace_linears(model, self.quantization_config.format)
        if kv := self.quantization_config.format.kv:
            quantize_kv(model, kv)
        for module in model.modules():
            if any(isinstance(child, QuantLinear | SeparateExperts) for child in module.children()):
                # some models initialize a module by the weights of its linears or stacks, which
                # packed ones lack; buffers that no checkpoint holds still have to be computed
                module._is_hf_initialized = not module._non_persistent_buffers_set  # type: ignore[assignment]

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        require_scales(model)
        return model

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """``config`` without the notice that stops a transformers that does not know qtool.

        This is the only hook that sees the config before transformers looks for the weight files;
        earlier 5.x call it ``update_tp_plan``.
        """
        if hasattr(config, WEIGHTS_FIELD):
            delattr(config, WEIGHTS_FIELD)
        return config

    update_tp_plan = update_attn_implementation

    def update_weight_conversions(
        self, weight_conversions: list[Any], *model: PreTrainedModel
    ) -> list[Any]:
        """No conversions for a mixture of experts, whose modules have the checkpoint's names.

        Modules of a derived family have them too. Only new versions of transformers pass the model,
        so this was noted when its linears were replaced (:func:`separate_experts`).
        """
        return [] if self.own_names else weight_conversions

    def is_serializable(self, **kwargs: Any) -> bool:
        """False: ``save_pretrained`` would drop the notice and the hashes; copy the files."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def replace_linears(model: PreTrainedModel, format: CheckpointFormat) -> None:
    """Put an empty QuantLinear (on the linear's device) wherever ``format`` says so."""
    linears = PackedLinears(model.config.to_dict(), format)
    blocks = linears.family.blocks
    # AutoModel leaves the head out, and its prefix
    if blocks not in dict(model.named_modules()):
        raise QtoolError(
            f"{type(model).__name__} has no {blocks}: load a native checkpoint as a causal "
            "language model (AutoModelForCausalLM)"
        )
    for name, linear_format in linears.formats().items():
        linear: Any = model.get_submodule(name)
        quantized = QuantLinear(
            linear.in_features,
            linear.out_features,
            linear_format,
            bias=linear.bias is not None,
            permuted=format.is_permuted(name),
            dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        model.set_submodule(name, quantized)


def quantized_linears(model: nn.Module) -> dict[str, QuantLinear]:
    """The QuantLinears of ``model`` by full name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)
    }


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with its QuantLinears replaced, in place, by linears of the dequantized weights."""
    for name, module in quantized_linears(model).items():
        weight = module.dequantize().to(model.dtype)
        model.set_submodule(name, linear_of(weight, module.bias))
    return model
