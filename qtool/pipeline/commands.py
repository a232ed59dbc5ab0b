"""What the commands do, once parsed: names become objects, objects go to the pipeline."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool import recipes
from qtool.distributed import ranks
from qtool.errors import QtoolError, suggest
from qtool.eval.results import Results
from qtool.io.source import DEMO, Checkpoint, read_config, resolve
from qtool.pipeline.job import Job
from qtool.pipeline.planning.plan import Plan
from qtool.pipeline.planning.plan import plan as make_plan
from qtool.recipes import Recipe
from qtool.schemes import hardware
from qtool.schemes.kv import KV4, KV_QUANTIZERS

if TYPE_CHECKING:
    from torch import Tensor

    from qtool.bench.quantize import Measured
    from qtool.exchange.export import Exported


@dataclass(frozen=True)
class Wishes:
    """What the command line may say of a recipe; None leaves the recipe's own."""

    recipe: str | None = None
    target: str | None = None
    group_size: str | None = None
    layout: str | None = None
    kv: str | None = None
    windows: str | None = None
    max_8bit_blocks: int | None = None

    def of(self, scheme: str, *, calibrated: bool = False) -> Recipe:
        """The recipe of ``scheme`` with these wishes applied.

        Raises:
            QtoolError: an unknown scheme, variant, GPU or KV quantizer, or a group size that is no
                number.
        """
        reason = ""
        if self.target is not None:
            scheme, reason = granularity(scheme, self.target)
        chosen = recipes.load(scheme, self.recipe or ("paper" if calibrated else "fast"))
        chosen = replace(chosen, reason=reason)
        if self.group_size is not None:
            if self.group_size != "channel" and not self.group_size.isdigit():
                raise QtoolError(
                    f"--group-size {self.group_size!r}: a number of input channels or 'channel' is expected"
                )
            chosen = chosen.with_group_size(
                None if self.group_size == "channel" else int(self.group_size)
            )
        if self.layout is not None:
            chosen = chosen.with_layout(self.layout)
        if self.max_8bit_blocks is not None:
            chosen = chosen.with_options("gather-outliers", max_8bit_blocks=self.max_8bit_blocks)
        if self.windows is not None:
            chosen = replace(chosen, windows=self.windows)
        if self.kv is not None:
            _require_kv(self.kv)
            chosen = replace(chosen, kv=self.kv)
            if KV_QUANTIZERS[self.kv] is KV4 and chosen.variant in ("paper", "best"):
                chosen = chosen.for_kv4()
        return chosen


def granularity(scheme: str, target: str) -> tuple[str, str]:
    """The scheme whose granularity suits the GPU ``target``, and why (APEX4 section 3.2.2, QServe
    section 5.3).

    Raises:
        QtoolError: an unknown GPU, or a scheme that has no granularity to choose.
    """
    if scheme in ("w4a4", "w4a4-g128", "w4a4-mix"):
        choice = hardware.choose_w4a4(hardware.gpu(target))
        return f"w4a4-{choice.choice}", choice.reason
    if scheme in ("w4a8-qoq", "w4a8-qoq-g128"):
        choice = hardware.choose_qoq(hardware.gpu(target))
        return choice.choice, choice.reason
    raise QtoolError(
        f"--target chooses between granularities of w4a4 and w4a8-qoq; {scheme} has one for every GPU"
    )


def plan(
    model: str,
    scheme: str,
    *,
    samples: int = 128,
    seqlen: int = 2048,
    device_memory: float | None = None,
    **wishes: Any,
) -> Plan:
    """The plan for MODEL: a directory, a hub id, ``demo``, or the path of a config.json;
    ``device_memory`` in GB.
    """
    path = Path(model)
    config = read_config(
        path.parent if path.name == "config.json" else resolve(model, weights=False)
    )
    job = Job.of(config, Wishes(**wishes).of(scheme), planning=True)
    return make_plan(
        job, samples, seqlen, *([] if device_memory is None else [device_memory * 1e9])
    )


