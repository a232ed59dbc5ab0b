"""Zero-shot: lm-eval's scores equal a hand computation, local files win, nothing reaches for the
network.
"""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from qtool.data import corpora
from qtool.errors import QtoolError
from qtool.eval import demo_choice, local_tasks, zero_shot
from qtool.eval.compare import compare
from qtool.eval.evaluate import load_tasks
from qtool.eval.results import Results
from qtool.io import hub

from .conftest import CONTEXT, make_model

DATA = Path(__file__).parents[3] / "shared" / "data"

CHOICES = [
    {"query": "Question: sky?\n", "choices": ["blue", "green", "a long red"], "gold": 0},
    {"query": "Question: grass?", "choices": ["blue", "green"], "gold": 1},
    {"query": "Question: 1+1?", "choices": ["2", "3", "4"], "gold": 0},
    {"query": "Question: 5?", "choices": ["[1]", "5"], "gold": 0},
]
OPTIONS = [
    {"context_options": ["Ann so Ann", "Ann so Bob"], "continuation": "won.", "gold": gold}
    for gold in (0, 1, 1)
]
LAST_WORDS = [
    {"context": "It was a", "continuation": "cat"},
    {"context": "He said", "continuation": "!"},
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    opened = []

    def refuse(_, address):
        opened.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.delenv("QTOOL_DATA_DIR", raising=False)
    yield
    assert opened == []


@pytest.fixture
def data_dir(tmp_path):
    (tmp_path / "tasks").mkdir()
    for name, rows in (
        ("piqa", CHOICES),
        ("winogrande", OPTIONS),
        ("lambada_openai", LAST_WORDS),
        ("mine", CHOICES),
    ):
        (tmp_path / "tasks" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return tmp_path


def run(name, model, tokenizer, data_dir=None, **options):
    tasks, origin = zero_shot.load(name, tokenizer, data_dir)
    [result] = zero_shot.zero_shot(tasks, model, tokenizer, origin=origin, **options)
    return result


def log_likelihood(model, tokenizer, context, continuation) -> tuple[float, bool]:
    """Sum of log p over the continuation's tokens, and whether greedy decoding would write them."""
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        log_p = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    wanted = ids[0, start:]
    return log_p.gather(1, wanted[:, None]).sum().item(), bool((log_p.argmax(-1) == wanted).all())


def by_hand(model, tokenizer, rows, suffix) -> tuple[list[bool], list[bool]]:
    """acc and acc_norm (by length in characters) of each row."""
    acc, norm = [], []
    for row in rows:
        query = row["query"].removesuffix("\n") + suffix
        scores = [
            log_likelihood(model, tokenizer, query, " " + choice)[0] for choice in row["choices"]
        ]
        lengths = [len(choice) for choice in row["choices"]]
        acc.append(scores.index(max(scores)) == row["gold"])
        per = [score / length for score, length in zip(scores, lengths, strict=True)]
        norm.append(per.index(max(per)) == row["gold"])
    return acc, norm


@pytest.mark.parametrize("batch_size", [1, 4])
def test_choices_equal_a_hand_computation(model, tokenizer, data_dir, batch_size):
    result = run("piqa", model, tokenizer, data_dir, batch_size=batch_size)
    acc, norm = by_hand(model, tokenizer, CHOICES, "\nAnswer:")
    assert result.metrics["acc"].value == sum(acc) / 4
    assert result.metrics["acc_norm"].value == sum(norm) / 4
    assert result.metrics["acc"].stderr == pytest.approx(
        torch.tensor(acc).double().std().item() / 2
    )
    assert (result.samples, result.origin) == (4, str(data_dir / "tasks" / "piqa.jsonl"))
    # the random model is right somewhere and wrong somewhere: the test can fail
    assert len(set(acc)) == 2


def test_a_task_of_ones_own_is_asked_as_written(model, tokenizer, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in CHOICES[1:])
    )
    result = run("mine", model, tokenizer, tmp_path)
    assert result.metrics["acc"].value == sum(by_hand(model, tokenizer, CHOICES[1:], "")[0]) / 3


def test_winogrande_scores_the_continuation(model, tokenizer, data_dir):
    scores = [
        log_likelihood(model, tokenizer, option, " won.")[0]
        for option in OPTIONS[0]["context_options"]
    ]
    best = scores.index(max(scores))
    result = run("winogrande", model, tokenizer, data_dir)
    assert result.metrics["acc"].value == pytest.approx(
        sum(row["gold"] == best for row in OPTIONS) / 3
    )
    assert list(result.metrics) == ["acc"]


def test_lambada_is_greedy_accuracy_and_perplexity(model, tokenizer, data_dir):
    scores = [
        log_likelihood(model, tokenizer, row["context"], " " + row["continuation"])
        for row in LAST_WORDS
    ]
    result = run("lambada_openai", model, tokenizer, data_dir)
    nll = -torch.tensor([score for score, _ in scores])  # nats
    found = result.metrics["log_perplexity"]
    assert found.value == pytest.approx(nll.mean().item(), rel=1e-5)
    assert found.stderr == pytest.approx(nll.std().item() / 2**0.5, rel=1e-3)
    assert not found.higher_is_better and list(result.metrics) == ["log_perplexity", "acc"]
    assert result.items("log_perplexity") == pytest.approx(nll.tolist(), rel=1e-5)
    assert result.metrics["acc"].value == sum(greedy for _, greedy in scores) / 2


def test_a_perplexity_beyond_every_float_is_a_log_perplexity(model, tokenizer, tmp_path):
    (tmp_path / "tasks").mkdir()
    rows = [{"context": "a", "continuation": "x" * 28 + letter} for letter in "yz"]
    path = tmp_path / "tasks" / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    worse = make_model()
    with torch.no_grad():
        worse.lm_head.weight.mul_(20)
    before, after = (run("long", m, tokenizer, tmp_path, questions="q") for m in (model, worse))
    assert after.metrics["log_perplexity"].value > 710
    [delta, _] = compare(Results([after]), Results([before]))
    assert delta.is_log and delta.paired and 0 < delta.stderr < delta.change < 10000
    rises = [
        a - b for a, b in zip(*(r.items("log_perplexity") for r in (after, before)), strict=True)
    ]
    assert delta.change == pytest.approx(sum(rises) / 2)


def test_continuation_that_merges_with_its_context(model, tmp_path):
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, " ": 3, "ba": 4, "a ": 5, "a b": 6}
    backend = Tokenizer(
        models.BPE(vocabulary, [("b", "a"), ("a", " "), ("a ", "b")], unk_token="<unk>")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>"
    )
    assert tokenizer("aa")["input_ids"] == [1, 1]
    assert tokenizer("aa b")["input_ids"] == [1, 6]  # no token of its own is left to " b"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "t.jsonl").write_text('{"context": "aa", "continuation": "b"}')
    with torch.no_grad():
        expected = -model(torch.tensor([[1]])).logits[0, -1].log_softmax(-1)[6]
    result = run("t", model, tokenizer, tmp_path, limit=1)
    assert result.metrics["log_perplexity"].value == pytest.approx(expected.item(), rel=1e-4)


