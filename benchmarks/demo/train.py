"""Train the demo model: a small Llama on books, several settings in one go, the best held-out
checkpoint kept.

    python benchmarks/demo/train.py --tokens WORK --out WORK/model

It reads `train.bin` and `valid.bin` (`tokenize_corpus.py`) and writes the best Hugging Face model
of each shape in bf16, and `training.json` with every evaluation of every setting. A setting takes
about a minute on one GPU. The corpus is small (7 M tokens), so the model begins to memorize it
within a few passes: strong weight decay delays that, and the held-out loss ends the training.
"""

import argparse
import json
import math
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512
WINDOWS_PER_STEP = 32
PATIENCE = 4  # evaluations without a new best held-out loss
EVALUATIONS_PER_PASS = 2


@dataclass(frozen=True)
class Setting:
    passes: int  # passes over the training tokens, at the end of which the cosine ends
    weight_decay: float
    learning_rate: float = 3e-3
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    intermediate: int = 768


SETTINGS = [
    Setting(passes=8, weight_decay=0.5),
    Setting(passes=5, weight_decay=0.1),
    Setting(passes=12, weight_decay=1.0),
    Setting(passes=8, weight_decay=0.5, hidden=384, layers=3, heads=6, intermediate=1024),
    Setting(passes=8, weight_decay=0.5, learning_rate=6e-3),
]


def build(setting: Setting) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=2,
        head_dim=setting.hidden // setting.heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).cuda()


def windows(tokens: torch.Tensor, passes: int, seed: int):
    """Batches [WINDOWS_PER_STEP, CONTEXT]: each pass cuts the corpus at a new offset and shuffles
    the windows.
    """
    random = torch.Generator().manual_seed(seed)
    for _ in range(passes):
        offset = int(torch.randint(CONTEXT, (), generator=random))
        count = (len(tokens) - CONTEXT) // CONTEXT
        cut = tokens[offset : offset + count * CONTEXT].view(count, CONTEXT)
        order = torch.randperm(count, generator=random).to(tokens.device)
        for rows in order.split(WINDOWS_PER_STEP):
            if len(rows) == WINDOWS_PER_STEP:
                yield cut[rows]


def loss_of(model, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, tokens: torch.Tensor) -> float:
    """Mean nats a token over non-overlapping windows, the first token of each unscored."""
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return sum(float(loss_of(model, batch)) * len(batch) for batch in rows.split(64)) / len(rows)


def optimizer_for(model, setting: Setting) -> torch.optim.AdamW:
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() == 2],
            "weight_decay": setting.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=setting.learning_rate, betas=(0.9, 0.95), fused=True)


def train(setting: Setting, train_tokens, valid_tokens, deadline: float) -> tuple[dict, dict]:
    """Train one setting; returns its record and its best weights."""
    model = build(setting)
    compiled = torch.compile(model)
    optimizer = optimizer_for(model, setting)
    steps_per_pass = (len(train_tokens) - CONTEXT) // CONTEXT // WINDOWS_PER_STEP
    steps, warmup = setting.passes * steps_per_pass, 100
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps))
        ),
    )
    every = steps_per_pass // EVALUATIONS_PER_PASS
    evaluations: list[dict] = []
    best, best_weights, stopped = math.inf, {}, "end of schedule"
    running, start = torch.zeros((), device="cuda"), time.monotonic()
    for step, batch in enumerate(windows(train_tokens, setting.passes, seed=1), start=1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(compiled, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        if step % every and step != steps:
            continue
        with torch.autocast("cuda", torch.bfloat16):
            held_out = held_out_loss(model, valid_tokens)
        since = step - (evaluations[-1]["step"] if evaluations else 0)
        evaluations.append(
            {
                "step": step,
                "tokens": step * batch.numel(),
                "train_loss": round(float(running) / since, 4),
                "held_out_loss": round(held_out, 4),
                "seconds": round(time.monotonic() - start, 1),
            }
        )
        print(evaluations[-1], flush=True)
        running.zero_()
        if held_out < best:
            best, since_best = held_out, 0
            best_weights = {
                name: value.detach().clone() for name, value in model.state_dict().items()
            }
        else:
            since_best += 1
        if since_best == PATIENCE:
            stopped = f"held-out loss did not fall for {PATIENCE} evaluations"
            break
        if time.monotonic() > deadline:
            stopped = "out of time"
            break
    record = {"setting": asdict(setting), "parameters": model.num_parameters(), "stopped": stopped}
    return record | {"best_held_out_loss": round(best, 4), "evaluations": evaluations}, best_weights


def load_tokens(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64)).cuda()


def save(setting: Setting, weights: dict, valid_tokens: torch.Tensor, out: Path) -> float:
    """Write the bf16 model; returns its held-out loss in float32 arithmetic."""
    model = build(setting)
    model.load_state_dict(weights)
    model.bfloat16().save_pretrained(out)
    return held_out_loss(model.float(), valid_tokens)


def one_line_each(document: str) -> str:
    """Indented JSON with each innermost object on a line of its own."""
    return re.sub(r"\{[^{}\[\]]*\}", lambda match: " ".join(match[0].split()), document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=Path, required=True, help="folder with train.bin and valid.bin"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=600, help="start nothing new after this long"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("train.py: a CUDA device is needed")

    deadline = time.monotonic() + arguments.seconds
    train_tokens, valid_tokens = (
        load_tokens(arguments.tokens / f"{name}.bin") for name in ("train", "valid")
    )
    record = {
        "command": "python " + " ".join(Path(a).name if a.startswith("/") else a for a in sys.argv),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gpu": torch.cuda.get_device_name(),
        },
        "train_tokens": len(train_tokens),
        "held_out_tokens": len(valid_tokens),
        "tokens_per_step": WINDOWS_PER_STEP * CONTEXT,
        "runs": [],
    }
    kept = record["kept"] = {}
    for setting in SETTINGS:
        if time.monotonic() > deadline:
            break
        print(setting, flush=True)
        run, weights = train(setting, train_tokens, valid_tokens, deadline)
        record["runs"].append(run)
        shape = f"{setting.hidden}x{setting.layers}"
        if shape not in kept or run["best_held_out_loss"] < kept[shape]["best_held_out_loss"]:
            bf16_loss = save(setting, weights, valid_tokens, arguments.out / shape)
            kept[shape] = {
                "run": len(record["runs"]),
                "best_held_out_loss": run["best_held_out_loss"],
                "bf16_held_out_loss": round(bf16_loss, 4),
            }
        (arguments.out / "training.json").write_text(
            one_line_each(json.dumps(record, indent=1)) + "\n"
        )
    print({key: value for key, value in record.items() if key != "runs"})


if __name__ == "__main__":
    main()
