"""What transformers' models call their KV cache: an argument, and a field of what they return."""

from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

OLDER = "past_key_values"
#: transformers renamed it with 5.24, and takes the older name too until 5.40
CACHE = "cache" if "cache" in {f.name for f in fields(BaseModelOutputWithPast)} else OLDER
#: names that a block's argument for the cache has
BLOCK_ARGUMENTS = (CACHE, "layer_past", "past_key_value")


def with_cache_renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` of a model, with the cache under the name that its forward has."""
    return {CACHE if name == OLDER else name: given for name, given in arguments.items()}
