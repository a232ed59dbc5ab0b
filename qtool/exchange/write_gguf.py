"""Writes a native checkpoint as one GGUF file, by llama.cpp's ``gguf`` package.

Names, hyper-parameters and tokenizer are llama.cpp's: its Llama turns neighbouring channels of
queries and keys together where transformers turns channel i and i + D/2, so their rows are
interleaved. Norms and biases are float32, tables and 16-bit linears stay as they are.
"""

import json
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qtool.errors import QtoolError
from qtool.exchange.convert import Conversion, Json, Progress, shards_of
from qtool.exchange.formats.gguf import ARCHITECTURES
from qtool.exchange.target import Formats
from qtool.io.integrity import RECORD, recorded_hashes, require_file_intact
from qtool.io.model_card import model_card
from qtool.io.safetensors import space_for, write_json
from qtool.io.source import BASE_CARD, CARD
from qtool.models.parts import Heads

FILE = "model.gguf"
#: what the blocks of a scheme, and a 16-bit tensor, are called there
KINDS = {"w4a16": "Q4_0", "w4a16-24": "Q4_0", "w8a8": "Q8_0"}
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's names of pre-tokenizers, by the expression that splits text
PRE_TOKENIZERS = {
    WORDS % r"\p{N}{1,3}" + SPACES: "llama-bpe",
    WORDS % r"\p{N}" + SPACES: "qwen2",
}
NO_TOKENIZER = (
    "tokenizer: llama.cpp has none that splits text as this model's does; give it token ids"
)


