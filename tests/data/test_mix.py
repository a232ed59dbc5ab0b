"""A mix of calibration data: its parts, their shares, and the order of all windows."""

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from qtool.data.mix import count_windows, facts, interleave, parse_mix
from qtool.errors import QtoolError

IDS, OTHER = torch.arange(40), torch.arange(40, 80)


def mixed(given: Any, samples: int | None = None) -> list[tuple[str, int]]:
    return [(part.data.name, part.samples) for part in parse_mix(given, samples)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files whose names are no help."""
    for name in ("a.txt", "b,c.txt", "d:7", "e,f:3"):
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("wikitext2", [("wikitext2", 128)]),
        ("wikitext2:9", [("wikitext2", 9)]),
        ("wikitext2:64,c4:60, a.txt:2", [("wikitext2", 64), ("c4", 60), ("a.txt", 2)]),
        ("wikitext2,c4,a.txt", [("wikitext2", 43), ("c4", 43), ("a.txt", 42)]),
        ("b,c.txt", [("b,c.txt", 128)]),
        (r"a.txt:1,b\,c.txt:2", [("a.txt", 1), ("b,c.txt", 2)]),
        ("d:7", [("d:7", 128)]),
        ("d:7,a.txt", [("d:7", 64), ("a.txt", 64)]),
        ("d:7:5,a.txt:4", [("d:7", 5), ("a.txt", 4)]),
        ("e,f:3", [("e,f:3", 128)]),
        (r"e\,f:3:2,a.txt:1", [("e,f:3", 2), ("a.txt", 1)]),
        ({"b,c.txt": 3, "d:7": 2}, [("b,c.txt", 3), ("d:7", 2)]),
        ({"b,c.txt": None, "c4": None}, [("b,c.txt", 64), ("c4", 64)]),
        ([(["one"], 3), (IDS, 2)], [("texts", 3), ("token ids", 2)]),
        ({"c4": np.int64(3)}, [("c4", 3)]),
        ([(["one"], np.int64(3))], [("texts", 3)]),
        ([(1, 2), (3, 4)], [("token ids", 128)]),
    ],
)
def test_parts_and_their_numbers(given: Any, expected: Any, here: Path) -> None:
    assert mixed(given) == expected
    assert count_windows(given, None) == sum(samples for _, samples in expected)


@pytest.mark.parametrize("names", ["c4,b,c.txt", r"a.txt,b\,c.txt,d:7", r"e\,f:3,pile"])
def test_the_record_is_what_the_command_line_takes(names: str, here: Path) -> None:
    parts = parse_mix(names.replace("c4,b,c.txt", r"c4,b\,c.txt"), 10)
    record = facts([(part.data.name, part.samples, part.content) for part in parts])
    assert parse_mix(record["text"], record["samples"])[0].samples == parts[0].samples
    assert mixed(record["text"]) == [(part.data.name, part.samples) for part in parts]
    assert [part["sha256"] for part in record["parts"]] == [part.content for part in parts]


def test_one_part_is_recorded_as_it_always_was() -> None:
    assert facts([("c4", 5, "ab")]) == {"text": "c4", "samples": 5, "sha256": "ab"}


@pytest.mark.parametrize(
    ("given", "samples", "message"),
    [
        ("c4:0", None, "calibration data c4: windows 0: a whole number of at least 1"),
        ("c4:2,pile:-1", None, "calibration data pile: windows -1"),
        ("c4:2,pile", None, "1 of 2 parts have a number of windows"),
        ("c4:2,pile:2", 5, "--samples 5: the parts of the calibration data have 4 windows"),
        ("c4:2", 5, "--samples 5: the parts of the calibration data have 2 windows"),
        ("c4:1", 5, "--samples 5: the parts of the calibration data have 1 window together"),
        ("c4", 0, "--samples 0: at least 1 expected, one window for each part"),
        ("c4,pile,demo", 2, "--samples 2: at least 3 expected, one window for each part"),
        ("c4:2,wikitex:2", None, "unknown corpus 'wikitex'"),
        ("c4:2,pile:many", None, "unknown corpus 'pile:many'"),
        ("c4:2,", None, "unknown corpus ''"),
        ("c4,", None, "unknown corpus ''"),
        ("c4,nofile.txt", None, "nofile.txt does not exist"),
        ("c4:2,pile:2,c4:3", None, "c4 is a part of the mix twice"),
        ([(IDS, 2), (IDS, 3)], None, "token ids is a part of the mix twice"),
        ([(IDS, 2.5), (OTHER, 3)], None, "calibration data Tensor: windows 2.5"),
        (b"c4:2", None, "found a bytes of int"),
        ({}, None, "found <class 'dict'>"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, None, "pass its input_ids"),
        (
            datasets.Dataset.from_dict({"text": ["a", "b"]})[:1],
            None,
            "a slice of a data set, is no",
        ),
        (datasets.DatasetDict({"a": datasets.Dataset.from_dict({"text": ["b"]})}), None, "split"),
    ],
)
def test_what_is_no_mix(given: Any, samples: int | None, message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        parse_mix(given, samples)


def test_a_mix_may_be_longer_than_a_file_name(here: Path) -> None:
    names = [f"{letter * 100}.txt" for letter in "abc"]
    for name in names:
        (here / name).write_text(name)
    assert mixed(",".join(names), 3) == [(name, 1) for name in names]
    with pytest.raises(QtoolError, match="no such file"):
        parse_mix("a" * 300, None)


@pytest.mark.parametrize("twin", ["./a.txt", "copy.txt"])
def test_a_file_under_two_names_is_there_twice(twin: str, here: Path) -> None:
    """Both parts would give the same windows."""
    (here / "copy.txt").write_text("a.txt")
    message = f"{twin} is a part of the mix twice: a.txt is the same text"
    with pytest.raises(QtoolError, match=message):
        parse_mix(f"a.txt:1,{twin}:2", None)


def test_a_name_with_a_colon_in_the_home_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "z:1").write_text("z")
    assert parse_mix("~/z:1", 3)[0].samples == 3


def test_a_pipe_is_no_text(here: Path) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(QtoolError, match="pipe is a pipe or a device, expected a text"):
        parse_mix(str(here / "pipe"), 3)


def test_every_stretch_holds_its_share_of_each_part() -> None:
    sizes = (12, 7, 1, 3)
    parts = [torch.full((n, 2), i) * 100 + torch.arange(n)[:, None] for i, n in enumerate(sizes)]
    whole = interleave(parts)
    assert sorted(whole.tolist()) == sorted(torch.cat(parts).tolist())
    owner, total = whole[:, 0] // 100, sum(sizes)
    for i, part in enumerate(parts):
        assert torch.equal(whole[owner == i], part)
        so_far = (owner == i).cumsum(0)
        fair = torch.arange(1, total + 1) * sizes[i] / total
        assert (so_far - fair).abs().max() <= 1
    assert torch.equal(interleave(parts[:1]), parts[0])
