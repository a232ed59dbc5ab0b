"""Train the models that docs/results quantizes, in a given time.

    python benchmarks/demo/tokenize_corpus.py --train TRAIN.txt --valid VALID.txt --out TOKENS
        --vocabulary 16384
    python benchmarks/accuracy/train.py dense OUT --tokens TOKENS --minutes 3
    python benchmarks/accuracy/train.py mixture OUT --tokens TOKENS --minutes 3

``dense`` and ``mixture`` have some 100 M parameters. :data:`FAMILIES` are small models of many
architectures, which benchmarks/accuracy/trained_families.py trains and quantizes.

It writes a Hugging Face model in bf16 with its tokenizer and ``training.json``. The model computes
in bf16 and AdamW keeps float32 weights. The cosine of the learning rate follows the clock, so that
a training ends on time on any GPU.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CONTEXT = 1024
WARMUP = 100  # steps
WEIGHT_DECAY = 0.1
EVALUATE_EVERY = 30  # seconds
HELD_OUT = 64  # windows of the evaluations during training; the last evaluation takes all
LAST_SECONDS = 10  # seconds for the last evaluation and for writing
COMMON = {
    "head_dim": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
    },
    "small": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 9,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "mixture": COMMON
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
    },
    "tiny": COMMON
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}

#: six blocks of width 256 of each architecture, with what it needs beside that
FAMILIES: dict[str, dict[str, Any]] = {
    name: COMMON
    | {
        "model_type": name,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    | own
    for name, own in {
        "bloom": {
            "num_key_value_heads": 4,
            "intermediate_size": 1024,
            "tie_word_embeddings": True,
        },
        "cohere2": {"sliding_window": 128, "tie_word_embeddings": True},
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 256,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 64,
        },
        "falcon": {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 1024,
            "intermediate_size": 1024,
        },
        "falcon_h1": {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_chunk_size": 64,
        },
        "gemma2": {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
        },
        "gemma3_text": {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        },
        "glm4": {},
        "gpt_neox": {"num_key_value_heads": 4, "intermediate_size": 1024},
        "gpt_oss": {
            "intermediate_size": 384,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
        },
        "granite": {
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 4.0,
        },
        "lfm2": {
            "block_auto_adjust_ff_dim": False,
            "layer_types": [*["conv"] * 2, "full_attention"] * 2,
        },
        "llama": {},
        "nemotron": {"intermediate_size": 1024},
        "olmo2": {},
        "opt": {
            "num_key_value_heads": 4,
            "intermediate_size": 1024,
            "ffn_dim": 1024,
            "word_embed_proj_dim": 256,
            "tie_word_embeddings": True,
        },
        "phi3": {},
        "qwen3": {"tie_word_embeddings": True},
        "qwen3_5_text": {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": [*["linear_attention"] * 2, "full_attention"] * 2,
        },
        "starcoder2": {"intermediate_size": 1024},
    }.items()
}
for name in ("deepseek_v3", "falcon"):
    del FAMILIES[name]["head_dim"]  # their configs compute it
SHAPES |= FAMILIES


def build(shape: str, vocabulary: int) -> PreTrainedModel:
    """A random model of one of :data:`SHAPES` in bf16, the same in each call."""
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), vocab_size=vocabulary, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def batches(tokens: Tensor, windows: int) -> Iterator[Tensor]:
    """Endless batches ``[windows, CONTEXT]``; each pass cuts at a new offset and shuffles."""
    random, count = torch.Generator().manual_seed(1), len(tokens) // CONTEXT - 1
    while True:
        offset = int(torch.randint(CONTEXT, (), generator=random))
        cut = tokens[offset : offset + count * CONTEXT].view(count, CONTEXT)
        order = torch.randperm(count, generator=random).to(tokens.device)
        for rows in order[: count // windows * windows].view(-1, windows):
            yield cut[rows].long()


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, tokens: Tensor, limit: int | None = None) -> float:
    """Mean nats a token over windows that do not overlap, the first token of each unscored."""
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:limit].long()
    losses = [
        float(model(input_ids=part, labels=part, use_cache=False).loss) * len(part)
        for part in rows.split(8)
    ]
    return sum(losses) / len(rows)


def learning_rate(step: int, share: float, peak: float) -> float:
    """The learning rate of a step that begins when ``share`` of the time is over."""
    return peak * min((step + 1) / WARMUP, 0.02 + 0.49 * (1 + math.cos(math.pi * min(share, 1))))


def train(model: PreTrainedModel, tokens: Tensor, valid: Tensor, arguments: Any) -> dict[str, Any]:
    """Train until the time is over; returns the record."""
    started = time.monotonic()
    deadline = started + 60 * arguments.minutes - LAST_SECONDS
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    groups = [
        {"params": [m for m in masters if m.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    moe = "num_experts" in SHAPES[arguments.shape]
    routed = {"output_router_logits": True} if moe else {}
    forward = torch.compile(model) if arguments.compile else model
    evaluations: list[dict[str, Any]] = []
    first = evaluated = started
    for step, batch in enumerate(batches(tokens, arguments.windows)):
        now = time.monotonic()
        if now > deadline and step:
            break
        if step == 1:
            first = now  # the compilation is over
        rate = learning_rate(step, (now - first) / (deadline - first), arguments.rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = forward(input_ids=batch, labels=batch, use_cache=False, **routed).loss
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_([weight.data for weight in weights], masters)
        if now - evaluated > EVALUATE_EVERY:
            evaluated = now
            model.eval()
            held_out = round(held_out_loss(model, valid, HELD_OUT), 4)
            model.train()
            trained = round(float(loss.detach()), 4)
            found = {"step": step + 1, "train_loss": trained, "held_out_loss": held_out}
            evaluations.append(found | {"seconds": round(time.monotonic() - started, 1)})
            print(evaluations[-1], flush=True)
        elif step % 8 == 0:
            loss.item()  # waits, so that the clock does not run ahead of the GPU
    model.eval()
    return {
        "steps": step,
        "tokens": step * arguments.windows * CONTEXT,
        "seconds": round(time.monotonic() - started, 1),
        "first_step_seconds": round(first - started, 1),
        "held_out_loss": round(held_out_loss(model, valid), 4),
        "evaluations": evaluations,
    }


def main() -> None:
    """Train one model and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=Path, required=True, help="tokenize_corpus.py's folder")
    parser.add_argument("--minutes", type=float, default=3, help="in all")
    parser.add_argument("--windows", type=int, default=48, help=f"of {CONTEXT} tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("train.py: a CUDA device is needed")
    tokens, valid = (
        torch.from_numpy(
            np.fromfile(arguments.tokens / f"{name}.bin", np.uint16).astype(np.int32)
        ).to(arguments.device)
        for name in ("train", "valid")
    )
    tokenizer = arguments.tokens / "tokenizer"
    vocabulary = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    model = build(arguments.shape, vocabulary).to(arguments.device).train()
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens", flush=True)
    record = {
        "command": "python " + " ".join(Path(a).name if a[:1] == "/" else a for a in sys.argv),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if tokens.is_cuda else "cpu",
        "parameters": model.num_parameters(),
        "train_tokens": len(tokens),
        "held_out_tokens": len(valid),
    } | train(model, tokens, valid, arguments)
    model.save_pretrained(arguments.out)
    for file in tokenizer.iterdir():
        shutil.copy(file, arguments.out)
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print({name: value for name, value in record.items() if name != "evaluations"})


if __name__ == "__main__":
    main()
