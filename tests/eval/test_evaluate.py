"""evaluate, compare, table: each name goes to the right place, deltas are right, unlike things are
not compared.
"""

import dataclasses
import json
import math

import pytest
import torch

from qtool.errors import QtoolError
from qtool.eval.compare import compare, table
from qtool.eval.evaluate import evaluate
from qtool.eval.results import Metric, Results, TaskResult, from_json

from .conftest import make_model

TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times! " * 4
ROW = {"query": "a", "choices": ["b", "c"], "gold": 0}


@pytest.fixture
def data_dir(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.jsonl").write_text(
        "".join(json.dumps({**ROW, "query": "a" * n}) + "\n" for n in range(1, 5))
    )
    (tmp_path / "c4.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def results(model, tokenizer, data_dir) -> Results:
    return evaluate(["c4", "mine", "c4"], model, tokenizer, data_dir=data_dir, seqlen=20)


@pytest.fixture
def worse(model, tokenizer, data_dir) -> Results:
    """The same model with its logits doubled: surer, hence worse, of the same argmax."""
    other = make_model()
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    return evaluate(["c4", "mine"], other, tokenizer, data_dir=data_dir, seqlen=20)


def test_each_name_goes_to_its_kind_once(results, data_dir):
    assert [(r.task, r.kind, r.samples) for r in results.tasks] == [
        ("c4", "perplexity", 11),
        ("mine", "zero_shot", 4),
    ]
    assert results["c4"].origin == str(data_dir / "c4.txt")
    assert results["c4"].metrics["perplexity"].value == pytest.approx(
        math.exp(results["c4"].details["nll"] / results["c4"].details["tokens"])
    )


def test_json_round_trip(results):
    assert from_json(results.to_json()) == results
    infinite = Results(
        [dataclasses.replace(results["c4"], metrics={"perplexity": Metric(math.inf, None, False)})]
    )
    assert from_json(infinite.to_json()) == infinite
    for bad in ("", "[]", '{"tasks": [{"task": "c4"}]}'):
        with pytest.raises(QtoolError, match="not the JSON of an evaluation"):
            from_json(bad)


def test_a_model_against_itself_is_zero(results):
    for delta in compare(results, results):
        assert delta.change == 0
    assert compare(results, results)[0].stderr == 0


def test_perplexity_rise_is_paired_over_windows(results, worse):
    delta = compare(worse, results)[0]
    rises = torch.tensor(worse["c4"].details["window_nll"]) - torch.tensor(
        results["c4"].details["window_nll"]
    )
    assert delta.change == pytest.approx(rises.mean().item(), rel=1e-4)
    assert delta.change == pytest.approx(math.log(delta.ratio), rel=1e-6)
    assert delta.stderr == pytest.approx(rises.std().item() / math.sqrt(11), rel=1e-3)
    assert delta.change > 0


def test_accuracy_errors_combine():
    def make(value, stderr):
        return Results([TaskResult("t", "zero_shot", "f", 9, {"acc": Metric(value, stderr, True)})])

    [delta] = compare(make(0.5, 0.3), make(0.75, 0.4))
    assert (delta.change, delta.stderr) == (-0.25, 0.5)
    assert compare(make(0.5, None), make(0.75, 0.4))[0].stderr is None


@pytest.mark.parametrize(
    ("options", "key"), [({"seqlen": 16}, "samples"), ({"limit": 2}, "samples")]
)
def test_other_windows_are_not_compared(results, model, tokenizer, data_dir, options, key):
    other = evaluate(["c4"], model, tokenizer, data_dir=data_dir, **{"seqlen": 20, **options})
    with pytest.raises(QtoolError, match=f"c4 cannot be compared: {key} is"):
        compare(other, results)


def test_other_text_is_not_compared(results, model, tokenizer, data_dir):
    (data_dir / "c4.txt").write_text(TEXT.upper())
    other = evaluate(["c4"], model, tokenizer, data_dir=data_dir, seqlen=20)
    with pytest.raises(QtoolError, match="c4 cannot be compared: sha256 is"):
        compare(other, results)


def test_table(results, worse):
    plain = table(results).splitlines()
    assert plain[0].split() == ["task", "metric", "value", "samples"]
    assert [line.split()[:2] for line in plain[2:]] == [
        ["c4", "perplexity"],
        ["mine", "acc"],
        ["mine", "acc_norm"],
    ]
    beside = table(worse, results)
    assert "nats (x" in beside.splitlines()[2]
    assert "+0.0000" in beside.splitlines()[3]
    assert table(worse, Results([])).splitlines()[2].split()[-3:] == ["-", "-", "11"]


def test_a_misspelt_last_name_stops_before_any_work(tokenizer, data_dir):
    with pytest.raises(QtoolError, match=r"unknown task 'min'.*did you mean mine\?"):
        evaluate(["c4", "min"], None, tokenizer, data_dir=data_dir)
    with pytest.raises(QtoolError, match=r"absent.txt does not exist"):
        evaluate(["c4", "absent.txt"], None, tokenizer, data_dir=data_dir)
