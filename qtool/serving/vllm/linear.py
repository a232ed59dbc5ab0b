"""Packed linears in vLLM."""

from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)

from qtool.serving.layer import OnePerLinear, PackedLinear, ParameterTypes


class _OnePerLinear(OnePerLinear, RowvLLMParameter):
    """Loaded by :class:`OnePerLinear`."""


@register_weight_loader_v2_supported_method
class QtoolLinearMethod(PackedLinear, LinearMethodBase):
    """A packed linear on vLLM's parameter classes."""

    types = ParameterTypes(
        RowvLLMParameter, ChannelQuantScaleParameter, PackedvLLMParameter, _OnePerLinear
    )
