"""Corpora: which file answers for which name, the hub's rows out of the raw file, and one sentence
for each mistake.
"""

import gzip
import hashlib
import json
import lzma
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from qtool.data import corpora
from qtool.errors import QtoolError
from qtool.io import hub

DATA = Path(__file__).parents[3] / "shared" / "data"
TEXTS = ["one  two\n", "", "dreißig ☃"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.delenv("QTOOL_DATA_DIR", raising=False)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)


def test_every_format_gives_the_same_documents(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": TEXTS}), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", jsonl(TEXTS))
    write(tmp_path / "a.json.gz", gzip.compress(jsonl(TEXTS).encode()))
    write(
        tmp_path / "a.jsonl.zst",
        pyarrow.compress(jsonl(TEXTS).encode(), codec="zstd", asbytes=True),
    )
    shutil.copy(tmp_path / "a.parquet", tmp_path / "B.PARQUET")
    shutil.copy(tmp_path / "a.json.gz", tmp_path / "B.JSON.GZ")
    for name in ("a.parquet", "a.jsonl", "a.json.gz", "a.jsonl.zst", "B.PARQUET", "B.JSON.GZ"):
        corpus = corpora.load(str(tmp_path / name), split="train")
        assert corpus.documents == TEXTS
        assert corpus.sha256 == hashlib.sha256("\n\n".join(TEXTS).encode()).hexdigest()


def test_text_file_is_one_document(tmp_path):
    path = write(tmp_path / "notes.txt", b"\xef\xbb\xbfa\r\n\r\nb\xe2\x80\xa8c\n")
    assert corpora.load(str(path), split="test").documents == ["a\n\nb\u2028c\n"]


def test_raw_lines_are_the_hub_rows(tmp_path):
    path = write(
        tmp_path / "wikitext2" / "wiki.test.raw", " \n = Title = \n \n First \x85 paragraph . \n"
    )
    expected = ["", " = Title = \n", "", " First \x85 paragraph . \n"]
    assert corpora.load("wikitext2", split="test", data_dir=tmp_path).documents == expected
    assert corpora.load(str(path), split="train").documents == expected


@pytest.mark.parametrize(
    ("name", "split", "file"),
    [
        ("wikitext2", "train", "wikitext-2-raw/wiki.train.raw"),
        ("wikitext2", "test", "wikitext2/test.txt"),
        ("c4", "train", "c4/train.txt"),
        ("c4", "test", "c4.txt"),
        ("c4", "train", "calibration/c4.utf8"),
        ("pile", "train", "pile/train.txt"),
    ],
)
def test_local_names(tmp_path, monkeypatch, name, split, file):
    path = write(tmp_path / file, "text\n")
    assert corpora.load(name, split=split, data_dir=tmp_path).origin == str(path)
    monkeypatch.setenv("QTOOL_DATA_DIR", str(tmp_path))
    assert corpora.load(name, split=split).documents == ["text\n"]


def test_published_c4_shards_are_cut_at_the_same_document_as_the_hub(tmp_path):
    write(
        tmp_path / "c4/c4-validation.00000-of-00008.json.gz",
        gzip.compress(jsonl(["x"] * 1200).encode()),
    )
    found = corpora.load("c4", split="test", data_dir=tmp_path)
    assert len(found.documents) == 1100
    assert found.text == " ".join("x" * 1100)  # as in the GPTQ scripts


def test_what_the_hub_says_is_one_line(monkeypatch):
    import datasets

    def fail(**kwargs):
        raise ValueError("no such\n data set\n\nTry again.")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(corpora.hub, "reachable", lambda: True)
    with pytest.raises(QtoolError, match=r"\(ValueError: no such data set\): put it at"):
        corpora.load("pile", split="train")


def test_hub_rows_reach_the_caller_in_order(monkeypatch):
    import datasets

    rows = [{"text": str(i)} for i in range(10_000)]
    monkeypatch.setattr(datasets, "load_dataset", lambda **kwargs: iter(rows))
    assert corpora.load("pile", split="train").documents == [str(i) for i in range(9000)]
    assert corpora.load("pile", split="test").documents == [str(i) for i in range(9000, 10_000)]


@pytest.mark.parametrize(("text", "kind"), [(5, "int"), (None, "NoneType")])
def test_a_row_of_the_hub_that_has_no_text_is_named(monkeypatch, text, kind):
    import datasets

    rows = [{"text": "a"}] * 9_001 + [{"text": text}]
    monkeypatch.setattr(datasets, "load_dataset", lambda **kwargs: iter(rows))
    assert len(corpora.load("pile", split="train").documents) == 9_000
    said = rf'^NeelNanda/pile-10k row 9002 has "text" of type {kind}, expected'
    with pytest.raises(QtoolError, match=said):
        corpora.load("pile", split="test")