def test_a_model_of_nan_answers_nothing(tokenizer, data_dir):
    broken = make_model()
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    for name in ("piqa", "winogrande", "lambada_openai"):
        with pytest.raises(QtoolError, match="logits are NaN"):
            run(name, broken, tokenizer, data_dir)


def test_a_continuation_beyond_the_context_is_refused(model, tokenizer, tmp_path):
    (tmp_path / "tasks").mkdir()
    row = {"context": "a", "continuation": "b" * CONTEXT}  # a space more than the context
    (tmp_path / "tasks" / "t.jsonl").write_text(json.dumps(row))
    said = f"begins with ' b+' has {CONTEXT + 1} tokens, .* context {CONTEXT}"
    with pytest.raises(QtoolError, match=said):
        run("t", model, tokenizer, tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tokenizer, data_dir):
    with pytest.raises(QtoolError, match=r"gives token id \d+ but the model embeds 40 ids"):
        run("piqa", make_model(40), tokenizer, data_dir)


def test_a_tokenizer_without_bos_and_eos_is_refused(model, tokenizer, data_dir):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(QtoolError, match="neither a BOS nor an EOS token"):
        run("piqa", model, bare, data_dir)


def test_answers_are_kept_question_by_question(model, tokenizer, data_dir):
    result = run("piqa", model, tokenizer, data_dir)
    acc, norm = by_hand(model, tokenizer, CHOICES, "\nAnswer:")
    assert result.items("acc") == acc and result.items("acc_norm") == norm


