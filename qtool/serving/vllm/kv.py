"""The KV cache of a native checkpoint in vLLM: who keeps it, and what was calibrated for it.

``config.json`` says kv4 or kv8, so vLLM is to keep keys and values so without being told. vLLM has
no hook for that choice: it is made when the model's first linear asks for its method, before the
first attention layer is built, in each process that builds the model, by setting in vLLM's own
configuration what ``--kv-cache-dtype`` and ``--attention-backend`` would set. Where those were
given, they count.
"""

import re
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from qtool.errors import QtoolError
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.runtime.packed_kv import NEUTRAL, SCALES
from qtool.serving.stored import PackedLinears, kv_names

logger = init_logger(__name__)

#: vLLM's cache dtype whose page has the size of ours
CACHE_DTYPES = {"kv4": "int4_per_token_head", "kv8": "int8_per_token_head"}
BACKEND = "qtool.serving.vllm.attention.QtoolAttentionBackend"
#: attributes of vLLM's attention layer: not the names that vLLM resets when it wakes up
PREFIX = "cache_"


def choose_cache(config: VllmConfig, quantizer: str | None) -> bool:
    """Have vLLM keep keys and values as the checkpoint was evaluated, if it can and may.

    Returns whether it does; else it is told why, once.
    """
    if quantizer is None:
        return False
    if reason := _reason_against(quantizer, config):
        logger.warning_once(
            "The checkpoint's %s cache is not used: %s. Keys and values are kept as "
            "--kv-cache-dtype says, in 16 bits by default.",
            quantizer,
            reason,
        )
        return False
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    config.cache_config.cache_dtype = CACHE_DTYPES[quantizer]  # type: ignore[assignment]
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    logger.info_once("The KV cache is the checkpoint's %s.", quantizer)
    return True


def _reason_against(quantizer: str, config: VllmConfig) -> str:
    cache, attention = config.cache_config, config.attention_config
    wanted = CACHE_DTYPES.get(quantizer)
    if wanted is None:
        return f"{quantizer} has no kernel over pages"
    if not hasattr(AttentionBackend, "get_kv_cache_shape") or wanted not in get_args(CacheDType):
        return "this vLLM has no pages of its size"
    if not current_platform.is_cuda():
        return "its kernels need a CUDA GPU"
    if attention.backend not in (None, AttentionBackendEnum.CUSTOM) or attention.backend_per_kind:
        return "another attention backend was asked for"
    ours = "auto" if attention.backend is None else wanted  # as set here, for another model
    if cache.cache_dtype not in ("auto", ours):
        return f"--kv-cache-dtype {cache.cache_dtype} was asked for"
    if cache.user_specified_block_size and cache.block_size % TOKENS:
        return f"--block-size {cache.block_size} was asked for, which is no multiple of {TOKENS}"
    if config.model_config.dtype not in (torch.float16, torch.bfloat16):
        return f"the model runs in {config.model_config.dtype}, its kernels in 16 bits"
    if config.speculative_config is not None:
        return "lengths of speculative decoding are known on the GPU only"
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism cuts sequences"
    return ""


class KVMethod(BaseKVCacheMethod):
    """Loads what a checkpoint stores for its cache: this rank's heads of each tensor ``[H, D]``.

    Args:
        prefix: vLLM's name of the layer.
    """

    def __init__(self, quant_config: Any, prefix: str, quantizer: str) -> None:
        super().__init__(quant_config)
        self.prefix, self.quantizer = prefix, quantizer
        self.loaded: set[str] = set()

    def create_weights(self, layer: Any) -> None:
        shape = (layer.num_kv_heads, layer.head_size)
        static = self.quantizer == "kv8"
        for name in (*SCALES, *NEUTRAL):
            if (name in SCALES) != static:
                layer.register_parameter(PREFIX + name, None)
                continue
            neutral = torch.full(shape, NEUTRAL.get(name, 0.0), dtype=torch.float32)
            parameter = nn.Parameter(neutral, requires_grad=False)
            parameter.weight_loader = self._loader(name)  # type: ignore[attr-defined]
            layer.register_parameter(PREFIX + name, parameter)

    def _loader(self, name: str) -> Any:
        def load(parameter: nn.Parameter, stored: Tensor) -> None:
            heads, dim = parameter.shape
            ranks = get_tensor_model_parallel_world_size()
            total = stored.shape[0] if stored.dim() == 2 else 0
            if stored.shape[1:] != (dim,) or max(total // ranks, 1) != heads:
                raise QtoolError(
                    f"{self.prefix}: {name} is {list(stored.shape)}; {heads} kv heads of {dim} "
                    f"channels are on each of {ranks} GPUs"
                )
            first = get_tensor_model_parallel_rank() * total // ranks
            parameter.data.copy_(stored[first : first + heads])
            self.loaded.add(name)

        return load

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse scales that are absent or damaged."""
        if self.quantizer != "kv8":
            return
        for name in SCALES:
            scale = getattr(layer, PREFIX + name)
            if name not in self.loaded or not (torch.isfinite(scale) & (scale > 0)).all():
                raise QtoolError(f"{self.prefix}: {name} is missing, or not a positive number")


def cache_tensors(linears: PackedLinears, served: bool) -> WeightsMapper:
    """From the checkpoint's names to :class:`KVMethod`'s; drops them where vLLM keeps its own."""
    names: dict[re.Pattern[str], str | None] = {}
    for stored in kv_names(linears):
        parent, _, name = stored.rpartition(".")
        ending = re.compile(rf"\.{re.escape(stored)}$")
        names[ending] = f".{parent}.attn.{PREFIX}{name}" if served else None
    return WeightsMapper(orig_to_new_regex=names)
