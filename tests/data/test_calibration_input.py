"""What calibration data may be given as: the same text gives the same windows in each form."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from qtool.data import corpora, windows
from qtool.data.calibration_input import Documents, TokenIds, parse
from qtool.data.chat import render
from qtool.data.windows import cut, token_ids
from qtool.errors import QtoolError
from qtool.io.model_directory import DEMO
from qtool.runtime.load import load_tokenizer

TEXTS = ["one two", "three"]
CHATS = [[{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
RENDERED = ["<user>who?<assistant>me"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO)


def documents(given: Any, tokenizer: Any) -> list[str]:
    parsed = parse(given)
    assert isinstance(parsed, Documents)
    return render(parsed.read(), tokenizer, parsed.name)


@pytest.mark.parametrize(
    ("column", "rows", "expected"), [("text", TEXTS, TEXTS), ("messages", CHATS, RENDERED)]
)
def test_texts_and_chats_in_every_form(
    column: str, rows: Any, expected: list[str], tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    parquet.write_table(pyarrow.table({"id": [0] * len(rows), column: rows}), table)
    data_set = datasets.Dataset.from_list([{"id": 0, column: row} for row in rows])
    forms = [lines, str(lines), table, data_set, *([rows] if column == "text" else [])]
    for given in forms:
        assert documents(given, tokenizer) == expected
    assert parse(data_set).sha256 == parse(datasets.Dataset.from_dict({column: rows})).sha256


def test_a_corpus_is_not_read_before_it_is_needed(tmp_path: Path) -> None:
    parsed = parse("c4", data_dir=tmp_path / "absent")
    assert isinstance(parsed, Documents) and parsed.name == "c4" and parsed.sha256 == ""
    assert documents("demo", None) == corpora.load("demo", split="train").documents


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        (torch.tensor([1, 2, 3]), [1, 2, 3]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), [[1, 2], [3, 4]]),
        ([[1, 2], [3]], [1, 2, 3]),
        ([np.int64(1), np.int64(2)], [1, 2]),
        ([[np.int64(1), np.int64(2)]], [[1, 2]]),
    ],
)
def test_token_ids(given: Any, expected: Any) -> None:
    parsed = parse(given)
    assert isinstance(parsed, TokenIds)
    assert parsed.ids.dtype == torch.long and parsed.ids.tolist() == expected


def test_windows_are_those_of_the_text(tokenizer: Any) -> None:
    """Text, its token ids, and the windows themselves give the same."""
    text = corpora.load("demo", split="train").documents[0][:9000]
    asked = {"samples": 5, "seqlen": 32, "vocabulary": len(tokenizer), "seed": 1}
    found = cut(token_ids(text, tokenizer, len(tokenizer)), **asked)
    assert found.shape == (5, 32)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    assert torch.equal(cut(ids, **asked), found)
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)  # cut row by row
    assert torch.equal(cut(rows, **asked | {"samples": 999}), rows.reshape(-1, 32))


def test_a_long_text_is_tokenized_in_parts(tokenizer: Any, monkeypatch: Any) -> None:
    """Cut behind blank lines it has the same tokens, and special ones at its beginning alone."""
    text = corpora.load("demo", split="train").documents[0][:40_000]
    whole = token_ids(text, tokenizer, len(tokenizer))
    seen: list[tuple[str, bool]] = []

    def noting(part: str, *, add_special_tokens: bool, **how: Any) -> Any:
        seen.append((part, add_special_tokens))
        return tokenizer(part, add_special_tokens=add_special_tokens, **how)

    monkeypatch.setattr(windows, "AT_ONCE", 4000)
    assert torch.equal(token_ids(text, noting, len(tokenizer)), whole)  # type: ignore[arg-type]
    parts = [part for part, _ in seen]
    assert "".join(parts) == text and max(map(len, parts)) <= 4000 and len(parts) > 9
    assert all(part.endswith("\n\n") for part in parts[:-1])
    assert [special for _, special in seen] == [True] + [False] * (len(parts) - 1)
    line = "a" * 9000  # has no blank line to be cut behind
    assert tokenizer.decode(token_ids(line, tokenizer, len(tokenizer))) == line


def test_rows_of_a_list_are_a_files(tokenizer: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    rows: list[Any] = [{"text": "one", "id": 3}, {"messages": CHATS[0]}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert documents(rows, tokenizer) == documents(path, tokenizer)
    with pytest.raises(QtoolError, match=r"^calibration data: row 2 has the keys body, expected"):
        parse([rows[0], {"body": "two"}])


def test_chats_need_a_template(tokenizer: Any, monkeypatch: Any) -> None:
    data_set = datasets.Dataset.from_dict({"messages": CHATS})
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(QtoolError, match=r"data set holds chats .* no chat template"):
        documents(data_set, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('ro\n les') }}")
    with pytest.raises(QtoolError, match=r"data set, row 1: .* cannot render it \(ro les\)"):
        documents(data_set, tokenizer)
    with pytest.raises(QtoolError, match='a list of messages with "role"'):
        documents(datasets.Dataset.from_dict({"messages": [[{"a": 1}]]}), tokenizer)
    with pytest.raises(QtoolError, match=r"^texts, row 1 is a chat without messages"):
        documents([{"messages": []}, {"text": "a"}], tokenizer)
    with pytest.raises(QtoolError, match='data set, row 1 has "messages" of type str, expected'):
        documents(datasets.Dataset.from_dict({"messages": ["hi"]}), tokenizer)


def test_text_parts_are_joined_and_others_refused(tokenizer: Any, monkeypatch: Any) -> None:
    """A template of texts would print a list as Python does."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    parts: list[Any] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = {"messages": [{"role": "user", "content": parts}]}
    assert render([chat], tokenizer, "it") == ["<user>one\ntwo"]
    parts.append({"type": "image", "text": None})
    with pytest.raises(QtoolError, match=r"^it, row 1: a part of a message is no text"):
        render([chat], tokenizer, "it")


