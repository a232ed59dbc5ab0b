"""The protocol of a floating-point format of fewer than 16 bits of published models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qtool.io.safetensors import Entry

#: a ``quantization_config``
Config = Mapping[str, Any]
Entries = Mapping[str, Entry]


@dataclass(frozen=True)
class Weight:
    """A weight that a checkpoint stores as codes and scales.

    Attributes:
        name: name of the weight in the plain model.
        entry: the entry that reads the weight.
        stored: names of the tensors from which it is made.
    """

    name: str
    entry: Entry
    stored: tuple[str, ...]


class FloatFormat(Protocol):
    """A format, as one ``quantization_config`` describes it.

    Attributes:
        about: a description of the format for messages.
        scales: endings of the names of scales; each must belong to a weight.
        unread: endings of the names of tensors that no weight needs: scales of activations or a KV
            cache.
    """

    @property
    def about(self) -> str: ...

    @property
    def scales(self) -> tuple[str, ...]: ...

    @property
    def unread(self) -> tuple[str, ...]: ...

    def weight(self, name: str, entries: Entries, dtype: torch.dtype) -> Weight | None:
        """The weight, in ``dtype``, whose codes tensor ``name`` holds; None if it holds none.

        Raises:
            QtoolError: codes without scales, or of other shapes.
        """
