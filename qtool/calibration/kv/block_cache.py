"""What a block finds in place of transformers' KV cache while it is calibrated.

Legend: B sequences in a batch, H kv heads, T tokens, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BlockCache:
    """The KV cache of one block, whose keys and values ``cache`` observes or quantizes.

    ``cache`` takes and returns each kv head once, also where attention repeats kv heads for query
    heads (Falcon). A recurrent layer of the block (Falcon-H1) or an indexer (Qwen4) finds nothing
    of earlier forwards, and nothing of its own is kept.
    """

    cache: Any
    heads: int

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """``cache``'s result for ``keys``, ``values [B, H * repeats, T, D]``, repeated too."""
        repeats = keys.shape[1] // self.heads
        if repeats == 1:
            return self.cache.update(keys, values, *args, **kwargs)
        keys, values = self.cache.update(keys[:, ::repeats], values[:, ::repeats], *args, **kwargs)
        return keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)

    def get_seq_length(self, *args: Any) -> int:
        """Tokens of earlier forwards, which some attention asks for (MPT, Llama 4): always 0."""
        return 0

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """The state of earlier forwards: none."""

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Whether there are states of earlier forwards: never."""
        return False

    def update_conv_state(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``states``, as the only ones."""
        return states

    update_recurrent_state = update_indexer = update_conv_state