@pytest.mark.parametrize("name", ["wikitext2", "c4", "pile"])
def test_offline_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        QtoolError, match=rf"train text of {name} is not here.*no connection.*--data-dir"
    ) as caught:
        corpora.load(name, split="train", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.txt", None, "does not exist"),
        ("a.txt", "", "holds no text"),
        ("a.txt", " \n\n", "holds no text"),
        ("a.txt", b"abc\xff", "not UTF-8 text, .* at byte 3"),
        ("a.txt.xz", lzma.compress(b"a"), r"plain or compressed \(.gz, .zst\): .* at byte 0"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"content": "b", "id": 1}\n',
            "line 2 has the keys content, id, expected",
        ),
        ("a.json", '[\n{"text": "a"}\n]\n', "line 1 is not JSON: .*; one row in each line is"),
        ("a.jsonl", '["a"]\n', "line 1 has a list"),
        ("a.jsonl", '{"id": 1, "text": 5}\n', 'line 1 has "text" of type int, expected'),
        ("a.jsonl", '{"text": null}\n', 'line 1 has "text" of type NoneType, expected'),
        ("a.jsonl", '{"messages": "hi"}\n', 'line 1 has "messages" of type str, expected'),
        ("a.jsonl", '{"text": "a"\n', "line 1 is not JSON: Expecting ',' delimiter at column 14"),
        ("a.jsonl", '{"text": "a\n', "line 1 is not JSON: Invalid control character at column"),
        ("a.jsonl", '{"text": "a", "id": ' + "1" * 5000 + "}", "line 1 cannot be read: .*digits"),
        ("a.jsonl", "[" * 100_000, "line 1 cannot be read: maximum recursion depth"),
        ("a.parquet", "PAR0", "not a parquet file"),
        ("a.json.gz", "plain", "cannot be read"),
        ("a.csv", "id,text\n1,a\n", "is a table, expected a text, or a .jsonl"),
    ],
)
def test_bad_files(tmp_path, file, content, message):
    path = tmp_path / file
    if content is not None:
        write(path, content)
    with pytest.raises(QtoolError, match=message):
        corpora.load(str(path), split="train")


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    """What cuts strings of UTF-16, as JavaScript has them, leaves such halves in JSON."""
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    corpus = corpora.load(str(path), split="test")
    assert corpus.text == "a\ufffd\n\n\U0001f600" and len(corpus.sha256) == 64


@pytest.mark.parametrize("column", ["text", "messages"])
@pytest.mark.parametrize(("row", "kind"), [(5, "int"), (None, "NoneType")])
def test_a_parquet_column_of_another_type(tmp_path, column, row, kind):
    parquet.write_table(pyarrow.table({column: [row]}), tmp_path / "b.parquet")
    with pytest.raises(QtoolError, match=f'has "{column}" of type {kind}, expected a row with a'):
        corpora.load(str(tmp_path / "b.parquet"), split="train")


def test_the_row_of_a_parquet_file_that_has_no_text_is_named(tmp_path):
    rows = ["x"] * 1024 + ["y", None]  # more than are read at once
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "b.parquet")
    with pytest.raises(QtoolError, match=r"b\.parquet row 1026 has \"text\" of type NoneType"):
        corpora.load(str(tmp_path / "b.parquet"), split="train")


def test_bad_parquet_column_and_directory(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(QtoolError, match="has the columns body"):
        corpora.load(str(tmp_path / "b.parquet"), split="train")
    monkeypatch.chdir(tmp_path.parent)
    for directory in (str(tmp_path), tmp_path.name):
        with pytest.raises(QtoolError, match="is a directory"):
            corpora.load(directory, split="train")


def test_bad_names(tmp_path):
    with pytest.raises(QtoolError, match=r"unknown corpus 'wikitext'.*did you mean wikitext2\?"):
        corpora.load("wikitext", split="train")
    for name in ("c4", "demo", __file__):
        with pytest.raises(QtoolError, match=r"data directory .* does not exist"):
            corpora.load(name, split="train", data_dir=tmp_path / "absent")
    with pytest.raises(QtoolError, match="data_dir 3: a string or a path is expected"):
        corpora.load("c4", split="train", data_dir=3)


def test_a_file_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    assert corpora.load("~/a.txt", split="test").documents == ["text"]


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_wikitext2_test_is_the_published_text():
    rows = corpora.load("wikitext2", split="test", data_dir=DATA).documents
    # as the hub's test split; GPT-2 makes 287,644 tokens of the joined text
    assert len(rows) == 4358
    assert rows[:2] == ["", " = Robert Boulter = \n"]
    assert corpora.load("c4", split="test", data_dir=DATA).documents
