"""A sample of the classes of ``make families``: quantized, loaded and held against their own."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qtool
from qtool import recipes
from qtool.errors import QtoolError
from qtool.exchange.export import export
from qtool.io.source import SINGLE, Checkpoint
from qtool.models import family_of
from qtool.models.auto import config_of
from qtool.models.skeleton import skeleton
from qtool.pipeline.quantize import quantize
from qtool.runtime.linear import QuantLinear
from qtool.runtime.load import load
from tests.models import proof
from tests.models.proof import check, exported_right, quantized_right, transforms_keep_logits
from tests.models.tiny import save_tiny, tiny_config

#: post-norms, layers without RoPE, parallel branches, by-head fused rows, stacked, transposed,
#: interleaved and biased experts, names of its own on disk, MLA, Gated DeltaNet, convolutions that
#: are joined at load, infinite numbers in config.json, experts that get their tokens sorted, a
#: tower whose q, k and v are one on disk, in another order, Conv1D, blocks that return a list
SAMPLE = (
    *("olmo2", "smollm3", "cohere", "gpt_neox", "gpt_oss", "phimoe", "deepseek_v3", "qwen3_next"),
    *("nanochat", "olmo_hybrid", "falcon_h1", "llama4_text", "step3p7", "openai-gpt"),
)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_class_is_quantized_end_to_end(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.cuda
@pytest.mark.parametrize("model_type", (*SAMPLE, "qwen2_vl", "xglm", "gemma3", "kosmos-2"))
def test_a_class_is_quantized_on_a_gpu(model_type: str, tmp_path: Path) -> None:
    """Some do not move their frequencies or positions to their input, or prepare more arguments."""
    source, out = save_tiny(model_type, tmp_path / "source", dtype="bfloat16"), tmp_path / "out"
    proof.quantize(source, out, "best", device="cuda")
    assert {row.problem for row in qtool.verify(out, device="cuda")} == {""}
    on_gpu, on_cpu = (proof.logits(qtool.load(out, device=device)) for device in ("cuda", "cpu"))
    assert proof.typical_distance(on_gpu, on_cpu) < 0.05


@pytest.mark.parametrize("model_type", ["llama", "openai-gpt", "kosmos-2", "gptj"])
def test_a_skeleton_has_the_buffers_of_a_loaded_model(model_type: str, tmp_path: Path) -> None:
    """Masks and positions are in its dtype, frequencies in float32; none is computed in 16 bits."""
    source = save_tiny(model_type, tmp_path / "source", dtype="bfloat16")
    loaded = dict(load(source).named_buffers())
    made = dict(skeleton(config_of(source), torch.bfloat16).named_buffers())
    assert made
    for name, buffer in made.items():
        assert buffer.dtype == loaded[name].dtype and torch.equal(buffer, loaded[name]), name


#: Gemma 4's experts hang in the block itself, beside its MLP
GEMMA4_MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
}
#: what configurations may choose: one kv head, as many as query heads, ties, biases or none, layers
#: of two kinds, part of a head turned, dense blocks before mixtures, one expert a token, one block,
#: two layers of transformers in a block, experts beside an MLP
UNUSUAL = [
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 331}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("qwen3", {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    ("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": False, "num_hidden_layers": 1}),
    ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 2, "num_hidden_layers": 3}),
    ("qwen3_moe", {"mlp_only_layers": [0], "num_experts": 3, "num_experts_per_tok": 1}),
    ("gemma2", {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 64}),
    ("longcat_flash", {"zero_expert_num": 0}),
    ("gemma4_text", GEMMA4_MIXTURE),
]


@pytest.mark.parametrize(("model_type", "changes"), UNUSUAL)
def test_an_unusual_configuration(
    model_type: str, changes: dict[str, object], tmp_path: Path
) -> None:
    source = save_tiny(model_type, tmp_path / "source", **changes)
    quantized_right(source, tmp_path / "fast")
    transforms_keep_logits(source, tmp_path / "transforms")


def test_names_on_disk_that_count_blocks_from_another_one_on(tmp_path: Path) -> None:
    """Inkling 2's first block has no query before its attention: the second one's is number 0."""
    source = save_tiny("inkling2_text", tmp_path / "source", num_hidden_layers=3)
    quantized_right(source, tmp_path / "out")


@pytest.mark.parametrize("model_type", ["granite", "stablelm", "glm4_moe", "xlnet"])
def test_transforms_leave_the_logits_as_they_were(model_type: str, tmp_path: Path) -> None:
    """XLNet norms a norm's output again: nothing may be folded into the first."""
    transforms_keep_logits(save_tiny(model_type, tmp_path / "source"), tmp_path / "out")


