"""What the commands do, once parsed: names become objects, objects go to the pipeline."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from qtool import recipes
from qtool.checkpoint.source import DEMO, Checkpoint, read_config, resolve
from qtool.errors import QtoolError, suggest
from qtool.eval.results import Results
from qtool.pipeline.job import Job
from qtool.pipeline.plan import Plan
from qtool.pipeline.plan import plan as make_plan
from qtool.recipes import Recipe

KV = ("kv8", "kv4", "kv4-channel")


def chosen_recipe(
    scheme: str,
    recipe: str | None,
    group_size: str | None,
    layout: str | None,
    kv: str | None,
    *,
    calibrated: bool = False,
) -> Recipe:
    """The recipe with the command line's wishes applied.

    Raises:
        QtoolError: an unknown scheme, variant or KV quantizer, or a group size that is no number.
    """
    chosen = recipes.load(scheme, recipe or ("paper" if calibrated else "fast"))
    if group_size is not None:
        if group_size != "channel" and not group_size.isdigit():
            raise QtoolError(f"--group-size {group_size!r}: a number of input channels or 'channel' is expected")
        chosen = chosen.with_group_size(None if group_size == "channel" else int(group_size))
    if layout is not None:
        chosen = chosen.with_layout(layout)
    if kv is not None:
        if kv not in KV:
            raise QtoolError(f"unknown --kv {kv!r}: {suggest(kv, KV)}")
        chosen = replace(chosen, kv=kv)
    return chosen


def plan(
    model: str, scheme: str, recipe: str | None, group_size: str | None, layout: str | None, kv: str | None
) -> Plan:
    """The plan for MODEL: a directory, a hub id, ``demo``, or the path of a config.json."""
    path = Path(model)
    config = read_config(path.parent if path.name == "config.json" else resolve(model))
    return make_plan(Job.of(config, chosen_recipe(scheme, recipe, group_size, layout, kv)))


def quantize(
    model: str,
    scheme: str,
    out: Path | None,
    *,
    recipe: str | None,
    group_size: str | None,
    layout: str | None,
    kv: str | None,
    calib: str | None,
    data_dir: Path | None,
    samples: int,
    seqlen: int,
    seed: int,
    device: str,
    resume: bool,
    progress: Any,
) -> Path:
    """Quantize MODEL; returns the output directory."""
    from qtool.pipeline.quantize import quantize as run

    chosen = chosen_recipe(scheme, recipe, group_size, layout, kv, calibrated=calib is not None)
    directory = resolve(model)
    source = Checkpoint(directory)
    out = out or _default_out(model, directory, scheme)
    job = Job.of(source.config, chosen)
    text = calib or ("demo" if directory == DEMO else "wikitext2")
    calibration = _calibration(source, text, data_dir, samples, seqlen, seed) if job.needs_data else None
    return run(source, chosen, out, calibration=calibration, device=device, resume=resume, progress=progress)


def _default_out(model: str, directory: Path, scheme: str) -> Path:
    """``MODEL-SCHEME`` beside a local model, in the working directory for the demo or a hub id."""
    local = Path(model).expanduser()
    if model != "demo" and local.is_dir():
        return local.resolve().with_name(f"{local.resolve().name}-{scheme}")
    return Path(f"{model.split('/')[-1]}-{scheme}")


def _calibration(source: Checkpoint, text: str, data_dir: Path | None, samples: int, seqlen: int, seed: int) -> Any:
    from qtool import corpora
    from qtool.calibration.data import windows
    from qtool.pipeline.quantize import Calibration, fingerprint
    from qtool.runtime.load import load_tokenizer

    corpus = corpora.load(text, split="train", data_dir=data_dir)
    seqlen = min(seqlen, source.config.get("max_position_embeddings", seqlen))
    ids = windows(
        corpus.documents,
        load_tokenizer(source.directory),
        samples=samples,
        seqlen=seqlen,
        vocabulary=source.config["vocab_size"],
        seed=seed,
    )
    facts = {"text": text, "sha256": corpus.sha256, "samples": len(ids), "seqlen": seqlen, "seed": seed}
    batch = max(1, 4096 // seqlen)
    tokens = list(ids.split(batch))
    return Calibration(tokens, facts | {"tokens": fingerprint(tokens)})


def evaluate(
    tasks: list[str], model: str, compare: str | None, *, device: str, **options: Any
) -> tuple[Results, Results | None]:
    """Results of ``tasks`` on MODEL, and on the baseline ``compare`` if one is given."""
    from qtool.eval.evaluate import evaluate as evaluated
    from qtool.runtime.load import load, load_tokenizer

    def run(name: str) -> Results:
        directory = resolve(name)
        return evaluated(tasks, load(directory, device=device), load_tokenizer(directory), **options)

    return run(model), run(compare) if compare else None
