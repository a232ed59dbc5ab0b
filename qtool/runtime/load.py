"""``load``: a native checkpoint as a transformers model that runs the packed weights."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qtool import plugins
from qtool.errors import QtoolError, in_one_line
from qtool.io.integrity import INDEX, require_intact
from qtool.io.model_directory import directory_of, require_tokenizer
from qtool.io.source import Checkpoint, plain_config, read_config
from qtool.io.source_names import as_on_disk
from qtool.models import family_of
from qtool.models.architecture import require_dtype
from qtool.models.auto import auto_class, config_of, float_config
from qtool.models.family import Family
from qtool.models.torch_defaults import torch_defaults
from qtool.models.unsupported import config_class
from qtool.runtime import huggingface  # noqa: F401  (registers the quantizer)
from qtool.runtime.decode import graph_decoding
from qtool.runtime.device import require_device
from qtool.runtime.experts import group_experts
from qtool.runtime.fused_norms import fuse_norms
from qtool.runtime.kv_cache import quantize_kv, quantized_decoder
from qtool.runtime.merge import merge_linears
from qtool.schemes.kv import require_kv

#: exceptions that transformers raises for a model that it cannot load
UNLOADABLE = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    SafetensorError,
    AttributeError,
    TypeError,
)


def load(
    model: str | PathLike[str] | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    device_map: str | dict[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    kv: str | None = None,
) -> PreTrainedModel:
    """The causal language model ``model``, quantized by qtool or not, in eval mode.

    On a CUDA device packed linears that read one input are multiplied as one
    (:mod:`qtool.runtime.merge`), and ``generate`` decodes over a static cache by CUDA graphs if the
    architecture allows it (:mod:`qtool.runtime.decode`);
    ``generate(cache_implementation="dynamic")`` decodes as transformers does by default.

    Args:
        model: a directory, a hub id, or ``demo``; a path is a directory. A :class:`Checkpoint`
            gives its own tensors, with an adapter merged.
        device: where it runs: ``cpu``, ``cuda`` or ``cuda:N``.
        device_map: instead of ``device``, transformers' placement on several devices, such as
            ``auto``.
        dtype: dtype of all that is not quantized, or its name; by default the checkpoint's.
        kv: KV-cache quantizer; by default the checkpoint's. A static one must be the checkpoint's
            own.

    Raises:
        QtoolError: the model is not there or cannot be loaded, the device is not there, or ``kv``
            is not for it.
        CheckFailed: a shard that qtool wrote has changed since.
    """
    loaded = load_as_stored(model, device=device, device_map=device_map, dtype=dtype, kv=kv)
    return loaded if device_map else _made_fast(loaded)


def load_tensors(
    config: Any, tensors: Mapping[str, Tensor], device: torch.device
) -> PreTrainedModel:
    """The model of ``config`` with the weights ``tensors``, as :func:`load` would give it.

    Args:
        config: transformers' config; with ``quantization_config`` the tensors are packed.

    Raises:
        QtoolError: transformers cannot load it, or a tensor is missing.
    """
    options = {"dtype": "auto", "output_loading_info": True}
    name = str(config.name_or_path)
    try:
        found = _of_tensors(config, tensors, options)
    except UNLOADABLE as error:
        raise QtoolError(_unloadable(name, error)) from error
    loaded = _complete(name, *found)
    torch.nn.Module.to(loaded, device)
    return _made_fast(loaded.eval())


def _family(config: Any) -> Family | None:
    """The family of transformers' ``config``; None if qtool does not know the architecture."""
    try:
        return family_of(config)
    except QtoolError:
        return None


