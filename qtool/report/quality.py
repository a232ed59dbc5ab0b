"""The report's results: perplexity and accuracy before and after, with intervals."""

from statistics import fmean

from qtool.report import svg
from qtool.report.data import Quality, Report
from qtool.report.html import Html, figure, join, missing, plots, table, tag

INTERVAL = 1.96  # standard errors on either side hold 95 %


def quality(report: Report) -> Html:
    """Results with 95 % intervals, and where each text got harder."""
    command = f"qtool eval wikitext2 piqa --model {report.directory} --compare {report.baseline or 'BASE'} --save"
    if not report.quality:
        return missing("No results are kept beside this model. Fill it with", command)
    header = ("task", "metric", "quantized", "baseline", "change", "samples")
    rows = [(_asked(q), q.metric, *_numbers(q), f"{q.result.samples:,}") for q in report.quality]
    text = (
        "± is the half-width of a 95 % interval (1.96 standard errors). A perplexity's change is the rise of its "
        "logarithm in nats a token, paired window by window; an accuracy's interval takes both models as independent, "
        "which overstates it."
    )
    shown = [_rises(q) for q in report.quality if len(q.rises) > 1]
    gap = (
        []
        if all(q.baseline for q in report.quality)
        else [missing("A baseline's result is missing. Fill it with", command)]
    )
    return join(
        table(header, rows, "llrrrr"),
        tag("p", text, class_="quiet"),
        *gap,
        plots(*shown) if shown else "",
    )


def _asked(q: Quality) -> Html:
    limit, seqlen = q.facts.get("limit"), q.result.details.get("seqlen")
    how = [f"the first {limit:,} only"] if limit else []
    how += [f"windows of {seqlen:,} tokens"] if seqlen else []
    how += [f"KV cache {q.facts['kv']}"] if "kv" in q.facts else []
    return join(q.result.task, tag("span", ", ".join(how), class_="quiet") if how else "")


def _numbers(q: Quality) -> tuple[str, str, Html]:
    scale, digits, unit = (100, 2, " %") if q.metric.startswith("acc") else (1, 3, "")

    def value(number: float, stderr: float | None) -> str:
        interval = "" if stderr is None else f" ± {scale * INTERVAL * stderr:.{digits}f}"
        return f"{scale * number:.{digits}f}{interval}{unit}"

    own = value(q.value.value, q.value.stderr)
    if not q.baseline or not q.change:
        return own, "–", Html("–")
    base, sign = value(q.baseline.value, q.baseline.stderr), "+" if q.change.change >= 0 else "−"
    if not q.change.is_log:
        return (
            own,
            base,
            join(sign, value(abs(q.change.change), q.change.stderr).replace(" %", " points")),
        )
    interval = "" if q.change.stderr is None else f" ± {INTERVAL * q.change.stderr:.4f}"
    ratio = tag("span", f"× {q.change.ratio:.4f}", class_="quiet")
    return own, base, join(f"{sign}{abs(q.change.change):.4f}{interval} nats", ratio)


def _rises(q: Quality) -> Html:
    x = svg.axis("window", list(range(len(q.rises))), whole=True)
    mean, worse = fmean(q.rises), sum(rise > 0 for rise in q.rises)
    plot = svg.strip(
        f"Rise of log-perplexity by window of {q.result.task}",
        list(enumerate(q.rises)),
        x,
        svg.axis("rise, nats a token", q.rises),
        mean=mean,
    )
    harder = f"{worse} of {len(q.rises)} windows are harder for the quantized model"
    reading = f"{harder}; the dashed line is the mean, {mean:+.4f}."
    return figure(f"{q.result.task}: rise of log-perplexity by window", plot, reading)
