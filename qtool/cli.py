"""The command line: parse, call, print. No logic."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import qtool
from qtool.arguments import GIGABYTES, NOT_NEGATIVE, POSITIVE, TWO_OR_MORE, Device, NewPath
from qtool.distributed import watch
from qtool.errors import CheckFailed, QtoolError
from qtool.text_table import render

CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=CONTEXT)
@click.version_option(qtool.__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Quantize large language models and prove that they still are the same models."""


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, a failed check exit code 1."""
    debug = "--debug" in sys.argv
    if not sys.stderr.isatty():  # bars are for terminals
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault(
        "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    )  # a GPU's memory is not cut into odd pieces
    try:
        cli(standalone_mode=False)
    except QtoolError as error:
        if watch.fail():
            if debug:
                traceback.print_exc()
            click.echo(f"qtool: {error}", err=True)
        watch.leave(1 if isinstance(error, CheckFailed) else 2)
    except (
        OSError
    ) as error:  # no permission, no space, a path that is none: nothing a traceback would explain
        if watch.fail():
            if debug:
                traceback.print_exc()
            click.echo(
                f"qtool: {error.filename}: {error.strerror}"
                if error.filename
                else f"qtool: {error}",
                err=True,
            )
        watch.leave(2)
    except click.ClickException as error:
        if watch.fail():
            error.show()
        watch.leave(2)
    except (click.Abort, KeyboardInterrupt):
        if watch.fail():
            click.echo(
                "qtool: interrupted; an unfinished `qtool quantize` can be continued with --resume",
                err=True,
            )
        watch.leave(130)
    except Exception:
        if watch.fail():
            traceback.print_exc()
        watch.leave(1)


def _command(example: str, **options: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A subcommand whose help ends with an example."""
    return cli.command(context_settings=CONTEXT, epilog=f"Example: {example}", **options)


