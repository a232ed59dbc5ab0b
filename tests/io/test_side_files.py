"""What a result carries beside its weights, and its model card."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from qtool import recipes
from qtool.api import write_report
from qtool.eval import saved
from qtool.eval.results import Metric, TaskResult
from qtool.exchange.export import export
from qtool.exchange.import_ import import_checkpoint
from qtool.io.model_card import results_in, with_results
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from tests.conftest import MakeModel

CARRIED = {
    "LICENSE": "free",
    "LICENSE.md": "free",
    "NOTICE": "of",
    "USE_POLICY.md": "nicely",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "tokenizer.model": "words",
    "qwen.tiktoken": "words",
    "tekken.json": "words",
}
LEFT = {
    "tokenizer_mine.py": "1 / 0",
    "tokenizer.pkl": "code",
    "additional_chat_templates/run.py": "1 / 0",
    "pytorch_model.bin": "code",
    "notes.txt": "mine",
}
FRONT = "---\nlicense: apache-2.0\nlanguage: [de]\nwidget: [x]\n---\n# Base\n"


def put(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def made(source: Path, out: Path) -> Path:
    return quantize(Checkpoint(source), recipes.load("w4a16"), out)


def test_a_directory_whose_name_is_no_utf_8(make_model: MakeModel, tmp_path: Path) -> None:
    """Cards and reports name it with question marks, and are written."""
    named = tmp_path / os.fsdecode(b"mod\xe9le")
    made(make_model().rename(named), native := tmp_path / os.fsdecode(b"nativ\xe9"))
    export(native, "awq", exported := tmp_path / "exported")
    write_report(native)
    assert "`mod?le`" in (native / "README.md").read_text(encoding="utf-8")
    assert "`nativ?`" in (exported / "README.md").read_text(encoding="utf-8")
    assert "nativ?" in (native / "report.html").read_text(encoding="utf-8")


def front_of(card: Path) -> dict[str, object]:
    return yaml.safe_load(card.read_text().split("---\n")[1])


def test_licenses_templates_and_processors_are_carried(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model()
    put(source, CARRIED | LEFT)
    out = made(source, tmp_path / "out")
    assert {name: (out / name).read_text() for name in CARRIED} == CARRIED
    assert not [name for name in LEFT if (out / name).exists()]


def test_the_card_says_how_it_was_made_and_keeps_the_bases(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model()
    put(source, {"README.md": FRONT})
    out = made(source, tmp_path / "out")
    assert (out / "README.base.md").read_text() == FRONT
    card, front = (out / "README.md").read_text(), front_of(out / "README.md")
    assert front["license"] == "apache-2.0" and front["language"] == ["de"]
    assert "widget" not in front and front["tags"] == ["qtool", "w4a16"]
    served = "`vllm serve llama-w4a16`"
    for text in ("import qtool", 'qtool.load("llama-w4a16")', served, "rtn", "README.base.md"):
        assert text in card
    # a result does not depend on the name of its directory
    assert "`llama-w4a16` below stands for this directory: write its path" in card


def test_the_cards_commands_quote_the_name(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model().rename(tmp_path / "a model")
    out = made(source, tmp_path / "out")
    card = (out / "README.md").read_text()
    for command in ("vllm serve", "qtool verify"):
        assert f"`{command} 'a model-w4a16'`" in card
    assert "pretrained='a model-w4a16',dtype=auto" in card
    export(out, "compressed-tensors", tmp_path / "foreign")
    foreign = (tmp_path / "foreign" / "README.md").read_text()
    assert "`vllm serve 'a model-compressed-tensors'`, by this directory's path" in foreign


def test_a_model_that_is_named_by_a_dot_has_its_own_name(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_model())
    native = made(Path("."), tmp_path / "native")
    assert "`llama` in w4a16, quantized by qtool." in (native / "README.md").read_text()
    monkeypatch.chdir(native)
    exported = export(Path("."), "awq", tmp_path / "exported").directory
    assert (
        "`native`, quantized by qtool, in the format `awq`." in (exported / "README.md").read_text()
    )


def test_an_export_of_a_hub_model_names_the_hub_model(
    make_model: MakeModel, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--owner--llama-w4a16" / "snapshots" / "0123456789"
    snapshot.parent.mkdir(parents=True)
    made(make_model(), tmp_path / "native").rename(snapshot)
    exported = export(snapshot, "awq", tmp_path / "exported").directory
    assert "`owner/llama-w4a16`, quantized by qtool" in (exported / "README.md").read_text()


def test_an_exports_card_says_how_many_weights_are_exact(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """Progressive groups' scales s1 * s2 are rounded, and no note says so."""
    source = Checkpoint(make_model(dtype=torch.float16))
    for scheme, found in {
        "w4a16": r"- 14 of 14 linears exact\n",
        "w4a8-qoq-g128": r"- 0 of 14 linears exact; largest relative error of a weight \d",
    }.items():
        native = quantize(source, recipes.load(scheme), tmp_path / scheme)
        directory = export(native, "awq", tmp_path / f"{scheme}-awq").directory
        assert re.search(found, (directory / "README.md").read_text())


def test_the_reference_has_every_field(make_model: MakeModel, tmp_path: Path) -> None:
    native = made(make_model(dtype=torch.float16), tmp_path / "native")
    exported = export(native, "awq", tmp_path / "awq").directory
    config = json.loads((native / "config.json").read_text())["quantization_config"]
    reference = Path(__file__).parents[2] / "docs" / "reference"
    for directory, page, fields in (native, "native.md", config), (exported, "formats.md", {}):
        text = (reference / page).read_text()
        record = json.loads((directory / "qtool.json").read_text())
        assert [key for key in (*record, *fields) if not re.search(f'[`"]{key}[`"]', text)] == []


