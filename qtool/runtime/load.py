"""``load``: a native checkpoint as a transformers model that runs the packed weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qtool.errors import QtoolError
from qtool.runtime import huggingface  # noqa: F401  (registers the quantizer)


def load(directory: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal language model in ``directory``, quantized by qtool or not, in eval mode.

    Args:
        device: where it runs. dtype: of what is not quantized; by default the checkpoint's.

    Raises:
        QtoolError: if the directory is not a loadable model.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise QtoolError(f"{path}: no config.json; expected a model directory")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise QtoolError(f"{path}: transformers cannot load it ({str(error).splitlines()[0]})") from error
    torch.nn.Module.to(model, device)
    return model.eval()


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``directory``.

    Raises:
        QtoolError: if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise QtoolError(f"{directory}: no usable tokenizer ({str(error).splitlines()[0]})") from error
