"""GGUF: every tensor as llama.cpp's package and transformers read it is ours."""

import builtins
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import qtool
from qtool.errors import CheckFailed, QtoolError
from qtool.exchange.export import Exported, export
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.exchange.formats.gguf import Gguf
from qtool.exchange.gguf.architectures import ARCHITECTURES
from qtool.exchange.gguf.tokenizer import SPACES, WORDS, caution
from qtool.exchange.gguf.write import FILE
from qtool.format import LinearFormat
from qtool.io.output import LOCK, lock
from qtool.io.source import Checkpoint
from qtool.models import Heads
from qtool.pipeline.planning.plan_text import as_text
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import dequantized
from qtool.runtime.load import load
from tests.exchange.conftest import Export, Native, recipe_of, rule
from tests.models.tiny import save_tiny

gguf = pytest.importorskip("gguf")

IDS = torch.arange(48).reshape(2, 24) * 5 % 320
VARIANTS = ("llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mixtral", "qwen2_moe")
#: what llama.cpp takes for granted of others
KNOWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
}
#: of those that a class knows
OTHERS: dict[str, Any] = {"tie_word_embeddings": False, "sliding_window": None}
OTHERS |= {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.25}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCHEMES = [("w4a16", 32), ("w4a16", 128), ("w4a16", "channel"), ("w8a8", "channel")]


