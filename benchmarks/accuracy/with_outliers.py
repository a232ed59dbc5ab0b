"""The cost of outliers in each scheme and recipe: the divergence of a model with and without them.

    python benchmarks/accuracy/with_outliers.py MODEL [--schemes all] [--recipes fast,paper,best]
    [--first-token ID] [--texts 1] [--apart 16] [--massive 1000 --norm 100 ...] [--device cuda]
    [--write]

Both models have the outputs of MODEL and the same shapes. One of them has the outliers that
outliers.py describes, whose options this script has too. Windows are sampled from MODEL, begin with
the first token (its ``bos`` by default) and have it nowhere else. Each pair of texts starts from a
rotation of its own, since the results of learning from weights alone would be the same for all. It
prints a Markdown table and, with --write, keeps it in benchmarks/results/outliers.json after every
row.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean, stdev

import outliers
import torch
from sampled import sample
from schemes import divergence, named_schemes
from torch import Tensor
from transformers import PreTrainedModel

import qtool
from qtool import recipes
from qtool.bench.stored import store
from qtool.io.model_directory import directory_of
from qtool.recipes import Recipe

RESULTS = Path(__file__).parents[1] / "results" / "outliers.json"
KINDS = {"norm": 100, "value": 100, "product": 1000, "key": 10, "massive": 1000}
HEAD = ["scheme", "recipe", "KL without", "KL with", "change"]


def main() -> None:
    """Make the model with and without outliers, then print each recipe's divergence on both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("--schemes", default="all", help="all, or names with commas")
    parser.add_argument("--recipes", default="fast,paper,best")
    parser.add_argument("--first-token", type=int, help="begins every text")
    for kind, factor in KINDS.items():
        parser.add_argument(f"--{kind}", type=float, default=factor)
    parser.add_argument("--apart", type=float, default=16)
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--limit", type=int, default=32, help="windows evaluated")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--texts", type=int, default=1, help="pairs of texts; all rows are means")
    parser.add_argument("--device", default="cpu", help="quantizes")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    source, device = directory_of(arguments.model), arguments.device
    base = qtool.load(source, dtype=torch.float32)
    first = arguments.first_token
    if first is None:
        first = base.config.bos_token_id
    if first is None:
        parser.error("the model has no bos: name a --first-token")
    texts = [
        (
            sample(base, arguments.samples, arguments.length, 2 * number, first),
            sample(base, arguments.limit, arguments.length, 2 * number + 1, first),
        )
        for number in range(arguments.texts)
    ]
    with tempfile.TemporaryDirectory() as work:
        kinds = {kind: getattr(arguments, kind) for kind in KINDS}
        kinds["apart"] = arguments.apart
        none = dict.fromkeys(KINDS, 1) | {"massive": 0}
        models = [
            made(source, Path(work, name), first, factors)
            for name, factors in (("without", none), ("with", kinds))
        ]
        for model in models:
            kl = divergence(qtool.load(model, dtype=torch.float32), base, texts[0][1])
            print(f"{model.name} outliers: KL {kl:.1e} from the model itself", flush=True)
        rows: list[list[str]] = []
        for scheme in named_schemes(arguments.schemes):
            for recipe in arguments.recipes.split(","):
                chosen = [with_rotation_seed(scheme, recipe, i) for i in range(len(texts))]
                kls = [
                    [
                        quantized_divergence(model, scheme, one, *text, base, device)
                        for one, text in zip(chosen, texts, strict=True)
                    ]
                    for model in models
                ]
                rows.append([f"`{scheme}`", recipe, *(f"{fmean(kl):.5f}" for kl in kls)])
                rows[-1].append(change(*kls))
                print(f"| {' | '.join(rows[-1])} |", flush=True)
                if arguments.write:
                    found = {"head": HEAD, "rows": rows}
                    store(arguments.write, found, device=device)


def change(before: list[float], after: list[float]) -> str:
    """The change of the mean as text, with its standard error if there are several texts."""
    ratio = fmean(after) / fmean(before)
    if ratio >= 2:
        return f"x {ratio:.0f}"
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    error = f" ± {stdev(ratios) / len(ratios) ** 0.5:.1%}" if len(ratios) > 1 else ""
    return f"{ratio - 1:+.1%}{error}"


def made(source: Path, out: Path, first: int, factors: dict[str, float]) -> Path:
    """Make the model with outliers of these sizes."""
    options = [f"--{kind}={factor}" for kind, factor in factors.items()]
    outliers.make(
        outliers.parser().parse_args([str(source), str(out), f"--first-token={first}", *options])
    )
    return out


def with_rotation_seed(scheme: str, variant: str, seed: int) -> Recipe:
    """A built-in recipe whose rotation, if it has one, starts from ``seed``."""
    found = recipes.load(scheme, variant)
    return found.with_options("rotate", seed=seed) if found.step("rotate") else found


def quantized_divergence(
    model: Path,
    scheme: str,
    recipe: Recipe,
    calibration: Tensor,
    windows: Tensor,
    base: PreTrainedModel,
    device: str,
) -> float:
    """The divergence from ``base`` of ``model`` after it is quantized on ``calibration``."""
    with tempfile.TemporaryDirectory() as work:
        done = qtool.quantize(
            model,
            scheme,
            recipe=recipe,
            calibration=calibration,
            samples=len(calibration),
            seqlen=calibration.shape[1],
            windows="given",  # they are already sampled from the model
            device=device,
            out=Path(work, "out"),
        )
        return divergence(qtool.load(done, dtype=torch.float32), base, windows)


if __name__ == "__main__":
    main()
