"""The commands that reproduce a checkpoint, from its provenance."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from qtool import recipes
from qtool.data.corpora import SOURCES
from qtool.errors import QtoolError
from qtool.eval.perplexity import SEQLEN
from qtool.report.data import Quality, Report

RECIPE = "recipe.yaml"
#: tasks in the command if nothing has been evaluated yet
TASKS = "wikitext2 piqa"


def commands(report: Report) -> list[str]:
    """The commands that quantize, verify, evaluate and report."""
    record, quantization = report.provenance, report.quantization
    directory, source = shlex.quote(str(report.directory)), record.get("source", {})
    if report.imported:
        layouts = {rule["layout"] for rule in quantization["rules"] if rule["scheme"]}
        layout = f" --layout {layouts.pop()}" if len(layouts) == 1 else ""
        imported = f"qtool import {_model(source)} --out {directory}{layout}"
        return [imported, f"qtool verify {directory}"]
    if not report.methods:
        return [f"qtool verify {directory}"]
    base = shlex.quote(report.baseline) if report.baseline else _model(source)
    quantize = f"qtool quantize {base} --scheme {quantization['scheme']} --recipe "
    quantize += RECIPE if recipe_file(report) else record["recipe"]["variant"]
    if calibration := record.get("calibration"):
        named = {
            "text": "calib",
            "samples": "samples",
            "seqlen": "seqlen",
            "seed": "seed",
            "windows": "windows",
        }
        quantize += "".join(
            f" --{flag} {shlex.quote(str(calibration[key]))}"
            for key, flag in named.items()
            if key in calibration
        )
    if quantization.get("kv") and not recipe_file(report):
        quantize += f" --kv {quantization['kv']}"
    if adapter := source.get("adapter"):
        quantize += f" --adapter {_model(adapter)}"
    if dtype := record.get("dtype"):
        quantize += f" --dtype {dtype['stored']}"
    if record.get("unknown_tensors"):
        quantize += " --keep-unknown"
    if (device := record.get("job", {}).get("device", "cpu")) != "cpu":
        quantize += f" --device {device}"
    return [
        f"{quantize} --out {directory}",
        f"qtool verify {directory}",
        *(evaluations(report.quality, directory, base) or [evaluation(TASKS, directory, base)]),
        f"qtool report {directory} --compare {base}",
    ]


def _model(record: Mapping[str, Any]) -> str:
    """The hub id, or else the directory, in the ``record`` of a source or an adapter, quoted."""
    return shlex.quote(record.get("hub id") or record.get("directory", "MODEL"))


def evaluations(rows: Sequence[Quality], directory: str, base: str) -> list[str]:
    """The commands that evaluate ``rows``, one for all rows with the same options."""
    by_options: dict[str, list[str]] = {}
    for row in rows:
        fact, result = row.facts, row.result
        options = [f"--limit {fact['limit']}"] if fact.get("limit") else []
        options += [f"--seqlen {fact['seqlen']}"] if fact.get("seqlen", SEQLEN) != SEQLEN else []
        options += [f"--{name} {fact[name]}" for name in ("kv", "dtype") if name in fact]
        options += ["--deterministic"] if fact.get("deterministic") else []
        tasks = by_options.setdefault(" ".join(options), [])
        is_file = result.kind == "perplexity" and result.task not in SOURCES
        if (task := shlex.quote(result.origin if is_file else fact["task"])) not in tasks:
            tasks.append(task)
    return [
        evaluation(" ".join(tasks), directory, base, options)
        for options, tasks in by_options.items()
    ]


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
    recipe: dict[str, Any] = {"scheme": quantization["scheme"], "layers": layers}
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
    group = rule["group_size"] or "channel"
    return {
        "match": rule["match"],
        "scheme": rule["scheme"],
        "group_size": group,
        "layout": rule["layout"],
    }


def _is_built_in(report: Report, layers: list[dict[str, Any]]) -> bool:
    variant = report.provenance["recipe"].get("variant")
    if variant not in recipes.VARIANTS:
        return False
    try:
        known = recipes.load(report.quantization["scheme"], variant)
    except QtoolError:
        return False
    rules = [
        (r.match, r.scheme, (r.group_size or "channel") if r.scheme else None, r.layout)
        for r in known.layers
    ]
    same = len(rules) == len(layers) and all(
        (match, scheme, group) == (layer["match"], layer["scheme"], layer.get("group_size"))
        and layout in (None, layer.get("layout"))
        for (match, scheme, group, layout), layer in zip(rules, layers, strict=False)
    )
    steps = [(step.name, dict(step.options)) for step in (*known.transforms, known.rounding)]
    return same and steps == [(name, dict(options)) for name, options in report.methods]
