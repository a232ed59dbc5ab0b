"""The report's plots: errors by layer, activation ranges before and after, the KV cache's error."""

from statistics import median

from qtool.eval.channel_range import ChannelRange, outlier
from qtool.report import svg
from qtool.report.data import Report, gains
from qtool.report.html import Html, figure, join, missing, plots, table, tag

BLOCK = "block"


def layer_errors(report: Report) -> Html:
    """One panel for each role of linear, all on one scale; then what the transforms gained."""
    return join(_errors(report), _gains(report))


def _errors(report: Report) -> Html:
    errors = report.errors
    if errors is None:
        return missing(
            "Not measured. Fill it with", f"qtool report {report.directory} --compare BASE"
        )
    values = [value for by_block in errors.by_role.values() for value in by_block.values()]
    x = svg.axis(
        BLOCK, [block for by_block in errors.by_role.values() for block in by_block], whole=True
    )
    y = svg.axis("loss" if errors.method == "distill" else "relative error", [0.0, *values])
    shown = []
    for role, by_block in errors.by_role.items():
        worst = max(by_block, key=by_block.__getitem__)
        reading = (
            f"Median {median(by_block.values()):.4f}; worst {by_block[worst]:.4f} in block {worst}."
        )
        title = f"{errors.what.capitalize()} error of {role} by block"
        shown.append(figure(role, svg.strip(title, list(by_block.items()), x, y), reading))
    return join(tag("p", EXPLAINED[errors.what]), plots(*shown))


EXPLAINED = {
    "output": "Relative error of each linear's output on the calibration text, ‖X(W−V)ᵀ‖ / ‖XWᵀ‖, recorded by GPTQ "
    "while it quantized. All panels share one scale: a linear that stands out is the one to give more bits.",
    "block output": "Loss of each block's output against its teacher's after distillation, as the run recorded it.",
    "weight": "Relative error of each weight, ‖V−W‖ / ‖W‖: what rounding alone does, after the transforms and whatever "
    "the inputs are. All panels share one scale.",
}


def _gains(report: Report) -> Html:
    rows = [
        (g.method, g.choices, f"{g.median:.3f}", f"{g.least:.3f}", f"{g.greatest:.3f}")
        for g in gains(report.provenance.get("blocks", []))
    ]
    if not rows:
        return Html("")
    header = ("method", "choices", "median", "best", "least effect")
    text = "The error each method looks at, after it divided by before it: 1 is no gain."
    return join(tag("h3", "What the methods gained"), tag("p", text), table(header, rows, "lrrrr"))


def activations(report: Report) -> Html:
    """Before and after, side by side on one scale, for one linear of each group."""
    if not report.ranges:
        return missing(
            "Not measured. Fill it with", f"qtool report {report.directory} --compare BASE"
        )
    windows, tokens = report.windows
    text = (
        f"max|X| of each input channel over {windows * tokens:,} tokens ({windows} windows of {tokens}) of the "
        "held-out text that ships with qtool, in units of the median channel. A quantizer whose scale follows the "
        "largest value has few codes left for a channel at 1 when another is at 50. Of each kind of input the block "
        "with the baseline's largest outlier is shown; each pair shares one scale."
    )
    names = [name for name, _ in report.methods[:-1]]
    changed = (
        f"The recipe's transforms: {', '.join(names)}."
        if names
        else "The recipe has no transform: nothing changes but rounding."
    )
    return join(tag("p", text), tag("p", changed), *(_pair(one) for one in report.ranges))


def _pair(one: ChannelRange) -> Html:
    before, after = (amax / amax.median().clamp_min(1e-30) for amax in (one.before, one.after))
    y = svg.axis("× median channel", [float(before.max()), float(after.max())])
    x = f"input channel (of {len(before):,})"
    readings = [
        f"The largest channel is {outlier(amax):.1f} × the median one; the largest value is {float(amax.max()):.3g}."
        for amax in (one.before, one.after)
    ]
    return join(
        tag("h3", one.name),
        plots(
            figure(
                "baseline",
                svg.area(
                    f"Baseline: input ranges of {one.name}", before.tolist(), x, y, kind="before"
                ),
                readings[0],
            ),
            figure(
                "quantized",
                svg.area(f"Quantized: input ranges of {one.name}", after.tolist(), x, y),
                readings[1],
            ),
        ),
    )


def kv_cache(report: Report) -> Html:
    """Error of keys and of values by block, if the cache is quantized."""
    kv = report.quantization.get("kv")
    if not kv or not report.kv:
        return tag(
            "p",
            "Kept in 16 bits: the recipe names no KV quantizer (",
            tag("code", "qtool quantize --kv kv4"),
            ").",
        )
    x = svg.axis(BLOCK, list(range(len(report.kv))), whole=True)
    y = svg.axis("relative error", [v for e in report.kv for v in (e.keys, e.values)])
    shown = []
    for name, values in (
        ("keys", [e.keys for e in report.kv]),
        ("values", [e.values for e in report.kv]),
    ):
        reading = f"Median {median(values):.4f}; worst {max(values):.4f} in block {values.index(max(values))}."
        shown.append(
            figure(
                name,
                svg.strip(f"Relative error of the {name} by block", list(enumerate(values)), x, y),
                reading,
            )
        )
    windows, tokens = report.windows
    text = (
        f"Quantizer {kv}. ‖X′−X‖ / ‖X‖ of keys (after RoPE) and values as attention reads them, over "
        f"{windows * tokens:,} tokens of the held-out text that ships with qtool."
    )
    return join(tag("p", text), plots(*shown))
