"""The KV cache of a native checkpoint in vLLM: its backend, and its calibrated tensors.

If ``config.json`` says kv4 or kv8, vLLM must store keys and values so without a flag, but it has no
hook for that choice. So the choice is made when the model's first linear asks for its method,
before the first attention layer is built, in each process that builds the model. It sets in vLLM's
own configuration what ``--kv-cache-dtype`` and ``--attention-backend`` would set; if these were
given, they take precedence. The values depend on how this vLLM accepts our pages, which its
interfaces tell, not its version.
"""

import re
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config import cache as cache_dtypes
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from qtool.errors import QtoolError
from qtool.io.finite import require_finite
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.runtime.packed_kv import NEUTRAL, OFFSET, SCALES, kv_tensors
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.preflight import cache_refused

logger = init_logger(__name__)

#: prefix of attributes of vLLM's attention layer; vLLM resets other names when it wakes up
PREFIX = "cache_"


def choose_cache(config: VllmConfig, linears: PackedLinears) -> bool:
    """Let vLLM store keys and values as the checkpoint was evaluated, if it can and may.

    Returns whether it does; else the log says why, once.
    """
    quantizer = linears.format.kv
    if quantizer is None:
        return False
    pages = offered_pages()
    if reason := _reason_against(linears, pages, config):
        logger.warning_once(
            "The checkpoint's %s cache is not used: %s. Keys and values are kept as "
            "--kv-cache-dtype says, in 16 bits by default.",
            quantizer,
            reason,
        )
        return False
    register_backend(AttentionBackendEnum.CUSTOM, backend_path(pages))
    config.cache_config.cache_dtype = pages.CACHE_DTYPES[quantizer]
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    logger.info_once("The KV cache is the checkpoint's %s.", quantizer)
    return True


def offered_pages() -> Any:
    """The module for the way in which this vLLM accepts our pages, or None if it does not."""
    if hasattr(AttentionBackend, "customize_spec") and hasattr(
        cache_dtypes, "register_kv_cache_dtype"
    ):
        from qtool.serving.vllm import kv_registered

        return kv_registered
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        from qtool.serving.vllm import kv_borrowed

        if kv_borrowed.BITS.keys() <= set(get_args(cache_dtypes.CacheDType)):
            return kv_borrowed
    return None


def backend_path(pages: Any) -> str:
    """vLLM's name of the backend in a module of :func:`offered_pages`."""
    return f"{pages.__name__}.{pages.QtoolAttentionBackend.__name__}"


def _reason_against(linears: PackedLinears, pages: Any, config: VllmConfig) -> str:
    quantizer, cache, attention = linears.format.kv, config.cache_config, config.attention_config
    if reason := cache_refused(linears):
        return reason
    if pages is None:
        return "this vLLM has no cache dtype of its size, and plugins cannot add one"
    if not current_platform.is_cuda():
        return "its kernels need a CUDA GPU"
    if attention.backend not in (None, AttentionBackendEnum.CUSTOM) or attention.backend_per_kind:
        return "another attention backend was asked for"
    # as set here, for another model
    ours = "auto" if attention.backend is None else pages.CACHE_DTYPES[quantizer]
    if cache.cache_dtype not in ("auto", ours):
        return f"--kv-cache-dtype {cache.cache_dtype} was asked for"
    if cache.user_specified_block_size and cache.block_size % TOKENS:
        return f"--block-size {cache.block_size} was asked for, which is no multiple of {TOKENS}"
    if config.model_config.dtype not in (torch.float16, torch.bfloat16):
        return f"the model runs in {config.model_config.dtype}, its kernels in 16 bits"
    if config.model_config.is_hybrid:
        return "the size of its pages is not that of the model's recurrent states"
    if config.model_config.using_transformers_backend():
        return "vLLM runs transformers' model, which has no place for the cache's tensors"
    if config.speculative_config is not None:
        return "lengths of speculative decoding are known on the GPU only"
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism cuts sequences"
    return ""


class KVMethod(BaseKVCacheMethod):
    """Loads the tensors ``[H, D]`` that a checkpoint stores for its cache, this rank's heads.

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
            empty = torch.zeros(shape, dtype=torch.float32)
            parameter = nn.Parameter(empty, requires_grad=False)
            parameter.weight_loader = self._loader(name)  # type: ignore[attr-defined]
            layer.register_parameter(PREFIX + name, parameter)
        if size_window := getattr(offered_pages(), "size_window", None):
            size_window(layer)

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
        """Refuse tensors that are absent or damaged."""
        for name in SCALES if self.quantizer == "kv8" else NEUTRAL:
            if name not in self.loaded:
                raise QtoolError(f"{self.prefix}: {name} is missing; the checkpoint is damaged")
            found = require_finite(f"{self.prefix}.{name}", getattr(layer, PREFIX + name))
            if name != OFFSET and not (found > 0).all():
                raise QtoolError(f"{self.prefix}: {name} is not a positive number")


def cache_tensors(linears: PackedLinears, served: bool) -> WeightsMapper:
    """From the checkpoint's names to :class:`KVMethod`'s; drops them for vLLM's own cache."""
    names: dict[re.Pattern[str], str | None] = {}
    tensors = (kv_tensors(linears.format.kv, f, linears.settings) for f in linears.families)
    for stored in {name for of_block in tensors for name in of_block}:
        parent, _, name = stored.rpartition(".")
        ending = re.compile(rf"\.{re.escape(stored)}$")
        names[ending] = f".{parent}.attn.{PREFIX}{name}" if served else None
    return WeightsMapper(orig_to_new_regex=names)
