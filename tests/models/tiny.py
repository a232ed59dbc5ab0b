"""Tiny random models of transformers' causal classes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from qtool.models.auto import auto_class

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
#: the most parameters of a tiny model
MOST_PARAMETERS = 45_000_000
MLA = {"num_key_value_heads": 4, "head_dim": None}
DSA = {"num_key_value_heads": 4, "mlp_layer_types": None, "indexer_types": None} | {
    "index_head_dim": 64,
    "index_n_heads": 2,
}
MIXED = ["sliding_attention", "full_attention"]
ROPE_BY_TYPE = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in MIXED}
#: blocks that use an indexer's choice of the one before; it chooses fewer tokens than there are
SHARED_INDEXER = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "shared"],
    "index_topk": 8,
}
#: blocks that use keys and values of the first ones
SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED * 2}
GEMMA4 = SHARED_KV | {
    "per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}},
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 64,
    "num_experts": None,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
SMALL_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SMALL_SAM = SMALL_TOWER | {
    "mlp_dim": 128,
    "output_channels": 32,
    "downsample_channels": [32, 64],
    "window_size": 2,
    "global_attn_indexes": [1],
}
BLT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
SMALL_VQ = {"base_channels": 32, "num_embeddings": 64, "latent_channels": 32, "embed_dim": 8}
#: what else a class needs to be small, or to be built at all
CHANGES: dict[str, dict[str, Any]] = {
    "inkling2_text": {"unpadded_vocab_size": 320},
    "inkling2_loop_text": {"unpadded_vocab_size": 320},
    "git": {"vision_config": SMALL_TOWER},
    "chameleon": {"vq_config": SMALL_VQ, "vocabulary_map": {"<image>": 319, "IMGIMGA": 318}},
    "emu3": {"vocabulary_map": {"<image>": 319, "<|extra_200|>": 318}},
    "blt": {
        "patcher_config": BLT,
        "encoder_config": BLT | {"hidden_size_global": 256},
        "decoder_config": BLT | {"hidden_size_global": 256},
        "global_config": BLT | {"hidden_size": 256},
        "encoder_hash_byte_group_vocab": 100,
    },
    "muse_spark": {"out_hidden_size": 256, "projector_hidden_size": 128},
    "granite4_vision": {"deepstack_layer_map": [[1, 0]], "downsample_rate": "1/2"},
    "idefics": {
        "vision_config": SMALL_TOWER | {"embed_dim": 64},
        "perceiver_config": {"resampler_depth": 1, "resampler_n_heads": 2},
    },
    "phi4_multimodal": {
        "vision_config": SMALL_TOWER | {"crop_size": 28},
        "audio_config": {"hidden_size": 64, "intermediate_size": 128, "num_blocks": 1}
        | {"num_attention_heads": 2, "nemo_conv_channels": 64, "ext_pw_out_channel": 64}
        | {"depthwise_separable_out_channel": 64},
    },
    "qwen2_5_omni": {"enable_audio_output": False},  # its voices are a pickle
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "sarvam_mla", "youtu", "minicpm3"), MLA),
    "axk1": MLA,
    "mistral4": MLA | {"head_dim": ...},
    "mistral_large4_text": MLA | SHARED_INDEXER | {"head_dim": ..., "kv_source_layers": [0, 0, 0]},
    "dots3_note_text": MLA | {"head_dim": ...},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": ...}
    | SHARED_INDEXER
    | {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]}
    | {"indexer_types": ["full", "full", "shared"], "index_kpool": 4}
    | {"linear_head_dim": 32, "linear_num_heads": 4},
    "hunyuan_vl_text": {"rope_parameters": MROPE},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [128, 128], "moe_num_experts": 4}
    | {"rope_parameters": MROPE | {"mrope_section": [6, 6, 4]}},
    "ovis2": {"vocab_size": 320, "hidden_size": 128},
    "paligemma": {"projection_dim": 128},
    "dbrx": {"n_heads": 4, "n_layers": 2, "max_seq_len": 256}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}}
    | {"ffn_config": {"hidden_size": 128, "ffn_hidden_size": 256}},
    "glm4_moe_lite": MLA | {"head_dim": ..., "mlp_layer_types": None},
    **dict.fromkeys(("axk2", "deepseek_v32"), DSA),
    "glm_moe_dsa": DSA | SHARED_INDEXER,
    "hy_v4": SHARED_INDEXER,
    "bailing_hybrid": MLA | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32},
    "bamba": MAMBA2 | {"attn_layer_indices": [1], "layer_types": ...},
    "cohere_compass_text": {"rope_parameters": ROPE_BY_TYPE, "layer_types": MIXED},
    "ctrl": {"dff": 256},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 64},
    "codegen": {"rotary_dim": 16},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"num_key_value_heads": None, "head_dim": None},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 256, "layer_types": ...},
    "gemma3n_text": SHARED_KV
    | {
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 128,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_k25": {"projection_hidden_size": 64},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": ...,
    },
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "expert_ffn_hidden_size": 128,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "num_key_value_heads": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16},
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
    "xlnet": {"d_inner": 256},
    "qwen4_exp_text": {
        "hc_lowrank": 128,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zamba": {"layers_block_type": ["hybrid", "mamba", "hybrid"], "num_hidden_layers": 3}
    | {"mamba_dt_rank": 8, "layer_types": ...}
    | {"attention_head_dim": 64, "attention_hidden_size": 256, "num_key_value_heads": 4},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "layer_types": ...,
    }
    | {"attention_head_dim": 64, "attention_hidden_size": 256, "num_key_value_heads": 4}
    | {"mamba_headdim": 32, "n_mamba_heads": 8, "kv_channels": 32, "num_query_groups": 4},
    "zaya": {
        "num_hidden_layers": 3,
        "layer_types": None,
        "router_hidden_size": 64,
        "num_experts_per_tok": 1,
    },
}


#: sizes of what is beside a wrapper's text model
TOWER: dict[str, Any] = {
    **{key: SIZES[key] for key in ("vocab_size", "pad_token_id")},
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    "num_key_value_heads": 2,
    "head_dim": 32,
    "out_hidden_size": 128,
    "projector_hidden_size": 128,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 128,
    "projector_input_dim": 128,
    "projector_output_dim": 128,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "pixel_shuffle_ratio": 0.5,
}
#: of wrappers' sub-configs, beside :data:`SIZES` and :data:`TOWER`
INNER: dict[str, dict[str, dict[str, Any]]] = {
    "emu3": {"vq_config": {"base_channels": 32, "codebook_size": 64, "num_attention_heads": 1}},
    "cosmos3_edge": {"text_config": {"rope_parameters": MROPE}},
    "dots3_note": {
        "vision_config": {
            "per_layer_config": {"1": {}},
            "adapter_in_dim": 64,
            "adapter_out_dim": 128,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 128},
    },
    "muse_spark": {"audio_config": {"num_hidden_layers": ..., "hidden_sizes": [32, 32, 64, 64]}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 128, "intermediate_size": 32}},
    "inkling2": {"vision_config": {"text_hidden_size": 128}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
        "vision_config": {
            "encoder_config": SMALL_TOWER | {"num_key_value_heads": 2},
            "sam_config": SMALL_SAM,
        },
    },
    "granite4_vision": {"qformer_config": {"encoder_hidden_size": 64}},
    "janus": {"vq_config": SMALL_VQ | {"projection_dim": 64, "image_token_embed_dim": 64}},
    "molmo2": {
        "vision_config": {"image_size": [28, 28]},
        "adapter_config": {"text_hidden_size": 128, "vision_feature_layer": [1, 0]},
    },
    "unlimited_ocr": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"encoder_config": SMALL_TOWER, "sam_config": SMALL_SAM},
    },
    "vibevoice_asr": {
        name: {"num_filters": 4, "hidden_size": 16, "depths": [1] * 7}
        for name in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    },
    "gemma3": {"text_config": {"layer_types": MIXED}},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "diffusion_gemma": {"text_config": {"top_k_experts": 2, "layer_types": MIXED}},
    "gemma3n": {"vision_config": {"architecture": "mobilenetv3_small_050"}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": [28, 28]},
        }
    },
    "gemma4": {"text_config": GEMMA4},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}, "vision_config": {"hidden_size": 128}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen3_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen3_vl_moe": {"text_config": {"rope_parameters": MROPE}},
    "glm4v": {"text_config": {"rope_parameters": MROPE}},
    "glm46v": {"text_config": {"rope_parameters": MROPE}},
    "glm_ocr": {"text_config": {"rope_parameters": MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}}},
    "glmga": {"text_config": {"rope_parameters": MROPE}},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_omni": {
        "thinker_config": {"text_config": {"rope_parameters": MROPE}},
        "talker_config": {"hidden_size": 128, "embedding_size": 128, "rope_parameters": MROPE},
    },
    "qwen3_omni_moe": {
        "thinker_config": {"text_config": {"rope_parameters": MROPE}},
        "talker_config": {
            "text_config": {"rope_parameters": MROPE, "shared_expert_intermediate_size": 128},
            "spatial_merge_size": 2,
        },
        "code2wav_config": {"decoder_dim": 64},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nemo_speechlm": {
        "word_timestamp_config": {"blank_token_id": 319},
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}},
    },
    "qwen3_5": {"text_config": GATED_DELTA},
    "qwen3_5_moe": {"text_config": GATED_DELTA},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of ``model_type``; ``...`` leaves a setting as the class has it."""
    config = AutoConfig.for_model(model_type)
    wraps = config.get_text_config() is not config
    inner = _tiny_parts(config, INNER.get(model_type, {})) if wraps else {}
    known = set(config.to_dict()) | set(type(config).attribute_map)
    wanted = {**SIZES, **CHANGES.get(model_type, {}), **changes}
    if inner:
        wanted = {"image_token_index": 319, "image_token_id": 319, "projector_hidden_act": "gelu"}
        wanted |= {"tie_word_embeddings": False, **CHANGES.get(model_type, {}), **changes}
    own = {key: value for key, value in wanted.items() if key in known and value is not ...}
    return AutoConfig.for_model(model_type, **inner, **own)


