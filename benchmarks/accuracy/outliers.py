"""A Llama-like model with outlier channels put in that leave what it computes as it was.

    python benchmarks/accuracy/outliers.py MODEL OUT [--factor 50] [--channels 4] [--seed 0]

In every block a few channels of both norms become ``factor`` times larger and the columns that read
them as much smaller; likewise a few rows of v against o's columns (the same for all query heads of
a kv head) and of up against down's. Real models grow such channels by themselves (LLM.int8(),
SmoothQuant); smoothing and rotation are for them. The model is stored in float32, so that its
logits stay the same to rounding.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=50.0)
    parser.add_argument("--channels", type=int, default=4, help="of each kind in each block")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    weights: Weights = {}
    for file in sorted(arguments.model.glob("*.safetensors")):
        weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
    random = torch.Generator().manual_seed(arguments.seed)
    for block in range(config["num_hidden_layers"]):
        inject(weights, config, block, arguments.factor, arguments.channels, random)
    shutil.copytree(arguments.model, arguments.out, ignore=shutil.ignore_patterns("*.safetensors*"))
    (arguments.out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        arguments.out / "model.safetensors",
    )


def inject(
    weights: Weights, config: dict, block: int, factor: float, count: int, random: torch.Generator
) -> None:
    """Put outliers into the block's norms, v and up, in place."""

    def weight(name: str) -> Tensor:
        return weights[f"model.layers.{block}.{name}.weight"]

    def chosen(of: int) -> Tensor:
        return torch.randperm(of, generator=random)[:count]

    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for norm, linears in readers.items():
        channels = chosen(config["hidden_size"])
        weight(norm)[channels] *= factor
        for linear in linears:
            weight(linear)[:, channels] /= factor
    channels = chosen(config["intermediate_size"])
    weight("mlp.up_proj")[channels] *= factor
    weight("mlp.down_proj")[:, channels] /= factor
    heads, dim = (
        config["num_attention_heads"],
        len(weight("self_attn.q_proj")) // config["num_attention_heads"],
    )
    group = heads // (config.get("num_key_value_heads") or heads)
    channels = chosen(len(weight("self_attn.v_proj")))
    weight("self_attn.v_proj")[channels] *= factor
    for query in range(group):
        columns = (channels // dim * group + query) * dim + channels % dim
        weight("self_attn.o_proj")[:, columns] /= factor


if __name__ == "__main__":
    main()
