"""Makes checkpoints of known models' shapes with random weights, to measure runs on.

Weights are normal with standard deviation 0.02, norms are ones. Each block is a shard, written as a
stream.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError, suggest
from qtool.io.integrity import INDEX
from qtool.io.safetensors import write, write_json
from qtool.pipeline.job import Job
from qtool.recipes import parse

UNTOUCHED = {"scheme": "none", "layers": [{"match": ".*", "scheme": None}]}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _llama(
    hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, **rest: Any
) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    return LLAMA | sizes | {"max_position_embeddings": 4096} | rest


#: config.json by name
SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(256, 512, 2, 4, 2, 512),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": _llama(
        4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0, max_position_embeddings=8192
    ),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama-3.1-405b": _llama(
        16384, 53248, 126, 128, 8, 128256, rope_theta=500000.0, max_position_embeddings=131072
    )
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "qwen3-235b-a22b": _llama(4096, 12288, 94, 64, 4, 151936, head_dim=128)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek-v3": _llama(7168, 18432, 61, 128, 128, 129280)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of ``shape``, with another number of blocks if ``layers`` is given.

    Raises:
        QtoolError: an unknown shape.
    """
    if shape not in SHAPES:
        raise QtoolError(f"unknown shape {shape!r}: {suggest(shape, SHAPES)}")
    return SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})


def make(config: dict[str, Any], directory: Path) -> Path:
    """Write a checkpoint of ``config`` into ``directory``; weights are drawn on a GPU if possible.

    Files that a killed call has left there are written again; a whole checkpoint is kept, whatever
    its config.
    """
    if (directory / "config.json").exists():  # it is written last
        return directory
    job = Job.of(config, parse(UNTOUCHED, "none"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    directory.mkdir(parents=True, exist_ok=True)

    def shard(number: int, spec: dict[str, Tensor]) -> str:
        name = f"model-{number:05d}.safetensors"
        random = torch.Generator(device).manual_seed(number)
        write(directory / name, spec, ((key, _weight(t, random)) for key, t in spec.items()))
        return name

    specs = job.shards()
    with ThreadPoolExecutor(4 if device.type == "cuda" else 1) as pool:
        names = list(pool.map(shard, range(len(specs)), specs))
    weight_map = {key: name for spec, name in zip(specs, names, strict=True) for key in spec}
    total = sum(tensor.nbytes for spec in specs for tensor in spec.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(directory / "config.json", config)
    return directory


def _weight(spec: Tensor, random: torch.Generator) -> Tensor:
    if spec.dim() == 1:
        return torch.ones(spec.shape, dtype=spec.dtype)
    drawn = torch.empty(spec.shape, dtype=spec.dtype, device=random.device)
    return drawn.normal_(std=0.02, generator=random)
