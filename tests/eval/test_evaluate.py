"""evaluate, compare, table: each name goes to the right place, deltas are right, unlike things are
not compared.
"""

import dataclasses
import json
import math

import pytest
import torch

from qtool.errors import QtoolError
from qtool.eval import checkpoints
from qtool.eval.checkpoints import evaluate_checkpoints
from qtool.eval.compare import Delta, compare, table
from qtool.eval.evaluate import evaluate, load_tasks
from qtool.eval.results import Metric, Results, TaskResult, batch_means, from_plain
from qtool.runtime.load import load_tokenizer

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


def test_a_task_that_was_not_evaluated_is_no_key(results):
    """A StopIteration would end a caller's loop or generator without a word."""
    with pytest.raises(KeyError, match="c5"):
        results["c5"]


def test_results_are_a_mapping_of_their_tasks(results):
    """Without ``__iter__`` Python would ask for ``results[0]``."""
    assert list(results) == [task.task for task in results.tasks]
    assert "c4" in results
    assert "c5" not in results


def test_json_round_trip(results):
    def from_json(text):
        return Results(list(map(from_plain, json.loads(text)["tasks"])))

    assert from_json(results.to_json()) == results
    windows = [math.inf, *results["c4"].details["window_nll"][1:]]
    infinite = Results(
        [
            dataclasses.replace(
                results["c4"],
                metrics={"perplexity": Metric(math.inf, None, False)},
                details=results["c4"].details | {"nll": math.inf, "window_nll": windows},
            )
        ]
    )
    assert from_json(infinite.to_json()) == infinite
    undefined = Metric(math.nan, None, higher_is_better=True)  # a correlation of equal answers
    stored = Results([dataclasses.replace(results["c4"], metrics={"pearson": undefined})]).to_json()
    assert math.isnan(from_json(stored)["c4"].metrics["pearson"].value)


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
    runs = torch.stack([run.mean() for run in rises.split([4, 4, 3])])
    assert delta.stderr == pytest.approx(runs.std().item() / math.sqrt(3), rel=1e-3)
    assert delta.freedom == 2
    assert delta.change > 0


def answered(value, stderr, items=(), questions="q"):
    details = {"questions": questions, "items": {"acc": list(items)}}
    metrics = {"acc": Metric(value, stderr, True)}
    return Results([TaskResult("t", "zero_shot", "f", 4, metrics, details)])


def test_accuracies_are_paired_over_the_questions_that_both_answered(results):
    mine, other = answered(0.5, 0.29, [1, 0, 1, 0]), answered(0.75, 0.25, [1, 1, 1, 0])
    [delta] = compare(mine, other)
    assert delta.paired and delta.change == -0.25
    assert delta.stderr == pytest.approx(torch.tensor([0.0, -1, 0, 0]).std().item() / 2)
    assert delta.interval == pytest.approx(3.182 * delta.stderr, rel=3e-3)
    assert compare(mine, mine)[0].stderr == 0
    assert all(delta.paired for delta in compare(results, results))


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (9, 2.262), (30, 2.042), (0, 1.960)],
)
def test_an_interval_is_wider_the_fewer_items_there_are(freedom, quantile):
    assert Metric(0.5, 2.0, True, freedom).interval == pytest.approx(2 * quantile, rel=3e-3)


def test_the_error_of_windows_that_are_alike_is_that_of_their_runs():
    """Each value of independent ones is repeated: no repetition makes their mean surer."""
    independent = torch.randn(16, generator=torch.Generator().manual_seed(0)).tolist()
    windows = [value for value in independent for _ in range(16)]
    assert batch_means(windows) == pytest.approx(independent)
    assert [len(batch_means(windows[:n])) for n in (1, 2, 3, 9)] == [1, 2, 2, 3]


def test_infinite_perplexities_have_no_ratio():
    infinite = Delta("t", "perplexity", math.inf, math.inf, math.nan, None, True, True)
    assert math.isnan(infinite.ratio)
    assert dataclasses.replace(infinite, baseline=2.0, change=math.inf).ratio == math.inf


def test_errors_of_other_questions_combine():
    [delta] = compare(answered(0.5, 0.3, [1, 0]), answered(0.75, 0.4, [1, 0], questions="others"))
    assert (delta.change, delta.stderr, delta.paired) == (-0.25, 0.5, False)
    assert "unpaired" in table(answered(0.5, 0.3), answered(0.75, 0.4))
    assert compare(answered(0.5, None), answered(0.75, 0.4))[0].stderr is None


