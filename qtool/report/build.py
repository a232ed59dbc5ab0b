"""``qtool report``: sizes, checks, results, errors and ranges of a quantized model on one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.data import corpora
from qtool.errors import CheckFailed, QtoolError
from qtool.eval import saved
from qtool.eval.channel_range import channel_amax, role, worst
from qtool.eval.checkpoints import evaluate_checkpoints
from qtool.eval.kv_error import kv_errors
from qtool.eval.perplexity import cut_windows
from qtool.format import native_format
from qtool.format.stored_linears import packed_names
from qtool.io.integrity import read_record, recorded_transforms
from qtool.io.model_directory import directory_of
from qtool.io.run_record import read_run
from qtool.io.safetensors import write_text
from qtool.io.source import Checkpoint, read_config
from qtool.io.source_names import adopt
from qtool.models import family_of
from qtool.models.architecture import Architecture
from qtool.models.family import REQUIRED
from qtool.models.torch_defaults import torch_defaults
from qtool.pipeline.inspect import Row, inspect
from qtool.pipeline.verify import Verified, verify
from qtool.report.data import Check, LayerErrors, Report, Size, quality, recorded_errors
from qtool.runtime.load import load, load_tokenizer
from qtool.runtime.read_linear import load_linear

WINDOWS, TOKENS = 4, 512


@torch_defaults()
def report(
    directory: Path,
    compare: str | None,
    tasks: list[str],
    *,
    out: Path | None,
    data_dir: Path | None,
    device: str,
) -> Path:
    """Write the report of the native checkpoint ``directory``; returns the file.

    It is ``report.html`` in the directory unless ``out`` says otherwise.

    Args:
        compare: the baseline; without it the measurements that need one are left out.
        tasks: tasks that are first evaluated, with results kept in eval.json.

    Raises:
        QtoolError: the baseline has other sizes or is ``directory`` itself, or an evaluation fails.
        CheckFailed: a check failed; the page is written and names it.
    """
    from qtool.report.page import render  # matplotlib takes seconds to import

    if compare is not None:
        baseline = directory_of(compare)
        require_same_sizes(read_config(directory), read_config(baseline), compare)
        if baseline.samefile(directory):
            raise QtoolError(
                f"--compare {compare} is the model of the report itself: pass the model that was "
                "quantized"
            )
    out = out or directory / "report.html"
    if out.is_dir():
        raise QtoolError(f"--out {out} is a directory: a file to write is expected")
    if not out.parent.is_dir():
        raise QtoolError(f"{out.parent} is no directory: the report cannot be written there")
    if tasks:
        evaluate_checkpoints(tasks, directory, compare, device=device, save=True, data_dir=data_dir)
    found = collect(directory, compare, device)
    write_text(out, render(found))
    if problems := [problem for check in found.checks for problem in check.problems]:
        more = f" ({len(problems)} problems in all)" if len(problems) > 1 else ""
        raise CheckFailed(f"{directory}: {problems[0]}{more}; {out} says so too")
    return out


def collect(directory: Path, compare: str | None, device: str) -> Report:
    """All data of the report; data that is not recorded is measured.

    Nothing is measured on a checkpoint that fails a check.
    """
    checkpoint, record = Checkpoint(directory), read_record(directory)
    base = None if compare is None else directory_of(compare)
    recorded = record.get("source", {}).get("fingerprint", "")
    source = saved.identity(base) if base else recorded
    verified = list(verify(directory, device=device))
    passed = not any(row.problem for row in verified)
    errors = recorded_errors(record.get("blocks", []))
    if errors is None and base and not recorded_transforms(record):
        errors = weight_errors(checkpoint, Checkpoint(base))
    return Report(
        directory,
        checkpoint.config,
        record,
        sizes(inspect(directory)),
        checks(verified),
        baseline=compare,
        is_source=source == recorded,
        quality=quality(saved.read(directory), saved.identity(directory), source),
        errors=errors,
        run=read_run(directory, record.get("job", {})),
        **(_measured(directory, base, checkpoint.config, device) if passed else {}),
    )


def require_same_sizes(config: Mapping[str, Any], baseline: Mapping[str, Any], name: str) -> None:
    """Refuse a baseline ``name`` from which the model of ``config`` cannot have been made.

    Raises:
        QtoolError: names the first size that differs.
    """
    there, here = ({"model_type": one.get("model_type")} for one in (baseline, config))
    if there == here:
        there, here = _required(baseline), _required(config)
    for key, value in here.items():
        if there[key] != value:
            raise QtoolError(
                f"--compare {name}: {key} is {there[key]!r} there and {value!r} here; pass the "
                "model that was quantized"
            )


def _required(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in a config.json, under any of their names (GPT-2's ``n_embd``)."""
    settings = family_of(config).settings(config)
    return {key: getattr(settings, key, None) for key in REQUIRED}


