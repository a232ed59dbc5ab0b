"""The report as one HTML file without network or script, light or dark.

``template/report.html.j2`` is the template. Jinja escapes all text that is not marked as HTML here,
since anyone may have chosen the names in a checkpoint.
"""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from statistics import fmean, median
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import qtool
from qtool.eval.channel_range import ChannelRange, outlier
from qtool.report import commands, glossary, plots, rows
from qtool.report.data import Quality, Report, Size, experts, gains
from qtool.table import decimal
from qtool.units import bytes_text, times

#: most bytes a second that a decode step of one token can read on an NVIDIA H200
BANDWIDTH = 4.8e12
ERRORS = {
    "output": "Relative error of each linear's output on the calibration text, "
    "‖X(W−V)ᵀ‖ / ‖XWᵀ‖, recorded by GPTQ while it quantized.",
    "block output": "Loss of each block's output against its teacher's after distillation.",
    "weight": "Relative error of each weight, ‖V−W‖ / ‖W‖: what rounding alone does, after the "
    "transforms.",
}


def render(report: Report) -> str:
    """The HTML of the page."""
    environment = Environment(
        loader=PackageLoader("qtool.report", "template"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"nbytes": bytes_text, "plain": rows.plain}
    environment.filters["quote"] = lambda path: shlex.quote(str(path))
    return environment.get_template("report.html.j2").render(view(report))


def view(report: Report) -> dict[str, Any]:
    """The variables of the template, from ``report``."""
    blocks = report.provenance.get("blocks", [])
    total, each_expert = summed(report.sizes), experts(blocks)
    by_size = sorted(report.sizes, key=lambda s: (not s.packed, -s.nbytes))
    models = shlex.quote(str(report.directory)), shlex.quote(report.baseline or "BASE")
    return {
        "report": report,
        "title": title(report),
        "version": qtool.__version__,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "verdict": verdict(report),
        "failed": [problem for check in report.checks for problem in check.problems],
        "checked": sum(check.count for check in report.checks),
        "check_rows": rows.checks(report.checks),
        "packed": [s for s in report.sizes if s.packed],
        "rest": [s for s in report.sizes if not s.packed],
        "total": total,
        "size_rows": rows.sizes([*by_size, total]),
        "summed": summed,
        "bandwidth": BANDWIDTH,
        "result_rows": [result(q) for q in report.quality],
        "without_baseline": commands.evaluations(
            [q for q in report.quality if not q.baseline], *models
        ),
        "without_results": commands.evaluation(commands.TASKS, *models),
        "rises": [
            rises(q) for q in report.quality if len(q.rises) > 1 and all(map(isfinite, q.rises))
        ],
        "errors": errors(report),
        "errors_are": ERRORS.get(report.errors.what, "") if report.errors else "",
        "gain_rows": rows.gains(gains(blocks)),
        "experts": each_expert,
        "expert_rows": rows.experts(each_expert),
        "ranges": [ranges(one) for one in report.ranges],
        "cache": cache(report),
        "import_rows": rows.imported(report),
        "method_rows": rows.methods(report),
        "layer_rows": rows.layers(report),
        "calibration_rows": rows.calibration(report),
        "model_rows": rows.model(report),
        "run_rows": rows.run(report.run),
        "commands": commands.commands(report),
        "recipe_file": commands.recipe_file(report),
        "recipe_name": commands.RECIPE,
        "glossary": glossary.entries(report),
    }


def title(report: Report) -> str:
    """The page's title: ``source, quantized to scheme``."""
    source = report.provenance.get("source", {}).get("directory", report.directory.name)
    return f"{source}, quantized to {report.quantization['scheme']}"


def verdict(report: Report) -> list[tuple[str, bool]]:
    """The most important findings, each with whether it is good; a failed check comes first.

    A change from another model than the source names it.
    """
    total = summed(report.sizes)
    other = "" if report.is_source else f" from {report.baseline}"
    changes: dict[str, str] = {}  # the latest for equal options
    for q in report.quality:
        if q.change and q.change.is_log:
            changes[q.title] = f"{q.change.ratio - 1:+.1%} perplexity{other} ({q.title})"
        elif q.change and q.metric == "acc":
            changes[q.title] = f"{100 * q.change.change:+.1f} points{other} ({q.title})"
    size = f"{times(2 * total.weights, total.nbytes)} than 16 bits"
    found = [(finding, True) for finding in (size, *changes.values())]
    bad = sum(len(check.problems) for check in report.checks)
    if bad:
        return [(f"{bad} check{'s' * (bad > 1)} FAILED", False), *found]
    return [*found, ("all checks passed", True)]


def summed(sizes: Sequence[Size]) -> Size:
    """The sum of ``sizes`` as one row."""
    return Size(
        "everything",
        "",
        sum(s.count for s in sizes),
        sum(s.weights for s in sizes),
        sum(s.nbytes for s in sizes),
        False,
    )


def result(q: Quality) -> rows.Row:
    """Task, metric, the model's and the baseline's value, the change, and the number of samples."""
    own, base, change, ratio = numbers(q)
    task = _with_note(q.result.task, ", ".join(q.options))
    return task, q.metric, own, base, _with_note(change, ratio), rows.plain(q.result.samples)


def _with_note(text: str, note: str) -> str:
    """HTML of ``text`` with a quiet ``note`` behind it, if there is one."""
    return Markup('{} <span class="quiet">{}</span>').format(text, note) if note else text


def numbers(q: Quality) -> tuple[str, str, str, str]:
    """The model's and the baseline's value, the change and the ratio, with 95 % intervals."""
    scale, digits, unit = (100, 2, " %") if q.metric.startswith("acc") else (1, 3, "")

    def value(number: float, interval: float | None, unit: str = unit) -> str:
        within = "" if interval is None else f" ± {decimal(scale * interval, digits)}"
        return f"{decimal(scale * number, digits)}{within}{unit}"

    own = value(q.value.value, q.value.interval)
    if not q.baseline or not q.change:
        return own, "–", "–", ""
    base, sign = value(q.baseline.value, q.baseline.interval), "+" if q.change.change >= 0 else "−"
    unpaired = "" if q.change.paired or q.change.stderr is None else ", unpaired"
    if q.change.is_log:
        interval = "" if q.change.interval is None else f" ± {q.change.interval:.4f}"
        change = f"{sign}{abs(q.change.change):.4f}{interval} nats{unpaired}"
        return own, base, change, f"× {decimal(q.change.ratio)}"
    points = " points" if unit else ""
    return own, base, sign + value(abs(q.change.change), q.change.interval, points) + unpaired, ""


def rises(q: Quality) -> dict[str, Any]:
    """The plot of log-perplexity's rise by window."""
    mean, worse = fmean(q.rises), sum(rise > 0 for rise in q.rises)
    heading = f"{q.title}: rise of log-perplexity by window"
    drawn = plots.stem(
        heading,
        dict(enumerate(q.rises)),
        "window",
        "rise, nats a token",
        limits=plots.limits(q.rises),
        mean=mean,
    )
    reading = (
        f"{worse} of {len(q.rises)} windows are harder for the quantized model; the dashed line "
        f"is the mean, {mean:+.4f}."
    )
    return {"title": heading, "plot": Markup(drawn), "reading": reading}


def errors(report: Report) -> list[dict[str, Any]]:
    """A plot of errors by block for each role of linear, all on one scale."""
    if report.errors is None or not report.errors.by_role:
        return []
    label = "loss" if report.errors.what == "block output" else "relative error"
    return _by_block(f"{report.errors.what.capitalize()} error of", label, report.errors.by_role)


def _by_block(
    what: str, label: str, found: Mapping[str, Mapping[int, float]]
) -> list[dict[str, Any]]:
    """A plot of numbers by block for each name in ``found``, all on one scale."""
    scale = plots.limits([number for by_block in found.values() for number in by_block.values()])
    shown = []
    for name, by_block in found.items():
        worst = max(by_block, key=by_block.__getitem__)
        drawn = plots.stem(f"{what} {name} by block", by_block, "block", label, limits=scale)
        reading = (
            f"Median {median(by_block.values()):.4f}; worst {by_block[worst]:.4f} in block {worst}."
        )
        shown.append({"title": name, "plot": Markup(drawn), "reading": reading})
    return shown


def ranges(one: ChannelRange) -> dict[str, Any]:
    """The input ranges of a linear before and after, on one scale."""
    relative = [amax / amax.median().clamp_min(1e-30) for amax in (one.before, one.after)]
    _, top = plots.limits(torch.cat(relative).tolist())
    sides = []
    for name, amax, scaled in zip(
        ("baseline", "quantized"), (one.before, one.after), relative, strict=True
    ):
        drawn = plots.channels(
            f"{name}: input ranges of {one.name}", scaled, top, before=name == "baseline"
        )
        peak = f"largest channel is {outlier(amax):.1f} × the median one"
        if not amax.median():
            peak = "median channel is 0"
        reading = f"The {peak}; the largest value is {float(amax.max()):.3g}."
        sides.append({"title": name, "plot": Markup(drawn), "reading": reading})
    return {"name": one.name, "sides": sides}


def cache(report: Report) -> list[dict[str, Any]]:
    """Errors of the quantized cache's keys and values by block."""
    if not report.quantization.get("kv") or not report.kv:
        return []
    keys = {block: error.keys for block, error in report.kv.items()}
    values = {block: error.values for block, error in report.kv.items()}
    return _by_block("Relative error of the", "relative error", {"keys": keys, "values": values})
