"""The command line: parse, call the API, print. No logic."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from qtool import __version__, api, progress
from qtool.cli_arguments import (
    CONTEXT,
    DATA_DIR,
    DEVICE,
    ENGINE,
    EVALUATE,
    FORMAT,
    JSON,
    MODEL,
    ONCE,
    PLAN,
    POSITIVE,
    QUANTIZE,
    QUIET,
    SENSITIVITY,
    TENSOR_PARALLEL,
    VERBOSE,
    NewPath,
    command,
    print_json,
)
from qtool.cli_bench import bench
from qtool.cli_errors import exit_code, known, show
from qtool.distributed import watch
from qtool.errors import CheckFailed, QtoolError
from qtool.table import render

#: the exit code if the reader of a pipe has ended, as shells report it
CLOSED_PIPE = 141
log = logging.getLogger("qtool")


class _Stderr(logging.Handler):
    """Prints the library's log messages, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(record.getMessage(), err=True)


@click.group(
    context_settings=CONTEXT,
    epilog="Shell completion of commands, schemes, recipes and formats, a line for ~/.bashrc"
    " (zsh_source for zsh, fish_source for fish):\n\n\b\n"
    'eval "$(_QTOOL_COMPLETE=bash_source qtool)"',
)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Quantize large language models, check the result and measure what it lost."""
    name, launched = context.invoked_subcommand, "LOCAL_RANK" in os.environ
    # a pod of a cluster may have WORLD_SIZE in its environment, and no launcher in it
    if name != "quantize" and launched and not watch.is_alone():
        raise QtoolError(
            f"{name} runs in one process, and torchrun or another launcher started "
            f"{os.environ['WORLD_SIZE']}: start it without one"
        )
    log.handlers, log.propagate = [_Stderr()], False
    log.setLevel(logging.INFO)
    progress.silence(not watch.is_first_rank())


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, a failed check exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are not UTF-8
        sys.stdout.reconfigure(errors="surrogateescape")
    # keeps a GPU's memory from being fragmented
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch's thread for gradients makes the context that it lacks
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
    try:
        cli(standalone_mode=False)
    except SystemExit:  # click raises it for a closed pipe
        watch.leave(CLOSED_PIPE)
    except (Exception, KeyboardInterrupt) as raised:
        error = known(raised)
        if watch.fail():
            show(error)
        watch.leave(exit_code(error))
    watch.leave(0)


class _ListsFormats(click.Command):
    """A command whose help lists the export formats, which are looked up only for the help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Formats"):
            formatter.write_dl(api.export_formats())
        super().format_epilog(ctx, formatter)


def _print_errors(errors: dict[str, float]) -> None:
    click.echo(render(("linear", "error"), [(name, f"{e:.2e}") for name, e in errors.items()]))


@command(cli, "qtool quantize demo --scheme w4a8-lqq --out demo-lqq")
@MODEL
@QUANTIZE
@QUIET
@VERBOSE
@JSON
def quantize(
    model: str, export_format: str | None, verbose: bool, as_json: bool, **options: Any
) -> None:
    """Quantize MODEL: a local directory, a hub id, or `demo`."""
    from qtool.pipeline.run import out_beside
    from qtool.pipeline.summary import shard_facts

    with progress.Display("quantize", "shard", shard_facts) as shown:
        done = api.quantize(model, export_format=export_format, progress=shown, **options)
    if not watch.is_first_rank():
        return
    exported = None
    if export_format:
        beside = out_beside(done.directory, export_format)
        with progress.Display("export", "shard") as shown:
            exported = api.export(done.directory, export_format, beside, progress=shown)
    if as_json:
        print_json(done.as_dict() | ({"export": exported.as_dict()} if exported else {}))
        return
    if verbose:
        _print_errors(done.errors)
    click.echo(done)
    if exported:
        click.echo(exported)


