"""Adds outliers like those of real models to a Llama-like model without changing its outputs.

    python benchmarks/accuracy/outliers.py MODEL OUT [--norm 100] [--value 100] [--product 1000]
    [--key 10] [--channels 4] [--massive 1000] [--apart 16] [--first-token ID] [--seed 0]

In every block a few channels become larger, and the weights that read them as much smaller:

| option    | larger                                    | smaller                            |
|-----------|-------------------------------------------|------------------------------------|
| --norm    | channels of both norms' outputs           | columns of q, k, v and gate, up    |
| --value   | rows of v                                 | columns of o, of all query heads   |
| --product | rows of up: the inputs of down            | columns of down                    |
| --key     | rows of k, both of a pair that RoPE turns | rows of q, of all query heads      |

The first token of every text gets a massive activation (Sun et al., "Massive activations in large
language models", 2024). In the first block one input of down is ``--massive`` times as large as the
mean input; it writes a value of ``--massive`` times an embedding's value into one channel of the
residual stream, where it stays until the end. This needs new channels in both (``--room``), which
are zero for all other tokens, and norms with weights and epsilon scaled for the greater width. A
first token that is always the same has one known state in each block, so the new channel's columns
in q, k, v, gate, up and the head can be chosen to keep their outputs. ``--first-token`` must
therefore begin every text and occur nowhere else; without it there is no massive activation. In the
new channel its embedding is ``--apart`` times as large as other embeddings, so that this channel is
most of its state. With 1 it would be a small part, and rounding errors of other tokens in that
channel would reach the input of down too, squared and a thousandfold.

Two kinds of outliers would change the outputs and are left out: a channel of the residual stream
that is large for every token, because a norm divides by it, and more attention to the first token
than the model has, because a softmax takes it from the others.

The model is stored in float32, so that its logits stay the same to rounding.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad, silu

Weights = dict[str, Tensor]
#: the model types whose blocks are Llama's: other norms, multipliers or fused linears would change
#: what is computed
LLAMA_LIKE = "llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WRITERS = ("self_attn.o_proj", "mlp.down_proj")


def parser() -> argparse.ArgumentParser:
    """The command line's options; a factor of 1 or ``--massive 0`` leaves a kind out."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("model", type=Path)
    found.add_argument("out", type=Path)
    for name, factor in {"norm": 100.0, "value": 100.0, "product": 1000.0, "key": 10.0}.items():
        found.add_argument(f"--{name}", type=float, default=factor)
    found.add_argument("--channels", type=int, default=4, help="of each kind in each block")
    found.add_argument("--massive", type=float, default=1000.0)
    found.add_argument("--apart", type=float, default=16.0, help="of the first token's embedding")
    found.add_argument("--first-token", type=int, help="id that begins every text")
    found.add_argument("--room", type=int, default=128, help="channels more in the residual stream")
    found.add_argument("--seed", type=int, default=0)
    return found


def make(arguments: argparse.Namespace) -> None:
    """Write the model with outliers."""
    config = json.loads((arguments.model / "config.json").read_text())
    kind, activation = config["model_type"], config.get("hidden_act", "silu")
    if kind not in LLAMA_LIKE or activation != "silu":
        sys.exit(
            f"outliers.py: {kind} with {activation} found, one of {', '.join(LLAMA_LIKE)} with silu"
            " expected"
        )
    weights: Weights = {}
    for file in sorted(arguments.model.glob("*.safetensors")):
        weights |= {name: tensor.double() for name, tensor in load_file(file).items()}
    put_in(weights, config, arguments)
    shutil.copytree(arguments.model, arguments.out, ignore=shutil.ignore_patterns("*.safetensors*"))
    (arguments.out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2))
    save_file(
        {name: tensor.float().contiguous() for name, tensor in weights.items()},
        arguments.out / "model.safetensors",
    )