def test_a_chat_of_a_file_is_named_by_its_line(
    tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    path, bad = tmp_path / "chats.jsonl", {"messages": [{"content": "no role"}]}
    path.write_text(f'{{"text": "one"}}\n\n{json.dumps(bad)}\n')
    with pytest.raises(QtoolError, match=rf'^{path} line 3: a list of messages with "role"'):
        documents(path, tokenizer)
    table = tmp_path / "chats.parquet"
    datasets.Dataset.from_list([{"messages": CHATS[0]}, bad]).to_parquet(table)
    with pytest.raises(QtoolError, match=rf'^{table} row 2: a list of messages with "role"'):
        documents(table, tokenizer)


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
        "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
        "{{ m.content[0]['text'] }}",
    ],
)
def test_a_template_of_parts_gets_parts(loop: str, tokenizer: Any, monkeypatch: Any) -> None:
    """Those of LLaVA and SmolVLM loop over parts, and a text would be left out."""
    template = "{% for m in messages %}<{{ m.role }}>" + loop + "{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert documents([{"messages": CHATS[0]}], tokenizer) == RENDERED
    parts = [[{"type": "text", "text": m["content"]}] for m in CHATS[0]]
    turns = [m | {"content": of} for m, of in zip(CHATS[0], parts, strict=True)]
    assert documents([{"messages": turns}], tokenizer) == RENDERED


def test_tools_and_calls_are_rendered_as_servers_do(
    tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A call's arguments are JSON in chats of OpenAI's API, and a template writes a mapping."""
    template = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or () %}{{ call.function.arguments.x + 1 }}{% endfor %}"
        "{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    rows = [{"tools": tools, "messages": messages}, {"tools": None, "messages": CHATS[0]}]
    expected = [json.dumps(tools) + "<assistant>a2", "null<user>who?<assistant>me"]
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    as_text = [row | {"tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    for given in (lines, table, *map(datasets.Dataset.from_list, (rows, as_text))):
        assert documents(given, tokenizer) == expected


def test_a_message_has_only_the_keys_that_it_has_itself(tmp_path: Path) -> None:
    """A table gives each message the keys of all; Llama 3.1's template asks which are there."""

    class Tokenizer:
        chat_template = "here"

        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return ",".join(key for turn in turns for key in sorted(turn))

    call = {"function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": "who?"}]},
    ]
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for given in (table, datasets.Dataset.from_list(rows)):
        assert documents(given, Tokenizer()) == ["role,tool_calls", "content,role"]