@command(cli, "qtool plan meta-llama/Llama-2-70b-hf --scheme w4a8-lqq")
@MODEL
@PLAN
@JSON
def plan(model: str, as_json: bool, **options: Any) -> None:
    """Print what quantizing MODEL takes: bits, memory, time.

    MODEL is a directory, a hub id or a config.json; no weight is read. The headers of a directory's
    safetensors files are checked as by `qtool quantize`. If one is missing, or is a Git LFS pointer
    or a pickle, config.json alone is read.
    """
    from qtool.pipeline.planning.plan_text import as_dict

    planned = api.plan(model, **options)
    print_json(as_dict(planned)) if as_json else click.echo(planned)


@command(
    cli, "qtool sensitivity demo --choices w4a16,w4a16:32,w8a8 --budget-bits 5 --out mixed.yaml"
)
@MODEL
@SENSITIVITY
@QUIET
@JSON
def sensitivity(model: str, as_json: bool, **options: Any) -> None:
    """Write a recipe with the best scheme for each layer of MODEL.

    The cost of a scheme in a layer is the divergence of the model's output. The recipe's schemes
    store at most --budget-bits per weight.
    """
    with progress.Display("measure", "group") as shown:
        found = api.sensitivity(model, progress=shown, **options)
    print_json(found.as_dict()) if as_json else click.echo(found)


@command(cli, "qtool family demo")
@MODEL
@JSON
def family(model: str, as_json: bool) -> None:
    """Print how the linears and norms of MODEL are connected.

    It lists what stays in 16 bits and which methods are left out, with the reasons. MODEL is a
    directory, a hub id or a config.json; no weight is read. The structure of a model that qtool
    does not declare is derived from transformers' own class.
    """
    from qtool.models.describe import as_dict, as_text

    found = api.family(model)
    print_json(as_dict(*found)) if as_json else click.echo(as_text(*found))


