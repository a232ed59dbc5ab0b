"""Which linears a native checkpoint stores packed, and their shapes."""

from qtool.format.linear import CODES
from qtool.io.source import Checkpoint
from qtool.models import family_of


def packed_names(checkpoint: Checkpoint) -> list[str]:
    """The full names of the linears that are stored packed."""
    ending = f".{CODES}"
    return [name.removesuffix(ending) for name in checkpoint.entries if name.endswith(ending)]


def linear_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """``(N, K)`` of the linear ``name``, by the family's declaration and config.json."""
    family = family_of(checkpoint.config)
    return family.linear_shape(name, family.settings(checkpoint.config))
