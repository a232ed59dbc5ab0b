"""Every scheme and recipe on one model: perplexity, divergence from full precision, size, time.

    python benchmarks/accuracy/schemes.py [--model demo] [--calib demo] [--text demo] [--schemes
    all] [--kv kv4]

Prints a Markdown table and, with --write, docs/accuracy.md. Results are kept in --work and reused,
so an interrupted run goes on where it was.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import qtool
from qtool import recipes
from qtool.data import corpora
from qtool.eval.perplexity import context_length, cut_windows, perplexity
from qtool.eval.results import standard_error
from qtool.io.source import resolve
from qtool.pipeline.inspect import inspect, total
from qtool.runtime.load import load, load_tokenizer

ORDER = (
    "w8a8",
    "w4a16",
    "w4a8-lqq",
    "w4a8-qoq-g128",
    "w4a8-qoq",
    "w4ax-fmpq",
    "w4a4-g128",
    "w4a4-mix",
    "w4a16-24",
)
DOCUMENT = Path("docs/accuracy.md")


@torch.no_grad()
def divergence(model: PreTrainedModel, base: PreTrainedModel, windows: torch.Tensor) -> float:
    """Mean KL(base || model) in nats a token, over the whole vocabulary."""
    sums, tokens = 0.0, 0
    for ids in windows.split(4):
        q = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        p = base(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        sums += float((p.exp() * (p - q)).sum(-1)[:, :-1].sum(dtype=torch.float64))
        tokens += ids[:, 1:].numel()
    return sums / tokens


def measure(arguments: argparse.Namespace, scheme: str, variant: str, base: Any) -> dict[str, Any]:
    """Quantize, then evaluate; reuses what ``--work`` holds."""
    options = [
        o
        for o in (arguments.kv, arguments.windows, f"seed{arguments.seed}" * bool(arguments.seed))
        if o
    ]
    out = arguments.work / "-".join([scheme, variant, *options])
    record = out.with_name(out.name + ".json")
    if record.exists():
        return dict(json.loads(record.read_text()))
    started = time.perf_counter()
    if not out.exists():
        qtool.quantize(
            arguments.model,
            scheme,
            out=out,
            recipe=variant,
            calibration=arguments.calib,
            kv=arguments.kv,
            device=arguments.device,
            samples=arguments.samples,
            seqlen=arguments.seqlen,
            seed=arguments.seed,
            windows=arguments.windows,
            resume=True,
        )
    seconds = time.perf_counter() - started
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    found = evaluated(load(out, device=arguments.device, dtype=dtype), arguments, base)
    packed = total("", (row for row in inspect(out) if row.layout))
    found |= {
        "bits": packed.bits,
        "megabytes": sum(r.nbytes for r in inspect(out)) / 1e6,
        "seconds": seconds,
    }
    record.write_text(json.dumps(found))
    return found


def evaluated(model: PreTrainedModel, arguments: argparse.Namespace, base: Any) -> dict[str, Any]:
    """Perplexity, and the divergence from ``base`` if there is one."""
    tokenizer = load_tokenizer(resolve(arguments.model))
    text = corpora.load(arguments.text, split="test").text
    result = perplexity(
        text,
        model,
        tokenizer,
        seqlen=arguments.seqlen,
        limit=arguments.limit,
        deterministic=True,  # one table for every device
    )
    found = {
        "perplexity": result.perplexity,
        "stderr": result.stderr,
        "window_nll": result.window_nll,
    }
    if base is not None:
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        windows = cut_windows(ids, min(arguments.seqlen, context_length(base) or arguments.seqlen))
        found["kl"] = divergence(model, base, windows[: arguments.limit].to(model.device))
    return found


def rise(found: dict[str, Any], full: dict[str, Any]) -> str:
    """Of perplexity, with the standard error over windows: each is paired with itself in full
    precision.
    """
    error = standard_error(
        [a - b for a, b in zip(found["window_nll"], full["window_nll"], strict=True)]
    )
    share = found["perplexity"] / full["perplexity"] - 1
    return f"{share:+.2%}" if error is None else f"{share:+.2%} ± {100 * error:.2f}"


def table(arguments: argparse.Namespace) -> str:
    """The Markdown table, row by row as it is measured."""
    base = load(resolve(arguments.model), device=arguments.device, dtype=torch.float32)
    full = evaluated(base, arguments, None)
    rows = [
        "| scheme | recipe | perplexity | rise | KL, nats | bits a weight | MB | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        f"| full precision | - | {full['perplexity']:.3f} | - | - | 16 | - | - |",
    ]
    known = {name: variants.split() for name, variants, _ in recipes.overview()}
    chosen = ORDER if arguments.schemes == "all" else arguments.schemes.split(",")
    for scheme in chosen:
        for variant in [v for v in arguments.recipes.split(",") if v in known[scheme]]:
            r = measure(arguments, scheme, variant, base)
            rows.append(
                f"| {scheme} | {variant} | {r['perplexity']:.3f} | {rise(r, full)} | {r['kl']:.4f} "
                f"| {r['bits']:.3f} | {r['megabytes']:.2f} | {r['seconds']:.0f} |"
            )
            print(rows[-1], flush=True)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calib", default="demo")
    parser.add_argument("--text", default="demo")
    parser.add_argument("--schemes", default="all", help="all, or names with commas")
    parser.add_argument("--recipes", default="fast,paper,best")
    parser.add_argument("--kv", help="a KV-cache quantizer for every row")
    parser.add_argument(
        "--windows", choices=("given", "continued"), help="of calibration; the recipes' by default"
    )
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of calibration windows")
    parser.add_argument("--limit", type=int, default=32, help="windows evaluated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of what is not quantized"
    )
    parser.add_argument("--work", type=Path, default=Path("out/accuracy"))
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT}")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = table(arguments)
    print("\n" + found)
    if arguments.write:
        versions = (
            f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.device}"
        )
        text = DOCUMENT.read_text().split("<!-- table -->")
        text[1] = f"\n{found}\n\nMeasured with {versions}, on {time.strftime('%Y-%m-%d')}.\n"
        DOCUMENT.write_text("<!-- table -->".join(text))


if __name__ == "__main__":
    main()
