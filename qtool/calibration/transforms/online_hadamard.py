"""Rotates the inputs of down projections at run time (QuaRot section 4, SpinQuant's R4).

Such an input is the product of two linears' outputs. Its few large values set every token's scale,
and no rotation folds into its producers. The operation that quantizes the input also rotates it
(:mod:`qtool.schemes.arithmetic.online_hadamard`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Transform
from qtool.calibration.transforms.reorder import recipe_group
from qtool.models.family import Family
from qtool.models.parts import Fold, LinearGroup
from qtool.schemes.arithmetic.online_hadamard import SPAN


@dataclass(kw_only=True)
class OnlineHadamard(Transform):
    """Rotate the inputs of down projections, 64 channels at a time.

    A linear is left out if its number of input channels is not a multiple of 64, or if a ReLU makes
    its input: most of that is zero, which rounding keeps, and a rotation spreads the errors of the
    rest over it.
    """

    name = "online-hadamard"
    needs_data = False
    after: ClassVar[dict[str, str]] = dict.fromkeys(
        ("rotate", "smooth", "reorder", "gather-outliers"),
        "it folds in the channels that come before the rotation",
    )
    _chosen = frozenset[str]()

    def prepare(self, family: Family, config: Any) -> None:
        super().prepare(family, config)
        divides: dict[str, bool] = {}
        for kind in dict.fromkeys(family.of_blocks(config)):
            downs = [g for g in kind.groups if recipe_group(g) == "product" and not _of_relu(g)]
            for name in (name for group in downs for name in group.linears):
                whole = kind.shape(f"{name}.weight", config)[1] % SPAN == 0
                divides[name] = divides.get(name, True) and whole
        self._chosen = frozenset(name for name, whole in divides.items() if whole)

    def rotates(self, family: Family) -> tuple[str, ...]:
        return tuple(name for name in family.linears() if name in self._chosen)

    def announce(self, block: Block) -> None:
        block.to_rotate |= {name for name in self.rotates(block.family) if name in block.schemes}

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        for name in self.rotates(block.family):
            if name in block.schemes:
                block.rotate_inputs(name)


def _of_relu(group: LinearGroup) -> bool:
    """Whether the input is relu(up): a factor passes through it without a gate."""
    return group.fold is Fold.PRODUCT and group.gate is None