@command(cli, "qtool eval wikitext2 piqa --model demo-lqq --compare demo", name="eval")
@EVALUATE
@QUIET
@JSON
def evaluate(
    tasks: tuple[str, ...],
    lists: bool,
    model: str | None,
    compare: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure perplexity and zero-shot accuracy.

    TASKS are wikitext2, c4, pile, demo or a text file for perplexity, and any lm-eval task for
    accuracy, separated by spaces or commas.

    With --save an interrupted evaluation continues where it stopped, and `qtool report` shows the
    saved results. The baseline's results are saved in MODEL's file too.
    """
    if lists:
        listed = api.all_tasks(options["data_dir"])
        print_json(listed) if as_json else click.echo("\n".join(listed))
        return
    from qtool.eval.compare import table
    from qtool.eval.results import Results

    results, baseline = api.evaluate(tasks, model or "demo", compare, **options)
    shown = Results.to_json if as_json else table
    try:
        click.echo(shown(results, baseline))
    except QtoolError:  # if the two cannot be compared, the model's results are still printed
        click.echo(shown(results))
        raise


@command(cli, "qtool verify demo-lqq")
@MODEL
@ENGINE
@TENSOR_PARALLEL
@DEVICE
@QUIET
@VERBOSE
@JSON
def verify(model: str, verbose: bool, as_json: bool, **options: Any) -> None:
    """Check every packed linear of a quantized MODEL.

    Weights, index, config.json and tokenizer must have the bytes that were written, the scheme's
    invariants must hold, packing must lose nothing, and outputs must be those of the reference.
    With --engine vllm, vLLM loads MODEL: the right kernels must run, in its CUDA graphs too, and
    its outputs must be those of qtool's runtime. The exit code is 1 if a check fails.
    """
    with progress.Display("verify", "linear", lines=10) as shown:
        rows = api.verify(model, progress=shown, **options)
    bad = [row for row in rows if row.problem]
    if as_json:
        print_json({"checks": [vars(row) for row in rows], "failed": len(bad)})
    else:
        _print_checks(rows, verbose)
    if bad:
        raise CheckFailed(f"{model}: {len(bad)} of {len(rows)} checks failed")


def _print_checks(rows: Sequence[Any], verbose: bool) -> None:
    """Print problems and a line for each arithmetic that ran; ``verbose`` lists linears first."""
    ran = [row for row in rows if row.ran]
    if verbose:
        lines = [(row.name, row.ran, f"{row.error:.1e}") for row in ran]
        click.echo(render(("linear", "ran", "error"), lines))
    for row in rows:
        if row.problem:
            click.echo(f"{row.name}: {row.problem}")
    if not rows:
        click.echo("no linear is packed; the files are those that were written")
    good = [row for row in rows if not row.problem]
    for kind in sorted({row.ran for row in good}):
        errors = [row.error for row in good if row.ran == kind]
        what = f"{len(errors)} linear{'s' * (len(errors) != 1)} verified"
        click.echo(f"{what}: {kind}; largest distance {max(errors):.1e}")


@command(cli, "qtool inspect demo-lqq")
@MODEL
@JSON
def inspect(model: str, as_json: bool) -> None:
    """List the linears of a quantized MODEL: scheme, layout, bits."""
    from qtool.pipeline.inspect import as_dicts, as_text

    rows = api.inspect(model)
    print_json(as_dicts(rows)) if as_json else click.echo(as_text(rows))


@command(
    cli, "qtool export demo-w4a16 --format compressed-tensors --out demo-ct", cls=_ListsFormats
)
@MODEL
@click.option("--format", "target", required=True, type=FORMAT, help="One of the formats below.")
@click.option("--out", type=NewPath(), help="Output directory. Default: MODEL-FORMAT beside MODEL.")
@click.option(
    "--tensor-parallel",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Refuse linears that this many GPUs cannot share.",
)
@QUIET
@VERBOSE
@JSON
def export(model: str, target: str, verbose: bool, as_json: bool, **options: Any) -> None:
    """Write a quantized MODEL in the format of a serving stack.

    The output says how many linears are equal in the format, and how far off the others are.
    """
    with progress.Display("export", "shard") as shown:
        done = api.export(model, target, progress=shown, **options)
    if as_json:
        print_json(done.as_dict())
        return
    if verbose:
        _print_errors(done.errors)
    click.echo(done)


@command(cli, "qtool import TheBloke/Llama-2-7B-GPTQ --out llama-w4a16", name="import")
@MODEL
@click.option("--out", required=True, type=NewPath(), help="Output directory.")
@click.option(
    "--layout",
    help="Packed layout of every linear; by default w4a16's, or row-major if that does not fit.",
)
@QUIET
@JSON
def import_model(model: str, as_json: bool, **options: Any) -> None:
    """Repack a 4-bit MODEL that another tool quantized.

    A symmetric GPTQ, AWQ, AutoRound or compressed-tensors MODEL becomes a native w4a16 checkpoint
    with the same codes. A model with one zero point per channel becomes w4a8-qoq, which has 8-bit
    activations.
    """
    with progress.Display("import", "shard") as shown:
        done = api.import_(model, progress=shown, **options)
    print_json(done.as_dict()) if as_json else click.echo(done)


@command(cli, "qtool report demo-lqq --compare demo --tasks demo,demo_choice")
@MODEL
@click.option("--compare", **ONCE, help="The model that MODEL was made from, for comparisons.")
@click.option(
    "--tasks",
    **ONCE,
    help="Tasks to evaluate first, separated by commas, as by `qtool eval --save`.",
)
@click.option("--out", type=NewPath(), help="Default: report.html in MODEL.")
@DATA_DIR
@DEVICE
@QUIET
def report(model: str, tasks: str | None, **options: Any) -> None:
    """Write one HTML page about a quantized MODEL.

    It shows sizes, results, errors by layer, activation ranges, checks, and how to reproduce them.
    """
    click.echo(api.write_report(model, tasks=tasks or (), **options))


@command(cli, "qtool schemes")
@JSON
def schemes(as_json: bool) -> None:
    """List the schemes with their recipes and a description."""
    found, header = api.schemes(), ("scheme", "recipes", "what it is")
    if as_json:
        left: dict[str, list[dict[str, str]]] = {}
        for scheme, variant, what, effect in api.departures():
            entry = {"recipe": variant, "what": what, "effect": effect}
            left.setdefault(scheme, []).append(entry)
        keys = ("scheme", "recipes", "about")
        rows = [dict(zip(keys, row, strict=True)) for row in found]
        print_json([row | {"departures": left.get(row["scheme"], [])} for row in rows])
    else:
        click.echo(render(header, found))


cli.add_command(bench)
