"""Every scheme and recipe on one model: perplexity, divergence from full precision, size, time.

    python benchmarks/accuracy/schemes.py [--model demo] [--calib demo] [--text demo] [--schemes
    all] [--kv kv4]

It prints a Markdown table and, with --write, keeps it in benchmarks/results/accuracy.json after
every row. Results are kept in --work and reused, so an interrupted run continues with the same row.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

import qtool
from qtool import api, recipes
from qtool.bench.stored import store
from qtool.data import corpora
from qtool.eval.perplexity import cut_windows
from qtool.eval.results import standard_error
from qtool.pipeline.inspect import total

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
RESULTS = Path(__file__).parents[1] / "results" / "accuracy.json"
HEAD = """\
| scheme | recipe | perplexity | rise | KL, nats | bits a weight | MB | CPU seconds |
|---|---|---:|---:|---:|---:|---:|---:|"""


def divergence(model: PreTrainedModel, base: PreTrainedModel, windows: torch.Tensor) -> float:
    """Mean KL(base || model) in nats a token, over the whole vocabulary."""
    return fmean(window_divergence(model, base, windows))


@torch.no_grad()
def window_divergence(
    model: PreTrainedModel, base: PreTrainedModel, windows: torch.Tensor
) -> list[float]:
    """KL(base || model) of each window, in nats a token."""
    found: list[float] = []
    for ids in windows.split(1):
        q = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        p = base(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        found.append(float((p.exp() * (p - q)).sum(-1)[:, :-1].mean(dtype=torch.float64)))
    return found


def measure(arguments: argparse.Namespace, scheme: str, variant: str, base: Any) -> dict[str, Any]:
    """Quantize, then evaluate; results in ``--work`` are reused."""
    options = (
        arguments.kv,
        arguments.windows,
        f"seed{arguments.seed}" if arguments.seed else None,
        "hadamard" if arguments.hadamard else None,
        "export" if arguments.for_export else None,
        "outputs-alike" if arguments.outputs_alike else None,
    )
    out = arguments.work / "-".join([scheme, variant, *filter(None, options)])
    record = out.with_name(out.name + ".json")
    if record.exists():
        return dict(json.loads(record.read_text()))
    for unfinished in (out, out.with_name(out.name + ".partial")):  # its time is unknown
        shutil.rmtree(unfinished, ignore_errors=True)
    recipe = recipes.load(scheme, variant)
    if arguments.hadamard:
        recipe = recipe.with_options("rotate", learn_steps=0)
    if arguments.for_export:
        recipe = recipe.for_export()
    if arguments.outputs_alike:
        recipe = recipe.with_options("gptq", output_hessian=False)
    started = time.process_time()
    qtool.quantize(
        arguments.model,
        out=out,
        recipe=recipe,
        calibration=arguments.calib,
        kv=arguments.kv,
        device=arguments.device,
        samples=arguments.samples,
        seqlen=arguments.seqlen,
        seed=arguments.seed,
        windows=arguments.windows,
    )
    seconds = time.process_time() - started
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    found = evaluated(qtool.load(out, device=arguments.device, dtype=dtype), arguments, base)
    rows = qtool.inspect(out)
    found |= {
        "bits": total("", (row for row in rows if row.layout)).bits,
        "megabytes": sum(row.nbytes for row in rows) / 1e6,
        "seconds": seconds,
    }
    record.write_text(json.dumps(found))
    return found


def evaluated(model: PreTrainedModel, arguments: argparse.Namespace, base: Any) -> dict[str, Any]:
    """Perplexity, and the divergence from ``base`` if there is one."""
    tokenizer = qtool.load_tokenizer(arguments.model)
    results, _ = qtool.evaluate(
        [arguments.text],
        model,
        tokenizer=tokenizer,
        seqlen=arguments.seqlen,
        limit=arguments.limit,
        batch_size=1,  # Quark shares a token's scale in a batch
        deterministic=True,  # one table for every device
    )
    result = results.tasks[0]
    found = {
        "perplexity": result.metrics["perplexity"].value,
        "stderr": result.metrics["perplexity"].stderr,
        "window_nll": result.details["window_nll"],
    }
    if base is not None:
        text = corpora.load(arguments.text, split=corpora.TEST).text
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        context = base.config.get_text_config().max_position_embeddings
        windows = cut_windows(ids, min(arguments.seqlen, context))
        found["window_kl"] = window_divergence(
            model, base, windows[: arguments.limit].to(model.device)
        )
        found["kl"] = fmean(found["window_kl"])
        found["kl_error"] = standard_error(found["window_kl"])
    return found


def rise_and_error(found: dict[str, Any], full: dict[str, Any]) -> tuple[float, float | None]:
    """The relative rise of perplexity, and its standard error to first order.

    The error is that over windows, each paired with itself in full precision.
    """
    pairs = zip(found["window_nll"], full["window_nll"], strict=True)
    ratio = found["perplexity"] / full["perplexity"]
    error = standard_error([a - b for a, b in pairs])  # of the ratio's logarithm
    return ratio - 1, None if error is None else ratio * error


def rise_text(rise: float, error: float | None) -> str:
    """The numbers of :func:`rise_and_error` in percent."""
    return f"{rise:+.2%}" if error is None else f"{rise:+.2%} ± {100 * error:.2f}"


def named_schemes(names: str) -> Sequence[str]:
    """The schemes that ``--schemes`` names; all of them for ``all``."""
    return ORDER if names == "all" else names.split(",")


def rows(arguments: argparse.Namespace, full: dict[str, Any], base: Any) -> Iterator[Any]:
    """The rows, each as soon as it is measured."""
    known = {name: variants.split() for name, variants, _ in api.schemes()}
    for scheme in named_schemes(arguments.schemes):
        for variant in [v for v in arguments.recipes.split(",") if v in known[scheme]]:
            found = measure(arguments, scheme, variant, base)
            share, error = rise_and_error(found, full)
            yield {
                "scheme": scheme,
                "recipe": variant,
                "perplexity": found["perplexity"],
                "rise": share,
                "rise_error": error,
                **{
                    name: found[name] for name in ("kl", "kl_error", "bits", "megabytes", "seconds")
                },
            }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    rise, kl = rise_text(row["rise"], row["rise_error"]), f"{row['kl']:.6f}"
    if row["kl_error"] is not None:
        kl += f" ± {row['kl_error']:.6f}"
    return (
        f"| {row['scheme']} | {row['recipe']} | {row['perplexity']:.3f} | {rise} | {kl}"
        f" | {row['bits']:.3f} | {row['megabytes']:.2f} | {row['seconds']:.0f} |"
    )


def main() -> None:
    """Print the table, and keep it where --write says."""
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
    parser.add_argument(
        "--hadamard", action="store_true", help="no recipe learns its rotation; all have one then"
    )
    parser.add_argument("--for-export", action="store_true", help="nothing is rotated at run time")
    parser.add_argument(
        "--outputs-alike", action="store_true", help="GPTQ without its option output_hessian"
    )
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of calibration windows")
    parser.add_argument("--limit", type=int, default=32, help="windows evaluated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of what is not quantized"
    )
    parser.add_argument("--work", type=Path, default=Path("out/accuracy"))
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FILE",
        help="keep the table as JSON, in benchmarks/results/accuracy.json if no file is named",
    )
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    base = qtool.load(arguments.model, device=arguments.device, dtype=torch.float32)
    full = evaluated(base, arguments, None)
    print(f"full precision: perplexity {full['perplexity']:.3f}\n\n{HEAD}", flush=True)
    found: dict[str, Any] = {"full": {"perplexity": full["perplexity"]}, "rows": []}
    for row in rows(arguments, full, base):
        found["rows"].append(row)
        print(line(row), flush=True)
        if arguments.write:
            store(arguments.write, found, device=arguments.device)


if __name__ == "__main__":
    main()
