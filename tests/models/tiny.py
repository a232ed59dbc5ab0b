"""Tiny random models of transformers' causal classes, and the proof that one is quantized right."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qtool import recipes
from qtool.io.source import Checkpoint
from qtool.models import Family, family_of
from qtool.models.experts import expert_tensors, is_experts
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import quantized_linears
from qtool.runtime.load import load

#: by the names that configs have for them; a class takes those that it knows
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    "layer_types": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "d_model": 128,
    "ffn_dim": 256,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 256,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
    "n_positions": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
#: parameters of a tiny model
LARGEST = 40_000_000
MLA = {"num_key_value_heads": 4, "head_dim": None}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
#: what else a class needs to be small, or to be built at all
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu", "minicpm3"), MLA),
    **dict.fromkeys(("axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v32"), MLA),
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 16},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"num_key_value_heads": None, "head_dim": None},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 256, "layer_types": ...},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": ...,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layer_types": ...,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"layer_types": ..., "num_hidden_layers": 3},
    "zamba2": MAMBA2,
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of ``model_type``; ``...`` leaves a setting as the class has it."""
    base = type(AutoConfig.for_model(model_type))
    known = set(base().to_dict()) | set(base.attribute_map)
    wanted = {**SIZES, **CHANGES.get(model_type, {}), **changes}
    own = {key: value for key, value in wanted.items() if key in known and value is not ...}
    return AutoConfig.for_model(model_type, **own)


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Path:
    """Save a random model of ``model_type``, with random norms and biases too."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type}: {size} parameters; the table does not make it small")
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() > 1 and float(parameter.detach().std()) == 0:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def with_weights_of(quantized: PreTrainedModel, source: Path) -> PreTrainedModel:
    """transformers' own model of ``source`` with the dequantized weights of ``quantized``."""
    model = AutoModelForCausalLM.from_pretrained(source)
    stacks = {
        name: (module, expert_tensors(module))
        for name, module in model.named_modules()
        if is_experts(module)
    }
    names = family_of(quantized.config).experts
    for name, linear in quantized_linears(quantized).items():
        weight = linear.dequantize()
        stack = next((s for s in stacks if name.startswith(f"{s}.")), None)
        if stack is None:
            model.get_submodule(name).weight.copy_(weight)  # type: ignore[operator, union-attr]
            continue
        assert names is not None
        number, leaf = name.removeprefix(f"{stack}.").split(".")
        roles = {names.gate: "gate", names.up: "up", names.down: "down"}
        stacks[stack][1][int(number)][f"{roles[leaf]}.weight"].copy_(weight)
    return model.eval()


@torch.no_grad()
def check(
    model_type: str, work: Path, recipe: str = "fast", scheme: str = "w4a16"
) -> dict[str, Any]:
    """Quantize a tiny model of ``model_type`` and hold the result against transformers' own class.

    Every tensor of the source is in the result, packed or equal; the logits are those of the float
    model with the dequantized weights.
    """
    source = save_tiny(model_type, work / "source")
    out = quantize(Checkpoint(source), recipes.load(scheme, recipe), work / "out")
    family = family_of(Checkpoint(source).config)
    assert_nothing_dropped(family, Checkpoint(source), Checkpoint(out))
    loaded = load(out)
    linears = quantized_linears(loaded)
    assert linears
    ids = torch.arange(3, 15)[None]
    expected = with_weights_of(loaded, source)(ids).logits
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-3, atol=1e-3)
    kept = {name for kind in _kinds(family) for name in kind.kept}
    return {"quantized": len(linears), "kept": sorted(kept), "fixed": family.why_fixed}


def _kinds(family: Family) -> list[Family]:
    blocks = range(int(family.defaults["num_hidden_layers"])) if family.derived else range(1)
    return list(dict.fromkeys(family.choose(None, b) if family.choose else family for b in blocks))


def assert_nothing_dropped(family: Family, source: Checkpoint, result: Checkpoint) -> None:
    """Every tensor of ``source`` is in ``result``, packed or with the same numbers."""
    own = {disk: own for own, disk in family.disk_names.items()}
    packed = {name.rpartition(".")[0] for name in result.entries if name.endswith(".qweight")}
    for disk in source.entries:
        parts = disk.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        prefix = next((p for p in prefixes if p in own), None)
        name = disk if prefix is None else own[prefix] + disk[len(prefix) :]
        if name in result:
            assert torch.equal(result.read(name), source.read(disk)), disk
        else:
            owner = name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
            stacked = any(p.startswith(f"{name.rpartition('.')[0]}.") for p in packed)
            assert owner in packed or stacked, disk


CAUSAL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
