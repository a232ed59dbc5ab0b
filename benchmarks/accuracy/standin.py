"""Train the Llama of 16 M parameters that benchmarks/journal/accuracy.md measures beside the demo
model.

    python benchmarks/accuracy/standin.py OUT --text books.train.txt.xz --text c4.utf8 ...

It tokenizes the texts with the demo's tokenizer (kept as OUT/train.npy), trains on a GPU (two and a
half minutes of an H200) and writes a Hugging Face model. Dropout keeps the model from memorizing
its texts: a model that does gets *better* on other texts when its weights are rounded, so that it
shows nothing about rounding.
"""

import argparse
import lzma
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import qtool

CONTEXT = 512
WINDOWS = 32  # windows a step
PASSES = 11
WARMUP = 200
DROPOUT = 0.1
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.05
END_OF_BOOK = "<|endofbook|>"


def tokens_of(paths: list[Path], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All documents of all texts as one row of ids, with an end-of-text token after each."""
    ids: list[int] = []
    for path in paths:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8", "replace")
        for document in text.replace("\r\n", "\n").split(END_OF_BOOK):
            if document := document.strip():
                ids += [*tokenizer(document, verbose=False)["input_ids"], tokenizer.eos_token_id]
    return np.array(ids, dtype=np.uint16)


def build(vocabulary: int) -> LlamaForCausalLM:
    """A Llama of width 384 with 8 blocks, 6 query and 2 kv heads, and a dropout before each
    addition to the residual stream.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj", "embed_tokens")):
            module.register_forward_hook(
                lambda _, inputs, out: F.dropout(out, DROPOUT, model.training)
            )
    return model.cuda()


def batches(tokens: Tensor, seed: int = 1):
    """Batches ``[WINDOWS, CONTEXT]``; every pass cuts the row at a new offset and shuffles the
    windows.
    """
    random = torch.Generator().manual_seed(seed)
    count = len(tokens) // CONTEXT - 1
    for _ in range(PASSES):
        offset = int(torch.randint(CONTEXT, (), generator=random))
        cut = tokens[offset : offset + count * CONTEXT].view(count, CONTEXT)
        order = torch.randperm(count, generator=random).to(tokens.device)
        for rows in order[: count // WINDOWS * WINDOWS].view(-1, WINDOWS):
            yield cut[rows].long()


def train(model: LlamaForCausalLM, tokens: Tensor) -> None:
    """Train by AdamW, with a cosine learning rate that ends with the last pass."""
    compiled, steps = torch.compile(model), PASSES * ((len(tokens) // CONTEXT - 1) // WINDOWS)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / WARMUP, 0.01 + 0.495 * (1 + math.cos(math.pi * i / steps))),
    )
    started = time.monotonic()
    for step, batch in enumerate(batches(tokens), 1):
        with torch.autocast("cuda", torch.bfloat16):
            logits = compiled(input_ids=batch, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(
                f"step {step} of {steps}: loss {loss:.3f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="UTF-8, plain or .xz; more than once"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("standin.py: a CUDA device is needed")
    tokenizer = AutoTokenizer.from_pretrained(Path(qtool.__file__).parent / "demo")
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = arguments.out / "train.npy"
    if not kept.exists():
        np.save(kept, tokens_of(arguments.text, tokenizer))
    tokens = torch.from_numpy(np.load(kept).astype(np.int32)).cuda()
    model = build(len(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens")
    train(model, tokens)
    model.bfloat16().save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
