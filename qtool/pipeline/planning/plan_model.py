"""Plans a run by names: finds the model and its headers, fits the recipe, counts the windows.

:mod:`qtool.pipeline.run` carries out what is planned here.
"""

from os import PathLike
from typing import TYPE_CHECKING

from qtool.data.mix import CalibrationMix, count_windows
from qtool.distributed import ranks
from qtool.errors import NotDownloaded, expand_home, require_positive
from qtool.io.integrity import INDEX
from qtool.io.model_directory import DEMO, UNREAD_WEIGHTS, require_tokenizer, what_is_there
from qtool.io.source import Checkpoint
from qtool.models.architecture import require_dtype
from qtool.models.torch_defaults import torch_defaults
from qtool.pipeline.given_model import Name, config_directory, config_of
from qtool.pipeline.job import Job
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.planning.estimate import H200
from qtool.pipeline.planning.plan import Plan, plan, require_devices
from qtool.pipeline.planning.repack import plan_repack
from qtool.pipeline.quantize import job_of, require_made
from qtool.recipes import Recipe

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel


@torch_defaults()
def plan_model(
    model: "Name | PreTrainedModel",
    recipe: Recipe,
    options: QuantizeOptions,
    *,
    text: "CalibrationMix | None",
    device_memory: float | None,
    device: str,
    gpus: int,
) -> Plan:
    """The plan of quantizing ``model`` by ``recipe``: see the public API.

    Args:
        text: the calibration text, of which only the windows are counted.
        device_memory: memory of the GPU, in GB (1e9 bytes); None: an H200's.

    Raises:
        QtoolError: what :func:`qtool.pipeline.run.run` would refuse for model, recipe or shapes.
    """
    if device_memory is not None:
        require_positive("--device-memory", device_memory)
    samples, config = count_windows(text, options.samples), config_of(model)
    source = None
    if isinstance(model, str | PathLike):
        if options.repacks(config, recipe, text):
            require_devices(device, gpus)
            return plan_repack(config_directory(model), recipe, options.layout)
        source = _local_source(model)
    if source:
        job = job_of(source, recipe, dtype=options.dtype, keep_unknown=options.keep_unknown)
        if job.needs_data and isinstance(text, str | PathLike):
            require_tokenizer(source.directory)
    else:
        cast = None if options.dtype is None else require_dtype("--dtype", options.dtype)
        job = Job.of(config, recipe, dtype=cast)
    if isinstance(model, str | PathLike):
        require_made(config_directory(model), job)
    return plan(
        job,
        samples,
        options.seqlen,
        H200.memory if device_memory is None else device_memory * 1e9,
        device=device,
        gpus=gpus,
        place=options.activations,
    )


def _local_source(model: Name) -> Checkpoint | None:
    """The checkpoint of a local directory or ``demo``, if its safetensors files are there."""
    directory = DEMO if model == "demo" else expand_home(model)
    problem = ""
    if (directory / INDEX).exists() or any(directory.glob("*.safetensors")):
        try:
            return Checkpoint(directory)
        except NotDownloaded as error:
            problem = str(error)
    elif any(any(directory.glob(name)) for name in UNREAD_WEIGHTS):
        problem = f"{directory}: {what_is_there(directory)}"
    if problem:
        ranks.log(
            f"{problem}; the plan is of config.json alone, and the weights were not looked at"
        )
    return None
