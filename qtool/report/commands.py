"""The commands that reproduce a checkpoint, from its provenance."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from qtool import recipes
from qtool.data.calibration_input import UNNAMED
from qtool.data.corpora import SOURCES, TEST
from qtool.data.defaults import EVALUATION_SEQLEN
from qtool.errors import QtoolError
from qtool.eval.results import TaskResult
from qtool.recipes import LayerRule
from qtool.report.data import Quality, Report

RECIPE = "recipe.yaml"
#: stands for calibration data that were given in Python
FILE = "FILE"
#: tasks in the command if nothing has been evaluated yet
TASKS = "wikitext2 piqa"


def commands(report: Report) -> list[str]:
    """The commands that quantize, verify, evaluate and report."""
    directory, source = shlex.quote(str(report.directory)), report.provenance.get("source", {})
    verify = f"qtool verify {directory}"
    if report.imported:
        layouts = {rule["layout"] for rule in report.quantization["rules"] if rule["scheme"]}
        layout = f" --layout {layouts.pop()}" if len(layouts) == 1 else ""
        return [f"qtool import {_model(source)} --out {directory}{layout}", verify]
    if not report.methods:
        return [verify]
    base = shlex.quote(report.baseline) if report.baseline else _model(source)
    quantized = base if report.is_source else _model(source)
    return [
        f"{_quantize(report, quantized)} --out {directory}",
        verify,
        *(evaluations(report.quality, directory, base) or [evaluation(TASKS, directory, base)]),
        f"qtool report {directory} --compare {base}",
    ]


def _quantize(report: Report, model: str) -> str:
    """The command that quantizes ``model`` again, but for ``--out``."""
    record, quantization, file = report.provenance, report.quantization, recipe_file(report)
    found = f"qtool quantize {model} --scheme {quantization['scheme']} --recipe "
    found += RECIPE if file else record["recipe"]["variant"]
    calibration = record.get("calibration") or {}
    for key in ("text", "samples", "seqlen", "seed", "windows", "data_dir"):
        if key in calibration:
            option = "calib" if key == "text" else key.replace("_", "-")
            value = FILE if key == "text" and calibration[key] in UNNAMED else calibration[key]
            found += f" --{option} {shlex.quote(str(value))}"
    if quantization.get("kv") and not file:
        found += f" --kv {quantization['kv']}"
    if adapter := record.get("source", {}).get("adapter"):
        found += f" --adapter {_model(adapter)}"
    if dtype := record.get("dtype"):
        found += f" --dtype {dtype['stored']}"
    if record.get("unknown_tensors"):
        found += " --keep-unknown"
    if (device := record.get("job", {}).get("device", "cpu")) != "cpu":
        found += f" --device {device}"
    return found


def _model(record: Mapping[str, Any]) -> str:
    """The hub id, or else the directory, in the ``record`` of a source or an adapter, quoted."""
    return shlex.quote(record.get("hub id") or record.get("directory", "MODEL"))


def evaluations(rows: Sequence[Quality], directory: str, base: str) -> list[str]:
    """The commands that evaluate ``rows``, one for all rows with the same options."""
    by_options: dict[str, list[str]] = {}
    for row in rows:
        fact, result = row.facts, row.result
        options = [f"--limit {fact['limit']}"] if fact.get("limit") else []
        if (seqlen := fact.get("seqlen", EVALUATION_SEQLEN)) != EVALUATION_SEQLEN:
            options.append(f"--seqlen {seqlen}")
        options += [f"--{name} {fact[name]}" for name in ("kv", "dtype") if name in fact]
        options += ["--deterministic"] if fact.get("deterministic") else []
        if directory_of_data := _data_dir(result):
            options.append(f"--data-dir {shlex.quote(directory_of_data)}")
        if fact.get("engine"):
            options += ["--engine vllm"]
        elif fact.get("device", "cpu") != "cpu":
            options += [f"--device {fact['device']}"]
        tasks = by_options.setdefault(" ".join(options), [])
        is_file = result.kind == "perplexity" and result.task not in SOURCES
        if (task := shlex.quote(result.origin if is_file else fact["task"])) not in tasks:
            tasks.append(task)
    return [
        evaluation(" ".join(tasks), directory, base, options)
        for options, tasks in by_options.items()
    ]


def _data_dir(result: TaskResult) -> str:
    """The ``--data-dir`` in which the local data of ``result`` lie; empty if they do not."""
    local = [f"tasks/{result.task}.jsonl"]
    if result.task in SOURCES and result.task != "demo":
        local = [pattern for pattern, _ in SOURCES[result.task][TEST].local]
    file = Path(result.origin)
    found = [pattern for pattern in local if file.match(pattern)]
    return str(file.parents[found[0].count("/")]) if found else ""


def evaluation(tasks: str, directory: str, base: str, options: str = "") -> str:
    """The command that evaluates ``tasks`` on model and baseline and keeps the results."""
    parts = ("qtool eval", tasks, f"--model {directory} --compare {base}", options, "--save")
    return " ".join(filter(None, parts))


def recipe_file(report: Report) -> str:
    """The recipe as YAML for ``quantize --recipe``; empty if it is a built-in variant."""
    quantization = report.quantization
    layers = [_layer(rule) for rule in quantization["rules"]]
    steps = [{name: dict(options)} if options else name for name, options in report.methods]
    if not steps or _is_built_in(report, layers):
        return ""
    recipe: dict[str, Any] = {"scheme": quantization["scheme"]}
    if about := report.provenance["recipe"].get("about"):
        recipe["about"] = about
    recipe["layers"] = layers
    if steps[:-1]:
        recipe["transforms"] = steps[:-1]
    recipe["rounding"] = steps[-1]
    if quantization.get("kv"):
        recipe["kv"] = quantization["kv"]
    if (least := report.provenance["recipe"].get("min_expert_tokens")) is not None:
        recipe["min_expert_tokens"] = least
    return yaml.safe_dump(recipe, sort_keys=False)


def _layer(rule: dict[str, Any]) -> dict[str, Any]:
    if not rule["scheme"]:
        return {"match": rule["match"], "scheme": None}
    named = {key: rule[key] for key in ("match", "scheme", "group_size", "layout")}
    return named | {"group_size": rule["group_size"] or "channel"}


def _is_built_in(report: Report, layers: list[dict[str, Any]]) -> bool:
    record = report.provenance["recipe"]
    variant = record.get("variant")
    if variant not in recipes.VARIANTS:
        return False
    try:
        known = recipes.load(report.quantization["scheme"], variant)
    except QtoolError:
        return False
    steps = [(step.name, dict(step.options)) for step in (*known.transforms, known.rounding)]
    return (
        steps == [(name, dict(options)) for name, options in report.methods]
        and len(known.layers) == len(layers)
        and all(map(_agrees, known.layers, layers))
        and record.get("min_expert_tokens") in (None, known.min_expert_tokens)
    )


def _agrees(rule: LayerRule, layer: Mapping[str, Any]) -> bool:
    """Whether ``layer`` is as ``rule`` says, which may name no layout, and Llama's names alone."""
    group = (rule.group_size or "channel") if rule.scheme else None
    same = (rule.scheme, group) == (layer.get("scheme"), layer.get("group_size"))
    named = f"{layer.get('match')}|".startswith(f"{rule.match}|")
    return same and named and rule.layout in (None, layer.get("layout"))