def _tiny_parts(config: Any, changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Small configs of the parts that ``config`` is made of."""
    parts = {name: getattr(config, name, None) for name in type(config).sub_configs}
    return {n: _tiny_part(n, part, changes.get(n, {})) for n, part in parts.items() if part}


def _tiny_part(name: str, config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """A small config of a wrapper's text model or tower, of the class that ``config`` has."""
    sizes = SIZES if name in ("text_config", "language_config", "llm_config") else TOWER
    known = set(config.to_dict()) | set(config.attribute_map)
    own = {**sizes, **CHANGES.get(config.model_type, {}), **changes, **_tiny_parts(config, changes)}
    found: dict[str, Any] = {"model_type": config.model_type}
    taken = known | changes.keys()
    return found | {key: value for key, value in own.items() if key in taken and value is not ...}


@contextmanager
def deterministic() -> Iterator[None]:
    """While open, memory that nothing is written to holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Path:
    """Save a random model of ``model_type``, with random norms and biases too.

    Its linears keep the size of their inputs, so that logits depend on each of them.
    """
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{model_type}: {size} parameters; the table does not make it small")
    with deterministic():
        model = auto_class(config).from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            continue
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module._fill_padding_idx_with_zero()  # Youtu's class does when it loads
    model.save_pretrained(directory)
    return directory
