"""A transformers model without weights: real buffers, parameters on ``meta``.

The blocks of the skeleton are filled one at a time; the rest of the model (embedding, rotary
embedding, masks) is transformers' own code.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qtool.models.auto import CANNOT_MAKE, auto_class, running
from qtool.models.cache_argument import BLOCK_ARGUMENTS
from qtool.models.conv1d import replace_conv1d
from qtool.models.experts import separate_experts
from qtool.models.family import Family
from qtool.models.placement import OffMeta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def skeleton(config: "PretrainedConfig", dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """The model of ``config`` in eval mode, all parameters float32 on ``meta``.

    Its buffers are as transformers loads them into a model in ``dtype``: some of them have its
    dtype, but all are computed in float32.

    Raises:
        QtoolError: as :func:`empty_model`.
    """
    model = empty_model(config)
    if dtype != torch.float32:
        loaded = dict(empty_model(config, dtype).named_buffers(remove_duplicate=False))
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            owner, _, part = name.rpartition(".")
            model.get_submodule(owner)._buffers[part] = buffer.to(loaded[name].dtype)
    replace_conv1d(model)
    separate_experts(model)
    return model.eval()


def empty_model(
    config: "PretrainedConfig", dtype: torch.dtype = torch.float32
) -> "PreTrainedModel":
    """The model of ``config`` as transformers makes it in ``dtype``, all parameters on ``meta``.

    Raises:
        QtoolError: transformers cannot make it, and what it says.
    """
    from accelerate import init_empty_weights

    with running(fails=CANNOT_MAKE), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    return model


def stays_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps tensor ``name`` of a ``model`` in ``dtype`` in float32.

    So it keeps a router's weight and bias, which choose other experts where they are rounded.
    """
    patterns = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def fill(module: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Give ``module`` the tensors of ``weights``, by name within it; some may be on ``meta``."""
    module.load_state_dict(weights, strict=True, assign=True)
    move(module, device)


def move(module: nn.Module, device: torch.device) -> None:
    """Put the tensors of ``module`` on ``device``, except those on ``meta``."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def release(module: nn.Module) -> None:
    """Put what ``module`` loads back on ``meta``; its memory is free.

    Buffers that no checkpoint holds (masks, frequencies) stay: nothing would bring them back.
    """
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                child._buffers[name] = buffer.to("meta")


#: block arguments that belong to generation, not to a calibration forward
CACHE_ARGUMENTS = frozenset({*BLOCK_ARGUMENTS, "use_cache", "cache_position"})


class _LastBlock(Exception):
    """Ends a forward once all blocks were called."""


def bound_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, those in ``**kwargs`` too; hidden states come first."""
    bound: dict[str, Any] = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While open, each of these modules computes its function instead of its own forward."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def block_arguments(
    model: "PreTrainedModel", family: Family, ids: Tensor
) -> tuple[Tensor, list[dict[str, Any] | None]]:
    """What enters the first block for ``ids [B, S]``, and all blocks' other arguments, by name.

    No block is run: each gives what it was given. A block that text alone does not call, as Llama
    3.2 Vision's cross-attention, has None.

    Raises:
        QtoolError: as :func:`~qtool.models.auto.running`.
    """
    blocks: Any = model.get_submodule(family.blocks)
    entered: list[Tensor] = []
    others: list[dict[str, Any] | None] = [None] * len(blocks)

    def recorder(number: int, signature: inspect.Signature) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = bound_arguments(signature, args, kwargs)
            entered.append(hidden := bound.pop(next(iter(bound))))
            others[number] = {n: given for n, given in bound.items() if n not in CACHE_ARGUMENTS}
            if number == len(others) - 1:
                raise _LastBlock
            return (hidden, *(None,) * (family.returns - 1)) if family.returns else hidden

        return forward

    forwards = {b: recorder(n, inspect.signature(b.forward)) for n, b in enumerate(blocks)}
    with running(), suppress(_LastBlock), OffMeta(ids.device), replaced_forwards(forwards):
        model.get_submodule(family.text)(input_ids=ids, use_cache=False)
    return entered[0], others
