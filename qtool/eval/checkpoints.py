"""Evaluates a checkpoint by its name, and a baseline with the same settings."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.eval import saved
from qtool.eval.engine import Engine, Model, require_engine
from qtool.eval.evaluate import LoadedTask, TaskKeywords, load_tasks, require_same_tokens
from qtool.eval.results import Results
from qtool.exchange.as_export import load_as_export, require_runs
from qtool.io.integrity import read_record
from qtool.io.model_directory import DEMO, directory_of
from qtool.io.source import Checkpoint
from qtool.models.architecture import DTYPES, dtype_name, require_dtype
from qtool.models.torch_defaults import torch_defaults
from qtool.runtime.load import load, load_tokenizer
from qtool.schemes.kv import require_kv


class EvaluateKeywords(TaskKeywords, total=False):
    """The keywords of :func:`evaluate_checkpoints` and of the tasks; each may be left out."""

    device: str | torch.device
    save: bool
    kv: str | None
    as_export: str | None
    dtype: str | torch.dtype | None
    tensor_parallel: int


@dataclass(frozen=True)
class _Settings:
    """Settings with which both the model and the baseline are evaluated.

    Attributes:
        store: the directory whose eval.json keeps the results of both; None keeps no results.
        options: options of :func:`qtool.eval.evaluate.load_tasks`.
    """

    tasks: list[str]
    device: str
    dtype: str | None
    engine: type[Engine] | None
    tensor_parallel: int
    store: Path | None
    options: Mapping[str, Any]

    def results(
        self, name: str | PathLike[str], kv: str | None = None, as_export: str | None = None
    ) -> Results:
        """Results of the checkpoint ``name``, in its native form or ``as_export``."""
        directory = directory_of(name)
        tasks = load_tasks(self.tasks, load_tokenizer(directory), **self.options)
        calibrated_on = _calibrated_on(directory)
        for task in tasks:
            if task.facts["sha256"] in calibrated_on:
                ranks.log(
                    f"{task.name} is a text that {name} was calibrated on: of other text its "
                    "perplexity may be higher"
                )
        with ExitStack() as opened:
            load_model = partial(self._load, opened, directory, tasks, kv, as_export)
            if self.store is None:
                model = load_model()
                return Results([result for task in tasks for result in task.evaluate(model)])
            facts = saved.environment(self.device, kv, self.dtype, self.engine)
            return saved.results(tasks, directory, load_model, self.store, facts)

    def _load(
        self,
        opened: ExitStack,
        directory: Path,
        tasks: Sequence[LoadedTask],
        kv: str | None,
        as_export: str | None,
    ) -> Model:
        """The model of ``directory``; closing ``opened`` also closes a model in an engine."""
        if self.engine is not None:
            lengths = [task.facts["seqlen"] for task in tasks if "seqlen" in task.facts]
            loaded = self.engine(
                directory,
                tokens=max(lengths) if len(lengths) == len(tasks) else None,
                dtype=self.dtype,
                tensor_parallel=self.tensor_parallel,
            )
            return opened.enter_context(closing(loaded))
        dtype = DTYPES[self.dtype] if self.dtype else None
        if as_export is not None:
            return load_as_export(directory, as_export, device=self.device, dtype=dtype)
        return load(directory, device=self.device, dtype=dtype, kv=kv)


@torch_defaults()
def evaluate_checkpoints(
    tasks: list[str],
    model: str | PathLike[str],
    compare: str | PathLike[str] | None = None,
    *,
    device: str | torch.device = "cpu",
    save: bool = False,
    kv: str | None = None,
    as_export: str | None = None,
    dtype: str | torch.dtype | None = None,
    engine: type[Engine] | None = None,
    tensor_parallel: int = 1,
    **options: Unpack[TaskKeywords],
) -> tuple[Results, Results | None]:
    """Results of ``tasks`` on ``model``, and on the baseline ``compare`` if one is given.

    Args:
        save: save the results of both in the model's eval.json, and reuse the results saved there.
        kv: KV-cache quantizer of the model while it is evaluated, by default its own; the baseline
            keeps its own.
        as_export: evaluate the model as transformers runs its export in this format
            (:mod:`qtool.exchange.as_export`).
        dtype: dtype of all that is not quantized in both models; by default the
            checkpoints' own.
        engine: the engine that loads the models and scores their tokens, in place of this process.
        tensor_parallel: number of GPUs over which the engine splits a model.
        options: options of :func:`qtool.eval.evaluate.load_tasks`.

    Raises:
        QtoolError: an unknown KV quantizer, dtype or format, or one that the model cannot have; a
            format with ``kv`` or ``save``; a text of which the two models' tokenizers give other
            tokens; an engine that is not installed, or an option that it does not support.
    """
    deterministic = options.get("deterministic", False)
    require_engine(engine, tensor_parallel, kv=kv, as_export=as_export, deterministic=deterministic)
    if dtype is not None:
        dtype = dtype_name(require_dtype("--dtype", dtype))
    store = directory_of(model)
    tokenizer = _loadable(store)
    base_tokenizer = None if compare is None else _loadable(directory_of(compare))
    if save and store == DEMO:
        raise QtoolError(
            "--save keeps results in the model's directory, and the demo's belongs to the package"
        )
    if kv is not None:
        require_kv(kv)
    if as_export is not None:
        require_runs(as_export)
        if kv is not None or save or deterministic:
            other = "--save" if save else f"--kv {kv}" if kv else "--deterministic"
            raise QtoolError(
                f"--as-export {as_export} goes without {other}: the results are transformers', not"
                " the native model's"
            )
    if base_tokenizer is not None:
        require_same_tokens(tasks, tokenizer, base_tokenizer, options.get("data_dir"))
    settings = _Settings(
        tasks, str(device), dtype, engine, tensor_parallel, store if save else None, options
    )
    results = settings.results(model, kv, as_export)
    return results, None if compare is None else settings.results(compare)


def _loadable(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without it or without safetensors is refused at the start."""
    Checkpoint(directory)
    return load_tokenizer(directory)


def _calibrated_on(directory: Path) -> set[str]:
    """sha256 of the texts on which the model in ``directory`` says that it was calibrated."""
    found = read_record(directory).get("calibration", {})
    return {part["sha256"] for part in found.get("parts", [found]) if "sha256" in part}
