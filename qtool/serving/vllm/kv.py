"""The KV cache of a native checkpoint in vLLM: for now vLLM's own, in the dtype asked for.

What a checkpoint stores for its quantized cache (kv8's scales, kv4's key offsets and importances)
is left in the files.
"""

import re

from vllm.logger import init_logger
from vllm.model_executor.models.utils import WeightsMapper

from qtool.serving.stored import PackedLinears, kv_names

logger = init_logger(__name__)


def say_unused(quantizer: str) -> None:
    """Tell, once, that keys and values are not kept as the checkpoint was evaluated."""
    logger.warning_once(
        "The checkpoint's %s cache is not served yet: keys and values are kept as --kv-cache-dtype "
        "says, in 16 bits by default.",
        quantizer,
    )


def without_cache_tensors(linears: PackedLinears) -> WeightsMapper:
    """Drops what is stored for the cache before vLLM looks for a place."""
    return WeightsMapper(
        orig_to_new_regex={re.compile(rf"\.{re.escape(name)}$"): None for name in kv_names(linears)}
    )
