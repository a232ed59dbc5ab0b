"""Damaged files of a checkpoint: one sentence each, whatever is wrong."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import qtool
from qtool.errors import QtoolError
from qtool.eval import saved
from qtool.io.integrity import CONFIG, INDEX, RECORD, hashes_beside_shards, read_record
from qtool.io.run_record import read_run
from qtool.io.safetensors import read_header
from qtool.io.source import SINGLE, Checkpoint
from tests.conftest import MakeModel


@pytest.fixture
def sharded(make_model: MakeModel) -> Path:
    return make_model(max_shard_size="200KB")


def shard_of(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[1]


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_shard(size: int, sharded: Path) -> None:
    path = shard_of(sharded)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(QtoolError, match=path.name):
        Checkpoint(sharded)


def test_a_shard_that_is_a_directory_or_gone(sharded: Path) -> None:
    path = shard_of(sharded)
    path.unlink()
    with pytest.raises(QtoolError, match=f"{path.name} is missing"):
        Checkpoint(sharded)
    path.mkdir()
    with pytest.raises(QtoolError, match=f"{path.name} cannot be read"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", [INDEX, SINGLE])
def test_a_link_to_a_file_that_is_gone(name: str, sharded: Path) -> None:
    """As a cache of the hub holds after a blob was removed."""
    (sharded / INDEX).unlink()
    (sharded / name).symlink_to("blob")
    with pytest.raises(QtoolError, match=rf"{name} (cannot be read: No such file|is missing)"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", [CONFIG, INDEX, SINGLE])
def test_a_pipe_is_not_waited_for(name: str, sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / name).unlink(missing_ok=True)
    os.mkfifo(sharded / name)
    with pytest.raises(QtoolError, match=rf"{name} is a pipe or a device, expected a file"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (RECORD, read_record),
        (CONFIG, hashes_beside_shards),
        ("eval.json", saved.read),
        ("run.json", partial(read_run, identity={})),
    ],
)
def test_a_pipe_in_place_of_a_record_is_not_waited_for(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(QtoolError, match=rf"{name} is a pipe or a device, expected a file"):
        read(tmp_path)


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_file_that_changes_after_it_was_opened(change: str, make_model: MakeModel) -> None:
    directory = make_model()
    checkpoint = Checkpoint(directory)
    path = directory / SINGLE
    path.unlink() if change == "gone" else path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(QtoolError, match=r"ended early|cannot be read: No such file"):
        checkpoint.read("lm_head.weight")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000, "\x00\xff"],
)
def test_a_damaged_index(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(QtoolError, match=INDEX.replace(".", r"\.")):
        Checkpoint(sharded)


@pytest.mark.parametrize("shard", [7, None, [], "../model.safetensors", "x.bin"])
def test_an_index_that_names_no_file(shard: object, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(QtoolError, match="is not a file name inside the model directory"):
        Checkpoint(sharded)


def test_an_index_beside_a_file_of_all_weights(sharded: Path, make_model: MakeModel) -> None:
    """transformers reads the one, vLLM the other, and nothing says that they are the same."""
    shutil.copy(make_model(name="whole") / SINGLE, sharded)
    with pytest.raises(QtoolError, match=rf"reads {SINGLE} there, other programs .* {INDEX}"):
        Checkpoint(sharded)
    names = read_header(sharded / SINGLE)
    (sharded / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
    assert Checkpoint(sharded).entries == names


def test_loading_names_a_file_of_some_weights_beside_the_index(sharded: Path) -> None:
    """And not the tensors that transformers, which reads that file alone, does not find."""
    save_file({"model.norm.weight": torch.ones(128)}, sharded / SINGLE, {"format": "pt"})
    with pytest.raises(QtoolError, match=rf"transformers reads {SINGLE} there"):
        qtool.load(sharded)


@pytest.mark.parametrize("named", [SINGLE, INDEX, "other.safetensors"])
def test_weights_that_config_json_names(named: str, make_model: MakeModel) -> None:
    """transformers reads no others."""
    directory = make_model()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    if named in (SINGLE, INDEX):
        assert "transformers_weights" not in Checkpoint(directory).config
        return
    with pytest.raises(QtoolError, match=r"transformers_weights names other\.safetensors"):
        Checkpoint(directory)