@pytest.mark.parametrize(
    "model_type", ["bailing_hybrid", "minimax_m2", "step3p7", "qwen3_omni_moe", "ernie4_5_vl_moe"]
)
def test_an_export_has_the_names_of_published_checkpoints(model_type: str, tmp_path: Path) -> None:
    """And what stays in 16 bits lies there as it was: convolutions, a talker's experts, and those
    of a mixture that lie behind another's, with a router that is transposed."""
    source = save_tiny(model_type, tmp_path / "source")
    published = Checkpoint(source)
    quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    export(tmp_path / "native", "compressed-tensors", tmp_path / "exported")
    exported = Checkpoint(tmp_path / "exported")
    found = {re.sub(r"_(packed|scale|shape)$", "", name) for name in exported.entries}
    assert found == set(published.entries)
    for name in published.entries.keys() & exported.entries.keys():
        assert torch.equal(published.read(name), exported.read(name)), name


def test_gpt2_is_quantized_as_it_is_published(tmp_path: Path) -> None:
    """Inputs before outputs, names of the bare decoder, and its masks beside the weights."""
    source = save_tiny("gpt2", tmp_path / "source")
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(source / SINGLE).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    save_file(tensors, source / SINGLE, {"format": "pt"})
    quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "out")
    result, loaded = Checkpoint(tmp_path / "out"), load(tmp_path / "out")
    assert torch.equal(result.read("transformer.h.0.attn.bias"), tensors["h.0.attn.bias"])
    linear = loaded.get_submodule("transformer.h.0.attn.c_attn")
    weight = tensors["h.0.attn.c_attn.weight"].T
    assert isinstance(linear, QuantLinear) and linear.out_features == weight.shape[0] == 384
    assert float((linear.dequantize() - weight).norm() / weight.norm()) < 0.2
    with pytest.raises(QtoolError, match=r"GPT2LMHeadModel are Conv1D"):
        export(tmp_path / "out", "compressed-tensors", tmp_path / "exported")


def test_an_export_loads_in_transformers(tmp_path: Path) -> None:
    quantized_right(save_tiny("cohere", tmp_path / "source"), tmp_path / "native")
    exported_right(tmp_path / "native", tmp_path / "exported")


def test_an_export_names_a_head_that_is_called_otherwise(tmp_path: Path) -> None:
    """BioGPT's: transformers takes every linear for packed that is not named."""
    quantize(
        Checkpoint(save_tiny("biogpt", tmp_path / "source")),
        recipes.load("w4a16"),
        tmp_path / "native",
    )
    exported_right(tmp_path / "native", tmp_path / "exported", dequantize=False)


def test_an_export_says_that_transformers_does_not_load_it(tmp_path: Path) -> None:
    """It joins the convolutions of queries, keys and values, which are in 16 bits."""
    source = save_tiny("olmo_hybrid", tmp_path / "source")
    quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    with pytest.raises(AssertionError, match=r"does not load this export: it makes .*conv1d"):
        exported_right(tmp_path / "native", tmp_path / "exported")
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_stacked_experts_are_not_exported(tmp_path: Path) -> None:
    source = save_tiny("gpt_oss", tmp_path / "source")
    quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    with pytest.raises(QtoolError, match="hold a block's experts as one stack"):
        export(tmp_path / "native", "compressed-tensors", tmp_path / "exported")


