"""Activation ranges: the largest input of each channel of chosen linears, on a few windows.

They show outliers: how a transform changes the channels that would set the scale for all others.
For each group of linears that read the same input one linear is shown, in the block where the
baseline's outliers are worst.

Legend: K input channels, b windows, s tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool.models import family_of
from qtool.models.auto import running, text_model
from qtool.runtime.linear import QuantLinear
from qtool.units import whole_number


@dataclass(frozen=True)
class ChannelRange:
    """max|X| ``[K]`` of the input channels of linear ``name``.

    ``before`` holds the baseline's maxima, ``after`` those of the quantized model.
    """

    name: str
    before: Tensor
    after: Tensor


def outlier(amax: Tensor) -> float:
    """The magnitude of the largest channel divided by that of the median channel."""
    return float(amax.max() / amax.median().clamp_min(torch.finfo(torch.float32).tiny))


@torch.no_grad()
def channel_amax(model: PreTrainedModel, windows: Tensor) -> dict[str, Tensor]:
    """max|X| ``[K]`` over ``windows [b, s]``, by the full name of a linear.

    The first linear of each group with the same input is observed, in every block. An input that is
    rotated at run time is observed after the rotation, as it is quantized.
    """
    found: dict[str, Tensor] = {}
    text = text_model(model)
    with running(), _watching(model, found):
        for window in windows:
            text(input_ids=window[None].to(model.device), use_cache=False)
    return {name: amax.float().cpu() for name, amax in found.items()}


def worst(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[ChannelRange]:
    """For each role the linear with the largest outlier in ``before``, in the model's order."""
    chosen: dict[str, str] = {}
    for name in before:
        kind = role(name)
        if name in after and (
            kind not in chosen or outlier(before[name]) > outlier(before[chosen[kind]])
        ):
            chosen[kind] = name
    order = [role(name) for name in before]
    return [
        ChannelRange(chosen[kind], before[chosen[kind]], after[chosen[kind]])
        for kind in sorted(chosen, key=order.index)
    ]


def role(name: str) -> str:
    """A linear's name without the numbers of its block and expert: ``mlp.down_proj``."""
    parts = name.split(".")
    block = next((i for i, part in enumerate(parts) if whole_number(part) is not None), -1)
    return ".".join(part for part in parts[block + 1 :] if whole_number(part) is None)


@contextmanager
def _watching(model: PreTrainedModel, found: dict[str, Tensor]) -> Iterator[None]:
    """While open, keep max|X| of the first linear of each group in ``found``."""
    config = model.config.get_text_config()
    family = family_of(model.config)
    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for block in range(len(modules[family.blocks])):
            for group in family.at(config, block).groups:
                name = f"{family.blocks}.{block}.{group.linears[0]}"
                if name in modules:  # a fused expert is no module of its own
                    note = partial(_note, found, name)
                    hooks.enter_context(modules[name].register_forward_pre_hook(note))
        yield


def _note(
    found: dict[str, Tensor], name: str, linear: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    """A forward pre-hook of linear ``name``, which keeps its largest inputs so far in ``found``."""
    x = inputs[0].detach()
    if isinstance(linear, QuantLinear) and linear.format.rotated:
        x = linear.arranged(x)
    amax = x.abs().flatten(0, -2).amax(0)  # [K]
    found[name] = torch.maximum(found[name], amax) if name in found else amax