class _ListsFormats(click.Command):
    """A command whose help lists the export formats; they are looked up only then."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from qtool.exchange.targets import TARGETS

        with formatter.section("Formats"):
            formatter.write_dl([(target.name, target.about) for target in TARGETS.values()])
        super().format_epilog(ctx, formatter)


MODEL = click.argument("model")
SCHEME = click.option(
    "--scheme", required=True, help="What to quantize to; `qtool schemes` lists them."
)
RECIPE = click.option(
    "--recipe", help="fast, paper, best, or a YAML file. Default: fast, or paper with --calib."
)
GROUP = click.option(
    "--group-size", help="Input channels a group, or 'channel'; the recipe's by default."
)
TARGET = click.option(
    "--target", help="A GPU (a100, l40s, h200, ...): choose the granularity it can afford."
)
BLOCKS = click.option(
    "--max-8bit-blocks", type=NOT_NEGATIVE, help="w4ax-fmpq: at most so many 8-bit blocks a layer."
)
LAYOUT = click.option(
    "--layout", help="Packed layout of every quantized layer; the recipe's by default."
)
KV = click.option("--kv", help="KV-cache quantizer: kv8, kv4, kv4-channel.")
DATA_DIR = click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Local copies of corpora and tasks."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
DIRECTORY = click.argument("directory", type=click.Path(path_type=Path))
SAMPLES = click.option(
    "--samples", type=POSITIVE, default=128, show_default=True, help="Calibration windows."
)
SEQLEN = click.option(
    "--seqlen",
    type=TWO_OR_MORE,
    default=2048,
    show_default=True,
    help="Tokens a window, at most the model's context.",
)
WINDOWS = click.option(
    "--windows",
    type=click.Choice(["given", "continued"]),
    help="Calibration windows all of the text, or begun by it and continued by the model; the recipe's by default.",
)
ACTIVATIONS = click.option(
    "--activations",
    type=click.Choice(["auto", "device", "host", "disk"]),
    default="auto",
    show_default=True,
    help="Where calibration activations are between blocks; auto: the first with room.",
)
DEVICE = click.option(
    "--device", type=Device(), default="cpu", show_default=True, help="cpu, cuda, cuda:1, ..."
)


@_command("qtool quantize demo --scheme w4a8-lqq --out demo-lqq")
@MODEL
@SCHEME
@RECIPE
@TARGET
@GROUP
@LAYOUT
@BLOCKS
@KV
@click.option("--out", type=NewPath(), help="Output directory. Default: MODEL-SCHEME beside MODEL.")
@click.option(
    "--calib",
    help="Calibration text: wikitext2, c4, pile, demo, or a .txt, .jsonl or .parquet file.",
)
@DATA_DIR
@SAMPLES
@SEQLEN
@WINDOWS
@click.option("--seed", default=0, show_default=True, help="Of the choice of calibration windows.")
@ACTIVATIONS
@DEVICE
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
@click.option(
    "--format",
    "export_format",
    help="Export the result too, to OUT-FORMAT; `qtool export -h` lists the formats.",
)
def quantize(
    model: str, scheme: str, out: Path | None, resume: bool, device: str, **options: Any
) -> None:
    """Quantize MODEL: a local directory, a hub id, or `demo`."""
    from qtool.distributed import ranks
    from qtool.pipeline import commands
    from qtool.pipeline.progress import Progress

    with ranks.process_group(device) as own, Progress(silent=ranks.rank() > 0) as progress:
        done = commands.quantize(
            model, scheme, out, resume=resume, device=own, progress=progress, **options
        )
        if ranks.rank() == 0:
            click.echo(done)
            if options["export_format"]:
                click.echo(commands.export_beside(done, options["export_format"]))


@_command("qtool plan meta-llama/Llama-2-70b-hf --scheme w4a8-lqq")
@MODEL
@SCHEME
@RECIPE
@TARGET
@GROUP
@LAYOUT
@BLOCKS
@KV
@SAMPLES
@SEQLEN
@WINDOWS
@click.option(
    "--device-memory",
    type=GIGABYTES,
    help="Of the GPU of a calibrated run, in GB; an H200's by default.",
)
@JSON
def plan(model: str, as_json: bool, **options: Any) -> None:
    """What quantizing MODEL (a directory or a config.json) will do: bits, bytes, memory, time."""
    from qtool.pipeline import commands
    from qtool.pipeline.planning.plan import as_dict, as_text

    planned = commands.plan(model, **options)
    click.echo(json.dumps(as_dict(planned), indent=2) if as_json else as_text(planned))


@_command("qtool eval wikitext2 --model demo-lqq --compare demo")
@click.argument("tasks", nargs=-1, required=True)
@click.option(
    "--model", default="demo", show_default=True, help="A quantized or plain model directory."
)
@click.option("--compare", help="A baseline model; prints the change against it.")
@DATA_DIR
@SEQLEN
@click.option("--limit", type=POSITIVE, help="At most this many windows or items a task.")
@click.option("--batch-size", type=POSITIVE, default=8, show_default=True)
@click.option(
    "--kv", help="KV-cache quantizer of --model meanwhile: kv8, kv4, kv4-channel. Default: its own."
)
@click.option(
    "--as-export", metavar="FORMAT", help="Run --model as transformers runs its export in FORMAT."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of all that is not quantized.",
)
@click.option(
    "--save",
    is_flag=True,
    help="Keep each finished task in MODEL's eval.json; use again what is there.",
)
@DEVICE
@JSON
def eval(
    tasks: tuple[str, ...], model: str, compare: str | None, as_json: bool, **options: Any
) -> None:
    """Perplexity on wikitext2, c4, demo or a text file; zero-shot accuracy on any lm-eval task.

    With --save an interrupted evaluation goes on where it was, and `qtool report` shows what is
    kept. The baseline's results are kept in MODEL's file too.
    """
    from qtool.eval.compare import as_json as results_json
    from qtool.eval.compare import table
    from qtool.pipeline import commands

    results, baseline = commands.evaluate(list(tasks), model, compare, **options)
    click.echo(results_json(results, baseline) if as_json else table(results, baseline))


@_command("qtool verify demo-lqq")
@DIRECTORY
@DEVICE
@click.option("--verbose", is_flag=True, help="One line a linear.")
def verify(directory: Path, device: str, verbose: bool) -> None:
    """Check every packed linear: integrity, invariants, packed bytes, arithmetic. Exit 1 on a
    mismatch.
    """
    from qtool.pipeline.verify import verify as verified

    rows = list(verified(directory, device=device))
    bad = [row for row in rows if row.problem]
    if verbose:
        click.echo(
            render(
                ("linear", "ran", "error"),
                [(r.name, r.ran, f"{r.error:.1e}") for r in rows if r.ran],
            )
        )
    for row in bad:
        click.echo(f"{row.name}: {row.problem}")
    good = [row for row in rows if not row.problem]
    for ran in sorted({row.ran for row in good}):
        same = [row for row in good if row.ran == ran]
        click.echo(
            f"{len(same)} linears verified: {ran}; largest distance {max(r.error for r in same):.1e}"
        )
    if bad:
        raise CheckFailed(f"{directory}: {len(bad)} of {len(rows)} checks failed")


@_command("qtool inspect demo-lqq")
@DIRECTORY
@JSON
def inspect(directory: Path, as_json: bool) -> None:
    """Schemes, layouts, bytes and bits a weight of a quantized model, from its headers."""
    from qtool.pipeline.inspect import as_dicts, as_text
    from qtool.pipeline.inspect import inspect as inspected

    rows = inspected(directory)
    click.echo(json.dumps(as_dicts(rows), indent=2) if as_json else as_text(rows))


@_command("qtool export demo-w4a16 --format compressed-tensors --out demo-ct", cls=_ListsFormats)
@DIRECTORY
@click.option("--format", "target", required=True, help="One of the formats below.")
@click.option("--out", required=True, type=NewPath(), help="Output directory.")
@click.option(
    "--tensor-parallel",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Refuse what N GPUs cannot share.",
)
def export(directory: Path, target: str, out: Path, tensor_parallel: int) -> None:
    """Write a quantized model in the format of a serving stack; says what changed, if anything."""
    from qtool.exchange.export import export as exported

    click.echo(exported(directory, target, out, tensor_parallel=tensor_parallel))


@_command("qtool import TheBloke/Llama-2-7B-GPTQ --out llama-w4a16", name="import")
@MODEL
@click.option("--out", required=True, type=NewPath(), help="Output directory.")
@click.option(
    "--layout",
    help="Packed layout of every linear; by default w4a16's, row-major where it does not fit.",
)
def import_model(model: str, out: Path, layout: str | None) -> None:
    """Repack a symmetric 4-bit GPTQ, AWQ, AutoRound or compressed-tensors model as a native one,
    code for code.
    """
    from qtool.pipeline import commands

    click.echo(commands.repack(model, out, layout))


@_command("qtool report demo-lqq --compare demo --tasks demo,demo_choice")
@DIRECTORY
@click.option("--compare", help="The model it was made from; fills what needs both.")
@click.option(
    "--tasks",
    default="",
    help="Evaluate first, as `qtool eval --save` would: names, separated by commas.",
)
@click.option("--out", type=NewPath(), help="Default: report.html in DIRECTORY.")
@DATA_DIR
@DEVICE
def report(directory: Path, compare: str | None, tasks: str, **options: Any) -> None:
    """Write one HTML file: sizes, results, errors by layer, activation ranges, checks, how to
    reproduce.
    """
    from qtool.report.build import report as reported

    click.echo(reported(directory, compare, [name for name in tasks.split(",") if name], **options))


@_command("qtool schemes")
def schemes() -> None:
    """List the schemes, their recipes and what they are."""
    from qtool import recipes

    click.echo(render(("scheme", "recipes", "what it is"), recipes.overview()))


@cli.group(
    context_settings=CONTEXT,
    epilog="Example: qtool bench quantize llama-3-8b --layers 4 --device cuda",
)
def bench() -> None:
    """Measure: the kernels' GEMMs and attention, or a whole run of the quantizer."""


