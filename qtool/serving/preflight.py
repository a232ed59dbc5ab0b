"""Whether an engine can serve a checkpoint on these GPUs, decided before it loads anything."""

from pathlib import Path
from typing import Any

import torch

from qtool.errors import QtoolError
from qtool.format import QUANT_METHOD, native_format
from qtool.io.source import Checkpoint, read_config
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.kernel import require_kernel
from qtool.serving.partition import require_shares
from qtool.serving.stored import require_stored

#: quantized KV caches whose kernels read pages
PAGED = ("kv4", "kv8")


def cache_refused(linears: PackedLinears) -> str:
    """Why vLLM cannot use the quantized KV cache of a checkpoint on any GPU; empty if it can."""
    if linears.format.kv not in PAGED:
        return f"{linears.format.kv} has no kernel over pages"
    if len({own.kv_cache for own in linears.families}) > 1:
        return "its pages are of one size, and not all blocks keep keys and values of one shape"
    return ""


def require_gpus(count: int) -> None:
    """Refuse a machine with fewer NVIDIA GPUs.

    Raises:
        QtoolError: saying how many there are.
    """
    if (there := torch.cuda.device_count()) < count:
        raise QtoolError(
            f"vLLM would run on {count} NVIDIA GPU{'s' * (count > 1)}; "
            f"this machine has {there or 'none'}"
        )


def require_servable(
    directory: Path,
    tensor_parallel: int,
    capability: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse a checkpoint that these GPUs cannot serve, by its files, shares and kernels.

    A model that is not native is not refused.

    Args:
        capability: compute capability of the GPUs; None if it is not known.
        dtype: dtype of the activations; None: the one that vLLM chooses, which has 16 bits.

    Raises:
        QtoolError: naming what does not fit; one sentence.
    """
    config = read_config(directory)
    if (config.get("quantization_config") or {}).get("quant_method") != QUANT_METHOD:
        return
    linears = PackedLinears(config, native_format(config))
    linears.require_joined()
    require_stored(Checkpoint(directory), linears)
    require_shares_and_kernels(linears, tensor_parallel, capability, dtype)


def require_shares_and_kernels(
    linears: PackedLinears,
    tensor_parallel: int,
    capability: tuple[int, int] | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse linears that ``tensor_parallel`` GPUs cannot share, or not multiply in ``dtype``.

    Raises:
        QtoolError: naming the first such linear.
    """
    seen: set[tuple[Any, ...]] = set()  # a mixture has tens of thousands of linears
    for name, linear_format in linears.formats().items():
        permuted = linears.format.is_permuted(name)
        case = *linears.place(name), linear_format, permuted
        if case not in seen:
            seen.add(case)
            outputs, k, ranks = linears.share(name, tensor_parallel)
            require_shares(name, linear_format, outputs, k, ranks, permuted=permuted)
            require_kernel(name, linear_format, sum(outputs), k, capability, dtype)
