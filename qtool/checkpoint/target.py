"""What a foreign format is: pure functions from codes and parameters to the tensors another loader reads."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from qtool.errors import QtoolError
from qtool.runtime.format import CheckpointFormat, LinearFormat
from qtool.schemes import Params


class Target(ABC):
    """One serving stack's format."""

    name: ClassVar[str]
    #: scheme -> group sizes the format can express
    expressible: ClassVar[Mapping[str, tuple[int | None, ...]]]

    def require(self, checkpoint_format: CheckpointFormat, name: str, shape: tuple[int, int]) -> None:
        """Refuse, before any work, what the format cannot express.

        Raises:
            QtoolError: naming the linear, the reason and what would be accepted.
        """
        found = checkpoint_format.of(name)
        assert found is not None
        if found.scheme not in self.expressible:
            raise QtoolError(
                f"{name}: {self.name} cannot express scheme {found.scheme}; it takes {', '.join(self.expressible)}"
            )
        if found.group_size not in (sizes := self.expressible[found.scheme]):
            accepted = ", ".join("channel" if size is None else str(size) for size in sizes)
            size = "channel" if found.group_size is None else found.group_size
            raise QtoolError(
                f"{name}: {self.name} cannot express group size {size} of {found.scheme}; it takes {accepted}"
            )
        if checkpoint_format.is_permuted(name):
            raise QtoolError(f"{name}: {self.name} cannot gather a layer's input; quantize without channel reordering")

    @abstractmethod
    def tensors(self, linear_format: LinearFormat, codes: Tensor, params: Params) -> dict[str, Tensor]:
        """The tensors of one linear, by their name after the module path. Runs on ``meta`` too."""

    @abstractmethod
    def quantization_config(self, formats: Mapping[str, LinearFormat]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json for these linears (full name -> format)."""