def test_a_hub_id_is_the_base_model(make_model: MakeModel, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--a-name" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    make_model().rename(snapshot)
    out = made(snapshot, tmp_path / "out")
    assert front_of(out / "README.md")["base_model"] == "owner/a-name"
    assert json.loads((out / "qtool.json").read_text())["source"]["directory"] == "a-name"
    foreign = export(out, "compressed-tensors", tmp_path / "foreign").directory
    assert front_of(foreign / "README.md")["base_model"] == "owner/a-name"
    assert "`vllm serve a-name-compressed-tensors`" in (foreign / "README.md").read_text()
    snapshot = tmp_path / "models--other--a-gptq" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    foreign.rename(snapshot)
    back = import_checkpoint(Checkpoint(snapshot), tmp_path / "back").directory
    assert front_of(back / "README.md")["base_model"] == "other/a-gptq"


def test_the_card_shows_what_is_saved_of_evaluations(make_model: MakeModel, tmp_path: Path) -> None:
    """Of this model, not of another that it was compared with; an export's card shows it too."""
    out = made(make_model(), tmp_path / "out")
    card = (out / "README.md").read_text()
    for model, task in ((saved.identity(out), "mine"), ("another", "theirs")):
        result = TaskResult(task, "zero_shot", "file", 9, {"acc": Metric(0.25, 0.01, True)})
        saved.save(out, saved.SavedResult(model, {"device": "cpu", "kv": "kv8"}, [result]))
    shown = (out / "README.md").read_text()
    assert "On device cpu, kv kv8:" in shown and "theirs" not in shown
    assert any(line.split()[:3] == ["mine", "acc", "0.2500"] for line in shown.splitlines())
    for seqlen in (64, 2048):  # two perplexities of one text
        result = TaskResult("text", "perplexity", "file", 9, {"perplexity": Metric(9, 1, False)})
        facts = {"device": "cpu", "seqlen": seqlen}
        saved.save(out, saved.SavedResult(saved.identity(out), facts, [result]))
        shown = (out / "README.md").read_text()
        assert f"On device cpu, seqlen {seqlen}:" in shown
    facts = {"device": "cpu", "deterministic": True, "seqlen": 64, "limit": 2}
    saved.save(out, saved.SavedResult(saved.identity(out), facts, [result]))
    facts |= {"deterministic": False}
    saved.save(out, saved.SavedResult(saved.identity(out), facts, [result]))
    shown = (out / "README.md").read_text()
    assert "On device cpu, deterministic True, seqlen 64, limit 2:" in shown
    assert "On device cpu, seqlen 64, limit 2:" in shown
    assert with_results(shown, results_in(card)) == with_results(card, "")
    foreign = export(out, "compressed-tensors", tmp_path / "foreign").directory
    assert results_in(shown) in (foreign / "README.md").read_text()
    (out / "README.md").write_text("mine\n")
    saved.save(out, saved.SavedResult(saved.identity(out), {}, []))
    assert (out / "README.md").read_text() == "mine\n"


def test_a_card_that_somebody_continued_in_another_encoding(
    make_model: MakeModel, tmp_path: Path
) -> None:
    out = made(make_model(), tmp_path / "out")
    with (out / "README.md").open("ab") as card:
        card.write(b"caf\xe9\r\n")
    result = TaskResult("text", "perplexity", "file", 9, {"perplexity": Metric(9, 1, False)}, {})
    saved.save(out, saved.SavedResult(saved.identity(out), {"device": "cpu"}, [result]))
    shown = (out / "README.md").read_bytes()
    assert b"On device cpu:" in shown and shown.endswith(b"caf\xe9\r\n")
    export(out, "awq", tmp_path / "foreign")
    assert "On device cpu:" in (tmp_path / "foreign" / "README.md").read_text()


def test_the_card_shows_the_windows_that_ran(make_model: MakeModel, tmp_path: Path) -> None:
    """They are no longer than the model's context, whatever was asked for."""
    out = made(make_model(), tmp_path / "out")
    metrics, details = {"perplexity": Metric(9, 1, False)}, {"seqlen": 16}
    result = TaskResult("text", "perplexity", "file", 9, metrics, details)
    facts = {"device": "cpu", "seqlen": 2048}
    saved.save(out, saved.SavedResult(saved.identity(out), facts, [result]))
    assert "On device cpu, seqlen 16:" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "card",
    [
        *("", "no front", "---\n"),
        *(f"---\n{front}\n---\n" for front in ("[", "- a", "[" * 2000, "a: !!bool a")),
    ],
)
def test_any_card_of_the_base_is_kept(card: str, make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    put(source, {"README.md": card})
    out = made(source, tmp_path / "out")
    assert (out / "README.base.md").read_text() == card and "license" not in front_of(
        out / "README.md"
    )


def test_the_next_result_keeps_the_base_models_card(make_model: MakeModel, tmp_path: Path) -> None:
    """Of a native checkpoint README.md is ours: an export keeps the base model's instead."""
    source = make_model()
    put(source, {"README.md": FRONT})
    out = made(source, tmp_path / "out")
    assert Checkpoint(out).side_files()["README.base.md"] == out / "README.base.md"