def quantize(
    model: str,
    scheme: str,
    out: Path | None,
    *,
    calib: str | None,
    data_dir: Path | None,
    samples: int,
    seqlen: int,
    seed: int,
    device: str,
    resume: bool,
    progress: Any,
    activations: str = "auto",
    export_format: str | None = None,
    **wishes: Any,
) -> Path:
    """Quantize MODEL; returns the output directory.

    With ``export_format`` what that format cannot express is refused before any work; the export
    itself is :func:`export_beside`. A MODEL that is quantized already is imported as it is, if
    nothing else is asked for.
    """
    from qtool.pipeline.quantize import quantize as run

    chosen = Wishes(**wishes).of(scheme, calibrated=calib is not None)
    directory = resolve(model)
    source = Checkpoint(directory)
    out = out or _default_out(model, directory, scheme)
    if "quantization_config" in source.config and _says_nothing_new(chosen, calib, wishes):
        return repack(model, out, wishes["layout"])
    job = Job.of(source.config, chosen)
    for note in job.recipe.left_out if ranks.rank() == 0 else ():
        print(note, file=sys.stderr)
    if export_format is not None:
        from qtool.exchange import targets
        from qtool.exchange.exportable import exported_formats

        untied = {"tie_word_embeddings": False} if job.unties else {}
        exported_formats(targets.get(export_format), job.format, source.config | untied)
    text = calib or ("demo" if directory == DEMO else "wikitext2")
    calibration = None
    if job.needs_data:
        from qtool.pipeline.calibration_windows import calibration as cut

        calibration = cut(
            source,
            job,
            text,
            data_dir=data_dir,
            samples=samples,
            seqlen=seqlen,
            seed=seed,
            device=device,
        )
        activations = _place(job, calibration.tokens, device, activations)
    return run(
        source,
        chosen,
        out,
        calibration=calibration,
        device=device,
        resume=resume,
        progress=progress,
        activations=activations,
    )


def _place(job: Job, batches: Sequence["Tensor"], device: str, asked: str) -> str:
    """Where this rank's activations will be kept; said on stderr."""
    import torch

    from qtool.pipeline.streaming.activations import described, place_for

    where, tokens = torch.device(device), sum(ids.numel() for ids in ranks.local_items(batches))
    place = place_for(job, tokens, where) if asked == "auto" else asked
    if ranks.rank() == 0:
        print(described(job, tokens, where, place), file=sys.stderr)
    return place


def export_beside(native: Path, export_format: str) -> "Exported":
    """Export the checkpoint ``native`` to ``NATIVE-FORMAT`` beside it; the native one stays, for
    eval and verify.
    """
    from qtool.exchange.export import export

    return export(native, export_format, native.with_name(f"{native.name}-{export_format}"))


def repack(model: str, out: Path, layout: str | None = None) -> Path:
    """Import the quantized MODEL (a directory or a hub id) in ``layout``; returns the output
    directory.
    """
    from qtool.exchange.repack import repack as run

    return run(Checkpoint(resolve(model)), out, layout)


def _says_nothing_new(recipe: Recipe, calib: str | None, wishes: Mapping[str, Any]) -> bool:
    """Whether ``--scheme w4a16`` stands alone (but for a layout): a quantized model can be that
    without rounding.
    """
    asked = {key for key, value in wishes.items() if value is not None} - {"layout"}
    return recipe.scheme == "w4a16" and calib is None and not asked


def _default_out(model: str, directory: Path, scheme: str) -> Path:
    """``MODEL-SCHEME`` beside a local model, in the working directory for the demo or a hub id."""
    local = Path(model).expanduser()
    if model != "demo" and local.is_dir():
        return local.resolve().with_name(f"{local.resolve().name}-{scheme}")
    return Path(f"{model.split('/')[-1]}-{scheme}")


