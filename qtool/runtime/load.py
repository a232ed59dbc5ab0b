"""``load``: a native checkpoint as a transformers model that runs the packed weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qtool.errors import QtoolError
from qtool.runtime import huggingface  # noqa: F401  (registers the quantizer)
from qtool.runtime.decode import graph_decoding, one_kernel_norms
from qtool.runtime.kv_cache import quantize_kv
from qtool.runtime.merge import merge_linears
from qtool.runtime.packed_kv import IMPORTANCE
from qtool.schemes.kv import KV_QUANTIZERS


def load(
    directory: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    kv: str | None = None,
) -> PreTrainedModel:
    """The causal language model in ``directory``, quantized by qtool or not, in eval mode.

    On a CUDA device packed linears that read one input are multiplied as one
    (:mod:`qtool.runtime.merge`), and ``generate`` decodes over a static cache by CUDA graphs where
    the architecture allows it (:mod:`qtool.runtime.decode`);
    ``generate(cache_implementation="dynamic")`` decodes as transformers does by default.

    Args:
        device: where it runs. dtype: of what is not quantized; by default the checkpoint's.
        kv: KV-cache quantizer; by default the checkpoint's. A static one must be the checkpoint's
            own.

    Raises:
        QtoolError: if the directory is not a loadable model, or ``kv`` is not for it.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise QtoolError(f"{path}: no config.json; expected a model directory")
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise QtoolError(
            f"{path}: transformers cannot load it ({str(error).splitlines()[0]})"
        ) from error
    model, info = found
    missing = sorted(name for name in info["missing_keys"] if not name.endswith(f".{IMPORTANCE}"))
    if missing:  # transformers leaves their memory as it found it
        raise QtoolError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if kv is not None and kv != getattr(model.get_decoder(), "kv_quantizer", None):
        if kv in KV_QUANTIZERS and KV_QUANTIZERS[kv].static:
            raise QtoolError(
                f"{path}: {kv} needs calibrated scales, which it does not hold: "
                f"quantize with --kv {kv}"
            )
        quantize_kv(model, kv)
    torch.nn.Module.to(model, device)
    if torch.device(device).type == "cuda":
        merge_linears(model)
        one_kernel_norms(model)
        graph_decoding(model)
    return model.eval()


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``directory``.

    Raises:
        QtoolError: if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise QtoolError(
            f"{directory}: no usable tokenizer ({str(error).splitlines()[0]})"
        ) from error
