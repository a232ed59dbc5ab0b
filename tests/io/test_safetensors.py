"""Our streams against the safetensors library, both ways, and damage of every kind."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qtool.errors import QtoolError
from qtool.io.safetensors import DTYPES, read, read_header, write, write_atomic, write_text
from tests.forks import run

KINDS = [dtype for name, dtype in DTYPES.items() if name != "F8_E4M3"]
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
specs = st.dictionaries(
    st.text("abc.", min_size=1, max_size=8), st.tuples(shapes, st.sampled_from(KINDS)), max_size=5
)


def tensors_of(spec: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in spec.items()}


@settings(max_examples=60)
@given(spec=specs)
def test_the_library_reads_what_we_write(spec, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("write") / "x.safetensors"
    tensors = tensors_of(spec)
    digest = write(path, tensors, tensors.items())
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    assert not list(path.parent.glob("*.tmp"))


@settings(max_examples=60)
@given(spec=specs)
def test_we_read_what_the_library_writes(spec, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("read") / "x.safetensors"
    tensors = tensors_of(spec)
    save_file(tensors, path)
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    assert all(torch.equal(read(entries[name]), tensor) for name, tensor in tensors.items())


def test_processes_that_write_one_file_do_not_share_a_temporary(tmp_path: Path) -> None:
    path = tmp_path / "x.json"

    def put(file: Any) -> None:
        ended = run(lambda: write_text(path, "the other's"), tmp_path / "other")
        assert ended.code == 0, ended.stderr
        file.write(b"mine")

    write_atomic(path, put)
    assert path.read_text() == "mine" and not list(tmp_path.glob("*.tmp"))


def test_rows_and_pieces(tmp_path: Path) -> None:
    weight = torch.randn(10, 3)
    specs = {"w": torch.empty(10, 3, device="meta"), "b": torch.empty(2, device="meta")}
    pieces = [("w", weight[:4]), ("w", weight[4:]), ("b", torch.ones(2))]
    write(tmp_path / "x.safetensors", specs, iter(pieces))
    entry = read_header(tmp_path / "x.safetensors")["w"]
    assert torch.equal(read(entry), weight)
    assert torch.equal(read(entry, slice(3, 7)), weight[3:7])
    assert torch.equal(read(entry, slice(8, 99)), weight[8:])


@settings(max_examples=60)
@given(data=st.data())
def test_rows_of_rows(data, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """Any rows of joined, transposed or reordered tensors, and matrices of the stack they make."""
    path = tmp_path_factory.mktemp("rows") / "x.safetensors"
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(3, 4), "c": torch.randn(8, 3)}
    write(path, tensors, tensors.items())
    entries = read_header(path)
    orders = st.lists(st.integers(0, 7), min_size=4, max_size=4)
    first, whole = data.draw(orders), torch.cat([tensors["a"], tensors["b"].T, tensors["c"]])
    parts = (
        entries["a"],
        entries["b"].transposed(),
        entries["c"].rows(range(8)),
        entries["c"].rows(first),
    )
    whole = torch.cat([whole, tensors["c"][first]])
    joined = replace(parts[0], shape=(20, 3), parts=parts)
    assert torch.equal(read(joined), whole)
    order = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=9))
    rows = slice(*sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))))
    picked = joined.rows(order)
    assert torch.equal(read(picked, rows), whole[order][rows])
    again = [len(order) - 1, 0]
    assert torch.equal(read(picked.rows(again)), whole[order][again])
    stack = replace(joined, shape=(4, 5, 3))
    assert torch.equal(read(stack), whole.view(4, 5, 3))
    number = data.draw(st.integers(0, 3))
    assert torch.equal(read(stack.matrix(number)), whole.view(4, 5, 3)[number])


@pytest.mark.parametrize(
    "pieces",
    [
        [("w", torch.zeros(2, 2))],  # too little
        [("w", torch.zeros(3, 2)), ("b", torch.zeros(2))],  # another tensor
        [("w", torch.zeros(4, 2))],  # too much
        [("w", torch.zeros(3, 2).half())],  # another dtype
    ],
)
def test_pieces_that_do_not_add_up_leave_nothing(pieces: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    with pytest.raises(QtoolError):
        write(tmp_path / "x.safetensors", {"w": torch.empty(3, 2, device="meta")}, iter(pieces))
    assert not list(tmp_path.iterdir())


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def byte(start: int, stop: int) -> str:
    return f'{{"dtype":"U8","shape":[{stop - start}],"data_offsets":[{start},{stop}]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (header("{"), "not valid JSON"),
        (header("[" * 9999), "not valid JSON"),
        (header("[]"), "no JSON object"),
        (header('{"w":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}', b"\0"), "dtype"),
        (header('{"w":{"dtype":"U8","shape":"1","data_offsets":[0,1]}}', b"\0"), "damaged"),
        (header('{"w":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}', b"\0"), "damaged"),
        (header('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0.0,1.0]}}', b"\0"), "damaged"),
        (header('{"w":{"dtype":"U8","shape":[1],"data_offsets":["0","1"]}}', b"\0"), "damaged"),
        (header('{"w":{"dtype":"F32"}}'), "damaged"),
        (
            header('{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', b"\0" * 8),
            "does not fit",
        ),
        (
            header('{"w":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}', b"\0" * 4),
            "does not fit",
        ),
        (header('{"w":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}', b"\0"), "dtype Q4"),
        (header('{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\0"), "is damaged"),
        (header('{"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"\0\0"), "gap"),
        (header(f'{{"a":{byte(0, 2)},"b":{byte(1, 2)}}}', b"\0\0"), "overlap"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "`git lfs pull` gets it"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    ],
)
def test_nothing_read_is_trusted(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(QtoolError, match=message.replace("?", r"\?")):
        read_header(path)


def test_a_dtype_that_no_file_holds_is_named(tmp_path: Path) -> None:
    wrong = {"a.scale": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(QtoolError, match=r"a\.scale: torch\.complex64 cannot be stored; .*float32"):
        write(tmp_path / "a.safetensors", wrong, wrong.items())
    assert not [*tmp_path.iterdir()]


def test_a_file_ends_where_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"w": torch.zeros(4)}, [("w", torch.zeros(4))])
    whole = path.read_bytes()
    for content in (whole + b"\0", whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(QtoolError, match=f"{len(content)} bytes found, {len(whole)} expected"):
            read_header(path)
