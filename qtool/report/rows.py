"""The rows of the page's tables, as text; the template has their headings."""

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.report.data import Check, Expert, Gain, Report, Size
from qtool.units import bytes_text, duration

Row = tuple[str, ...]
#: facts of config.json that the page shows, with what it calls them
CONFIG = {
    "architectures": "architecture",
    "num_hidden_layers": "blocks",
    "hidden_size": "hidden size",
    "intermediate_size": "MLP size",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key/value heads",
    "head_dim": "head dimension",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context, tokens",
    "dtype": "dtype of the rest",
}
#: the same for facts of the calibration; any other is shown under its own name
CALIBRATION = {
    "samples": "windows",
    "seqlen": "tokens a window",
    "windows": "their text",
    "sha256": "sha256 of the text",
    "tokens": "sha256 of the tokens",
}


def plain(value: object) -> str:
    """A value of a configuration as text for people."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def sizes(found: Sequence[Size]) -> list[Row]:
    """Role, format, count, weights, bytes and bits a weight."""
    return [
        (s.role, s.format, str(s.count), plain(s.weights), bytes_text(s.nbytes), f"{s.bits:.3f}")
        for s in found
    ]


def checks(found: Sequence[Check]) -> list[Row]:
    """What ran, number of linears, how many failed, and the largest relative distance."""
    return [
        (
            c.ran or "file or format",
            str(c.count),
            str(len(c.problems)),
            f"{c.error:.1e}" if c.ran else "",
        )
        for c in found
    ]


def experts(found: Sequence[Expert]) -> list[Row]:
    """Block, name, routed and added tokens, and the largest error."""
    return [
        (
            str(e.block),
            e.name,
            plain(e.routed),
            plain(e.added),
            "" if e.error is None else f"{e.error:.4f}",
        )
        for e in found
    ]


def gains(found: Sequence[Gain]) -> list[Row]:
    """Method, number of choices, and the median, best and worst factor."""
    return [
        (g.method, str(g.choices), f"{g.median:.3f}", f"{g.least:.3f}", f"{g.greatest:.3f}")
        for g in found
    ]


def imported(report: Report) -> list[Row]:
    """The settings of the tool whose checkpoint was imported."""
    config = report.imported.get("config")
    settings = config.items() if isinstance(config, Mapping) else ()
    return [
        (key, plain(value))
        for key, value in settings
        if value is not None and not isinstance(value, Mapping)
    ]


def methods(report: Report) -> list[Row]:
    """Name and options of each method of the recipe."""
    return [
        (name, ", ".join(f"{k} = {plain(v)}" for k, v in options.items()) or "defaults")
        for name, options in report.methods
    ]


def layers(report: Report) -> list[Row]:
    """Pattern, scheme, group size and layout of each rule."""
    return [
        (
            rule["match"],
            rule["scheme"] or "16 bits",
            str(rule.get("group_size") or "channel") if rule["scheme"] else "",
            rule.get("layout", ""),
        )
        for rule in report.quantization["rules"]
    ]


def calibration(report: Report) -> list[Row]:
    """Each fact of the calibration, and its corpora if there are several."""
    found = report.provenance.get("calibration") or {}
    facts = ((CALIBRATION.get(k, k), plain(v)) for k, v in found.items() if k != "parts")
    parts = (
        (part["text"], f"{plain(part['samples'])} windows, sha256 of the text {part['sha256']}")
        for part in found.get("parts", [])
    )
    return [*facts, *parts]


def model(report: Report) -> list[Row]:
    """Sizes of the model, its source, and what it was compared with."""
    source, config = report.provenance.get("source"), report.config
    found: list[Row] = [
        (label, plain(config[key])) for key, label in CONFIG.items() if config.get(key) is not None
    ]
    if source:
        found.append(("source", source.get("directory", "?")))
        found.append(("source fingerprint", source.get("fingerprint", "?")))
    else:
        found.append(("source", "unknown: qtool.json is missing or damaged"))
    if report.baseline:
        other = " (not the files of the source: another model, or copied or changed since)"
        found.append(("compared with", report.baseline + other * (not report.is_source)))
    return found


def run(record: Mapping[str, Any]) -> list[Row]:
    """Time and memory of the run; none without a ``record``."""
    if not record:
        return []
    phases = sorted(record["phases"].items(), key=lambda phase: phase[1], reverse=True)
    found: list[Row] = [("wall time", duration(record["seconds"]))]
    found += [
        (f"of it {name}", duration(seconds))
        for name, seconds in phases
        if seconds >= 0.01 * record["seconds"]
    ]
    found.append(("peak host memory", bytes_text(record["peak_host_bytes"])))
    found.append(("device", record["device"]))
    if record["peak_device_bytes"]:
        found.append(("peak device memory", bytes_text(record["peak_device_bytes"])))
    if (starts := len(record["attempts"])) > 1:
        found.append(("starts", f"{starts}: the run was interrupted and resumed; times are added"))
    return found
