"""Quantizes a model in memory: it is saved as a checkpoint, for as long as a run reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qtool.distributed import ranks
from qtool.errors import QtoolError, in_one_line
from qtool.io import hub
from qtool.pipeline.given_model import require_model, require_tokenizer
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.run import run
from qtool.pipeline.summary import Quantized
from qtool.recipes import Recipe
from qtool.runtime.load import load, load_tokenizer


def quantize_in_memory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    recipe: Recipe,
    out: Path | None,
    options: QuantizeOptions,
    *,
    device: str,
    **others: Any,
) -> Quantized | PreTrainedModel:
    """Quantize ``model``, which is not changed, into ``out``, or into a model on ``device``.

    Args:
        tokenizer: as in :func:`saved`.
        others: further arguments of :func:`qtool.pipeline.run.run`.

    Raises:
        QtoolError: several processes run, or as :func:`saved` and ``run``.
    """
    if ranks.size() > 1:
        raise QtoolError(
            "a model in memory is quantized by one process: save it, and pass its directory to "
            "several"
        )
    if options.resume:
        raise QtoolError(
            "a model in memory is saved anew for each run, so that no run of it can be resumed: "
            "save it, and pass its directory"
        )
    with saved(model, tokenizer) as source, TemporaryDirectory(prefix="qtool-") as work:
        target = out or Path(work) / "quantized"
        done = run(source, recipe, target, options, device=device, **others)
        # the source is a temporary directory, so nothing can be compared with it later
        return replace(done, source="") if out else load(target, device=device)


@contextmanager
def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Path]:
    """A temporary directory with ``model`` in safetensors, and its tokenizer if there is one.

    Args:
        tokenizer: by default the tokenizer of the directory or hub id from which the model was
            loaded, if it is on this machine.

    Raises:
        QtoolError: ``model`` is not a model of transformers, predicts no tokens, is quantized or
            has no weights, ``tokenizer`` is not a tokenizer, transformers does not save the model
            as it is, or the directory has no room for it.
    """
    require_model(model)
    if not model.can_generate() and model.get_output_embeddings() is None:
        raise QtoolError(
            f"the model in memory is a {type(model).__name__}, which predicts no tokens: load it "
            "by AutoModelForCausalLM"
        )
    if tokenizer is not None:
        require_tokenizer(tokenizer)
    if getattr(model, "hf_quantizer", None) is not None:
        raise QtoolError("the model in memory is quantized already: pass the original one")
    if model.device.type == "meta" and not hasattr(model, "hf_device_map"):  # nor offloaded
        raise QtoolError("the model in memory has no weights: it is on the device meta")
    with TemporaryDirectory(prefix="qtool-") as directory:
        source, tokenizer = Path(directory) / "source", tokenizer or _own_tokenizer(model)
        try:
            model.save_pretrained(source)
            if tokenizer is not None:
                tokenizer.save_pretrained(source)
        except (OSError, SafetensorError) as error:  # safetensors raises its own of the system
            raise QtoolError(
                f"the model in memory cannot be saved in {directory} ({in_one_line(error)}); the "
                "variable TMPDIR names another place for it"
            ) from error
        except Exception as error:  # settings that transformers refuses, weights that modules share
            raise QtoolError(
                f"transformers cannot save the model in memory ({in_one_line(error)})"
            ) from error
        try:
            yield source
        except QtoolError as error:  # its reader finds that directory no more
            said = str(error).replace(str(source), "the model in memory")
            raise type(error)(said) from error


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    if not (name := model.name_or_path):
        return None
    try:
        with hub.offline():
            return load_tokenizer(Path(name) if Path(name).is_dir() else name)
    except QtoolError:
        return None
