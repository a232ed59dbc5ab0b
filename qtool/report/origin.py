"""The report's provenance: the model, the recipe and its data, the run, and the commands that
repeat it.
"""

from qtool.report import commands as report_commands
from qtool.report.data import Report
from qtool.report.html import Html, duration, facts, join, missing, nbytes, plain, table, tag


def summary(report: Report) -> str:
    """One sentence: methods, KV cache, calibration."""
    methods, data = [name for name, _ in report.methods], report.provenance.get("calibration", {})
    if report.imported:
        return f"Imported code for code from {report.imported.get('format', '?')}; nothing was quantized here."
    if not methods:
        return "How it was made is not known: qtool.json is missing or damaged."
    transforms = (
        f"{', '.join(methods[:-1])}, then {methods[-1]}" if methods[1:] else f"{methods[0]} alone"
    )
    cache = (
        f"KV cache {report.quantization['kv']}"
        if report.quantization.get("kv")
        else "KV cache in 16 bits"
    )
    text = "no calibration data"
    if data:
        windows, tokens, text = (data.get(key, "?") for key in ("samples", "seqlen", "text"))
        text = f"calibrated on {windows} windows of {tokens} tokens of {text}"
        if data.get("windows") == "continued":
            text += ", begun by it and continued by the model itself"
    return f"Made by {transforms}; {cache}; {text}. The last part says what these words mean."


def model(report: Report) -> Html:
    """The architecture, from config.json, and where it came from."""
    config, source = report.config, report.provenance.get("source", {})
    rows: list[tuple[str, object]] = [
        (label, plain(config[key])) for key, label in MODEL if config.get(key) is not None
    ]
    if source:
        rows += [
            ("source", source.get("directory", "?")),
            ("source fingerprint", tag("code", source.get("fingerprint", "?"))),
        ]
    else:
        rows.append(("source", "unknown: qtool.json is missing or damaged"))
    if report.baseline:
        doubt = (
            ""
            if report.is_source
            else " (not the files of the source: another model, or copied or changed since)"
        )
        rows.append(("compared with", report.baseline + doubt))
    return facts(rows)


MODEL = (
    ("architectures", "architecture"),
    ("num_hidden_layers", "blocks"),
    ("hidden_size", "hidden size"),
    ("intermediate_size", "MLP size"),
    ("num_attention_heads", "query heads"),
    ("num_key_value_heads", "key/value heads"),
    ("head_dim", "head dimension"),
    ("vocab_size", "vocabulary"),
    ("max_position_embeddings", "context, tokens"),
    ("dtype", "dtype of the rest"),
)


def recipe(report: Report) -> Html:
    """Methods in order, the format of the layers, the calibration text."""
    if report.imported:
        return _imported(report)
    methods = [
        (name, ", ".join(f"{k} = {plain(v)}" for k, v in options.items()) or "defaults")
        for name, options in report.methods
    ]
    left_out = report.provenance.get("recipe", {}).get("left_out", [])
    steps = (
        table(("step, in order", "options"), methods, "ll")
        if methods
        else missing("Unknown: qtool.json is missing or damaged.")
    )
    found = report.provenance.get("calibration", {})
    data = facts(
        [
            (CALIBRATION.get(k, k), tag("code", v) if k in ("sha256", "tokens") else plain(v))
            for k, v in found.items()
        ]
    )
    none = tag("p", "None: the methods look at weights only.")
    calibration = tag("h3", "Calibration"), data if found else none
    return join(steps, *(tag("p", note) for note in left_out), *_layers(report), *calibration)


def _layers(report: Report) -> tuple[Html, Html]:
    """The formats of the linears, under their heading."""
    rules = [
        (
            tag("code", r["match"]),
            r["scheme"] or "16 bits",
            r.get("group_size") or ("channel" if r["scheme"] else ""),
            r.get("layout", ""),
        )
        for r in report.quantization["rules"]
    ]
    layers = table(("linears that match", "scheme", "group size", "layout"), rules, "llrl")
    return tag("h3", "Layers (the first rule that matches holds)"), layers


def _imported(report: Report) -> Html:
    """What the foreign checkpoint says of itself, and the layers."""
    config = report.imported.get("config")
    said = config.items() if isinstance(config, dict) else ()
    rows: list[tuple[str, object]] = [
        (key, plain(value))
        for key, value in said
        if value is not None and not isinstance(value, dict)
    ]
    text = "Another tool quantized it. Its own configuration:"
    return join(tag("p", text), facts(rows), *_layers(report))


CALIBRATION = {
    "samples": "windows",
    "seqlen": "tokens a window",
    "windows": "their text",
    "sha256": "sha256 of the text",
    "tokens": "sha256 of the tokens",
}


#: of the wall time, that a stage needs to be listed
LEAST_SHARE = 0.01


def run(report: Report) -> Html:
    """Wall time by stage and peak memory, as recorded by the run."""
    found = report.run
    if not found:
        return missing(
            f"Not known. Quantizing writes it to {report.directory.name}.run.json beside the model; that file is not "
            "here, or is of another run. A moved model keeps it if it moves along."
        )
    sessions, stages = found["sessions"], found["stages"]
    rows: list[tuple[str, object]] = [("wall time", duration(found["seconds"]))]
    shown = sorted(stages.items(), key=lambda stage: -stage[1])
    rows += [
        (f"of it {name}", duration(seconds))
        for name, seconds in shown
        if seconds >= LEAST_SHARE * found["seconds"]
    ]
    rows += [("peak host memory", nbytes(found["peak_host_bytes"])), ("device", found["device"])]
    if found["peak_device_bytes"]:
        rows.append(("peak device memory", nbytes(found["peak_device_bytes"])))
    if len(sessions) > 1:
        rows.append(
            ("sessions", f"{len(sessions)}: the run was interrupted and resumed; times are added")
        )
    return facts(rows)


def reproduce(report: Report) -> Html:
    """The commands, and the recipe file where no built-in one says the same."""
    commands, written = report_commands.commands(report), report_commands.recipe_file(report)
    versions = ", ".join(
        f"{name} {version}" for name, version in report.provenance.get("versions", {}).items()
    )
    parts = [tag("pre", "\n".join(commands))]
    if written:
        parts += [tag("p", "with ", tag("code", report_commands.RECIPE), ":"), tag("pre", written)]
    return join(*parts, tag("p", f"Made with {versions}." if versions else "", class_="quiet"))
