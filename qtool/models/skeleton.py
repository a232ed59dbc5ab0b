"""A transformers model without weights: real buffers, parameters on ``meta``.

The blocks of the skeleton are filled one at a time; the rest of the model (embedding, rotary
embedding, masks) is transformers' own code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qtool.models.experts import separate_experts
from qtool.models.family import Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def skeleton(config: "PretrainedConfig", dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """The model of ``config`` in eval mode, all parameters on ``meta``."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    separate_experts(model)
    return model.eval()


def fuse_norms(model: nn.Module) -> None:
    """Run each plain RMSNorm of ``model`` as one kernel instead of six, which rounds once."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
            norm.forward = partial(_rms_norm, norm)  # type: ignore[method-assign]


def _rms_norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    weight: Any = norm.weight
    epsilon: Any = norm.variance_epsilon
    return nn.functional.rms_norm(hidden, weight.shape, weight, epsilon)


def fill(module: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Give ``module`` the tensors of ``weights``, by name within it; some may be on ``meta``."""
    module.load_state_dict(weights, strict=True, assign=True)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def release(module: nn.Module) -> None:
    """Put ``module``'s parameters back on ``meta``; its memory is free."""
    module.to("meta")


class _Recorder(nn.Module):
    """Takes the place of a block, records its arguments and passes the hidden states on."""

    def __init__(self, block: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple
        self.kwargs: dict[str, Any] = {}
        # transformers reads per-layer facts (attention_type, ...) off the block itself
        for name, value in vars(block).items():
            if (
                not name.startswith("_")
                and isinstance(value, (str, int, bool))
                and name != "training"
            ):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        self.kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_ARGUMENTS}
        return (hidden,) if self.in_tuple else hidden


#: block arguments that belong to generation, not to a calibration forward
CACHE_ARGUMENTS = frozenset(
    {"past_key_values", "layer_past", "past_key_value", "use_cache", "cache_position"}
)


@contextmanager
def recording(model: "PreTrainedModel", family: Family) -> Iterator[list[_Recorder]]:
    """Replace the blocks by recorders while open: one forward gives all blocks' arguments."""
    blocks: Any = model.get_submodule(family.blocks)
    final_norm = model.get_submodule(family.final_norm)
    recorders = nn.ModuleList([_Recorder(block, family.returns_tuple) for block in blocks])
    model.set_submodule(family.blocks, recorders)
    model.set_submodule(family.final_norm, nn.Identity())
    try:
        yield list(recorders)  # type: ignore[arg-type]
    finally:
        model.set_submodule(family.blocks, blocks)
        model.set_submodule(family.final_norm, final_norm)