def _made_fast(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, rewritten for speed if it is on a CUDA device and of a known architecture."""
    if model.device.type == "cuda" and _family(model.config):
        fuse_norms(model)
        group_experts(model)
        merge_linears(model)
        graph_decoding(model)
    return model


@torch_defaults()
def load_as_stored(
    model: str | PathLike[str] | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    device_map: str | dict[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    kv: str | None = None,
) -> PreTrainedModel:
    """The model of :func:`load` without merged linears, fused norms and CUDA graphs."""
    plugins.load()  # before the model is made: a plugin may hold its class
    path = model.directory if isinstance(model, Checkpoint) else directory_of(model)
    config = read_config(path)
    cast = None if dtype is None else require_dtype("dtype", dtype)
    where, calibrated = require_device(device), kv is not None and require_kv(kv).static
    source = model if isinstance(model, Checkpoint) else None
    if config_class(config["model_type"]) is None:
        family_of(config)  # its error names the plugins that the checkpoint was made with
    if source is None and plain_config(config)[1]:
        source = Checkpoint(path)
    elif source is not None:
        source = as_on_disk(source) if source.notes else None
    placed = device_map
    if device_map is None and where.type == "cuda":
        family = _family(config_of(path))
        if family and family.experts:
            placed = {"": where}  # else transformers stacks the experts in host memory first
    loaded = _from_pretrained(path, cast, placed, source)
    if kv is not None and kv != getattr(quantized_decoder(loaded), "kv_quantizer", None):
        if calibrated:
            raise QtoolError(
                f"{path}: {kv} needs calibrated scales, which it does not hold: "
                f"quantize with --kv {kv}"
            )
        quantize_kv(loaded, kv)
    if device_map is None:
        torch.nn.Module.to(loaded, where)
    return loaded.eval()


def _from_pretrained(
    path: Path,
    dtype: torch.dtype | None,
    device_map: str | dict[str, Any] | None,
    source: Checkpoint | None,
) -> PreTrainedModel:
    """transformers' own load, with a check that all tensors of the model are in the files.

    The quantizer checks the shards' hashes.

    Args:
        source: the checkpoint, if its tensors differ from those in the files.
    """
    try:
        options: dict[str, Any] = {
            "dtype": dtype or "auto",
            "device_map": device_map,
            "output_loading_info": True,
        }
        if source is None:
            config = config_of(path)
            _require_quantizer(path, config)
            safely = {"trust_remote_code": False, "use_safetensors": True}  # never a pickle
            found = auto_class(config).from_pretrained(path, **safely, **options)
        else:
            tensors = {name: source.read(name) for name in source.entries}
            found = _of_tensors(float_config(path), tensors, options)
            _as_from(path, found[0])
    except UNLOADABLE as error:
        require_intact(path)  # a damaged shard explains the error better
        Checkpoint(path)  # so does an error in files without hashes, or that there are none
        raise QtoolError(_unloadable(path, error)) from error
    if found[1]["missing_keys"]:
        Checkpoint(path)  # an error in its files explains this one better
    return _complete(path, *found)


def _require_quantizer(path: Path, config: Any) -> None:
    """Refuse a quantized model that transformers would load as if it were none, at random."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method and method not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise QtoolError(f"{path}: it is quantized by {method!r}, which transformers does not load")


def _of_tensors(config: Any, tensors: Mapping[str, Tensor], options: dict[str, Any]) -> Any:
    """transformers' own load of ``tensors``, which are all in memory."""
    with torch.device("meta"):
        kind: Any = type(auto_class(config).from_config(config))
    return kind.from_pretrained(None, config=config, state_dict=dict(tensors), **options)


def _as_from(path: Path, model: PreTrainedModel) -> None:
    """Give ``model`` all that transformers reads from a directory except its tensors."""
    model.name_or_path = model.config.name_or_path = str(path)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)


def _unloadable(path: str | Path, error: Exception) -> str:
    said = in_one_line(error)
    if isinstance(error, KeyError):  # which says the key alone
        said = f"KeyError: {said}"
        if error.args == ("metadata",):
            said = f'{INDEX} has no "metadata": add "metadata": {{}} to it'
    return f"{path}: transformers cannot load it ({said})"


def _complete(path: str | Path, model: PreTrainedModel, info: dict[str, Any]) -> PreTrainedModel:
    """``model``, after a check that no tensor was missing."""
    if missing := sorted(info["missing_keys"]):  # transformers leaves their memory uninitialized
        raise QtoolError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    return model


def load_tokenizer(model: str | PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model``: a directory, a hub id, or ``demo``.

    Raises:
        QtoolError: if there is none.
    """
    directory = directory_of(model)
    require_tokenizer(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # a damaged file: tokenizers raises Exception itself
        if (directory / "config.json").is_file():
            config_of(directory)  # an error in the config explains this one better
        raise QtoolError(
            f"{directory}: no usable tokenizer ({type(error).__name__}: {in_one_line(error)})"
        ) from error
    # of tokenizer_config.json alone transformers makes one that knows no word, or a space alone
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)) + 1:
        raise QtoolError(
            f"{directory}: its tokenizer has no vocabulary: copy all files of the model's "
            "tokenizer there"
        )
    return tokenizer