def test_stacked_experts_are_exported_one_by_one_where_vllm_takes_them(tmp_path: Path) -> None:
    """Its loaders take them under these names (tests/serving)."""
    source = save_tiny("granitemoehybrid", tmp_path / "source")
    quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    done = export(tmp_path / "native", "compressed-tensors", tmp_path / "exported")
    assert any("vLLM loads them from version 0.33 on" in note for note in done.notes)
    names = Checkpoint(done.directory).entries
    assert "model.layers.1.block_sparse_moe.experts.3.down_proj.weight_packed" in names
    with pytest.raises(QtoolError, match=r"awq: its loaders were not seen .*: compressed-tensors"):
        export(tmp_path / "native", "awq", tmp_path / "awq")


def test_loaders_of_few_architectures_take_no_derived_family(tmp_path: Path) -> None:
    source = save_tiny("smollm3", tmp_path / "source")
    quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    with pytest.raises(QtoolError, match=r"qqq: its loaders do not know SmolLM3 .*: comp.*, awq"):
        export(tmp_path / "native", "qqq", tmp_path / "exported")


def test_what_is_made_between_blocks_is_only_streamed(tmp_path: Path) -> None:
    """Inkling 2 gathers the hidden states of earlier blocks, which later ones attend to."""
    check("inkling2_text", tmp_path)
    source = Checkpoint(tmp_path / "source")
    assert "block_states is made of earlier blocks" in family_of(source.config).streamed_only
    with pytest.raises(QtoolError, match=r"activations, which .* pass --recipe fast"):
        quantize(source, recipes.load("w4a16", "paper"), tmp_path / "paper")


@pytest.mark.parametrize(
    ("model_type", "passes"),
    [
        ("zaya", {"prev_router_hidden_states": 1}),
        ("glm_moe_dsa", {"prev_topk_indices": 1}),
        ("gemma3n_text", {"shared_kv_states": 0}),
        ("mistral_large4", {"prev_topk_indices": 1, "shared_kv_states": 0}),
    ],
)
def test_what_blocks_pass_on(model_type: str, passes: dict[str, int]) -> None:
    family = family_of(tiny_config(model_type).to_dict())
    assert family.passes == passes and not family.streamed_only


def test_what_is_passed_on_and_not_used_is_not_kept() -> None:
    """GLM-5's blocks hand an indexer's choice on, to blocks that have an indexer each."""
    assert not family_of(tiny_config("glm_moe_dsa", indexer_types=["full"] * 3).to_dict()).passes


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("paper", r"cannot run the model of config.json \(ValueError: .*`sliding_window`.*\)$"),
        ("best", r"cannot run .*, so it cannot continue calibration windows: pass --windows given"),
    ],
)
def test_a_model_that_transformers_cannot_run(recipe: str, says: str, tmp_path: Path) -> None:
    """A block with a sliding window, and no size of one."""
    changes = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False}
    source = save_tiny("qwen3", tmp_path / "source", **changes)
    with pytest.raises(QtoolError, match=says):
        proof.quantize(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_what_transformers_keeps_in_float32_is_not_cast(tmp_path: Path) -> None:
    """A router's bias, whose values may lie close together."""
    source = save_tiny("deepseek_v3", tmp_path / "source")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(source / SINGLE)
    tensors[name] = 14.2 + torch.rand(tensors[name].shape) / 30
    save_file(tensors, source / SINGLE, {"format": "pt"})
    for dtype in ("bfloat16", "float16"):
        out = qtool.quantize(source, "w4a16", recipe="fast", dtype=dtype, out=tmp_path / dtype)
        result = Checkpoint(Path(out))
        assert torch.equal(result.read(name), tensors[name])
        assert result.entry("model.norm.weight").dtype == getattr(torch, dtype)