def put_in(weights: Weights, config: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Put all outliers into ``weights`` and ``config``, in place."""
    random = torch.Generator().manual_seed(arguments.seed)
    if "head_dim" not in config:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    narrow = dict(config)
    if EMBEDDING not in weights:  # a tied embedding may be stored as the head
        weights[EMBEDDING] = weights[HEAD]
    if arguments.first_token is not None:
        before = {name: tensor.clone() for name, tensor in weights.items()}
        widen(weights, config, room_of(config, arguments.room))
        if arguments.massive:
            Massive(before, narrow, weights, config).put_in(
                arguments.first_token, arguments.massive, arguments.apart
            )
    for block in range(config["num_hidden_layers"]):
        scale_channels(weights, narrow, block, arguments, random)


def scale_channels(
    weights: Weights,
    config: dict[str, Any],
    block: int,
    arguments: argparse.Namespace,
    random: torch.Generator,
) -> None:
    """Put the outlier channels into one block, in place; ``config`` is the model's own."""
    at = f"model.layers.{block}"
    heads, dim = config["num_attention_heads"], config["head_dim"]
    kv_heads = config.get("num_key_value_heads") or heads

    def drawn(of: int) -> Tensor:
        return torch.randperm(of, generator=random)[: arguments.channels]

    for norm, linears in READERS.items():
        channels = drawn(config["hidden_size"])
        scale_rows(weights, f"{at}.{norm}", channels, arguments.norm)
        for linear in linears:
            weights[f"{at}.{linear}.weight"][:, channels] /= arguments.norm
    channels = drawn(config["intermediate_size"])
    scale_rows(weights, f"{at}.mlp.up_proj", channels, arguments.product)
    weights[f"{at}.mlp.down_proj.weight"][:, channels] /= arguments.product
    channels = drawn(kv_heads * dim)
    scale_rows(weights, f"{at}.self_attn.v_proj", channels, arguments.value)
    read = in_query_heads(channels, heads, kv_heads, dim)
    weights[f"{at}.self_attn.o_proj.weight"][:, read] /= arguments.value
    if f"{at}.self_attn.k_norm.weight" in weights:
        return  # it would take the factor away again
    pairs = drawn(kv_heads * dim // 2)
    channels = pairs // (dim // 2) * dim + pairs % (dim // 2)
    channels = torch.cat([channels, channels + dim // 2])
    scale_rows(weights, f"{at}.self_attn.k_proj", channels, arguments.key)
    queries = in_query_heads(channels, heads, kv_heads, dim)
    scale_rows(weights, f"{at}.self_attn.q_proj", queries, 1 / arguments.key)


def scale_rows(weights: Weights, module: str, channels: Tensor, factor: float) -> None:
    """Multiply output ``channels`` of a linear or a norm, in place."""
    for part in ("weight", "bias"):
        if (tensor := weights.get(f"{module}.{part}")) is not None:
            tensor[channels] *= factor


def in_query_heads(channels: Tensor, heads: int, kv_heads: int, dim: int) -> Tensor:
    """The positions of the kv heads' ``channels`` in the query heads that read them."""
    group = torch.arange(heads // kv_heads)[:, None]
    return ((channels // dim * len(group) + group) * dim + channels % dim).flatten()


def room_of(config: dict[str, Any], room: int) -> int:
    """The smallest multiple of ``room`` by which heads divide the wider stream too, as Llama asks.

    Of a stream that they do not divide, ``room`` itself.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        return room
    return next(more for more in count(room, room) if (hidden + more) % heads == 0)


def widen(weights: Weights, config: dict[str, Any], room: int) -> None:
    """Add ``room`` channels of zeros to the residual stream and to the inputs of down, in place."""
    narrow = config["hidden_size"]
    wide = narrow + room
    weights.setdefault(HEAD, weights[EMBEDDING].clone())
    for name, tensor in weights.items():
        if ".mlp.down_proj.weight" in name:
            weights[name] = tensor = pad(tensor, (0, room))
        elif ".mlp.gate_proj." in name or ".mlp.up_proj." in name:
            weights[name] = tensor = pad(tensor, (0,) * (2 * tensor.dim() - 1) + (room,))
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            # a mean over more channels, of which the new ones are zero
            weights[name] = pad(tensor * math.sqrt(narrow / wide), (0, room), value=1.0)
        elif name.endswith(tuple(f"{writer}.weight" for writer in WRITERS)):
            weights[name] = pad(tensor, (0, 0, 0, room))
        elif tensor.dim() == 2 or name.endswith(tuple(f"{writer}.bias" for writer in WRITERS)):
            weights[name] = pad(tensor, (0, room))
    config["rms_norm_eps"] *= narrow / wide
    config["intermediate_size"] += room
    config |= {"hidden_size": wide, "tie_word_embeddings": False}


class Massive:
    """The first token's state in the old and in the new model, block after block.

    Alone with itself, a token's attention is its own value.

    Args:
        before, narrow: weights and config of the old model.
        weights, config: weights and config of the widened model.
    """

    def __init__(
        self,
        before: Weights,
        narrow: dict[str, Any],
        weights: Weights,
        config: dict[str, Any],
    ) -> None:
        self.before, self.narrow, self.weights, self.config = before, narrow, weights, config
        self.channel, self.product = narrow["hidden_size"], narrow["intermediate_size"]

    def put_in(self, token: int, massive: float, apart: float) -> None:
        """Change the new weights so that ``token`` at the start has a massive activation."""
        if not self.before[EMBEDDING][token].any():
            sys.exit(f"outliers.py: token {token} has an embedding of zeros: choose another")
        usual = self.before[EMBEDDING].square().mean().sqrt()
        self.weights[EMBEDDING][token, self.channel] = apart * usual  # identifies the token
        old, new = self.before[EMBEDDING][token], self.weights[EMBEDDING][token]
        for block in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{block}"
            attention, mlp = READERS
            *_, value = self.outputs(at, attention, old, new)
            old, new = self.written(f"{at}.self_attn.o_proj", old, new, self.heads(value))
            gate, up = self.outputs(at, mlp, old, new)
            product = silu(gate) * up
            after = pad(product, (0, self.config["intermediate_size"] - len(product)))
            if block == 0:
                wanted = massive * product.square().mean().sqrt()
                after[self.product] = self.spike(at, new, wanted)
                down = self.weights[f"{at}.mlp.down_proj.weight"]
                down[self.channel, self.product] = massive * usual / after[self.product]
            old, new = self.written(f"{at}.mlp.down_proj", old, new, product, after)
        head = self.before.get(HEAD, self.before[EMBEDDING])
        self.keep("lm_head", head @ self.normed("model.norm", old), new, "model.norm")

    def outputs(self, at: str, norm: str, old: Tensor, new: Tensor) -> Iterator[Tensor]:
        """The outputs of the linears that read a norm; they are kept unchanged."""
        normed = self.normed(f"{at}.{norm}", old)
        for linear in READERS[norm]:
            found = self.before[f"{at}.{linear}.weight"] @ normed
            self.keep(f"{at}.{linear}", found, new, f"{at}.{norm}")
            yield found + self.before.get(f"{at}.{linear}.bias", torch.zeros(()).double())

    def normed(self, norm: str, old: Tensor) -> Tensor:
        return _rms_norm(old, self.before[f"{norm}.weight"], self.narrow)

    def keep(self, linear: str, wanted: Tensor, new: Tensor, norm: str) -> None:
        """Change ``linear`` to output ``wanted`` if the residual stream is ``new``."""
        weight = self.weights[f"{linear}.weight"][: len(wanted)]
        seen = _rms_norm(new, self.weights[f"{norm}.weight"], self.config)
        weight[:, self.channel] += (wanted - weight @ seen) / seen[self.channel]

    def spike(self, at: str, new: Tensor, wanted: Tensor) -> Tensor:
        """Make the new product of gate and up about ``wanted``; returns the product."""
        norm = "post_attention_layernorm"
        seen = _rms_norm(new, self.weights[f"{at}.{norm}.weight"], self.config)
        for linear in READERS[norm]:
            row = self.weights[f"{at}.{linear}.weight"][self.product]
            row[self.channel] = wanted.sqrt() / seen[self.channel]
        return silu(wanted.sqrt()) * wanted.sqrt()

    def heads(self, value: Tensor) -> Tensor:
        """The value of each query head, which is the value of its kv head."""
        of_one = value.view(-1, self.config["head_dim"])
        return of_one.repeat_interleave(
            self.config["num_attention_heads"] // len(of_one), 0
        ).flatten()

    def written(
        self, linear: str, old: Tensor, new: Tensor, given: Tensor, after: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both residual streams after ``linear`` reads ``given``, the new one ``after``."""
        parts = []
        for weights, stream, seen in (
            (self.before, old, given),
            (self.weights, new, given if after is None else after),
        ):
            out = weights[f"{linear}.weight"] @ seen
            parts.append(stream + out + weights.get(f"{linear}.bias", torch.zeros_like(out)))
        return parts[0], parts[1]


def _rms_norm(stream: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return stream / (stream.square().mean() + config["rms_norm_eps"]).sqrt() * weight


if __name__ == "__main__":
    make(parser().parse_args())
