"""The benchmarks of ``qtool bench``: kernels on this GPU, and a run of the quantizer."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError, require_positive, suggest
from qtool.units import whole_number

if TYPE_CHECKING:
    from qtool.bench.quantize import Measured


def bench_quantize(
    model: str,
    scheme: str | None,
    *,
    recipe: str | None = None,
    layers: int | None = None,
    device: str = "cpu",
    device_memory: float | None = None,
    work: Path,
    keep: bool = False,
    **options: Any,
) -> "Measured":
    """One measured run of ``model``, or of a random checkpoint if it names a known shape.

    Args:
        layers: number of blocks of a random checkpoint; by default the shape's own.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        device_memory: GB of the GPU's memory that the run may use; by default all.
        work: directory for files.
        keep: keep the result; a random checkpoint is always kept.
        options: options of :func:`qtool.bench.quantize.run`.

    Raises:
        QtoolError: ``model`` is neither a model nor a shape, ``layers`` are asked of a model,
            ``device_memory`` is no memory, or a launcher started several processes.
    """
    from qtool.bench import quantize
    from qtool.distributed import ranks
    from qtool.io.model_directory import provenance
    from qtool.io.run_record import record_path
    from qtool.pipeline.options import RecipeOverrides

    if device_memory is not None:
        require_positive("--device-memory", device_memory)
    with ranks.process_group(device) as own:
        if ranks.size() > 1:
            raise QtoolError("a run is measured in one process: start no others")
        source = _source(model, layers, work)
        chosen = RecipeOverrides().recipe(scheme, recipe)
        name = provenance(source)["directory"]
        out = work / f"{name}-{scheme or Path(chosen.scheme).name}"
        work.mkdir(parents=True, exist_ok=True)
        measured = quantize.run(
            source, chosen, out, device=own, device_memory=device_memory, **options
        )
        if not keep:
            shutil.rmtree(out)
            record_path(out).unlink()
    return measured


def _source(model: str, layers: int | None, work: Path) -> Path:
    """The directory of ``model``, or of a random checkpoint in ``work`` if it names a shape."""
    from qtool.bench import random_checkpoint
    from qtool.io.model_directory import directory_of

    if model in random_checkpoint.SHAPES:
        config = random_checkpoint.config_of(model, layers)
        return random_checkpoint.make(config, work / f"{model}-{config['num_hidden_layers']}")
    if layers is not None:
        raise QtoolError(f"--layers {layers} is for a random checkpoint, and {model} is none")
    try:
        return directory_of(model)
    except QtoolError as error:
        shapes = ", ".join(random_checkpoint.SHAPES)
        raise QtoolError(f"{error}; shapes of random checkpoints: {shapes}") from error


def bench_gemm(
    models: Sequence[str], tokens: Sequence[str], schemes: Sequence[str] | None = None
) -> str:
    """The table of GEMM times on this GPU.

    Args:
        models: names of layer shapes.
        tokens: numbers of tokens M of a call, as texts.
        schemes: columns of the table; by default the W4A8 schemes and w8a8.

    Raises:
        QtoolError: there is no CUDA device, a name of shapes or a scheme is unknown, or a token
            count is no number.
    """
    _require_gpu("gemm", "9.0")
    from qtool.bench.gemm import MODELS, gemm_rows, table
    from qtool.bench.gemm_columns import COLUMNS, DEFAULT_COLUMNS

    for model in models:
        if model not in MODELS:
            raise QtoolError(f"bench gemm: unknown model {model!r}: {suggest(model, MODELS)}")
    for scheme in schemes or ():
        if scheme not in COLUMNS:
            raise QtoolError(f"bench gemm: unknown scheme {scheme!r}: {suggest(scheme, COLUMNS)}")
    counts = [number for count in tokens if (number := whole_number(count))]
    if len(counts) < len(tokens):
        raise QtoolError(
            f"bench gemm: --tokens {','.join(tokens)!r}: positive numbers separated by commas are"
            " expected"
        )
    return table(gemm_rows(models, counts, schemes or DEFAULT_COLUMNS))


def bench_kv(shapes: Sequence[str] | None = None) -> str:
    """The table of attention times over a packed cache on this GPU.

    Raises:
        QtoolError: there is no CUDA device, or a text in ``shapes`` is no shape.
    """
    _require_gpu("kv", "8.0 or more")
    from qtool.bench.kv import HEAD, SHAPES, kv_rows
    from qtool.table import markdown

    return markdown(HEAD, kv_rows(shapes or SHAPES))


def _require_gpu(what: str, capability: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise QtoolError(
            f"bench {what}: no CUDA device here; the kernels need an NVIDIA GPU of compute"
            f" capability {capability}"
        )
