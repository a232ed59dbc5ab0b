"""The record of one forward of transformers' model of a config."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qtool.models.derived.facts import Facts
from qtool.models.derived.trace import Trace

#: the producer of the token ids
IDS = "token ids"
#: sequences and tokens of the forward
SHAPE = 1, 4


@dataclass
class Recorded:
    """A model on ``meta`` and the record of one forward.

    Attributes:
        text: the name of the module that was run, :attr:`~qtool.models.family.Family.text`.
        blocks: the module list of its blocks.
        embedding: the name of the embedding's module.
        head: the name of the head's module.
        start: facts of the values that enter the first block.
        outputs: length of the tuple that blocks return; 0 for a bare tensor.
        passes: other values that blocks use of earlier blocks, as in
            :attr:`~qtool.models.family.Family.passes`.
        handed: for each of ``passes``, the largest value that a block was given.
        width: numbers per token of the hidden states.
        impure: why a block's arguments depend on earlier blocks, if they do.
        like: for each block the first one with the same modules and settings; only this is
            recorded.
        reads_ids: whether another module than the embedding reads the token ids.
        active_experts: number of experts that a token goes to; 0 if there are none.
    """

    model: Any
    text: str
    trace: Trace
    blocks: str
    embedding: str
    head: str
    start: Facts = field(default_factory=dict)
    outputs: int = 0
    passes: dict[str, int] = field(default_factory=dict)
    handed: list[Tensor] = field(default_factory=list)
    width: int = 0
    impure: str = ""
    like: list[int] = field(default_factory=list)
    reads_ids: bool = False
    active_experts: int = 0

    @property
    def config(self) -> Any:
        """The config of the text model."""
        return self.text_model.config.get_text_config(decoder=True)

    @property
    def text_model(self) -> Any:
        """The module that was run."""
        return self.model.get_submodule(self.text)
