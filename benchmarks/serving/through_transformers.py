"""Compares greedy tokens of transformers from an export with those of qtool's runtime from the
native checkpoint.

    python benchmarks/serving/through_transformers.py NATIVE EXPORT [EXPORT ...] [--prompts 32]
    [--tokens 64]

For each export, way of loading it and dtype, it prints the number of prompts whose continuations
are equal to the last token, first with `qtool.load(NATIVE)`, then with
`qtool.load_as_export(NATIVE, FORMAT)`, and the number of tokens after which the others part.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import qtool
from qtool.data import corpora


@torch.no_grad()
def tokens(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """The greedy tokens ``[prompts, count]`` that follow ``ids [prompts, length]``."""
    options = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
    }
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return found[:, ids.shape[1] :]


def compared(ours: Tensor, theirs: Tensor) -> str:
    """The number of equal rows, and the places where the others part."""
    same = (ours == theirs).all(1)
    until = (ours == theirs).long().cumprod(1).sum(1)[~same].float()
    return f"{int(same.sum())} of {len(same)} equal" + (
        f", the others for {until.mean():.0f} tokens" if len(until) else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("native", type=Path)
    parser.add_argument("exports", type=Path, nargs="+")
    parser.add_argument("--text", default="demo")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=24, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    text = corpora.load(arguments.text, split="test").text
    ids = qtool.load_tokenizer(arguments.native)(text, return_tensors="pt", verbose=False)[
        "input_ids"
    ][0]
    apart = len(ids) // arguments.prompts
    prompts = ids[: apart * arguments.prompts].view(arguments.prompts, apart)[:, : arguments.length]
    for export in arguments.exports:
        name = json.loads((export / "qtool.json").read_text())["format"]
        for dtype in (torch.bfloat16, torch.float32):
            own = tokens(qtool.load(arguments.native, dtype=dtype), prompts, arguments.tokens)
            for dequantize in (False, True):
                config = CompressedTensorsConfig(dequantize=dequantize)  # type: ignore[no-untyped-call]
                try:
                    theirs = AutoModelForCausalLM.from_pretrained(
                        export, quantization_config=config, dtype=dtype
                    )
                except RuntimeError:
                    print(
                        f"{name}, dequantize={dequantize}, {dtype}: transformers does not load it",
                        flush=True,
                    )
                    continue
                expected = tokens(theirs.eval(), prompts, arguments.tokens)
                like = qtool.load_as_export(
                    arguments.native, name, dtype=dtype, dequantize=dequantize
                )
                as_export = compared(tokens(like, prompts, arguments.tokens), expected)
                line = f"load: {compared(own, expected)}; load_as_export: {as_export}"
                print(f"{name}, dequantize={dequantize}, {dtype}: {line}", flush=True)


if __name__ == "__main__":
    main()