def read(directory: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of the file, by its names."""
    tensors = gguf.GGUFReader(directory / FILE).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


def in_pairs(weight: Tensor, dim: int) -> Tensor:
    """Rows i and i + dim / 2 of each head beside each other."""
    heads = weight.unflatten(0, (-1, dim))
    return torch.stack([heads[:, : dim // 2], heads[:, dim // 2 :]], 2).flatten(0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("scheme", "size"), SCHEMES)
def test_every_tensor_is_ours(
    scheme: str, size: Any, variant: str, dtype: torch.dtype, native: Native, exported: Export
) -> None:
    ours = native(scheme, size, variant=variant, dtype=dtype)
    done = exported(ours, "gguf")
    assert set(done.errors.values()) == {0.0}
    assert_all_ours(ours, done.directory)


@pytest.mark.parametrize("variant", KNOWN)
def test_every_tensor_of_a_model_that_llama_cpp_knows(
    variant: str, native: Native, tmp_path: Path
) -> None:
    ours = changed(native("w4a16", 32, variant=variant), tmp_path / "native", **KNOWN[variant])
    assert_all_ours(ours, export(ours, "gguf", tmp_path / "out").directory)


@pytest.mark.parametrize(
    "kind", ["phi3", "olmo2", "granite", "smollm3", "glm4", "seed_oss", "ernie4_5"]
)
def test_every_tensor_of_other_families(kind: str, tmp_path: Path) -> None:
    model = load(save_tiny(kind, tmp_path / "float32", **OTHERS), dtype=torch.float16)
    model.save_pretrained(tmp_path / "source")
    recipe = recipe_of([rule("w4a16", 32)])
    ours = quantize(Checkpoint(tmp_path / "source"), recipe, tmp_path / "native")
    done = export(ours, "gguf", tmp_path / "out")
    assert_all_ours(ours, done.directory)
    arch, reader = ARCHITECTURES[kind].name, gguf.GGUFReader(done.directory / FILE)
    settings = load(ours, dtype=torch.float32).config
    rotated = settings.rope_parameters.get("partial_rotary_factor", 1) * 32
    assert reader.get_field(f"{arch}.rope.dimension_count").contents() == rotated
    scales = {"embedding_scale": 3.0, "attention.scale": 0.5, "residual_scale": 0.25}
    for key, value in scales.items() if kind == "granite" else ():
        assert reader.get_field(f"{arch}.{key}").contents() == value


def assert_all_ours(ours: Path, directory: Path) -> None:
    """Every tensor in the GGUF of ``directory`` is that of the native checkpoint, bit for bit."""
    assert_same(dequantized(load(ours, dtype=torch.float32)), directory)


def assert_same(model: Any, directory: Path) -> None:
    """Every tensor in the GGUF of ``directory`` is that of ``model``, and none is missing."""
    kind = model.config.model_type
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == ARCHITECTURES[kind].name), 2
    )
    left = read(directory)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ARCHITECTURES[kind].interleaved_rope and (".q_proj." in name or ".k_proj." in name):
            tensor = in_pairs(tensor, Heads.of(model.config).dim)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        expert = re.search(r"\.experts\.(\d+)\.", name)
        stored = names.get_name(
            re.sub(r"\.experts\.\d+\.", ".experts.", name), try_suffixes=(".weight", ".bias")
        )
        found = left[stored][int(expert[1])] if expert else left.pop(stored)
        assert np.array_equal(found, tensor.squeeze(0).float().numpy()), name
    assert all(name.endswith("_exps.weight") for name in left)


@pytest.mark.parametrize("variant", ["qwen2_moe", "qwen3_moe", "gemma2", "gemma3_text"])
def test_transformers_computes_the_logits_of_stacks_and_offset_norms(
    variant: str, native: Native, tmp_path: Path
) -> None:
    """By its own reader, which does not look for how wide experts are."""
    ours = changed(
        native("w4a16", 32, variant=variant), tmp_path / "native", **KNOWN.get(variant, {})
    )
    directory = export(ours, "gguf", tmp_path / "out").directory
    expected = dequantized(load(ours, dtype=torch.float32))
    config = expected.config.to_dict()
    plain = AutoConfig.for_model(**{k: v for k, v in config.items() if "quantiz" not in k})
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=FILE, config=plain, dtype=torch.float32
    )
    with torch.no_grad():
        found = theirs.eval()(IDS).logits
        torch.testing.assert_close(found, expected(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2"])
@pytest.mark.parametrize(("scheme", "size"), [("w4a16", 32), ("w8a8", "channel")])
def test_transformers_computes_our_logits(
    scheme: str, size: Any, variant: str, native: Native, exported: Export
) -> None:
    """Its reader knows no biases of Llama, and no head size of Qwen3 but 128."""
    ours = native(scheme, size, variant=variant)
    directory = exported(ours, "gguf").directory
    theirs = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32)
    expected = dequantized(load(ours, dtype=torch.float32))
    with torch.no_grad():
        assert torch.equal(theirs.eval()(IDS).logits, expected(IDS).logits)


def changed(directory: Path, out: Path, **config: Any) -> Path:
    """A copy with other settings in config.json."""
    shutil.copytree(directory, out)
    found = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(found))
    return out


def test_llama_3s_frequencies(native: Native, tmp_path: Path) -> None:
    model = changed(native("w4a16", 32), tmp_path / "native", rope_parameters=LLAMA3)
    factors = torch.from_numpy(
        read(export(model, "gguf", tmp_path / "out").directory)["rope_freqs.weight"].copy()
    )
    config = AutoConfig.from_pretrained(model)
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert factors.min() == 1 and factors.max() > 7.9
    torch.testing.assert_close(plain / factors, scaled)


def test_frequencies_divided_by_a_factor(native: Native, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = changed(native("w4a16", 32), tmp_path / "native", rope_parameters=rope)
    reader = gguf.GGUFReader(export(model, "gguf", tmp_path / "out").directory / FILE)
    found = [reader.get_field(f"llama.rope.scaling.{key}").contents() for key in ("type", "factor")]
    assert found == ["linear", 4.0]


def tokenizer(steps: list[Any], *, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer with two merges, whose ``pre_tokenizer`` does ``steps``."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = letters | {"th": 256, "the": 257}
    merges = [("t", "h"), ("th", "e")]
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return made


def saved(made: Tokenizer, directory: Path) -> None:
    """``made`` as transformers saves it, with two added tokens."""
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.add_tokens(["<think>"])
    fast.save_pretrained(directory)


def splits(rule: str) -> list[Any]:
    """The steps of a pre-tokenizer that splits text by ``rule``."""
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(rule), "isolated"), after]


THREE, ONE = (WORDS % digits + SPACES for digits in (r"\p{N}{1,3}", r"\p{N}"))
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def field(directory: Path, name: str) -> Any:
    found = gguf.GGUFReader(directory / FILE).get_field(f"tokenizer.ggml.{name}")
    return found and found.contents()


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("llama-bpe", splits(THREE)),
        ("dbrx", splits(THREE)),
        ("qwen2", splits(ONE)),
        ("gpt-2", [GPT2]),
        ("smollm", [DIGITS, GPT2]),
    ],
)
def test_a_tokenizer(name: str, steps: list[Any], native: Native, tmp_path: Path) -> None:
    model = changed(native("w4a16", 32), tmp_path / "native")
    saved(tokenizer(steps, ignore_merges=name == "llama-bpe"), model)
    done = export(model, "gguf", tmp_path / "out")
    assert not any("tokenizer" in note for note in done.notes)
    out = done.directory
    assert (field(out, "model"), field(out, "pre")) == ("gpt2", name)
    tokens, kinds = field(out, "tokens"), field(out, "token_type")
    assert len(tokens) == len(kinds) == 320
    assert tokens[256:260] == ["th", "the", "<end>", "<think>"]
    assert kinds[256:261] == [1, 1, 3, 4, 5]  # normal, control, user-defined, unused
    assert field(out, "merges") == ["t h", "th e"] and field(out, "eos_token_id") == 258
    assert (field(out, "add_bos_token"), field(out, "add_eos_token")) == (False, False)


def test_a_tokenizer_that_llama_cpp_does_not_have(native: Native, tmp_path: Path) -> None:
    """Its ids are given by who calls; nothing is split in another way in silence."""
    model = changed(native("w4a16", 32), tmp_path / "native")
    saved(tokenizer(splits(r"\s+")), model)
    done = export(model, "gguf", tmp_path / "out")
    assert any("give it token ids" in note for note in done.notes)
    assert field(done.directory, "model") == "none"


def test_bytes_that_are_split_almost_as_llama_cpp_does(tmp_path: Path) -> None:
    """What differs is said, or there is no tokenizer."""
    made = tokenizer(splits(ONE))
    made.normalizer = normalizers.NFC()
    saved(made, tmp_path)
    assert "NFC" in caution(tmp_path)
    made.normalizer = normalizers.Lowercase()
    saved(made, tmp_path)
    assert "give it token ids" in caution(tmp_path)
    spaced = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    merged = pre_tokenizers.Split(Regex(ONE), "merged_with_next")
    for steps in ([splits(ONE)[0], spaced], [merged, splits(ONE)[1]], [DIGITS, *splits(ONE)]):
        saved(tokenizer(steps), tmp_path)
        assert "give it token ids" in caution(tmp_path)
    made = tokenizer(splits(ONE))
    made.add_tokens([AddedToken("<a>", rstrip=True), AddedToken("<b>", lstrip=True)])
    saved(made, tmp_path)
    assert "finds <a> and 1 more anywhere" in caution(tmp_path)


def refused(native: Path, out: Path, said: str) -> None:
    with pytest.raises(QtoolError, match=said):
        export(native, "gguf", out)
    assert not list(out.parent.glob(f"{out.name}*"))


def test_scales_in_float32_are_refused_before_any_work(
    source: Callable[..., Path], native: Native, tmp_path: Path
) -> None:
    said = "scales are in float32, .* with --dtype float16 or bfloat16"
    refused(native("w4a16", 32, dtype=torch.float32), tmp_path / "out", said)
    model, options = source("llama", torch.float32), {"group_size": 32, "recipe": "paper"}
    with pytest.raises(QtoolError, match=said):  # before a tokenizer is looked for
        qtool.quantize(model, "w4a16", export_format="gguf", out=tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
    assert "gguf" not in as_text(qtool.plan(model, "w4a16", **options))
    for dtype in ("float16", "bfloat16"):
        assert "gguf" in as_text(qtool.plan(model, "w4a16", dtype=dtype, **options))
    out = qtool.quantize(model, "w4a16", dtype="float16", out=tmp_path / "half", group_size=32)
    qtool.export(out, "gguf")


def test_what_is_not_exact_there_is_refused(native: Native, tmp_path: Path) -> None:
    codes, scale = torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[1.5 * 2**-24]])
    with pytest.raises(CheckFailed, match="1 of 1 scales are not exact in float16"):
        Gguf().tensors(
            LinearFormat("w4a16", 32, "row-major", "bfloat16"), codes, {"scale": scale.bfloat16()}
        )
    ours = native("w4a16", 32)
    settings: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "mistral", "sliding_window": 16}, "has no sliding window"),
        ({"model_type": "mistral"}, "has no sliding window"),  # transformers' own is of 4096 tokens
        ({"rope_parameters": YARN}, "'yarn'; for llama.cpp's llama qtool writes default, linear"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "does not take this config",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ]
    for number, (config, said) in enumerate(settings):
        refused(changed(ours, tmp_path / str(number), **config), tmp_path / "out", said)
    with pytest.raises(QtoolError, match=r"llama\.cpp's own converter"):
        EXPORT_FORMATS["gguf"].require_model({"model_type": "starcoder2"})
    saved = {"model_type": "falcon_h1", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    with pytest.raises(QtoolError, match=r"falcon_h1 models need llama\.cpp's own converter"):
        EXPORT_FORMATS["gguf"].require_model(saved)
    gemma2 = {"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    local = {"rope_type": "default", "rope_theta": 5e4}
    gemma3 = {"sliding_attention": local, "full_attention": {"rope_type": "default"} | local}
    for config, said in (
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen3", "rope_parameters": LLAMA3}, "RoPE is of type 'llama3'"),
        ({"model_type": "qwen2", "head_dim": 64}, "32 heads of 64; .* heads of 128"),
        ({"model_type": "qwen2_moe", "head_dim": 64}, "heads of 64; .* heads of 128"),
        ({"model_type": "qwen2_moe", "tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"model_type": "olmo2", "tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"model_type": "phi3", "head_dim": 64}, "heads of 64; .* heads of 96"),
        ({"model_type": "smollm3", "no_rope_layers": [1] * 36}, "all but the last of every 4"),
        ({"model_type": "seed_oss", "mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "ernie4_5", "use_bias": True}, "use_bias is True"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "attention is True"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ({"model_type": "mixtral", "sliding_window": 64}, "has no sliding window"),
        (gemma2, "the last of every 2 blocks"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 100}, "by the root of 256"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "softcapping is None"),
        ({"model_type": "gemma3_text", "rope_parameters": gemma3}, "RoPE of base 10000"),
    ):
        with pytest.raises(QtoolError, match=said):
            EXPORT_FORMATS["gguf"].require_model(config)
    for kind in ("mixtral", "gemma", "gemma2", "gemma3_text"):  # as transformers has them
        EXPORT_FORMATS["gguf"].require_model({"model_type": kind})
    first_gemma = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None}
    EXPORT_FORMATS["gguf"].require_model(first_gemma)


def test_without_the_package(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = builtins.__import__

    def absent(name: str, *more: Any, **named: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return whole(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    refused(native("w4a16", 32), tmp_path / "out", r"pip install 'qtool\[gguf\]'")


def test_its_output_is_as_new_as_that_of_other_formats(native: Native, tmp_path: Path) -> None:
    ours = native("w4a16", 32)
    full, link, busy = (tmp_path / name for name in ("full", "link", "busy"))
    full.mkdir()
    (full / "file").touch()
    link.symlink_to(tmp_path / "nowhere")
    (tmp_path / "foreign.gguf.partial/folder").mkdir(parents=True)
    partial = tmp_path / "busy.gguf.partial"
    partial.mkdir()
    with lock(partial / LOCK, partial):
        for out, said in (
            (full, "full exists already"),
            (link, "link is a symbolic link"),
            (busy, "another run is working on .*busy.gguf.partial"),
            (tmp_path / "foreign", "foreign.gguf.partial is not of an unfinished run"),
        ):
            with pytest.raises(QtoolError, match=said):
                export(ours, "gguf", out)
    assert (partial / LOCK).is_file()  # as a killed export leaves it, with what it was writing
    (partial / "README.md.4711.tmp").touch()
    busy.mkdir()  # empty
    found = {path.name for path in export(ours, "gguf", busy).directory.iterdir()}
    new = {path.name for path in export(ours, "gguf", tmp_path / "new").directory.iterdir()}
    assert found == new and FILE in found and LOCK not in found and not partial.exists()
    assert (tmp_path / "foreign.gguf.partial/folder").is_dir()


def test_a_finished_export_is_not_done_again(native: Native, tmp_path: Path) -> None:
    ours, out = native("w4a16", 32), tmp_path / "out"
    first = export(ours, "gguf", out)
    (out / LOCK).touch()  # as an export leaves it that is killed after the last rename
    written = (out / FILE).stat().st_mtime_ns
    assert export(ours, "gguf", out) == first
    assert (out / FILE).stat().st_mtime_ns == written and not (out / LOCK).exists()
    with pytest.raises(QtoolError, match="out exists already"):
        export(native("w4a16", 64), "gguf", out)


def test_the_file_is_on_the_disk_before_it_has_its_name(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the shards of other formats are; else a loss of power may leave a part of it."""
    stored: list[tuple[int, int]] = []

    def note(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        stored.append((stat.st_ino, stat.st_size))

    monkeypatch.setattr(os, "fsync", note)
    stat = (export(native("w4a16", 32), "gguf", tmp_path / "out").directory / FILE).stat()
    assert (stat.st_ino, stat.st_size) in stored


def test_a_flipped_byte_stops_it(native: Native, tmp_path: Path) -> None:
    model = changed(native("w4a16", 32), tmp_path / "native")
    path = sorted(model.glob("*.safetensors"))[1]
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CheckFailed, match="its sha256 is not"):
        export(model, "gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_source_that_changes_meanwhile_makes_no_result(native: Native, tmp_path: Path) -> None:
    model = changed(native("w4a16", 32), tmp_path / "native")

    def touch(*_: object) -> None:
        for file in model.glob("*.safetensors"):
            os.utime(file, ns=(0, 0))

    with pytest.raises(QtoolError, match="native changed while it was read"):
        export(model, "gguf", tmp_path / "out", progress=touch)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_the_card_names_it(native: Native, exported: Export) -> None:
    done: Exported = exported(native("w4a16", 32), "gguf")
    assert str(done).endswith(f"\nnext: llama-server -m {done.directory}/{FILE}")
    card = (done.directory / "README.md").read_text()
    assert "llama.cpp. Next: `llama-server -m llama-gguf/model.gguf`, by this" in card
    assert any("int8 per token and group of 32 there" in note for note in done.notes)


@pytest.mark.parametrize(
    ("kind", "transforms"),
    [("gemma3", []), ("llava", ["norm-fusion", "rotate"]), ("mistral3", [])],
)
def test_the_text_model_of_a_wrapper(kind: str, transforms: list[str], tmp_path: Path) -> None:
    """As the GGUF of a model that is nothing else; its tower is said to be left out.

    And not to fit, if the residual stream is rotated.
    """
    source = save_tiny(kind, tmp_path / "float32")
    whole = load(source, dtype=torch.float16)
    whole.save_pretrained(tmp_path / "source")
    recipe = recipe_of([rule("w4a16", 32)], transforms=transforms)
    native = quantize(Checkpoint(tmp_path / "source"), recipe, tmp_path / "native")
    config = json.loads((native / "config.json").read_text())
    config["text_config"] |= {"query_pre_attn_scalar": 32, "sliding_window": None}
    if kind == "gemma3":
        config["text_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
    (native / "config.json").write_text(json.dumps(config))
    done = export(native, "gguf", tmp_path / "out")
    (note,) = [note for note in done.notes if "towers and projectors left out" in note]
    assert ("one made of the source does not fit" in note) == bool(transforms)
    model = dequantized(load(native, dtype=torch.float32))
    state = {n.replace("model.language_model.", "model."): t for n, t in model.state_dict().items()}
    text = AutoConfig.from_pretrained(native).get_text_config()
    text.tie_word_embeddings = model.config.tie_word_embeddings
    alone = AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    alone.load_state_dict({n: state[n] for n in alone.state_dict()})
    assert_same(alone, done.directory)
