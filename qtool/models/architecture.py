"""A family at the sizes of one config.json: how many blocks, which tensors, of which shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from qtool.errors import QtoolError, suggest
from qtool.models.family import Family

#: the dtypes in which a model's weights may be stored, by their names in config.json
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: where a multimodal wrapper's config.json has its text model's, or a wrapper of that
TEXT_CONFIGS = ("text_config", "thinker_config")


@dataclass
class Architecture:
    """The tensors of one model before it is quantized.

    Attributes:
        config: the model's config.json.
    """

    config: dict[str, Any]
    family: Family

    @property
    def blocks(self) -> int:
        return int(self.namespace.num_hidden_layers)

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor in the source."""
        return bool(getattr(self.namespace, "tie_word_embeddings", False))

    @cached_property
    def namespace(self) -> SimpleNamespace:
        """The config as an object, for code that reads attributes."""
        return self.family.settings(self.config)

    def window(self, seqlen: int) -> int:
        """Tokens of a window where ``seqlen`` are asked for: at most the model's context."""
        return min(seqlen, context_length(self.namespace) or seqlen)

    def block_family(self, block: int) -> Family:
        """The family as it is in block ``block``."""
        return self.family.at(self.namespace, block)

    def full(self, block: int, name: str) -> str:
        """The full name of the tensor or module ``name`` of block ``block``."""
        return f"{self.family.blocks}.{block}.{name}"

    def block_shapes(self, block: int) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of a block, by their names within the block."""
        return self.block_family(block).block_shapes(self.namespace)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that the source must hold, by full name."""
        first, last = self.embedding_and_head()
        if self.tied:
            del last[f"{self.family.head}.weight"]
        blocks = {
            self.full(block, name): shape
            for block in range(self.blocks)
            for name, shape in self.block_shapes(block).items()
        }
        return first | blocks | last

    def embedding_and_head(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Shapes of the tensors before the blocks (tables) and after them (final norm, head)."""
        family, dims = self.family, self.family.dimensions(self.namespace)
        first: dict[str, tuple[int, ...]] = {}
        last: dict[str, tuple[int, ...]] = {}
        first[f"{family.embedding}.weight"] = (dims["vocab"], dims["hidden"])
        if family.positions:
            first[f"{family.positions}.weight"] = (dims["positions"], dims["hidden"])
        if family.final_norm:
            last[f"{family.final_norm}.weight"] = (dims["hidden"],)
        has_bias = family.layer_norm if family.final_bias is None else family.final_bias
        if family.final_norm and has_bias:
            last[f"{family.final_norm}.bias"] = (dims["hidden"],)
        last[f"{family.head}.weight"] = (dims.get("head", dims["vocab"]), dims["hidden"])
        return first, last | dict(family.outside)


def context_length(settings: Any) -> int | None:
    """The longest window that a model was made for, tokens; None if its config names none.

    Args:
        settings: transformers' config of the text model, or :attr:`Architecture.namespace`.
    """
    lengths = (getattr(settings, key, None) for key in ("max_position_embeddings", "max_seq_len"))
    return next((length for length in lengths if length and length > 0), None)  # XLNet has -1


def with_text_config(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """config.json, under ``""``, and the parts of a multimodal wrapper's that the text model is in.

    These are named as ``thinker_config.text_config`` is.
    """
    found = {"": config}
    for key in TEXT_CONFIGS:
        if isinstance(part := config.get(key), Mapping):
            inner = with_text_config(part)
            found |= {f"{key}.{name}".rstrip("."): own for name, own in inner.items()}
    return found


def named_dtype(config: Mapping[str, Any]) -> str:
    """The name of the dtype in config.json, of a wrapper without one that of its text model.

    It is empty if there is none.
    """
    return next(filter(None, map(own_dtype, with_text_config(config).values())), "")


def own_dtype(part: Mapping[str, Any]) -> str:
    """The name of the dtype in a part of config.json, under its new or its old key; or empty."""
    return str(part.get("dtype") or part.get("torch_dtype") or "")


def dtype_name(dtype: str | torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def require_dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    """The dtype ``value``, given as itself or by its name.

    Raises:
        QtoolError: it is none of :data:`DTYPES`; naming it.
    """
    if dtype_name(value) not in DTYPES:
        raise QtoolError(f"{name} {value!r}: {suggest(dtype_name(value), DTYPES)}")
    return DTYPES[dtype_name(value)]