def test_one_bar_a_task_with_its_name(model, tokenizer, data_dir, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    run("piqa", model, tokenizer, data_dir, label="piqa")
    bars = [bar for bar in capsys.readouterr().err.replace("\r", "\n").split("\n") if bar.strip()]
    assert {bar.partition(":")[0] for bar in bars} == {"piqa"}
    assert any("/10" in bar for bar in bars)  # choices of four questions


def test_limit(model, tokenizer, data_dir):
    assert run("piqa", model, tokenizer, data_dir, limit=2).samples == 2
    assert run("piqa", model, tokenizer, data_dir, limit=1).metrics["acc"].stderr is None


def test_demo_choice_cuts_the_text_itself(tokenizer):
    text = "".join(chr(32 + (index * index + index // 7) % 95) for index in range(1000))
    rows = demo_choice.questions(text, tokenizer)
    assert len(rows) == 12
    for index, row in enumerate(rows):
        start = index * 80
        assert row["query"] + row["choices"][row["gold"]] == text[start : start + 80]
        assert len(set(row["choices"])) == 4
    assert {row["gold"] for row in rows} == {0, 1, 2, 3}
    assert rows == demo_choice.questions(text, tokenizer)
    with pytest.raises(QtoolError, match="demo_choice needs 320 tokens, and the text has 300"):
        demo_choice.questions(text[:300], tokenizer)
    with pytest.raises(QtoolError, match="ByT5Tokenizer does not say where"):
        demo_choice.questions(text, ByT5Tokenizer())


def test_demo_choice_runs(model, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "heldout.txt").write_text("The quick brown fox; " * 40)
    monkeypatch.setattr(corpora, "DEMO", tmp_path)
    result = run("demo_choice", model, tokenizer, limit=8)
    assert (result.samples, list(result.metrics)) == (8, ["acc"])


def test_available_tasks(data_dir, monkeypatch):
    names = ["demo_choice", "lambada_openai", "mine", "piqa", "winogrande"]
    assert zero_shot.available_tasks() == ["demo_choice"]
    assert zero_shot.available_tasks(data_dir) == names
    monkeypatch.setenv("QTOOL_DATA_DIR", str(data_dir))
    assert zero_shot.available_tasks() == names


def test_quiet(model, tokenizer, data_dir, capfd, monkeypatch):
    monkeypatch.chdir(data_dir)  # no git repository, of which git would complain
    run("lambada_openai", model, tokenizer, data_dir)
    assert capfd.readouterr() == ("", "")


def test_a_byte_order_mark_is_dropped(tmp_path):
    path, row = tmp_path / "t.jsonl", {"context": "a", "continuation": "b"}
    path.write_text(json.dumps(row), encoding="utf-8-sig")
    (document,) = local_tasks.load("t", path, zero_shot._index).eval_docs
    assert document == row | {"continuation": " b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no task can be made of it"),
        ("{", "is not JSON lines"),
        ("[" * 100_000, "is not JSON lines: maximum recursion depth exceeded"),
        ("[1]\n", "is not JSON lines of objects"),
        (
            '{"question": "a", "answer": "b"}\n',
            r"has the keys answer, question, expected choices, gold, query or",
        ),
        (
            '{"query": "a", "choices": ["b", "c"], "gold": 2}\n',
            "line 1: gold is 2, expected the index",
        ),
        (
            '{"query": "a", "choices": ["b"], "gold": 0}\n{"query": "a"}\n',
            "line 2 has the keys query",
        ),
        ('{"query": null, "choices": ["b"], "gold": 0}', "line 1: query is None, expected a text"),
        ('{"query": "2 + 2 =", "choices": [3, 4], "gold": 1}', r"choices is \[3, 4\], expected"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "expected a list of texts"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "gold is True, expected"),
        ('{"context": "a", "continuation": 5}', "continuation is 5, expected a text"),
        ('{"context": "a", "continuation": ""}', "continuation is '', expected a text"),
        (r'{"context": "a", "continuation": "\ud800"}', "is not JSON lines: .* surrogates not all"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(QtoolError, match=message):
        local_tasks.load("t", path, zero_shot._index)


def test_a_file_of_questions_is_no_text(tokenizer, data_dir, tmp_path):
    """The sentence says where a task's file belongs."""
    file = data_dir / "tasks" / "piqa.jsonl"
    with pytest.raises(QtoolError, match=r"not a text: put it at DIR/tasks/piqa\.jsonl and"):
        load_tasks([str(file)], tokenizer)
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "?"}')
    with pytest.raises(QtoolError, match="has the keys question, expected a row with"):
        load_tasks([str(other)], tokenizer)
    with pytest.raises(QtoolError, match="unknown corpus"):  # no file can have this name
        load_tasks([f"{'a' * 300}.jsonl"], tokenizer)


def test_a_pipe_is_no_task(tmp_path):
    os.mkfifo(path := tmp_path / "t.jsonl")
    with pytest.raises(QtoolError, match="is a pipe or a device, expected a file"):
        local_tasks.load("t", path, zero_shot._index)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"ctx_a": "a", "endings": ["b"], "label": "0"},
            "expected choices, .* data set for hellaswag .KeyError: 'ctx_b'",
        ),
        (
            {"ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": ["d"], "label": "x"},
            "ValueError: invalid literal",
        ),
    ],
)
def test_a_published_file_without_its_fields(row, message, tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(QtoolError, match=message):
        local_tasks.load("hellaswag", path, zero_shot._index)
    path.write_text(json.dumps(row) + '\n{"ctx_a": "a"}')
    with pytest.raises(QtoolError, match="line 2 has the keys ctx_a, line 1 has"):
        local_tasks.load("hellaswag", path, zero_shot._index)


def test_a_published_text_is_scored_token_by_token(model, tokenizer, tmp_path):
    pages = ["The quick brown fox jumps over the lazy dog.", "Ann saw Bob, so Bob saw Ann."]
    (tmp_path / "tasks").mkdir()
    rows = "\n".join(json.dumps({"page": page}) for page in pages)
    (tmp_path / "tasks" / "wikitext.jsonl").write_text(rows)
    nll = 0.0
    for page in pages:
        ids = torch.tensor([1, *tokenizer(page)["input_ids"]])
        for first in range(0, len(ids) - 1, CONTEXT):  # windows that share no scored token
            last = min(first + CONTEXT, len(ids) - 1)
            start = max(0, last - CONTEXT)
            with torch.no_grad():
                log_p = model(ids[None, start:last]).logits[0, first - start :].log_softmax(-1)
            nll -= log_p.gather(1, ids[first + 1 : last + 1, None]).sum().item()
    result = run("wikitext", model, tokenizer, tmp_path)
    assert result.metrics["log_byte_perplexity"].value == pytest.approx(
        nll / sum(map(len, pages)), rel=1e-5
    )


def test_examples_are_not_taken_from_the_questions(tokenizer, tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    (tmp_path / "tasks").mkdir()
    for name in ("gsm8k", "gsm8k_cot"):
        (tmp_path / "tasks" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(QtoolError, match="gsm8k puts 5 examples of its training data before each"):
        zero_shot.load("gsm8k", tokenizer, tmp_path)
    [task], _ = zero_shot.load("gsm8k_cot", tokenizer, tmp_path)  # it brings its own examples
    assert len(task.eval_docs) == 8


@pytest.mark.parametrize(
    ("typed", "meant"), [("pica", "piqa"), ("arc-easy", "arc_easy"), ("mmlu_astronmy", "mmlu_ast")]
)
def test_a_misspelt_task_is_first_taken_for_a_common_one(typed, meant, tokenizer):
    with pytest.raises(QtoolError, match=rf"did you mean {meant}"):
        zero_shot.load(typed, tokenizer)


def test_unknown_and_unreachable_tasks(tokenizer, data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(QtoolError, match=r"unknown task 'winogrand'.*did you mean winogrande\?"):
        zero_shot.load("winogrand", tokenizer, data_dir)
    with pytest.raises(
        QtoolError, match=r"data of task piqa is not here .*\(no connection.*tasks/piqa.jsonl"
    ) as caught:
        zero_shot.load("piqa", tokenizer)
    assert "\n" not in str(caught.value)


def test_a_package_that_a_task_lacks_is_named(tokenizer, monkeypatch):
    def load(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'langdetect'")

    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", load)
    with pytest.raises(QtoolError, match=r"piqa needs a package .* No module named 'langdetect'"):
        zero_shot.load("piqa", tokenizer)


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    "name", ["piqa", "arc_easy", "arc_challenge", "winogrande", "lambada_openai"]
)
def test_development_tasks_load(name, tokenizer):
    [task], _ = zero_shot.load(name, tokenizer, DATA)
    assert len(task.eval_docs) > 1000


def test_prompts_are_those_of_lm_eval(tokenizer, data_dir):
    def arguments(name):
        [task], _ = zero_shot.load(name, tokenizer, data_dir)
        task.set_config("num_fewshot", 0)
        task.build_all_requests(limit=1)
        return [instance.args for instance in task.instances]

    prompt = "Question: sky?\nAnswer:"
    assert arguments("piqa") == [(prompt, " blue"), (prompt, " green"), (prompt, " a long red")]
    assert arguments("winogrande") == [("Ann so Ann", " won."), ("Ann so Bob", " won.")]
    assert arguments("lambada_openai") == [("It was a", " cat")]


def test_a_common_name_over_rows_of_another_form(model, tokenizer, tmp_path):
    (tmp_path / "tasks").mkdir()
    row = {"context": "the cat", "continuation": "sat"}
    (tmp_path / "tasks" / "piqa.jsonl").write_text(json.dumps(row) + "\n")
    assert run("piqa", model, tokenizer, tmp_path).samples == 1
