"""Argument types and options that several commands share."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from qtool import api, progress
from qtool.data.defaults import (
    CALIBRATION_SEQLEN,
    EVALUATION_SEQLEN,
    SAMPLES,
    SENSITIVITY_SAMPLES,
)
from qtool.errors import QtoolError, require_new_path
from qtool.recipes import VARIANTS
from qtool.strict_json import strict_json

CONTEXT = {"help_option_names": ["-h", "--help"]}
F = TypeVar("F", bound=Callable[..., Any])
POSITIVE, NOT_NEGATIVE, TWO_OR_MORE = (click.IntRange(min=least) for least in (1, 0, 2))


class Device(click.ParamType):
    """``cpu``, ``cuda`` or ``cuda:N``, as torch finds it on this machine."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from qtool.runtime.device import require_device  # imports torch

        try:
            return str(require_device(str(value)))
        except QtoolError as error:
            self.fail(str(error), param, ctx)


class NewPath(click.Path):
    """A path to be written, with ``~`` for the home directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        try:
            return require_new_path("path", value)
        except QtoolError as error:
            self.fail(str(error), param, ctx)


class Name(click.ParamType):
    """A name that the shell can complete; the command itself checks the name.

    Args:
        names: function that returns all names; called only when a shell completes.
        or_file: a path is accepted too.
    """

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]], *, or_file: bool = False) -> None:
        self.names, self.or_file = names, or_file

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        known = [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]
        return known + ([CompletionItem(incomplete, type="file")] if self.or_file else [])


def _schemes() -> Iterable[str]:
    return (name for name, *_ in api.schemes())


def _kv_quantizers() -> Iterable[str]:
    from qtool.schemes.kv import KV_QUANTIZERS

    return KV_QUANTIZERS


def _formats() -> Iterable[str]:
    return (name for name, _ in api.export_formats())


def _be_quiet(ctx: click.Context, param: click.Parameter, quiet: bool) -> None:
    if quiet:
        progress.silence(True)
        logging.getLogger("qtool").setLevel(logging.ERROR)


def _only_one(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """The value of an option that a user may give twice for both; click would take the last."""
    if len(values) > 1:
        raise click.BadParameter(f"{' and '.join(values)} are given; one is expected", ctx, param)
    return values[0] if values else None


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator that adds several options, in the order in which help lists them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


#: how click is told of :func:`_only_one`
ONCE: dict[str, Any] = {"multiple": True, "callback": _only_one}
FORMAT = Name(_formats)
KV_NAME = Name(_kv_quantizers)
FLOATS = click.Choice(["bfloat16", "float16", "float32"])
MODEL = click.argument("model")
SCHEME = click.option(
    "--scheme",
    type=Name(_schemes),
    help="Scheme to quantize to; `qtool schemes` lists them. A --recipe file may name it instead.",
)
RECIPE_NAME = Name(lambda: VARIANTS, or_file=True)
DATA_DIR = click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Directory of local corpora and tasks."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
CALIB = click.option(
    "--calib",
    "calibration",
    **ONCE,
    help="Calibration text: wikitext2, c4, pile, demo, or a .txt, .jsonl or .parquet file; or"
    " several with their numbers of windows, as in wikitext2:64,chat.jsonl:32."
    " Default: wikitext2, or the demo's own text, if the recipe looks at activations.",
)


def seqlen(default: int) -> Callable[[F], F]:
    """The option for the length of windows."""
    return click.option(
        "--seqlen",
        type=TWO_OR_MORE,
        default=default,
        show_default=True,
        help="Tokens per window, at most the model's context.",
    )


SEED = click.option("--seed", default=0, show_default=True, help="Seed of the calibration windows.")
ACTIVATIONS = click.option(
    "--activations",
    type=click.Choice(["auto", "device", "host", "disk"]),
    default="auto",
    show_default=True,
    help="Where to keep calibration activations between blocks; auto: on the device, the rest in"
    " host memory; all on disk if these have no room.",
)
DEVICE = click.option(
    "--device", type=Device(), default="cpu", show_default=True, help="cpu, cuda, cuda:1, ..."
)
ENGINE = click.option(
    "--engine", type=click.Choice(["vllm"]), help="Load and run the model in this serving engine."
)
TENSOR_PARALLEL = click.option(
    "--tensor-parallel",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="GPUs over which the engine splits the model.",
)
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print one line per linear.")
QUIET = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_be_quiet,
    help="Print no progress and no notes.",
)
#: options on scheme, recipe and device, for a run and for its plan
RUN = (
    SCHEME,
    click.option(
        "--recipe",
        type=RECIPE_NAME,
        help="fast, paper, best, or a YAML file. Default: fast, or paper with --calib.",
    ),
    click.option(
        "--target",
        help="Choose the group size and the layout for this GPU: a100, l40s, h200, ...",
    ),
    click.option(
        "--group-size", help="Input channels per group, or 'channel'; the recipe's by default."
    ),
    click.option(
        "--layout", help="Packed layout of every quantized layer; the recipe's by default."
    ),
    click.option(
        "--max-8bit-blocks",
        type=NOT_NEGATIVE,
        help="Most blocks of 128 channels with 8-bit inputs per linear, of w4ax-fmpq.",
    ),
    click.option(
        "--for-export",
        is_flag=True,
        help="Leave out of the recipe what other tools' loaders cannot run.",
    ),
    click.option("--kv", type=KV_NAME, help="KV-cache quantizer: kv8, kv4, kv4-channel."),
    CALIB,
    click.option(
        "--samples",
        type=POSITIVE,
        help=f"Number of calibration windows. Default: as --calib says, or {SAMPLES}.",
    ),
    seqlen(CALIBRATION_SEQLEN),
    click.option(
        "--windows",
        type=click.Choice(["given", "continued"]),
        help="given: calibration windows come from the text; continued: the text starts them and"
        " the model writes the rest. Default: as the recipe says.",
    ),
    ACTIVATIONS,
    click.option(
        "--dtype",
        type=FLOATS,
        help="Dtype of tensors that are not packed, but for those that transformers keeps float32."
        " Default: unchanged.",
    ),
    click.option(
        "--keep-unknown",
        is_flag=True,
        help="Copy tensors that neither qtool nor transformers knows.",
    ),
)
QUANTIZE = _options(
    *RUN,
    click.option(
        "--out", type=NewPath(), help="Output directory. Default: MODEL-SCHEME beside MODEL."
    ),
    DATA_DIR,
    SEED,
    DEVICE,
    click.option(
        "--adapter",
        **ONCE,
        help="A LoRA adapter (a directory or a hub id) to merge into MODEL's weights.",
    ),
    click.option("--resume", is_flag=True, help="Continue an unfinished run."),
    click.option(
        "--format",
        "export_format",
        type=FORMAT,
        help="Export the result too, to OUT-FORMAT; `qtool export -h` lists the formats.",
    ),
)
PLAN = _options(
    *RUN,
    click.option(
        "--device-memory",
        type=float,
        help="Memory of the GPU in GB; an H200's by default.",
    ),
    click.option(
        "--gpus", type=POSITIVE, default=1, show_default=True, help="GPUs that share the run."
    ),
    click.option(
        "--device",
        type=click.Choice(["cuda", "cpu"]),
        default="cuda",
        show_default=True,
        help="Device of the run: cuda is an H200, cpu is two cores.",
    ),
)
SENSITIVITY = _options(
    click.option(
        "--choices",
        **ONCE,
        required=True,
        help="Schemes, with a group size after a colon if not the recipe's: w4a16,w4a16:32,w8a8;"
        " none leaves a layer in 16 bits.",
    ),
    click.option(
        "--budget-bits",
        type=float,
        required=True,
        help="Most stored bits per weight, such as 4.25.",
    ),
    click.option("--out", type=NewPath(), required=True, help="The recipe to write, a YAML file."),
    click.option(
        "--recipe",
        type=Name(lambda: VARIANTS),
        default="best",
        show_default=True,
        help="fast, paper or best: the recipe from which the methods are taken.",
    ),
    CALIB,
    DATA_DIR,
    click.option(
        "--samples",
        type=POSITIVE,
        help=f"Number of windows. Default: as --calib says, or {SENSITIVITY_SAMPLES}.",
    ),
    seqlen(512),
    SEED,
    DEVICE,
)
EVALUATE = _options(
    click.argument("tasks", nargs=-1),
    click.option("--list", "lists", is_flag=True, help="List all tasks and corpora instead."),
    click.option(
        "--model",
        **ONCE,
        help="A model, quantized or not: a directory, a hub id or, by default, demo.",
    ),
    click.option("--compare", **ONCE, help="A baseline model; print the change from it."),
    DATA_DIR,
    seqlen(EVALUATION_SEQLEN),
    click.option("--limit", type=POSITIVE, help="Most windows or questions per task."),
    click.option(
        "--batch-size",
        type=POSITIVE,
        default=8,
        show_default=True,
        help="Windows or questions at once.",
    ),
    click.option(
        "--kv",
        type=KV_NAME,
        help="KV-cache quantizer of --model: kv8, kv4, kv4-channel. Default: the checkpoint's.",
    ),
    click.option(
        "--as-export",
        type=FORMAT,
        metavar="FORMAT",
        help="Run --model as transformers runs its export in FORMAT.",
    ),
    click.option(
        "--dtype",
        type=FLOATS,
        help="Dtype of what is not quantized.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        help="Compute the same bits on every device; slower, and not what is served.",
    ),
    click.option(
        "--save",
        is_flag=True,
        help="Keep each finished task in MODEL's eval.json, and reuse what is saved there.",
    ),
    DEVICE,
    ENGINE,
    TENSOR_PARALLEL,
)


def command(
    group: click.Group, example: str, **options: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """A command of ``group`` whose help ends with an example."""
    return group.command(context_settings=CONTEXT, epilog=f"Example: {example}", **options)


def print_json(value: Any) -> None:
    """Print ``value`` as strict JSON on stdout, for programs: all that ``--json`` prints."""
    click.echo(strict_json(value))
