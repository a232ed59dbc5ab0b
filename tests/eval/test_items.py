"""lm-eval's metrics as means over items: what is kept, and errors that hold for ratios."""

import math

import pytest
import torch

from qtool.eval.items import metrics_and_items


def samples(metric: str, logged: list, filter: str = "none") -> list[dict]:
    return [{"filter": filter, metric: value} for value in logged]


def test_a_mean_keeps_its_items_and_lm_evals_error() -> None:
    values = {"acc,none": 0.5, "acc_stderr,none": 0.3, "alias": "t"}
    metrics, items = metrics_and_items(values, samples("acc", [1, 0, 1, 0]), {"acc": True})
    assert (metrics["acc"].value, metrics["acc"].stderr) == (0.5, 0.3)
    assert items == {"acc": [1, 0, 1, 0]}


def test_what_is_no_mean_has_no_items() -> None:
    metrics, items = metrics_and_items({"f1,none": 0.9}, samples("f1", [1, 0]), {})
    assert metrics["f1"].value == 0.9 and items == {}
    pairs = samples("f1", [(1, 0), (0, 1)])
    assert metrics_and_items({"f1,none": 0.5}, pairs, {})[1] == {}
    assert metrics_and_items({"acc,none": 0.5}, [], {})[1] == {}  # a group


def test_filters_are_kept_apart() -> None:
    values = {"exact_match,strict": 1.0, "exact_match,flexible": 0.0}
    logged = samples("exact_match", [1], "strict") + samples("exact_match", [0], "flexible")
    _, items = metrics_and_items(values, logged, {})
    assert items == {"exact_match,strict": [1], "exact_match,flexible": [0]}


def test_a_text_perplexity_is_a_ratio_whose_error_is_the_jackknifes() -> None:
    """The delta method and leaving one out estimate the same error, of large samples alike."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(50, 150, (400,), generator=random).double()
    nll = words * 3 + torch.randn(400, generator=random).double() * 20
    logged = samples("word_perplexity", list(zip((-nll).tolist(), words.tolist(), strict=True)))
    ratio = float(nll.sum() / words.sum())
    values = {"word_perplexity,none": math.exp(ratio)}
    metrics, items = metrics_and_items(values, logged, {"word_perplexity": False})
    found = metrics["log_word_perplexity"]
    assert found.value == pytest.approx(ratio) and not found.higher_is_better
    assert len(items["log_word_perplexity"]) == 400
    without = (nll.sum() - nll) / (words.sum() - words)
    jackknife = float((399 / 400 * (without - without.mean()).square().sum()).sqrt())
    assert found.stderr == pytest.approx(jackknife, rel=0.02)


@pytest.mark.parametrize(
    ("metric", "logged"),
    [("perplexity", [-math.inf, -1.0]), ("word_perplexity", [(-math.inf, 2.0), (-1.0, 3.0)])],
)
def test_a_text_without_probability_has_an_infinite_perplexity(metric: str, logged: list) -> None:
    metrics, items = metrics_and_items({f"{metric},none": math.inf}, samples(metric, logged), {})
    [found] = metrics.values()
    assert (found.value, found.stderr) == (math.inf, None)
    assert items == {}  # as JSON they would be null, and no saved result could be compared
