"""`qtool eval --kv`: the model under another KV cache, its baseline as it is; `--dtype`: both. All
kept apart.
"""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

import qtool
from qtool.cli import cli
from qtool.errors import QtoolError
from qtool.eval import saved
from qtool.eval.checkpoints import evaluate_checkpoints
from qtool.report.data import quality
from tests.conftest import MakeModel, copy_tokenizer

OPTIONS: dict[str, Any] = {
    "seqlen": 64,
    "limit": 2,
    "data_dir": None,
    "batch_size": 2,
    "device": "cpu",
}


@pytest.fixture
def demo_like(make_model: MakeModel) -> Path:
    """A random model with the demo's tokenizer."""
    directory = make_model(hidden_size=256, num_attention_heads=4, head_dim=64, vocab_size=4096)
    copy_tokenizer(directory)
    return directory


def perplexities(*arguments: str) -> list[float]:
    done = CliRunner().invoke(
        cli, ["eval", "demo", "--seqlen", "64", "--limit", "2", "--json", *arguments]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    tasks = [found["tasks"], *([found["baseline"]["tasks"]] if "baseline" in found else [])]
    return [task[0]["metrics"]["perplexity"]["value"] for task in tasks]


def test_only_the_model_gets_it(demo_like: Path) -> None:
    [plain] = perplexities("--model", str(demo_like))
    [kv4] = perplexities("--model", str(demo_like), "--kv", "kv4")
    assert kv4 != plain and kv4 == pytest.approx(plain, rel=0.1)
    results, baseline = evaluate_checkpoints(
        ["demo"], str(demo_like), str(demo_like), kv="kv4", **OPTIONS
    )
    assert baseline is not None
    found = [r["demo"].metrics["perplexity"].value for r in (results, baseline)]
    assert found == [kv4, plain]


def test_a_baseline_that_is_not_there_costs_no_evaluation(
    demo_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.eval.checkpoints.load", lambda *_, **__: pytest.fail("loaded"))
    (nothing := demo_like.parent / "nothing").mkdir()
    for baseline in ("nowhere", str(nothing)):
        with pytest.raises(QtoolError, match=baseline):
            evaluate_checkpoints(["demo"], str(demo_like), baseline, **OPTIONS)
    for lacking, said in (("model.safetensors", "no weights"), ("tokenizer.json", "no usable")):
        part = Path(shutil.copytree(demo_like, demo_like.parent / f"no-{lacking}"))
        (part / lacking).unlink()
        with pytest.raises(QtoolError, match=said):
            evaluate_checkpoints(["demo"], str(demo_like), str(part), **OPTIONS)
        engine = mock.Mock(side_effect=lambda *_, **__: pytest.fail("an engine may read a pickle"))
        with pytest.raises(QtoolError, match=said):
            evaluate_checkpoints(["demo"], str(part), engine=engine, **OPTIONS)


def test_what_cannot_be_compared_is_not_lost(demo_like: Path, tmp_path: Path) -> None:
    shorter = shutil.copytree(demo_like, tmp_path / "shorter")
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    models = ("--model", str(demo_like), "--compare", str(shorter))
    done = CliRunner().invoke(cli, ["eval", "demo", *models, "--seqlen", "64", "--limit", "2"])
    assert "demo cannot be compared: seqlen is 64, the baseline's is 32" in str(done.exception)
    assert "perplexity" in done.stdout


def test_a_text_of_the_calibration_is_said(
    demo_like: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The captain was not at all able to endure it. " * 30)
    how: dict[str, Any] = {"calibration": f"{text}:2,demo:2", "recipe": "paper", "seqlen": 32}
    done = qtool.quantize(demo_like, "w8a8", out=tmp_path / "out", **how)
    caplog.clear()
    evaluate_checkpoints([str(text), "demo"], done.directory, demo_like, **OPTIONS)
    assert [line for line in caplog.messages if "calibrated on" in line] == [
        f"{text} is a text that {done.directory} was calibrated on: of other text its perplexity "
        "may be higher"
    ]


def test_answers_are_kept_apart_and_find_their_baseline(demo_like: Path) -> None:
    for kv in (None, "kv4", "kv4"):
        evaluate_checkpoints(["demo"], str(demo_like), str(demo_like), kv=kv, save=True, **OPTIONS)
    answers, identity = saved.read(demo_like), saved.identity(demo_like)
    assert sorted(answer.facts.get("kv", "") for answer in answers) == ["", "kv4"]
    rows = quality(answers, identity, identity)
    assert all(row.baseline and row.change for row in rows) and len(rows) == 2
    changes = {row.facts.get("kv"): row.change.change for row in rows if row.change}
    assert changes[None] == 0 and changes["kv4"] != 0


def test_a_dtype_is_for_both(demo_like: Path) -> None:
    own, found = (
        perplexities("--model", str(demo_like), *more) for more in ([], ["--dtype", "bfloat16"])
    )
    assert found != own and found == pytest.approx(own, rel=0.01)
    asked: dict[str, Any] = {"save": True, **OPTIONS}
    evaluate_checkpoints(["demo"], str(demo_like), None, **asked)
    results, baseline = evaluate_checkpoints(
        ["demo"], str(demo_like), str(demo_like), dtype="bfloat16", **asked
    )
    assert baseline is not None
    assert [r["demo"].metrics["perplexity"].value for r in (results, baseline)] == found * 2
    assert sorted(answer.facts.get("dtype", "") for answer in saved.read(demo_like)) == [
        "",
        "bfloat16",
    ]


@pytest.mark.parametrize(
    ("kv", "message"), [("kv5", "unknown --kv 'kv5'"), ("kv8", "needs calibrated scales")]
)
def test_what_it_cannot_be(kv: str, message: str, demo_like: Path) -> None:
    with pytest.raises(QtoolError, match=message):
        evaluate_checkpoints(["demo"], str(demo_like), None, kv=kv, **OPTIONS)