def require_gguf() -> Any:
    """The ``gguf`` package.

    Raises:
        QtoolError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise QtoolError(
            "GGUF files are written by the gguf package: pip install 'qtool[gguf]'"
        ) from None
    return gguf


def write_gguf(
    work: Conversion, formats: Formats, facts: Json, out: Path, progress: Progress | None = None
) -> Json:
    """Write ``work``'s source into ``out``, as ``model.gguf`` with its model card and qtool.json.

    Args:
        formats: of the packed linears.
        facts: for qtool.json.

    Returns:
        The notes of the tensors.

    Raises:
        QtoolError: ``out`` is there already, or the gguf package is not.
        CheckFailed: a damaged source, or a scale that float16 does not hold.
    """
    package = require_gguf()
    if out.exists():
        raise QtoolError(f"{out} exists already; choose another --out or remove it")
    # not OUT.partial, which a killed run may have left and goes on from
    partial = out.with_name(f"{out.name}.gguf.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with space_for(out / FILE):
            notes = _write(package, partial / FILE, work, formats, progress)
        for name, file in work.source.side_files().items():
            if name == BASE_CARD or name.startswith(("LICEN", "NOTICE", "USE_POLICY")):
                shutil.copyfile(file, partial / name)
        card = model_card(facts, partial / BASE_CARD)
        (partial / CARD).write_text(card, encoding="utf-8")
        write_json(partial / RECORD, facts | {"blocks": [notes]})
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return notes


def _write(
    package: Any, path: Path, work: Conversion, formats: Formats, progress: Progress | None
) -> Json:
    """Write the file, tensor by tensor; returns the notes of the tensors."""
    arch, notes = ARCHITECTURES[work.source.config["model_type"]], dict[str, Any]()
    settings = AutoConfig.from_pretrained(work.source.directory)
    architecture = next(a for a, name in package.MODEL_ARCH_NAMES.items() if name == arch)
    names = package.get_tensor_name_map(architecture, settings.num_hidden_layers)
    writer = package.GGUFWriter(path, arch)
    _hyper_parameters(writer, settings)
    _tokenizer(package, writer, work.source.directory, settings.vocab_size)
    shards, recorded = shards_of(work), recorded_hashes(work.source.directory)
    for owner in chain.from_iterable(shards.values()):
        for name, spec in work.specs(owner):
            data, packed = _stored(name, spec, settings), formats.get(owner)
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise QtoolError(f"{name}: llama.cpp's {arch} has no such tensor")
            kind = KINDS[packed.scheme] if packed else DTYPES[data.dtype]
            _announce(package, writer, found, data, kind)
    if (factors := _rope_factors(settings)) is not None:
        _announce(package, writer, "rope_freqs.weight", factors, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (file, owners) in enumerate(shards.items(), 1):
        require_file_intact(file, recorded.get(file.name))
        for name, tensor in chain.from_iterable(work.tensors(owner, notes) for owner in owners):
            writer.write_tensor_data(_bytes(_stored(name, tensor, settings)).numpy())
        if progress:
            progress(number, len(shards), {})
    if factors is not None:
        writer.write_tensor_data(_bytes(factors).numpy())
    writer.close()
    return notes


def _announce(package: Any, writer: Any, name: str, data: Tensor, kind: str) -> None:
    """Tell ``writer`` of a tensor that it will get."""
    shape = _bytes(data).shape
    quantization = package.GGMLQuantizationType[kind]
    writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), quantization)


def _bytes(tensor: Tensor) -> Tensor:
    """``tensor`` as uint8, its last dimension longer."""
    return tensor.contiguous().view(torch.uint8)


def _stored(name: str, tensor: Tensor, settings: Any) -> Tensor:
    """``tensor`` as llama.cpp wants it: vectors in float32, Llama's q and k with rows in pairs."""
    tensor = tensor.float() if tensor.dim() == 1 else tensor
    linear = name.rpartition(".")[0].rpartition(".")[2]
    if ARCHITECTURES[settings.model_type] != "llama" or linear not in ("q_proj", "k_proj"):
        return tensor
    heads = Heads.of(settings)
    count = heads.query if linear == "q_proj" else heads.kv
    return tensor.unflatten(0, (count, 2, heads.dim // 2)).transpose(1, 2).flatten(0, 2)


def _hyper_parameters(writer: Any, settings: Any) -> None:
    heads = Heads.of(settings)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(heads.query)
    writer.add_head_count_kv(heads.kv)
    writer.add_key_length(heads.dim)
    writer.add_value_length(heads.dim)
    writer.add_rope_dimension_count(heads.dim)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_vocab_size(settings.vocab_size)


def _rope_factors(settings: Any) -> Tensor | None:
    """What llama.cpp divides Llama 3's frequencies by, float32 ``[D / 2]``."""
    if settings.rope_parameters["rope_type"] == "default":
        return None
    dim, theta = Heads.of(settings).dim, settings.rope_parameters["rope_theta"]
    plain = 1 / theta ** (torch.arange(0, dim, 2).float() / dim)
    scaled, _ = ROPE_INIT_FUNCTIONS[settings.rope_parameters["rope_type"]](settings, None)
    return plain / scaled


def pre_tokenizer(directory: Path) -> str:
    """llama.cpp's name of the rule by which the tokenizer in ``directory`` splits text.

    Empty for a tokenizer that is no byte-level BPE, or whose rule is none of the known ones.
    """
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        rule, bytes_after = tokenizer["pre_tokenizer"]["pretokenizers"]
        name = PRE_TOKENIZERS[rule["pattern"]["Regex"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    merges_first = not tokenizer["model"].get("ignore_merges", False)
    plain = bytes_after["type"] == "ByteLevel" and not bytes_after["use_regex"]
    return name if plain and merges_first == (name != "llama-bpe") else ""


def _tokenizer(package: Any, writer: Any, directory: Path, size: int) -> None:
    """Write the tokenizer, or that there is none, for ``size`` token ids."""
    if not (pre := pre_tokenizer(directory)):
        writer.add_tokenizer_model("none")
        return
    tokenizer = AutoTokenizer.from_pretrained(directory)
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = package.TokenType

    def kind(number: int) -> Any:
        if number in added:
            return kinds.CONTROL if added[number].special else kinds.USER_DEFINED
        return kinds.NORMAL if number in words else kinds.UNUSED

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([kind(number) for number in range(size)])
    package.SpecialVocab(directory, load_merges=True, n_vocab=size).add_to_gguf(writer)
