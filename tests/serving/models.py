"""vLLM's own model and loaders on a CPU, as any rank of a tensor-parallel group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from torch import nn
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform

if (
    not platforms.current_platform.device_type
):  # vLLM's CUDA wheel on a machine without a GPU; before the rest asks
    platforms._current_platform = platforms.current_platform = CpuPlatform()
CpuPlatform.get_attn_backend_cls = lambda *_, **__: (
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
)  # type: ignore

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.network_utils import get_open_port

from qtool.serving.vllm import register

register()
_lookup = torch._ops._OpNamespace.__getattr__


def _absent(namespace: Any, name: str) -> Any:
    """vLLM's compiled operations are not in a CUDA wheel on such a machine; modules look them up,
    or call them to pack a weight, which stays as it is.
    """
    try:
        return _lookup(namespace, name)
    except AttributeError:
        if namespace.name.startswith(("_C", "_moe_C")) and not name.startswith("__"):
            return lambda *given, **_: given[0] if given else None
        raise


torch._ops._OpNamespace.__getattr__ = _absent  # type: ignore[method-assign]


def configured(directory: Path, **options: Any) -> VllmConfig:
    """vLLM's configuration of the model in ``directory``."""
    given = {"enforce_eager": True, "max_model_len": 64} | options
    config = EngineArgs(model=str(directory), **given).create_engine_config()
    if not torch.distributed.is_initialized():
        with set_current_vllm_config(config):
            init_distributed_environment(
                1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, backend="gloo"
            )
            initialize_model_parallel(1, 1)
            parallel_state._EP = parallel_state._EP or parallel_state._TP  # made for mixtures only
    return config


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """This process is rank ``rank`` of ``ranks`` for whoever asks; nothing is communicated."""
    group = parallel_state._TP
    assert group is not None
    before = group.rank_in_group, group.world_size
    group.rank_in_group, group.world_size = rank, ranks
    try:
        yield
    finally:
        group.rank_in_group, group.world_size = before


def loaded(
    directory: Path,
    rank: int = 0,
    ranks: int = 1,
    unset: int | None = None,
    prefix: str = "",
    **options: Any,
) -> nn.Module:
    """vLLM's model of ``directory`` as ``rank`` of ``ranks`` holds it, its weights loaded and
    processed.

    With ``unset`` they are not processed: what was not loaded has this value. ``prefix`` comes
    before the names of its layers, as before a draft model's.
    """
    config, before = configured(directory, **options), torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), as_rank(rank, ranks):
            model = initialize_model(config, prefix=prefix)
            for parameter in model.parameters() if unset is not None else ():
                parameter.data.fill_(unset)
            loader: Any = get_model_loader(config.load_config)
            loader.load_weights(model, config.model_config)
            if unset is None:
                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    finally:  # vLLM's own context leaves its dtype behind after an error
        torch.set_default_dtype(before)
    return model.eval()