@bench.command(
    "gemm",
    context_settings=CONTEXT,
    epilog="Example: qtool bench gemm --models llama-3-8b --tokens 1,16,64",
)
@click.option(
    "--models",
    default="llama-3-8b",
    show_default=True,
    help="Layer shapes: llama-2-7b, llama-3-8b, ...",
)
@click.option("--tokens", default="1,16,64,256,1024", show_default=True, help="Tokens M of a call.")
@click.option(
    "--schemes",
    help="Columns: w4a8-lqq-g64, w4a4-g128, w4ax-fmpq, ...; else the W4A8 ones and w8a8.",
)
def bench_gemm(models: str, tokens: str, schemes: str | None) -> None:
    """Time the packed GEMMs on this GPU beside their floor and torch's own matmuls."""
    from qtool.pipeline import commands

    chosen = schemes.split(",") if schemes else None
    click.echo(commands.bench_gemm(models.split(","), tokens.split(","), chosen))


@bench.command(
    "kv", context_settings=CONTEXT, epilog="Example: qtool bench kv --shapes 64x4096x8x32x128"
)
@click.option(
    "--shapes",
    help="Sequences x tokens x kv heads x query heads x head dimension, separated by commas.",
)
def bench_kv(shapes: str | None) -> None:
    """Time decode attention over a packed kv4 and kv8 cache on this GPU beside torch's SDPA on a
    16-bit one.
    """
    from qtool.pipeline import commands

    click.echo(commands.bench_kv(shapes.split(",") if shapes else None))


@bench.command(
    "quantize",
    context_settings=CONTEXT,
    epilog="Example: qtool bench quantize llama-3-8b --layers 4 --scheme w4a8-lqq --recipe paper --device cuda",
)
@MODEL
@SCHEME
@RECIPE
@click.option(
    "--layers", type=POSITIVE, help="Blocks of a random checkpoint; the shape's own by default."
)
@SAMPLES
@SEQLEN
@ACTIVATIONS
@click.option(
    "--work", type=NewPath(), default="bench", show_default=True, help="Directory for files."
)
@click.option("--keep", is_flag=True, help="Keep the result; a random checkpoint is kept anyway.")
@DEVICE
@JSON
def bench_quantize(as_json: bool, **options: Any) -> None:
    """Quantize MODEL, or a random checkpoint of a known shape (llama-3-8b, llama-2-70b, ...), and
    time every stage.

    Calibration is on random tokens. The table sets each stage beside its floor: bytes by the disk's
    rate, operations by the measured rates of this device.
    """
    from qtool.pipeline import commands
    from qtool.pipeline.progress import Progress

    with Progress() as progress:
        measured = commands.bench_quantize(progress=progress, **options)
    click.echo(json.dumps(measured.as_dict(), indent=2) if as_json else measured.table())
