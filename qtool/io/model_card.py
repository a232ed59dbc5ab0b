"""Writes the model card: README.md of a result."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from qtool.io.source import BASE_CARD

#: fields of the base model's card that hold for the result too
INHERITED = ("license", "license_name", "license_link", "language")
#: facts of the calibration that the card shows
CALIBRATION = ("text", "samples", "seqlen", "windows", "continued_by", "seed")
#: the entry of an export's notes with the relative error of each linear's weight
ERRORS = "relative weight errors"
#: each saved evaluation replaces the text between these two
RESULTS = "<!-- results -->", "<!-- /results -->"

TEMPLATE = """---
{front}---

# {name}

{what}

`{name}` below stands for this directory: write its path or its hub id.

## Load

```python
import qtool

model, tokenizer = qtool.load("{name}"), qtool.load_tokenizer("{name}")
```

Run `import qtool.transformers` before transformers' `from_pretrained`; transformers alone refuses
this checkpoint and says so. lm-eval's own command line:
`python -m qtool.lm_eval run --model hf --model_args pretrained={path},dtype=auto --tasks ...`.

## Serve

{serve}
{exports}

## Results

{results}

## How it was made

{how}

`qtool.json` holds the whole recipe, the hashes of the calibration tokens, of config.json, of the
tokenizer's and the weights' files, and the versions. `qtool verify {path}` checks the files.
{base}"""
EXPORTED = """---
{front}---

# {name}

{what}

## Serve

{serve}

## Results

{results}

## How it was made

{how}

`qtool.json` holds the relative error of every weight against the checkpoint it was exported from.
{base}"""


def model_card(provenance: Mapping[str, Any], base_card: Path) -> str:
    """The card of the result whose qtool.json has the content ``provenance``.

    Args:
        base_card: path of the source's card, which need not exist.
    """
    source = provenance.get("source", {})
    base, exported = source.get("hub id"), provenance.get("exported from")
    front = _inherited(base_card)
    if base:
        front |= {"base_model": base, "base_model_relation": "quantized"}
    scheme = provenance.get("scheme") or provenance.get("format")
    front |= {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized" if exported else "qtool", str(scheme)],
    }
    of = base or source.get("directory") or exported or "a model"
    name = f"{of.split('/')[-1]}-{scheme}"
    path = shlex.quote(name)
    if exported:
        template, parts = EXPORTED, _of_export(provenance, path)
    else:
        template, parts = TEMPLATE, _of_native(provenance, path, f"`{of}` in {scheme}")
    parts["results"] = with_results("".join(RESULTS), parts["results"])
    link = f"\nThe card of the base model is [{BASE_CARD}]({BASE_CARD}).\n"
    return template.format(
        name=name,
        path=path,
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        base=link if base_card.is_file() else "",
        **parts,
    )


def _of_export(provenance: Mapping[str, Any], path: str) -> dict[str, str]:
    """The parts of the card of an export that users have as ``path``."""
    native, target = provenance["exported from"], provenance["format"]
    results, notes = provenance.get("results"), provenance.get("notes", ())
    lines = exactness(weight_errors(provenance["blocks"])), *notes
    serve = f"`{target}`: {provenance['loaders']}."
    if step := provenance.get("next step"):
        run = step.replace("DIR", path)
        serve += f" Next: `{run}`, by this directory's path or, where one is taken, its hub id."
    if notes:
        serve += " Exceptions for this model are among the notes below."
    return {
        "what": f"`{native}`, quantized by qtool, in the format `{target}`.",
        "serve": serve,
        "results": f"Of `{native}`, by qtool's arithmetic. {results}" if results else "None yet.",
        "how": "\n".join(f"- {line}" for line in lines),
    }


def _of_native(provenance: Mapping[str, Any], path: str, what: str) -> dict[str, str]:
    """The parts of the card of a native checkpoint that users have as ``path``."""
    by = "imported" if "imported from" in provenance else "quantized"
    serve = f"`vllm serve {path}` where `pip install 'qtool[vllm]'` was run."
    if reason := provenance.get("not served"):
        serve = f"vLLM cannot serve it: {reason}."
    exports = "`qtool export -h` lists the formats that other stacks read."
    if rotated := provenance.get("rotated"):
        exports = (
            f"Other stacks' loaders do not rotate inputs while the model runs, as those of "
            f"{', '.join(f'`{name}`' for name in rotated)} are here: to export, quantize with "
            "`--for-export`."
        )
    return {
        "what": f"{what}, {by} by qtool.",
        "serve": serve,
        "exports": exports,
        "results": "None yet: `qtool eval TASKS --model DIR --save` writes them here.",
        "how": _how(provenance),
    }


def weight_errors(blocks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The :data:`ERRORS` in the notes of all ``blocks``, by linear."""
    return {linear: e for notes in blocks for linear, e in notes.get(ERRORS, {}).items()}


def exactness(errors: Mapping[str, float]) -> str:
    """How near an export's weights are to the native ones, whose ``errors`` are by linear."""
    exact = sum(error == 0 for error in errors.values())
    found = f"{exact} of {len(errors)} linears exact"
    if exact == len(errors):
        return found
    worst = max(errors, key=errors.__getitem__)
    return f"{found}; largest relative error of a weight {errors[worst]:.2e} ({worst})"


def with_results(card: str, table: str) -> str:
    """``card`` with ``table``, in markdown, as its results; unchanged if it has no place for it."""
    before, old, after = _parts(card)
    return card if old is None else f"{before}{RESULTS[0]}\n{table}\n{RESULTS[1]}{after}"


def results_in(card: str) -> str:
    """The results that :func:`with_results` wrote into ``card``; empty if there are none."""
    old = _parts(card)[1]
    return "" if old is None or old.startswith("None yet") else old


def _parts(card: str) -> tuple[str, str | None, str]:
    """The text before, in and after the place for results; None in it if ``card`` has no place."""
    before, found, rest = card.partition(RESULTS[0])
    old, ended, after = rest.partition(RESULTS[1])
    return before, old.strip() if found and ended else None, after


def _how(provenance: Mapping[str, Any]) -> str:
    if imported := provenance.get("imported from"):
        return f"Imported from {imported['format']} code for code; nothing was quantized anew."
    recipe = provenance.get("recipe", {})
    names = [name for method in recipe.get("methods", ()) for name in method]
    source = provenance.get("source", {})
    lines = []
    if form := source.get("dequantized from"):
        lines.append(f"- source: {form}, dequantized")
    if adapter := source.get("adapter"):
        name = adapter.get("hub id") or adapter["directory"]
        hashes = ", ".join(f"{file} {sha256}" for file, sha256 in adapter["sha256"].items())
        lines.append(f"- LoRA adapter merged: `{name}` (sha256 of {hashes})")
    lines += [f"- recipe `{recipe.get('variant')}`: {', '.join(names)}"]
    if data := provenance.get("calibration"):
        line = ", ".join(f"{key} {data[key]}" for key in CALIBRATION if key in data)
        lines.append(f"- calibration data: {line}")
        lines += [
            f"  - {part['samples']} windows of {part['text']}, sha256 {part['sha256']}"
            for part in data.get("parts", ())
        ]
    versions = provenance.get("versions", {})
    lines.append("- " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return "\n".join(lines)


def _inherited(card: Path) -> dict[str, Any]:
    """License and language from the front matter of ``card``."""
    try:
        _, front, _ = card.read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(front)
    except Exception:  # PyYAML lets errors of several types pass
        return {}
    return {key: found[key] for key in INHERITED if key in found} if isinstance(found, dict) else {}