def evaluate(
    tasks: list[str],
    model: str,
    compare: str | None,
    *,
    device: str,
    save: bool = False,
    kv: str | None = None,
    as_export: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> tuple[Results, Results | None]:
    """Results of ``tasks`` on MODEL, and on the baseline ``compare`` if one is given.

    Args:
        save: keep both in MODEL's eval.json and use again what is there.
        kv: KV-cache quantizer of MODEL while it is evaluated, by default its own; the baseline
            keeps its own.
        as_export: evaluate MODEL as transformers runs its export in this format
            (:mod:`qtool.exchange.as_export`).
        dtype: name of the dtype of what is not quantized, of both; by default the checkpoints' own.

    Raises:
        QtoolError: an unknown KV quantizer or format, or one that MODEL cannot have; a format with
            ``kv`` or ``save``.
    """
    import torch

    from qtool.eval import saved
    from qtool.eval.evaluate import ask
    from qtool.exchange.as_export import load_as_export, require_runs
    from qtool.runtime.load import load, load_tokenizer

    store = resolve(model)
    if save and store == DEMO:
        raise QtoolError(
            "--save keeps results in the model's directory, and the demo's belongs to the package"
        )
    if kv is not None:
        _require_kv(kv)
    if as_export is not None:
        require_runs(as_export)
        if kv is not None or save:
            other = "--save" if save else f"--kv {kv}"
            raise QtoolError(
                f"--as-export {as_export} goes without {other}: it is not what the native model computes"
            )

    def run(name: str, kv: str | None = None, as_export: str | None = None) -> Results:
        directory = resolve(name)
        asked = ask(tasks, load_tokenizer(directory), **options)
        where: dict[str, Any] = {
            "device": device,
            "dtype": getattr(torch, dtype) if dtype else None,
        }
        made = partial(load, directory, kv=kv, **where)
        if as_export is not None:
            made = partial(load_as_export, directory, as_export, **where)
        if save:
            return saved.answers(
                asked, saved.identity(directory), made, store, saved.environment(device, kv, dtype)
            )
        loaded = made()
        return Results([result for one in asked for result in one.answer(loaded)])

    return run(model, kv, as_export), run(compare) if compare else None


def _require_kv(kv: str) -> None:
    if kv not in KV_QUANTIZERS:
        raise QtoolError(f"unknown --kv {kv!r}: {suggest(kv, KV_QUANTIZERS)}")


def bench_quantize(
    model: str,
    scheme: str,
    *,
    recipe: str | None,
    layers: int | None,
    work: Path,
    keep: bool,
    **options: Any,
) -> "Measured":
    """One measured run of MODEL, or of a random checkpoint if MODEL names a shape; files go to
    ``work``.

    Raises:
        QtoolError: neither a model nor a shape.
    """
    from qtool.bench import quantize as bench
    from qtool.bench import random_checkpoint

    work.mkdir(parents=True, exist_ok=True)
    if model in random_checkpoint.SHAPES:
        config = random_checkpoint.config_of(model, layers)
        source = work / f"{model}-{config['num_hidden_layers']}"
        if not (source / "config.json").exists():
            random_checkpoint.make(config, source)
    else:
        source = resolve(model)
    out = work / f"{source.name}-{scheme}"
    measured = bench.run(source, Wishes(recipe=recipe).of(scheme), out, **options)
    if not keep:
        shutil.rmtree(out)
    return measured


def bench_gemm(models: list[str], tokens: list[str], schemes: list[str] | None = None) -> str:
    """The table of GEMM times on this GPU.

    Args:
        schemes: its columns; by default the W4A8 ones and w8a8.

    Raises:
        QtoolError: no CUDA device, an unknown model's shapes or scheme, or token counts that are no
            numbers.
    """
    import torch

    from qtool.bench.gemm import COLUMNS, DEFAULT_COLUMNS, MODELS, gemm_table, markdown

    if not torch.cuda.is_available():
        raise QtoolError(
            "bench gemm: no CUDA device here; the kernels need an NVIDIA GPU of compute capability 9.0"
        )
    for model in models:
        if model not in MODELS:
            raise QtoolError(f"bench gemm: unknown model {model!r}: {suggest(model, MODELS)}")
    for scheme in schemes or ():
        if scheme not in COLUMNS:
            raise QtoolError(f"bench gemm: unknown scheme {scheme!r}: {suggest(scheme, COLUMNS)}")
    if not all(count.isdigit() and int(count) for count in tokens):
        raise QtoolError(
            f"bench gemm: --tokens {','.join(tokens)!r}: positive numbers separated by commas are expected"
        )
    return markdown(
        gemm_table(models, [int(count) for count in tokens], schemes or DEFAULT_COLUMNS)
    )


def bench_kv(shapes: list[str] | None = None) -> str:
    """The table of attention times over a packed cache on this GPU.

    Raises:
        QtoolError: no CUDA device, or a shape that is none.
    """
    import torch

    from qtool.bench.kv import SHAPES, kv_table

    if not torch.cuda.is_available():
        raise QtoolError(
            "bench kv: no CUDA device here; the kernels need an NVIDIA GPU of compute capability 8.0 or more"
        )
    return kv_table(shapes or SHAPES)
