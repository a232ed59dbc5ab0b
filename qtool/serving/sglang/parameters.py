"""SGLang's parameter classes, as :class:`qtool.serving.layer.PackedLinear` takes them."""

from sglang.srt.layers.parameter import (
    ChannelQuantScaleParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)

from qtool.serving.layer import OnePerLinear, ParameterTypes


class _OnePerLinear(OnePerLinear, RowvLLMParameter):
    """Loaded by :class:`OnePerLinear`."""


TYPES = ParameterTypes(
    RowvLLMParameter, ChannelQuantScaleParameter, PackedvLLMParameter, _OnePerLinear
)