def sizes(rows: Sequence[Row]) -> list[Size]:
    """The rows of ``inspect``, grouped by role and format."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        stored = f"{row.scheme}, {row.layout}" if row.layout else row.scheme
        found.setdefault((role(row.name), stored), []).append(row)
    return [
        Size(
            kind,
            stored,
            len(same),
            sum(r.weights for r in same),
            sum(r.nbytes for r in same),
            bool(same[0].layout),
        )
        for (kind, stored), same in found.items()
    ]


def checks(rows: Sequence[Verified]) -> list[Check]:
    """The rows of ``verify`` grouped by their arithmetic; rows that ran none are one group."""
    found: dict[str, list[Verified]] = {}
    for row in rows:
        found.setdefault(row.ran, []).append(row)
    return [
        Check(
            ran,
            len(same),
            max(r.error for r in same),
            [f"{r.name}: {r.problem}" for r in same if r.problem],
        )
        for ran, same in found.items()
    ]


@torch.no_grad()
def weight_errors(checkpoint: Checkpoint, source: Checkpoint) -> LayerErrors | None:
    """``||V - W|| / ||W||`` of all packed linears V, if the recipe only rounds their weights W.

    It is None if the source has no plain weights, as the quantized source of an import.
    """
    family = family_of(source.config)
    adopt(source, Architecture(source.config, family))
    errors, undefined = dict[str, dict[int, float]](), list[str]()
    checkpoint_format = native_format(checkpoint.config)
    for name in packed_names(checkpoint):
        if (linear_format := checkpoint_format.of(name)) and f"{name}.weight" in source:
            weight = source.read(f"{name}.weight").float()
            rounded = load_linear(checkpoint, name, linear_format, torch.device("cpu")).dequantize()
            block, _ = family.place(name)
            assert block is not None  # else load_linear refuses the name
            error, norm = float((rounded - weight).norm()), float(weight.norm())
            if error and not norm:
                undefined.append(name)
                continue
            by_block = errors.setdefault(role(name), {})
            by_block[block] = max(by_block.get(block, 0.0), error / (norm or 1.0))
    return LayerErrors("weight", errors, undefined) if errors or undefined else None


def _measured(
    directory: Path, base: Path | None, config: dict[str, Any], device: str
) -> dict[str, Any]:
    """Activation ranges of both models and the KV cache's error.

    They are measured on windows of the text that ships with qtool.
    """
    kv = config["quantization_config"].get("kv")
    if not base and not kv:
        return {}
    windows = _windows(directory, config)
    model = load(directory, device=device)
    found: dict[str, Any] = {"windows": tuple(windows.shape), "kv": kv_errors(model, windows)}
    if base:
        after = channel_amax(model, windows)
        del model  # the baseline needs the memory
        found["ranges"] = worst(channel_amax(load(base, device=device), windows), after)
    return found


def _windows(directory: Path, config: dict[str, Any]) -> Tensor:
    """``[WINDOWS, tokens]`` ids of the demo's held-out text."""
    text = corpora.load("demo", split=corpora.TEST).text
    ids = torch.tensor(load_tokenizer(directory)(text, verbose=False)["input_ids"])
    return cut_windows(ids, Architecture(config, family_of(config)).window(TOKENS))[:WINDOWS]
