"""qtool's public functions; every command of the command line but ``bench`` calls one of them.

Every function takes and returns plain things: paths, names, tensors, dataclasses. Errors are
:class:`qtool.errors.QtoolError`, one sentence each; a failed check is a
:class:`qtool.errors.CheckFailed`. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, overload

from qtool import plugins
from qtool.errors import (
    QtoolError,
    expand_home,
    plain,
    require_names,
    require_new_path,
    require_path,
)
from qtool.progress import Progress, require_progress
from qtool.recipes import Recipe

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qtool.eval.checkpoints import EvaluateKeywords
    from qtool.eval.engine import Engine
    from qtool.eval.results import Results
    from qtool.exchange.export import Exported
    from qtool.models import Family
    from qtool.pipeline.given_model import Name
    from qtool.pipeline.inspect import Row
    from qtool.pipeline.options import QuantizeKeywords
    from qtool.pipeline.planning.plan import Plan
    from qtool.pipeline.sensitivity import Sensitivity
    from qtool.pipeline.summary import Quantized
    from qtool.pipeline.verify import Verified

    Model: TypeAlias = Name | PreTrainedModel
    RecipeLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Recipe
    OneText: TypeAlias = str | Path | Sequence[str] | Sequence[Sequence[int]] | Tensor | Dataset
    CalibrationData: TypeAlias = (
        OneText | Mapping[str, int | None] | Sequence[tuple[OneText, int | None]]
    )


@overload
def quantize(
    model: PreTrainedModel,
    scheme: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    calibration: CalibrationData | None = None,
    out: None = None,
    kv: str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> PreTrainedModel: ...


@overload
def quantize(
    model: Name,
    scheme: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    calibration: CalibrationData | None = None,
    out: Name | None = None,
    kv: str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    export_format: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Quantized: ...


@overload
def quantize(
    model: PreTrainedModel,
    scheme: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    calibration: CalibrationData | None = None,
    out: Name,
    kv: str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    export_format: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Quantized: ...


def quantize(
    model: Model,
    scheme: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    calibration: CalibrationData | None = None,
    out: Name | None = None,
    kv: str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    export_format: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> Quantized | PreTrainedModel:
    """Quantize ``model``.

    Args:
        model: a directory, a hub id, ``demo``, or a model in memory, which is not changed (its
            weights go through a temporary directory on disk).
        scheme: the scheme to quantize to; it may be left out if the recipe is a file that names it.
        recipe: ``fast``, ``paper``, ``best``, a YAML file, its content, or a :class:`Recipe`; by
            default ``fast``, or ``paper`` where ``calibration`` is given.
        calibration: the text on which methods observe activations: a corpus (``wikitext2``,
            ``c4``, ``pile``, ``demo``), a text file, texts, token ids (rows, or a tensor
            ``[samples, tokens]``), or a ``datasets.Dataset`` with a column ``text`` or
            ``messages``, which the tokenizer's chat template renders; or a mix of them with their
            numbers of windows: ``"wikitext2:64,chat.jsonl:32"``, ``{"wikitext2": 64, ...}`` or
            pairs ``[(texts, 64), ...]``. The default is wikitext2, and for the demo its own text.
        out: the output directory; by default ``MODEL-SCHEME``, beside a local model, else in the
            working directory. Without it, a model in memory gives a model in memory.
        kv: KV-cache quantizer: ``kv8``, ``kv4`` or ``kv4-channel``.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        tokenizer: tokenizer of a model in memory; by default the one in the directory that the
            model was loaded from.
        export_format: a format for a later :func:`export`: whatever it cannot express is refused
            before any work, and so is an ``OUT-FORMAT`` that exists.
        progress: called after each shard with ``(done, total, notes)``.
        options: the fields of :class:`qtool.pipeline.options.QuantizeOptions`, which describes each
            of them: ``samples`` (windows), ``seqlen`` (tokens per window), ``group_size``, ...

    Returns:
        The checkpoint that was written; or, for a model in memory without ``out``, a model on
        ``device`` whose linears run packed weights.

    Raises:
        QtoolError: anything wrong with the input; nothing that looks whole is left behind.

    Example::

        done = qtool.quantize("demo", "w4a8-lqq", out="demo-lqq")
        model = qtool.load(done)
    """
    from qtool.distributed import ranks
    from qtool.pipeline.options import QuantizeOptions
    from qtool.pipeline.run import default_out, run
    from qtool.runtime.device import require_device

    require_progress(progress)
    settings = QuantizeOptions.of({**options, "kv": kv})
    chosen = settings.recipe(scheme, recipe, calibrated=calibration is not None)
    device = str(require_device(device))
    common: dict[str, Any] = {
        "text": calibration,
        "export_format": export_format,
        "progress": progress,
    }
    with ranks.process_group(device) as own:
        if isinstance(model, str | os.PathLike):
            _require_no_tokenizer(tokenizer)
            name = scheme or Path(chosen.scheme).name
            target = require_new_path("out", out) if out is not None else default_out(model, name)
            return run(model, chosen, target, settings, device=own, **common)
        from qtool.pipeline.in_memory import quantize_in_memory

        path = None if out is None else require_new_path("out", out)
        return quantize_in_memory(model, tokenizer, chosen, path, settings, device=own, **common)


def plan(
    model: Model,
    scheme: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    calibration: CalibrationData | None = None,
    kv: str | None = None,
    device_memory: float | None = None,
    device: str | torch.device = "cuda",
    gpus: int = 1,
    **options: Unpack[QuantizeKeywords],
) -> Plan:
    """The plan of quantizing ``model``: bits, bytes, memory and time; no weight is read.

    Args:
        model: as :func:`quantize` takes it, or the path of a config.json. The headers of a
            directory's safetensors files are checked as :func:`quantize` checks them. If a file is
            missing, a Git LFS pointer or a pickle, or ``model`` is no directory, only the config is
            read.
        scheme: as :func:`quantize` takes it.
        recipe: as :func:`quantize` takes it.
        calibration: as :func:`quantize` takes it; its windows are counted, none is read.
        kv: as :func:`quantize` takes it.
        options: as :func:`quantize` takes them; ``samples``, ``seqlen`` and ``activations`` matter
            only if the recipe calibrates, and ``seed``, ``data_dir`` and ``resume`` never.
        device_memory: memory of the GPU, in GB (1e9 bytes); by default an H200's.
        device: ``cuda``, which stands for an H200, or ``cpu``, for two cores.
        gpus: GPUs that share the run. The host's memory is that of this machine.

    Returns:
        The plan's numbers; ``print`` shows them as text.

    Raises:
        QtoolError: what :func:`quantize` would refuse for its model, recipe or shapes.

    Example::

        qtool.plan("meta-llama/Llama-2-70b-hf", "w4a8-lqq").output_bytes
    """
    from qtool.pipeline.options import QuantizeOptions
    from qtool.pipeline.planning.plan_model import plan_model

    settings = QuantizeOptions.of({**options, "kv": kv})
    return plan_model(
        model,
        settings.recipe(scheme, recipe, calibrated=calibration is not None),
        settings,
        text=calibration,
        device_memory=device_memory,
        device=str(device),
        gpus=plain(gpus),
    )


def sensitivity(
    model: Name,
    choices: str | Sequence[str],
    budget_bits: float,
    out: Name,
    *,
    recipe: str = "best",
    calibration: CalibrationData | None = None,
    data_dir: str | Path | None = None,
    samples: int | None = None,
    seqlen: int = 512,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Sensitivity:
    """Choose a scheme for each group of linears of ``model``, and write the recipe to ``out``.

    All that was measured is written beside it, to a file of the same name that ends in ``.json``.
    The device holds the whole float model, and the log-probabilities of all tokens of the
    vocabulary on the measured windows, in float32. Host memory holds a byte for each weight in each
    choice and, for a GPU, the float weights.

    Args:
        model: a directory, a hub id or ``demo``.
        choices: schemes, in a list or separated by commas, each with or without a group size
            (``w4a16``, ``w4a16:32``, ``w4a16:channel``), and ``none`` to leave a group unquantized.
        budget_bits: most stored bits per weight, on average over all that may be quantized.
        out: a new YAML file for :func:`quantize`.
        recipe: ``fast``, ``paper`` or ``best``: the recipe whose methods are written, of the choice
            whose weights, then whose inputs, have the fewest bits. While the divergence is
            measured, weights are rounded to nearest if this recipe does so, else by GPTQ.
        calibration: as :func:`quantize` takes it. The divergence is measured on one of four of its
            windows, and GPTQ looks at the others; without GPTQ it is measured on all of them.
        data_dir: directory with local copies of corpora.
        samples: number of calibration windows, by default as ``calibration`` says, or 32.
        seqlen: tokens per window.
        seed: seed of the choice of windows.
        device: where the model runs.
        progress: called after each group with ``(done, total, notes)``.

    Raises:
        QtoolError: anything wrong with the input, a budget below the smallest choice, or a file
            that exists.

    Example::

        found = qtool.sensitivity("demo", ["w4a16", "w8a8"], 5.0, "mixed.yaml")
        qtool.quantize("demo", recipe="mixed.yaml", calibration="demo")
    """
    from qtool.distributed import ranks
    from qtool.io.model_directory import directory_of
    from qtool.pipeline.options import QuantizeOptions
    from qtool.pipeline.sensitivity_recipe import write_recipe
    from qtool.runtime.device import require_device

    require_progress(progress)
    device = str(require_device(device))
    asked = {"samples": samples, "seqlen": seqlen, "seed": seed, "data_dir": data_dir}
    with ranks.process_group(device) as own:
        if ranks.size() > 1:
            raise QtoolError("the sensitivity is measured by one process: start no others")
        return write_recipe(
            directory_of(model),
            require_names("choices", choices),
            budget_bits,
            require_new_path("out", out),
            QuantizeOptions.of(asked),
            recipe=recipe,
            text=calibration,
            device=own,
            progress=progress,
        )


def family(model: Model) -> tuple[Family, dict[str, Any]]:
    """The family of ``model`` and its config: declared, or derived from transformers' own model.

    Args:
        model: as :func:`plan` takes it; no weight is read.

    Raises:
        QtoolError: if there is none; the message says why.

    Example::

        family, config = qtool.family("demo")
        print(list(family.linears()))
    """
    from qtool.models import family_of
    from qtool.pipeline.given_model import config_of

    config = config_of(model)
    return family_of(config), config


def verify(
    model: Name,
    *,
    device: str | torch.device = "cpu",
    engine: str | None = None,
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> list[Verified]:
    """Check all shards and all packed linears of a native checkpoint.

    Args:
        model: its directory or hub id.
        device: where its linears are multiplied, by the kernels that would serve them.
        engine: ``vllm``: load the checkpoint in that engine and compare it with qtool's runtime.
        tensor_parallel: GPUs over which the engine splits the model.
        progress: called after each linear with ``(done, total, notes)``.

    Returns:
        One outcome per linear, and one per damaged file; ``problem`` is empty if all is well. If
        the index or a shard is missing or cannot be read, no linear is checked.

    Raises:
        QtoolError: not a native checkpoint, or an engine that is not installed.

    Example::

        assert not [row for row in qtool.verify("demo-lqq") if row.problem]
    """
    from qtool.eval.engine import require_engine
    from qtool.pipeline.given_model import native_directory
    from qtool.pipeline.verify import verify as verified

    require_progress(progress)
    tensor_parallel = plain(tensor_parallel)
    require_engine(_engine(engine), tensor_parallel)
    directory = native_directory(model)
    if engine is not None:
        from qtool.serving.verify import verify_in_vllm

        return list(verify_in_vllm(directory, tensor_parallel=tensor_parallel))
    return list(verified(directory, device=device, progress=progress))


def evaluate(
    tasks: Name | Iterable[Name],
    model: Model = "demo",
    compare: Name | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    engine: str | None = None,
    **options: Unpack[EvaluateKeywords],
) -> tuple[Results, Results | None]:
    """Perplexity and zero-shot accuracy of ``model``, and of the baseline ``compare`` beside it.

    Args:
        tasks: one or several, in a list or separated by commas; ``wikitext2``, ``c4``, ``pile``,
            ``demo`` or a text file give perplexity (its value, not in nats), every other name is a
            zero-shot task of lm-eval (0 to 1).
        model: a directory, a hub id or ``demo``, quantized or not, or a model in memory, which
            needs its ``tokenizer`` and is left in eval mode.
        compare: the baseline: a directory, a hub id or ``demo``.
        tokenizer: tokenizer of a model in memory.
        engine: ``vllm``: the models run in that engine, split over ``tensor_parallel`` GPUs.
        options: ``device``, ``dtype``, ``kv``, ``save`` (keep results in the model's
            eval.json), ``as_export``, ``data_dir``, ``seqlen`` (tokens), ``limit`` (windows or
            items per task), ``batch_size`` and ``deterministic``; a model in memory takes only the
            last five.

    Returns:
        The model's results and the baseline's (None without ``compare``).
        ``qtool.eval.compare.compare(results, baseline)`` gives their paired difference.

    Raises:
        QtoolError: an unknown task or option, a text that is not there, a model that cannot be
            loaded.

    Example::

        results, baseline = qtool.evaluate(["wikitext2"], "demo-lqq", "demo", limit=8)
    """
    if not (names := require_names("tasks", tasks)):
        raise QtoolError("no task: name one, or list them with `qtool eval --list`")
    options = plain(options)
    if isinstance(model, str | os.PathLike):
        _require_no_tokenizer(tokenizer)
        from qtool.eval.checkpoints import EvaluateKeywords, evaluate_checkpoints

        plugins.require_keywords(options, EvaluateKeywords)
        return evaluate_checkpoints(names, model, compare, engine=_engine(engine), **options)
    from qtool.eval.evaluate import TaskKeywords
    from qtool.eval.evaluate import evaluate as evaluate_loaded
    from qtool.pipeline.given_model import require_model, require_tokenizer

    require_model(model)
    plugins.require_keywords(options, TaskKeywords)
    if tokenizer is None:
        raise QtoolError("a model in memory is evaluated with its tokenizer: pass tokenizer=")
    if compare is not None or engine is not None:
        raise QtoolError(
            "a model in memory is evaluated without an engine and without a baseline: evaluate the"
            " baseline alone, and take their difference by qtool.eval.compare.compare"
        )
    require_tokenizer(tokenizer)
    return evaluate_loaded(names, model, tokenizer, **options), None


def _engine(name: str | None) -> type[Engine] | None:
    """The serving engine called ``name``, or None if that is None."""
    if name is None:
        return None
    if name != "vllm":
        raise QtoolError(f"--engine {name!r}: vllm is expected")
    from qtool.serving.evaluate import VllmModel

    return VllmModel


def _require_no_tokenizer(tokenizer: object) -> None:
    if tokenizer is not None:
        raise QtoolError("tokenizer is for a model in memory; one on disk has its own beside it")


def all_tasks(data_dir: Name | None = None) -> list[str]:
    """The tasks that :func:`evaluate` knows: texts, tasks without network, then lm-eval's."""
    from qtool.data.corpora import SOURCES
    from qtool.eval import zero_shot

    where = None if data_dir is None else require_path("data_dir", data_dir)
    return [*SOURCES, *zero_shot.all_tasks(where)]


