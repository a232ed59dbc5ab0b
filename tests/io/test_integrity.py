"""Recorded hashes: the shard that changed is named, and an intact or foreign model passes."""

import hashlib
import json
from pathlib import Path

import pytest

from qtool.errors import CheckFailed
from qtool.io.integrity import damaged_shards, hashes_to_check, require_intact


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shards = {f"model-{index}.safetensors": bytes([index]) * 100 for index in range(3)}
    for name, content in shards.items():
        (tmp_path / name).write_bytes(content)
    recorded = {name: hashlib.sha256(content).hexdigest() for name, content in shards.items()}
    (tmp_path / "qtool.json").write_text(json.dumps({"shards": recorded}))
    return tmp_path


def test_an_intact_checkpoint_and_one_without_a_record_pass(checkpoint: Path) -> None:
    require_intact(checkpoint)
    (checkpoint / "qtool.json").unlink()
    (checkpoint / "model-0.safetensors").write_bytes(b"")
    require_intact(checkpoint)


def test_every_changed_shard_is_found_and_the_first_is_named(checkpoint: Path) -> None:
    changed = bytearray((checkpoint / "model-1.safetensors").read_bytes())
    changed[50] ^= 1
    (checkpoint / "model-1.safetensors").write_bytes(changed)
    (checkpoint / "model-2.safetensors").unlink()
    assert [name for name, _ in damaged_shards(checkpoint)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    with pytest.raises(CheckFailed, match=r"model-1.safetensors: the file's sha256 is not"):
        require_intact(checkpoint)


def test_a_damaged_record_is_a_failed_check(checkpoint: Path) -> None:
    record = json.loads((checkpoint / "qtool.json").read_text())
    wrong = {"source": "x", "blocks": 5, "recipe": [], "calibration": 5, "job": None, "shards": 3}
    of_fields = [json.dumps(record | {key: value}) for key, value in wrong.items()]
    of_items = [
        json.dumps(record | more) for more in ({"blocks": [5]}, {"recipe": {"methods": [5]}})
    ]
    for content in ("{", "[]", "{}", "[" * 100_000, *of_fields, *of_items):
        (checkpoint / "qtool.json").write_text(content)
        with pytest.raises(CheckFailed, match=r"qtool.json: missing or damaged"):
            require_intact(checkpoint)


def test_a_conversion_wants_a_record_that_can_be_read(checkpoint: Path) -> None:
    assert len(hashes_to_check(checkpoint)) == 3
    (checkpoint / "qtool.json").write_text("{")
    with pytest.raises(CheckFailed, match=r"qtool.json: missing or damaged"):
        hashes_to_check(checkpoint)
    (checkpoint / "qtool.json").unlink()
    assert hashes_to_check(checkpoint) == {}
