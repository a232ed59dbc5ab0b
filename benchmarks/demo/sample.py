"""Sample the demo's held-out and calibration text from the demo model itself, at temperature 1.

On text sampled from a model p, the mean of log p - log q is the Kullback-Leibler divergence KL(p ||
q) per token. So the rise of log-perplexity of a quantized model q is its divergence from the
full-precision model, without other data. That holds if the scored windows are the sampled windows.
So each window is exactly the 512 tokens that an evaluation cuts from the file, begins with the
token of a blank line (given, not scored), and must tokenize to itself again.

A model puts a little of its probability (the record's `redrawn_share`) on spellings that a
tokenizer never produces: " th" + "e" for " the". Such a token is drawn again, so p above is the
model restricted to tokens that can follow one another; a rise of log-perplexity then differs from
the restricted models' divergence only by the mean change of the logarithm of the mass they keep,
far below sampling error. The few windows that fail for another reason (bytes that are no UTF-8, a
window's end that would join its neighbour) are dropped: `rejected_share`.

    python benchmarks/demo/sample.py --model qtool/demo --windows 64 --seed 1 --out heldout.txt
    --record heldout.json python benchmarks/demo/sample.py --model qtool/demo --windows 128 --seed 2
    --out calibration.txt --record ...

The arithmetic is float32 over the bf16 weights, on a CPU; 64 windows take about a minute.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qtool.models.cache_argument import CACHE

CONTEXT = 512
BATCH = 32
BLANK_LINE = "\n\n"


class NextTo:
    """Whether the tokenizer can produce two tokens side by side. Parts of a UTF-8 character are
    accepted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.known: dict[tuple[int, int], bool] = {}

    def __call__(self, left: int, right: int) -> bool:
        if (left, right) not in self.known:
            text = self.tokenizer.decode([left, right])
            self.known[left, right] = "\ufffd" in text or self.tokenizer(text)["input_ids"] == [
                left,
                right,
            ]
        return self.known[left, right]


def draw(
    p: torch.Tensor, previous: list[int], next_to: NextTo, random: torch.Generator
) -> tuple[torch.Tensor, int]:
    """One token for each row of p [windows, vocabulary], drawn again while it cannot follow; also
    the number of redraws.
    """
    tokens = torch.multinomial(p, 1, generator=random)
    redraws = 0
    while rows := [r for r, left in enumerate(previous) if not next_to(left, int(tokens[r]))]:
        redraws += len(rows)
        p[rows, tokens[rows, 0]] = 0
        tokens[rows] = torch.multinomial(p[rows], 1, generator=random)
    return tokens, redraws


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    first: int,
    next_to: NextTo,
    random: torch.Generator,
    windows: int,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens [windows, length], the surprisal in nats of each but the first [windows, length - 1],
    and the redraws.
    """
    tokens = [torch.full((windows, 1), first)]
    surprisal, cache, redraws = [], None, 0
    for _ in range(length - 1):
        output = model(input_ids=tokens[-1], **{CACHE: cache}, use_cache=True)
        cache = getattr(output, CACHE)
        log_p = output.logits[:, -1].log_softmax(-1)
        drawn, redrawn = draw(log_p.exp(), tokens[-1][:, 0].tolist(), next_to, random)
        redraws += redrawn
        tokens.append(drawn)
        surprisal.append(-log_p.gather(1, drawn))
    return torch.cat(tokens, 1), torch.cat(surprisal, 1), redraws


def survives_as_text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the window's text, followed by another window, tokenizes to the same ids, and so is
    valid UTF-8.
    """
    text = tokenizer.decode(ids)
    return "\r" not in text and tokenizer(text + BLANK_LINE)["input_ids"] == [*ids, ids[0]]


def mean_and_error(per_window: list[float]) -> dict[str, float]:
    """The mean over windows and its standard error."""
    values = torch.tensor(per_window, dtype=torch.float64)
    return {
        "mean": round(float(values.mean()), 4),
        "standard_error": round(float(values.std() / len(values) ** 0.5), 4),
    }


def main() -> None:
    """Sample until enough windows survive as text; write the text and a record of the sampling."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=CONTEXT, help="of a window")
    parser.add_argument("--at-once", type=int, default=BATCH, help="windows sampled side by side")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    (first,) = tokenizer(BLANK_LINE)["input_ids"]
    random = torch.Generator().manual_seed(arguments.seed)

    next_to = NextTo(tokenizer)
    kept: list[list[int]] = []
    surprisals: list[float] = []
    rejected = redraws = batches = 0
    while len(kept) < arguments.windows:
        tokens, surprisal, redrawn = sample(
            model, first, next_to, random, arguments.at_once, arguments.tokens
        )
        batches += 1
        redraws += redrawn
        for ids, nats in zip(tokens.tolist(), surprisal.mean(1).tolist(), strict=True):
            if len(kept) == arguments.windows:
                break
            if survives_as_text(ids, tokenizer):
                kept.append(ids)
                surprisals.append(nats)
            else:
                rejected += 1
        print(f"{len(kept)} windows kept, {rejected} rejected", file=sys.stderr)

    text = "".join(tokenizer.decode(ids) for ids in kept)
    if tokenizer(text)["input_ids"] != [token for ids in kept for token in ids]:
        raise SystemExit("the windows' concatenated text does not tokenize to the sampled tokens")
    arguments.out.write_text(text, encoding="utf-8", newline="")
    redrawable = batches * arguments.at_once * (arguments.tokens - 1)
    record = {
        "windows": len(kept),
        "tokens": len(kept) * arguments.tokens,
        "seed": arguments.seed,
        "redrawn_share": round(redraws / redrawable, 5),
        "rejected_share": round(rejected / (rejected + len(kept)), 4),
        "nats_per_token": mean_and_error(surprisals),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
