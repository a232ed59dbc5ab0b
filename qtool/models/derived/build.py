"""transformers' model of a config.json, without numbers."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qtool.errors import QtoolError, in_one_line
from qtool.models.auto import auto_class
from qtool.models.conv1d import replace_conv1d
from qtool.models.family import MOST_BLOCKS, MOST_EXPERTS
from qtool.models.unsupported import ENCODER_DECODER

#: the most blocks and experts that a config may ask for, by transformers' names
MOST = {
    "num_hidden_layers": MOST_BLOCKS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MOST_EXPERTS),
}
#: implementations in plain torch operations, which take every dtype
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
#: the most elements of a tensor that gets memory while a model is built
MOST_ELEMENTS = 1 << 16


def build(config: Mapping[str, Any]) -> Any:
    """transformers' model of a config.json, on ``meta``, in eval mode.

    It may change ``config``.

    Raises:
        QtoolError: transformers has no such model, or cannot build this one.
    """
    import transformers
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    try:
        made = transformers.AutoConfig.for_model(**config)
        if made.is_encoder_decoder or made.get_text_config(decoder=True).is_encoder_decoder:
            raise QtoolError(ENCODER_DECODER)
        _require_counts(made.get_text_config())
        with init_empty_weights(include_buffers=False), _NoMemory(), no_init_weights():
            model = auto_class(made).from_config(made, **EAGER).eval()
        replace_conv1d(model)
        model.tie_weights()  # moving weights to meta one by one untied them
        return model
    except QtoolError:
        raise
    except Exception as error:
        raise QtoolError(
            f"{config.get('model_type')!r}: transformers {transformers.__version__} cannot build "
            f"the model of this config.json ({in_one_line(error)})"
        ) from error


class _NoMemory(TorchDispatchMode):
    """While open, large new tensors are made on ``meta``; small ones keep their numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        size = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else ()
        if all(isinstance(n, int) for n in size) and prod(size) > MOST_ELEMENTS:
            kwargs = dict(kwargs or {}, device=torch.device("meta"))
        return func(*args, **(kwargs or {}))


def _require_counts(config: Any) -> None:
    """Refuse more blocks or experts than any model has: each is an object even on ``meta``."""
    for key, most in MOST.items():
        if isinstance(found := getattr(config, key, None), int) and found > most:
            raise QtoolError(f"config.json: {key} is {found}; at most {most} are expected")
