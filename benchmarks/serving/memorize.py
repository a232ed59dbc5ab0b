"""Makes a model that has memorized a text: its greedy tokens are sure, so no rounding changes them.

    python benchmarks/serving/memorize.py MODEL OUT [--windows 16] [--length 64] [--steps 400]

MODEL is a small causal language model, random or trained, whose vocabulary holds the demo's 4096
tokens. It learns to continue each of the first ``--windows`` windows of the demo's held-out text
with the next window, until every token of the next window is e^5 times as likely as the next best.
The model is stored in OUT in bfloat16, with the demo's tokenizer. Then run

    qtool quantize OUT --scheme w4a8-lqq --calib demo --out NATIVE
    python benchmarks/serving/generate_vllm.py NATIVE EXPORT --text qtool/demo/heldout.txt
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from qtool.io.model_directory import DEMO
from qtool.runtime.load import load_tokenizer

SURE = 5.0  #: smallest wanted distance of the right token's logit from the next best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()

    tokenizer = load_tokenizer(DEMO)
    text = tokenizer((DEMO / "heldout.txt").read_text(), verbose=False)["input_ids"]
    length = options.length
    ids = torch.tensor(text[: (options.windows + 1) * length]).unfold(
        0, 2 * length, length
    )  # [windows, 2 length]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.0)
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, step / 20)
        logits = model(ids).logits[:, length - 1 : -1].float()  # they predict the second window
        target = ids[:, length:]
        right = logits.gather(2, target[..., None]).squeeze(2)
        margin = right - logits.scatter(2, target[..., None], -torch.inf).amax(2)
        smallest = float(margin.detach().min())
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        if step % 20 == 0 or smallest > SURE:
            print(f"step {step}: loss {loss:.4f}, smallest margin {smallest:.2f}", flush=True)
        if smallest > SURE:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
