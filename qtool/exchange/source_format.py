"""What a foreign 4-bit format that can be imported is: how its linears are stored.

A checkpoint is described once, from its ``quantization_config``; what no scheme of ours holds
(other widths, quantized activations) is refused there, with the reason. Zero points and the order
of input channels are data: :mod:`qtool.exchange.import_` looks at them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange.affine import Affine

#: a ``quantization_config``
Config = Mapping[str, Any]
#: how to go on where a checkpoint cannot be imported
INSTEAD = (
    "quantize the original model, or dequantize this one to 16 bits with the tool that made it "
    "and quantize that"
)


@dataclass(frozen=True)
class SourceFormat:
    """How the linears of a foreign checkpoint are stored.

    Attributes:
        name: what messages call the format.
        weight, scales, zeros: the tensors of the codes, which marks a quantized linear, of the
            scales and of the zero points.
        group_index: the tensor that gives each input channel its group; "" if there is none.
        optional: those of these tensors that a linear may lack.
        other: further tensors of a linear, which say nothing new.
        transposed: scales are ``[G, N]``, not ``[N, G]``.
        read: codes, scales and zero points of the linear ``(tensors, n, k)``.
        read_zeros: zero points ``[n, groups]`` alone, of ``(stored, n, groups)``.
    """

    name: str
    weight: str
    scales: str
    zeros: str
    group_index: str
    transposed: bool
    read: Callable[[Mapping[str, Tensor], int, int], Affine]
    read_zeros: Callable[[Tensor, int, int], Tensor]
    optional: frozenset[str] = frozenset()
    other: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a linear's tensors."""
        named = (self.weight, self.scales, self.zeros, self.group_index, *self.other)
        return tuple(name for name in named if name)

    def linear_of(self, tensor: str) -> str | None:
        """The linear whose codes ``tensor`` holds; None if it holds none."""
        module, _, part = tensor.rpartition(".")
        return module if part == self.weight and module else None


def require_setting(config: Config, key: str, wanted: int | str, what: str, why: str) -> None:
    """Refuse a config whose ``key`` is not ``wanted``.

    Raises:
        QtoolError: naming format, key and both values.
    """
    if config.get(key) != wanted:
        raise QtoolError(
            f"{what} with {key}={config.get(key)} cannot be imported, only {key}={wanted}: {why}"
        )
