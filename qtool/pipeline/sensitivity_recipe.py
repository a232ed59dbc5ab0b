"""Writes the recipe that a sensitivity chooses, and all that was measured for it.

:mod:`~qtool.pipeline.sensitivity` measures and chooses; here the model is found and loaded, and
what would fail after the measurements, which take long, is refused before them.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from qtool import recipes, schemes
from qtool.data.defaults import SENSITIVITY_SAMPLES
from qtool.data.mix import CalibrationMix, count_windows
from qtool.errors import QtoolError, in_one_line, require_positive, suggest
from qtool.io.check_source import require_tied
from qtool.io.safetensors import write_json, write_text
from qtool.io.source import Checkpoint
from qtool.models.torch_defaults import torch_defaults
from qtool.pipeline.calibration_windows import Windows
from qtool.pipeline.free_memory import host_memory
from qtool.pipeline.job import Job
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.planning.memory import HOST_SHARE
from qtool.pipeline.quantize import job_of, versions
from qtool.pipeline.run import default_text
from qtool.pipeline.sensitivity import Sensitivity, recipes_of, sensitivity
from qtool.progress import Progress
from qtool.recipes import Recipe
from qtool.recipes.schema import GIVEN
from qtool.runtime.load import load
from qtool.units import bytes_text

#: the divergence is measured on one of so many windows; GPTQ looks at the others
MEASURED_OF = 4


@torch_defaults()
def write_recipe(
    directory: Path,
    choices: Sequence[str],
    budget_bits: float,
    out: Path,
    options: QuantizeOptions,
    *,
    recipe: str,
    text: "CalibrationMix | None",
    device: str,
    progress: Progress | None,
) -> Sensitivity:
    """Write both files of :func:`sensitivity` for the model in ``directory``: see the public API.

    Args:
        recipe: the variant that gives the methods, among the recipes of the choice with the fewest
            bits (:func:`fewest_bits`); if there is none of that name, as in
            :func:`qtool.recipes.load`.
        text: the calibration text; by default as in :func:`qtool.pipeline.run.run`.

    Raises:
        QtoolError: anything wrong with the input, or a file already exists.
    """
    require_positive("--budget-bits", budget_bits)
    facts_file = out.with_suffix(".json")
    _require_writable(out, facts_file)
    samples = count_windows(text, options.samples, SENSITIVITY_SAMPLES)
    if recipe not in recipes.VARIANTS:
        raise QtoolError(f"--recipe {recipe!r}: {suggest(recipe, recipes.VARIANTS)}")
    least = fewest_bits(choices)
    source = Checkpoint(directory)
    methods = recipes.load(least.scheme, default=recipe)  # a registered recipe may lack it
    job = job_of(source, replace(methods, layers=least.layers))
    require_tied(source, job)
    windows = Windows(
        source,
        replace(job, recipe=replace(job.recipe, windows=GIVEN)),
        default_text(directory) if text is None else text,
        replace(options, samples=samples),
        device,
    ).drawn
    looked_at, measured = (
        _parted(windows.tokens) if job.rounding.needs_data else ([], windows.tokens)
    )
    _require_memory(job, measured, len(recipes_of(choices)), device)
    try:
        model = load(directory, device=device, dtype=torch.float32 if device == "cpu" else None)
        found = sensitivity(
            job, model, measured, looked_at, choices, budget_bits, progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise QtoolError(
            f"{device} ran out of memory ({in_one_line(error)}) for the model and what it says of "
            "the windows: free memory, or pass smaller --samples or --seqlen"
        ) from error
    asked = {"source": source.identity(), "calibration": windows.facts, "budget_bits": budget_bits}
    write_json(facts_file, {**asked, **found.as_dict(), "versions": versions()})
    write_text(out, recipes.as_yaml(found.recipe))
    return found


def fewest_bits(choices: Sequence[str]) -> Recipe:
    """The recipe of the choice whose weights, then whose inputs, have the fewest bits.

    Of several it is the first. Layers with fewer bits lose most, so that all layers get the methods
    that are made for these.
    """

    def bits(recipe: Recipe) -> tuple[int, int]:
        scheme = schemes.get(str(recipe.layers[0].scheme))
        return scheme.code_bits, scheme.activation.bits

    return min(filter(None, recipes_of(choices).values()), key=bits)


def _require_writable(out: Path, facts_file: Path) -> None:
    """Refuse files that could not be written, before the measurements, which take long."""
    try:
        for path in (out, facts_file):
            if path.exists():
                raise QtoolError(f"{path} exists already; choose another --out or remove it")
        if facts_file == out or not out.parent.is_dir():
            raise QtoolError(f"--out {out}: a YAML file in a directory that exists is expected")
        TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise QtoolError(f"--out {out}: cannot be written there: {error.strerror}") from error


def _parted(batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Windows ``[1, S]`` that GPTQ looks at, and those on which the divergence is measured.

    The latter are every fourth one, from the first on: GPTQ makes the error smaller on windows that
    it has seen than on others.
    """
    windows = [window for ids in batches for window in ids.split(1)]
    if len(windows) < 2:
        raise QtoolError(
            f"{len(windows)} calibration window: two or more are expected, since the divergence is "
            "measured on a fourth of them, and GPTQ looks at the others"
        )
    measured = windows[::MEASURED_OF]
    return [w for i, w in enumerate(windows) if i % MEASURED_OF], measured


def _require_memory(job: Job, windows: Sequence[Tensor], choices: int, device: str) -> None:
    """Refuse what does not fit host memory.

    That is a byte for each weight in each of the ``choices``, and on a CPU the model's
    log-probabilities on ``windows`` in float32, on a GPU the float weights that wait.
    """
    tokens = sum(ids.numel() for ids in windows)
    weights = sum(prod(shape) for b in range(job.blocks) for shape in job.linears(b).values())
    need = choices * weights
    if device == "cpu":
        need += 4 * job.namespace.vocab_size * tokens
    else:
        need += job.source_dtype.itemsize * weights
    if need > (free := HOST_SHARE * host_memory()[1]):
        raise QtoolError(
            f"what the model says of {tokens} tokens, and its weights in {choices} choices, take "
            f"{bytes_text(need)} of host memory, where {bytes_text(free)} are free for them: pass "
            "fewer --choices, or smaller --samples or --seqlen"
        )