def export(
    model: Name,
    format: str,
    out: Name | None = None,
    *,
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> Exported:
    """Write a native checkpoint in the format of a serving stack.

    Args:
        model: the native checkpoint's directory or hub id.
        format: ``compressed-tensors``, ``gptq``, ``awq``, ...: `qtool export -h` lists them.
        out: the output directory; by default ``MODEL-FORMAT``, beside a local model, else in the
            working directory.
        tensor_parallel: GPUs over which every linear will be split; a linear that they cannot share
            is refused.
        progress: called after each shard with ``(done, total, notes)``.

    Returns:
        What was written, and how it differs; ``print`` shows it as text.

    Raises:
        QtoolError: an unknown format, or a linear that it cannot express (before any work).

    Example::

        print(qtool.export("demo-w4a16", "compressed-tensors"))
    """
    from qtool.exchange import export_formats
    from qtool.exchange.export import export as exported
    from qtool.pipeline.given_model import native_directory
    from qtool.pipeline.quantize import require_apart
    from qtool.pipeline.run import default_out

    require_progress(progress)
    format = export_formats.get(format).name
    directory = native_directory(model)
    target = default_out(model, format) if out is None else require_new_path("out", out)
    require_apart(target, directory)
    split = plain(tensor_parallel)
    return exported(directory, format, target, tensor_parallel=split, progress=progress)


def import_(
    model: Name,
    out: Name,
    *,
    layout: str | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Repack a 4-bit GPTQ, AWQ, AutoRound or compressed-tensors model, code for code.

    A symmetric model becomes ``w4a16``. A model with one zero point per channel becomes
    ``w4a8-qoq``, which has 8-bit activations.

    Args:
        model: its directory or hub id.
        out: the native checkpoint's directory.
        layout: layout of every linear; by default w4a16's, or row-major if its tile does not fit.
        progress: called after each shard with ``(done, total, notes)``.

    Raises:
        QtoolError: a format or a grid that no scheme of qtool has.

    Example::

        qtool.import_("TheBloke/Llama-2-7B-GPTQ", "llama-w4a16")
    """
    from qtool.pipeline.run import repack

    require_progress(progress)
    return repack(model, require_new_path("out", out), layout, progress=progress)


def inspect(model: Name) -> list[Row]:
    """Scheme, layout, bytes and bits per weight of each linear of a native checkpoint.

    Args:
        model: its directory or hub id; no weight is read.

    Raises:
        QtoolError: not a native checkpoint.

    Example::

        [(row.name, row.bits) for row in qtool.inspect("demo-lqq")]
    """
    from qtool.pipeline.given_model import native_directory
    from qtool.pipeline.inspect import inspect as inspected

    return inspected(native_directory(model))


def write_report(
    model: Name,
    compare: Name | None = None,
    tasks: Name | Iterable[Name] = (),
    *,
    out: Name | None = None,
    data_dir: Name | None = None,
    device: str | torch.device = "cpu",
) -> Path:
    """Write one HTML file on a native checkpoint: sizes, results, errors by layer, checks.

    Args:
        model: its directory or hub id.
        compare: the model it was made from; the parts that compare the two need it.
        tasks: tasks that are evaluated first and saved, as by :func:`evaluate` with ``save``.
        out: the file, replaced if it exists; by default ``report.html`` in a local checkpoint, or
            ``MODEL-report.html`` in the working directory for a hub id.
        data_dir: directory with local copies of corpora and tasks, for ``tasks``.
        device: where the model and the baseline run.

    Returns:
        The file.

    Raises:
        QtoolError: not a native checkpoint, a baseline of other sizes or that is ``model`` itself,
            or ``data_dir`` without ``tasks``.

    Example::

        qtool.write_report("demo-lqq", compare="demo", tasks=["demo"])
    """
    from qtool.pipeline.given_model import native_directory
    from qtool.pipeline.run import default_out
    from qtool.report.build import report

    names = require_names("tasks", tasks)
    if data_dir is not None and not names:
        raise QtoolError(f"--data-dir {data_dir}: it is for --tasks, and none is named")
    directory = native_directory(model)
    if out is None and not expand_home(model).is_dir():
        out = default_out(model, "report.html")
    return report(
        directory,
        str(compare) if compare is not None else None,
        names,
        out=require_new_path("out", out) if out is not None else None,
        data_dir=require_path("data_dir", data_dir) if data_dir is not None else None,
        device=str(device),
    )


def load(
    model: Name,
    *,
    device: str | torch.device = "cpu",
    device_map: str | dict[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    kv: str | None = None,
) -> PreTrainedModel:
    """A transformers model in eval mode; its quantized linears run packed weights.

    Args:
        model: a directory, a hub id or ``demo``, quantized by qtool or not.
        device: where it runs: ``cpu``, ``cuda`` or ``cuda:N``.
        device_map: transformers' placement, such as ``auto``, instead of ``device``.
        dtype: dtype of what is not quantized, or its name; by default the checkpoint's.
        kv: KV-cache quantizer; by default the checkpoint's. A static quantizer must be the
            checkpoint's own.

    Raises:
        QtoolError: if it is not a loadable model, or ``kv`` is not for it.

    Example::

        model, tokenizer = qtool.load("demo-lqq"), qtool.load_tokenizer("demo-lqq")
    """
    from qtool.runtime.load import load as loaded

    return loaded(model, device=device, device_map=device_map, dtype=dtype, kv=kv)


def load_tokenizer(model: Name) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model``: a directory, a hub id or ``demo``.

    Raises:
        QtoolError: if there is none.
    """
    from qtool.runtime.load import load_tokenizer as loaded

    return loaded(model)


def schemes() -> list[tuple[str, str, str]]:
    """All schemes, plugins' included: name, variants of the recipe, description."""
    from qtool import recipes

    return recipes.overview()


def departures() -> list[tuple[str, str, str, str]]:
    """Where built-in recipes differ from their papers: scheme, variant, what is done, effect."""
    from qtool import recipes

    return [(scheme, variant, d.what, d.effect) for scheme, variant, d in recipes.departures()]


def export_formats() -> list[tuple[str, str]]:
    """All formats that :func:`export` writes, plugins' included: name and description."""
    from qtool.exchange.export_formats import EXPORT_FORMATS

    plugins.load()
    return [(target.name, target.about) for target in EXPORT_FORMATS.values()]