def test_chats_are_no_text_to_evaluate(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHATS[0]}))
    with pytest.raises(QtoolError, match=r'holds chats \(messages\), documents under "text"'):
        corpora.load(str(path), split="test")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "found an empty list"),
        ([3, "a", 4], "found a list of int and str$"),
        ([b"a text"], "found a list of bytes"),
        (7, "found <class 'int'>"),
        ([[1, "a"]], "a list of token ids holds something else"),
        (CHATS, r'a chat is given as {"messages": \[...\]}'),
        (pyarrow.table({"text": ["a"]}), "found <class 'pyarrow.lib.Table'>"),
        (torch.rand(4), r"shape \[4\] and torch.float32 on cpu found"),
        (torch.ones(2, 2, 2).long(), r"shape \[2, 2, 2\]"),
        ([2**70] * 4, "a token id has more than 63 bits"),
        (torch.ones(4, dtype=torch.long, device="meta"), "torch.int64 on meta found"),
        (torch.ones(4, dtype=torch.complex64), "torch.complex64 on cpu found"),
        ([{1: "a"}], "row 1 has the keys 1, expected a row"),
        ([[5]], r"shape \[1, 1\] .*at least 2 tokens"),
        ([{"text": "a"}, {"text": None}], 'row 2 has "text" of type NoneType, expected'),
        (
            datasets.Dataset.from_dict({"text": ["a", "", None]}),
            'data set, row 3 has "text" of type NoneType, expected',
        ),
        (datasets.Dataset.from_dict({"body": ["a"]}), "found the columns body"),
        (
            datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(),
            "pass some of its rows",
        ),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}), "one split"),
        ("nofile.txt", "nofile.txt does not exist"),
        ("wikitex", "unknown corpus 'wikitex'"),
    ],
)
def test_nothing_to_calibrate_on(given: Any, message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        parse(given)


def test_a_chat_may_hold_what_json_lacks() -> None:
    first, same, other = (
        parse([{"messages": [{"role": "user", "content": "Ahoy", "at": date(1851, 10, day)}]}])
        for day in (18, 18, 19)
    )
    assert first.sha256 == same.sha256 != other.sha256


@pytest.mark.parametrize("text", ["The captain went on deck. " * 99, "and/or\n" * 99])
def test_a_text_by_itself_is_named_by_its_first_words(text: str) -> None:
    with pytest.raises(QtoolError, match=r"; a text itself is given in a list$") as refused:
        parse(text + " the end")
    assert text[:6] in str(refused.value) and len(str(refused.value)) < 200


def test_ids_that_the_model_does_not_have() -> None:
    for ids in (torch.tensor([0, 9]), torch.tensor([-1, 2])):
        with pytest.raises(QtoolError, match="the model has 0 to 7"):
            cut(ids, samples=1, seqlen=2, vocabulary=8)


def test_windows_are_drawn_by_a_seed_and_stay_in_order() -> None:
    ids = torch.arange(400)
    drawn = [cut(ids, samples=5, seqlen=8, vocabulary=400, seed=seed) for seed in range(4)]
    assert all((windows[:, 0].diff() > 0).all() for windows in drawn)
    assert all(torch.equal(w, w[:, :1] + torch.arange(8)) for w in drawn)
    assert len({tuple(windows[:, 0].tolist()) for windows in drawn}) == 4
    again = cut(ids, samples=5, seqlen=8, vocabulary=400, seed=2)
    assert torch.equal(again, drawn[2])
