"""Writes the recipe that a sensitivity chooses, and all that was measured for it.

:mod:`~qtool.pipeline.sensitivity` measures and chooses; here the model is found and loaded, and
what would fail after the measurements, which take long, is refused before them.
"""

from collections.abc import Sequence
from dataclasses import replace
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
    _require_memory(job, windows.tokens)
    try:
        model = load(directory, device=device, dtype=torch.float32 if device == "cpu" else None)
        found = sensitivity(job, model, windows.tokens, choices, budget_bits, progress=progress)
    except torch.OutOfMemoryError as error:
        raise QtoolError(
            f"{device} ran out of memory ({in_one_line(error)}) for the model and what it makes of "
            "one window: free memory, or pass a smaller --seqlen"
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
    for path in (out, facts_file):
        if path.exists():
            raise QtoolError(f"{path} exists already; choose another --out or remove it")
    if facts_file == out or not out.parent.is_dir():
        raise QtoolError(f"--out {out}: a YAML file in a directory that exists is expected")
    try:
        TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise QtoolError(f"--out {out}: cannot be written there: {error.strerror}") from error


def _require_memory(job: Job, windows: Sequence[Tensor]) -> None:
    """Refuse windows if the model's log-probabilities for them, in float32, do not fit memory."""
    need = 4 * job.namespace.vocab_size * sum(ids.numel() for ids in windows)
    if need > (free := HOST_SHARE * host_memory()[1]):
        raise QtoolError(
            f"what the model says of {sum(map(len, windows))} windows takes {bytes_text(need)} of "
            f"host memory, where {bytes_text(free)} are free for it: pass smaller --samples or "
            "--seqlen"
        )
