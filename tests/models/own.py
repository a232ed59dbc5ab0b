"""A small architecture that transformers does not know, with one unusual structure at a time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from qtool.models.cache_argument import CACHE


class OwnConfig(PretrainedConfig):
    """``how`` names the structures, with spaces between them."""

    model_type = "own"

    def __init__(self, how: str = "", **others: Any) -> None:
        self.how, self.hidden_size, self.intermediate_size, self.vocab_size = how, 128, 256, 320
        self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads = 3, 4, 2
        self.head_dim, self.max_position_embeddings = 32, 256
        super().__init__(**{"tie_word_embeddings": False} | others)


class RMSNorm(nn.Module):
    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(size)), offset

    def forward(self, x: Tensor) -> Tensor:
        root = x.square().mean(-1, keepdim=True) + 1e-6
        return x * root.rsqrt() * (self.weight + self.offset)


class Unit(RMSNorm):
    """A norm that does not say so in its name."""


class Cached(nn.Module):
    """A module without tensors that calls the cache."""

    def forward(self, cache: Any, *given: Any) -> Any:
        return cache.update(*given)


class Block(nn.Module):
    def __init__(self, c: OwnConfig, number: int) -> None:
        super().__init__()
        self.c, self.number, self.how = c, number, c.how.split()
        h, d, q, kv = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
        own = nn.LayerNorm if "layernorm" in self.how else Unit if "unit" in self.how else RMSNorm
        self.norm, self.mlp_norm = own(h), own(h)
        if "offset" in self.how:
            self.mlp_norm = RMSNorm(h, 1.0)
        biased = "bias" in self.how
        self.q, self.o = nn.Linear(h, q * d, bias=biased), nn.Linear(q * d, h, bias=biased)
        self.k, self.v = (nn.Linear(h, kv * d, bias=biased) for _ in range(2))
        self.gate, self.up = (nn.Linear(h, c.intermediate_size, bias=biased) for _ in range(2))
        self.down = nn.Linear(c.intermediate_size, h, bias=biased)
        self.q_norm = RMSNorm(d) if "q-norm" in self.how else None
        self.k_norm = RMSNorm(d) if "k-norm" in self.how else None
        self.skip = nn.Linear(h, h, bias=biased) if "skip" in self.how else None
        self.scale = nn.Parameter(torch.ones(h)) if "scale" in self.how else None
        self.cached = Cached() if "cached" in self.how else None

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = x + self.attention(self.normed(self.norm, x), kwargs.get(CACHE))
        read = self.normed(self.mlp_norm, x)
        y = self.down(silu(self.gate(read)) * self.up(read))
        x = x + y if self.skip is None else x + y + self.skip(read)
        if "second" in self.how and self.number == 1:
            x = x + x.cumsum(1).abs() * 0.1
        if "clamp" in self.how:
            x = x.clamp(-0.5, 0.5)
        return x if self.scale is None else x * self.scale

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) * 0.5 if "multiple" in self.how else norm(x)

    def attention(self, x: Tensor, cache: Any) -> Tensor:
        c, how = self.c, self.how
        groups = c.num_attention_heads // c.num_key_value_heads
        heads = (linear(x).unflatten(-1, (-1, c.head_dim)) for linear in (self.q, self.k, self.v))
        q, k, v = (of_head.transpose(1, 2) for of_head in heads)
        v = k if "shared" in how else v
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k = turned(q), turned(k)
        if cache is not None:
            given = k, v, self.number
            k, v = self.cached(cache, *given) if self.cached else cache.update(*given)
        if "gqa" in how:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
            if "sdpa" in how:
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(2, 3) * c.head_dim**-0.5
                hidden = torch.full(scores.shape[-2:], -torch.inf).triu(1)
                out = (scores + hidden).softmax(-1) @ v
        if "q-gate" in how:
            out = out * q.mean(-1, keepdim=True).sigmoid()
        return self.o(out.transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    """Rotary embeddings of ``x [B, H, S, D]``."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class OwnPreTrained(PreTrainedModel):
    config_class, base_model_prefix, _no_split_modules = OwnConfig, "model", ["Block"]

    def _init_weights(self, module: nn.Module) -> None: ...


class OwnModel(OwnPreTrained):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, n) for n in range(config.num_hidden_layers))
        centred = {"layernorm", "final-layernorm"} & {*config.how.split()}
        self.norm = (nn.LayerNorm if centred else RMSNorm)(config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x, **{CACHE: kwargs.get(CACHE)})
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class OwnForCausalLM(OwnPreTrained):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return CausalLMOutputWithPast(
            logits=self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        )
