"""The protocol of a calibration method, and the order in which methods may stand in a recipe.

A *transform* rewrites the float weights so that the model's output stays the same but the model
quantizes better (rotation, smoothing, reordering), or notes a decision (clipping). A *rounding*
turns the weights of a block into codes. Both work block by block. A transform may also rewrite the
embedding and the head, row by row, so that these can be streamed too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.rounding.rounded import Rounded
from qtool.errors import QtoolError
from qtool.models.family import Family
from qtool.schemes import Scheme

#: calibration sequences given to a transform that learns from all blocks (:meth:`Transform.learn`)
LEARNING_SEQUENCES = 8


@dataclass(frozen=True)
class Norm:
    """A norm ``n * gain + bias`` of the normalized input n, all ``[H]``; ``bias`` may be None.

    The stored weight is the gain less ``offset`` (1 in Gemma).
    """

    gain: Tensor
    bias: Tensor | None = None
    offset: float = 0.0

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, offset: float) -> "Norm":
        """The norm of a stored weight and bias."""
        return cls(weight.double() + offset if offset else weight, bias, offset)

    def stored(self) -> dict[str, Tensor]:
        """``weight`` and ``bias`` as a checkpoint has them."""
        weight = self.gain - self.offset if self.offset else self.gain
        return {"weight": weight} | ({} if self.bias is None else {"bias": self.bias})


@dataclass
class Method(ABC):
    """A transform or a rounding. Options are dataclass fields (recipe keys)."""

    #: its name in recipes
    name: ClassVar[str]
    #: whether it looks at activations, so that the run needs calibration data
    needs_data: ClassVar[bool]
    #: options that must be above 0
    positive: ClassVar[tuple[str, ...]] = ()
    #: the largest value of options that have one
    most: ClassVar[Mapping[str, float]] = {}

    def work(self, block: BlockShape) -> Work:
        """The work on one block; by default one forward of all inputs if the method needs data."""
        return Work(forward_flops=block.partial_forward_flops() if self.needs_data else 0)

    def held_bytes(self, block: BlockShape) -> int:
        """Device bytes at the worst moment: the exact weights and what else is allocated.

        By default these are four float32 copies of the largest weight if the method needs data.
        """
        return block.exact_bytes + (16 * block.largest if self.needs_data else 0)

    def spare_bytes(self, block: BlockShape) -> int:
        """Device bytes beyond :meth:`held_bytes` that it takes where the device has room."""
        return 0


@dataclass
class Transform(Method):
    """Rewrites a block in place before it is rounded."""

    #: names of methods that, where present in a recipe, must come earlier, and why
    after: ClassVar[dict[str, str]] = {}
    #: names of methods that must be present and come earlier, and why
    requires: ClassVar[dict[str, str]] = {}

    @property
    def rewrites_embedding(self) -> bool:
        """Whether the embedding or the head changes, so that tied ones are untied."""
        return False

    @property
    def learns(self) -> bool:
        """Whether it learns from all blocks before the first one is rewritten."""
        return False

    def learn(self, blocks: Iterable[Block], batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Tensors that it learns from all ``blocks``, which this transform has not rewritten yet.

        :meth:`load` gets them; a resumed run reads them from disk. ``batches`` are the inputs of
        the first block for some of the calibration data; they are empty in a run without data.
        """
        return {}

    def learning_bytes(self, block: BlockShape) -> int:
        """Device bytes at the worst moment of :meth:`learn`, when no activations are kept yet.

        By default those of :meth:`held_bytes`.
        """
        return self.held_bytes(block)

    def load(self, learned: Mapping[str, Tensor]) -> None:
        """Take what :meth:`learn` found."""

    def announce(self, block: Block) -> None:
        """Write into ``block`` what earlier transforms should know: schemes, what will be rotated.

        It is called for each block before the first transform rewrites it.
        """

    def prepare(self, family: Family, config: Any) -> None:
        """Find out what the method must know about the model, before any work.

        Raises:
            QtoolError: if the family cannot have this transform; the message says why.
        """
        if reason := family.refuses.get(self.name):
            raise QtoolError(f"{self.name}: {family.name} models cannot have it: {reason}")

    def permutes(self, family: Family) -> tuple[str, ...]:
        """Linears of a block that will store an input permutation (``block.permutations``)."""
        return ()

    def rotates(self, family: Family) -> tuple[str, ...]:
        """Linears of a block whose inputs will be rotated at run time (``block.rotated``)."""
        return ()

    @abstractmethod
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        """Rewrite ``block`` (``batches`` is empty unless ``needs_data``)."""

    def embedding(self, rows: Tensor) -> Tensor:
        """Rows ``[n, H]`` of the embedding table, rewritten."""
        return rows

    def head(self, rows: Tensor, final_norm: Tensor) -> Tensor:
        """Rows ``[n, H]`` of the head, rewritten.

        ``final_norm [H]`` is the gain of the norm before it.
        """
        return rows

    def final_norm(self, norm: Norm) -> Norm:
        """The final norm after the transform."""
        return norm


@dataclass
class Rounding(Method):
    """Turns every linear of ``block.schemes`` into codes."""

    @property
    def iteration(self) -> int:
        """Sequences in one iteration of an optimizer, at least 1; a batch has a multiple of it."""
        return 1

    @property
    def compares(self) -> bool:
        """Whether the float model runs too, for comparison (``Block.reference``)."""
        return False

    @property
    def weighs_outputs(self) -> bool:
        """Whether it needs the gradients of the residual stream (``Block.sensitivity``)."""
        return False

    def require_scheme(self, scheme: Scheme) -> None:
        """Refuse, before any work, a scheme to which it cannot round.

        Raises:
            QtoolError: the message says why.
        """

    @abstractmethod
    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        """Codes and parameters of all linears in ``block.schemes``; it may install them itself.

        It may change their biases in place, which are stored after it.
        """


def check_order(transforms: Sequence[Transform]) -> None:
    """Refuse a list of transforms that cannot stand in this order.

    Raises:
        QtoolError: naming the two methods and the reason.
    """
    names = [transform.name for transform in transforms]
    for i, transform in enumerate(transforms):
        if transform.name in names[:i]:
            raise QtoolError(f"transforms: {transform.name} is listed twice; once is all it may be")
        for other, reason in transform.requires.items():
            if other not in names[:i]:
                raise QtoolError(f"transforms: {transform.name} needs {other} before it: {reason}")
        for other, reason in transform.after.items():
            if other in names[i + 1 :]:
                raise QtoolError(f"transforms: {other} must come before {transform.name}: {reason}")