def test_the_table_says_what_its_errors_are():
    beside = table(answered(0.5, 0.1), answered(0.75, 0.4)).splitlines()
    assert "value ± 95 %" in beside[0] and "change ± 95 %" in beside[0]
    assert "0.5000 ± 0.1960" in beside[2]
    assert "2.5000e+18 ± 1.9600e+06" in table(answered(2.5e18, 1e6)).splitlines()[2]


@pytest.mark.parametrize(
    ("options", "key"), [({"seqlen": 16}, "samples"), ({"limit": 2}, "samples")]
)
def test_other_windows_are_not_compared(results, model, tokenizer, data_dir, options, key):
    other = evaluate(["c4"], model, tokenizer, data_dir=data_dir, **{"seqlen": 20, **options})
    with pytest.raises(QtoolError, match=f"c4 cannot be compared: {key} is"):
        compare(other, results)


def test_token_ids_of_another_tokenizer_are_not_compared(results):
    task = results["c4"]
    other = dataclasses.replace(task, details=task.details | {"token_ids": "0"})
    with pytest.raises(QtoolError, match="c4 cannot be compared: token_ids is 0"):
        compare(Results([other]), results)


def test_another_tokenizer_is_refused_before_a_model_is_loaded(
    model, tokenizer, data_dir, tmp_path, monkeypatch
):
    first, other = tmp_path / "first", tmp_path / "other"
    for directory in (first, other):
        model.save_pretrained(directory)
    tokenizer.save_pretrained(first)
    load_tokenizer("demo").save_pretrained(other)
    monkeypatch.setattr(checkpoints, "load", None)
    with pytest.raises(QtoolError, match=r"^c4 cannot be compared: .* tokenizers differ$"):
        evaluate_checkpoints(["c4"], first, other, data_dir=data_dir)
    with pytest.raises(TypeError, match="not callable"):  # a model would be loaded
        evaluate_checkpoints(["c4"], first, first, data_dir=data_dir)


def test_other_text_is_not_compared(results, model, tokenizer, data_dir):
    (data_dir / "c4.txt").write_text(TEXT.upper())
    other = evaluate(["c4"], model, tokenizer, data_dir=data_dir, seqlen=20)
    with pytest.raises(QtoolError, match="c4 cannot be compared: sha256 is"):
        compare(other, results)


def test_texts_of_one_name_are_told_apart_by_their_paths(model, tokenizer, tmp_path):
    paths = [tmp_path / folder / "test.txt" for folder in ("mine", "other")]
    for number, path in enumerate(paths, 1):
        path.parent.mkdir()
        path.write_text(TEXT * number)
    found = evaluate(map(str, paths), model, tokenizer, seqlen=20)
    assert [result.task for result in found.tasks] == [str(path) for path in paths]
    assert [delta.change for delta in compare(found, found)] == [0, 0]


def test_table(results, worse):
    plain = table(results).splitlines()
    assert plain[0].split() == ["task", "metric", "value", "±", "95", "%", "samples"]
    assert [line.split()[:2] for line in plain[2:]] == [
        ["c4", "perplexity"],
        ["mine", "acc"],
        ["mine", "acc_norm"],
    ]
    beside = table(worse, results)
    assert "nats (x" in beside.splitlines()[2]
    assert "+0.0000" in beside.splitlines()[3]
    assert table(worse, Results([])).splitlines()[2].split()[-3:] == ["-", "-", "11"]


def test_a_misspelt_last_name_or_a_wrong_limit_stops_before_any_work(tokenizer, data_dir):
    with pytest.raises(QtoolError, match=r"unknown task 'min'.*did you mean mine\?"):
        evaluate(["c4", "min"], None, tokenizer, data_dir=data_dir)
    with pytest.raises(QtoolError, match=r"absent.txt does not exist"):
        evaluate(["c4", "absent.txt"], None, tokenizer, data_dir=data_dir)
    with pytest.raises(QtoolError, match="limit 0: a whole number of at least 1"):
        evaluate(["c4"], None, tokenizer, data_dir=data_dir, limit=0)


def test_a_yaml_file_is_neither_a_text_nor_a_task(tokenizer, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine")
    with pytest.raises(
        QtoolError,
        match=r"mine\.yaml: a YAML .* `python -m qtool\.lm_eval",
    ):
        load_tasks([str(tmp_path / "mine.yaml")], tokenizer)


def test_a_missing_data_directory_is_refused_by_tasks_that_need_none(model, tokenizer, tmp_path):
    with pytest.raises(QtoolError, match=r"the data directory .*absent does not exist"):
        evaluate(["demo_choice"], model, tokenizer, data_dir=tmp_path / "absent", limit=1)
