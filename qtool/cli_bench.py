"""``qtool bench``: the commands that measure."""

from typing import Any

import click

from qtool import progress
from qtool.cli_arguments import (
    ACTIVATIONS,
    CONTEXT,
    DEVICE,
    JSON,
    MODEL,
    POSITIVE,
    QUIET,
    RECIPE_NAME,
    SCHEME,
    TENSOR_PARALLEL,
    NewPath,
    command,
    print_json,
    seqlen,
)
from qtool.data.defaults import CALIBRATION_SEQLEN, SAMPLES
from qtool.errors import require_names


@click.group(
    context_settings=CONTEXT,
    epilog="Example: qtool bench quantize llama-3-8b --layers 4 --device cuda",
)
def bench() -> None:
    """Measure kernels, a quantization run, or a server."""


@command(bench, "qtool bench gemm --models llama-3-8b --tokens 1,16,64", name="gemm")
@click.option(
    "--models",
    default="llama-3-8b",
    show_default=True,
    help="Layer shapes: llama-2-7b, llama-3-8b, ...",
)
@click.option("--tokens", default="1,16,64,256,1024", show_default=True, help="Tokens M per call.")
@click.option(
    "--schemes",
    help="Columns: w4a8-lqq-g64, w4a4-g128, ...; by default the W4A8 schemes and w8a8.",
)
def bench_gemm(models: str, tokens: str, schemes: str | None) -> None:
    """Time the packed GEMMs on this GPU.

    The table sets them beside their floor and torch's own matmuls.
    """
    from qtool.bench import bench_gemm as measure

    chosen = schemes.split(",") if schemes else None
    click.echo(measure(models.split(","), tokens.split(","), chosen), nl=False)


@command(bench, "qtool bench kv --shapes 64x4096x8x32x128", name="kv")
@click.option(
    "--shapes",
    help="Sequences x tokens x kv heads x query heads x head dimension, separated by commas.",
)
def bench_kv(shapes: str | None) -> None:
    """Time attention over a packed KV cache on this GPU.

    The table sets decode attention over a kv4 and a kv8 cache beside torch's SDPA over a 16-bit
    one.
    """
    from qtool.bench import bench_kv as measure

    click.echo(measure(shapes.split(",") if shapes else None), nl=False)


@command(
    bench,
    "qtool bench quantize llama-3-8b --layers 4 --scheme w4a8-lqq --recipe paper --device cuda",
    name="quantize",
)
@MODEL
@SCHEME
@click.option(
    "--recipe", type=RECIPE_NAME, help="fast, paper, best, or a YAML file. Default: fast."
)
@click.option(
    "--layers", type=POSITIVE, help="Blocks of a random checkpoint; the shape's own by default."
)
@click.option(
    "--samples", type=POSITIVE, default=SAMPLES, show_default=True, help="Calibration windows."
)
@seqlen(CALIBRATION_SEQLEN)
@ACTIVATIONS
@click.option("--device-memory", type=float, help="GB of GPU memory for the run; all by default.")
@click.option(
    "--work", type=NewPath(), default="bench", show_default=True, help="Directory for files."
)
@click.option("--keep", is_flag=True, help="Keep the result; a random checkpoint is kept anyway.")
@DEVICE
@QUIET
@JSON
def bench_quantize(as_json: bool, **options: Any) -> None:
    """Time every part of a quantization run.

    MODEL is a directory, or a shape (llama-3-8b, qwen3-235b-a22b, ...) of which a random checkpoint
    is made. It is calibrated on random tokens, which the model continues if the recipe says so. The
    table sets each part beside its floor: bytes at the disk's rate, operations at the measured
    rates of this device.
    """
    from qtool.bench import bench_quantize as measure
    from qtool.pipeline.summary import shard_facts

    with progress.Display("quantize", "shard", shard_facts) as shown:
        measured = measure(progress=shown, **options)
    print_json(measured.as_dict()) if as_json else click.echo(measured.table())


@command(bench, "qtool bench serve demo-lqq --against fp8,bf16 --batches 1,16", name="serve")
@MODEL
@click.option("--against", default="fp8,bf16,w4a16", show_default=True, help="Baselines.")
@click.option("--batches", default="1,16,64,256,512", show_default=True, help="Sequences at once.")
@click.option(
    "--input-tokens", type=POSITIVE, default=1024, show_default=True, help="Tokens of each prompt."
)
@click.option(
    "--output-tokens", type=POSITIVE, default=512, show_default=True, help="Tokens of each answer."
)
@click.option("--memory", type=float, help="GB of each GPU for an engine; nearly all by default.")
@TENSOR_PARALLEL
@JSON
def bench_serve(model: str, against: str, batches: str, as_json: bool, **options: Any) -> None:
    """Time a quantized MODEL in vLLM beside vLLM's own formats."""
    from qtool.serving.bench import bench_model

    rows, text = bench_model(
        model, against=require_names("--against", against), batches=batches.split(","), **options
    )
    print_json(rows) if as_json else click.echo(text)
