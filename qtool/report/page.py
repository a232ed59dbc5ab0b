"""The report as one HTML file: no network, no script; plots are inline SVG, light and dark are the
reader's choice.
"""

from datetime import UTC, datetime
from pathlib import Path

import qtool
from qtool.report import origin as report_origin
from qtool.report import plots as report_plots
from qtool.report import quality as report_quality
from qtool.report import tables as report_tables
from qtool.report import words as report_words
from qtool.report.data import Report
from qtool.report.html import Html, join, tag

STYLE = Path(__file__).with_name("report.css")
#: title and content of each part, in reading order
PARTS = (
    ("Quality", report_quality.quality),
    ("Size", report_tables.size),
    ("Quantization error by layer", report_plots.layer_errors),
    ("Activation ranges", report_plots.activations),
    ("KV cache", report_plots.kv_cache),
    ("Verification", report_tables.verification),
    ("Model", report_origin.model),
    ("Recipe and calibration", report_origin.recipe),
    ("Time and memory of the run", report_origin.run),
    ("How to reproduce it", report_origin.reproduce),
    ("What the words mean", report_words.words),
)


def render(report: Report) -> str:
    """The page."""
    name = report_tables.title(report)
    parts = [tag("section", tag("h2", title), part(report)) for title, part in PARTS]
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = tag(
        "main",
        tag("h1", name),
        tag(
            "p",
            f"Report of {report.directory} by qtool {qtool.__version__}, {when}",
            class_="quiet",
        ),
        tag("p", report_origin.summary(report), class_="lead"),
        report_tables.tiles(report),
        *parts,
    )
    head = join(
        Html(
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        ),
        tag("title", name),
        tag("style", Html(STYLE.read_text())),
    )
    return f'<!doctype html>\n<html lang="en">{tag("head", head)}{tag("body", page)}</html>\n'
