"""``verify`` sees what each of its checks is for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool import recipes
from qtool.errors import QtoolError
from qtool.exchange.export import export
from qtool.format import LinearFormat
from qtool.io.integrity import INDEX
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.pipeline.verify import verify
from qtool.runtime.linear import QuantLinear
from qtool.runtime.load import load
from tests.conftest import MakeModel


@pytest.fixture
def problems(make_model: MakeModel, tmp_path: Path) -> Callable[[], set[str]]:
    """The problems of a whole checkpoint's linears."""
    source = make_model(num_hidden_layers=1)
    native = quantize(Checkpoint(source), recipes.load("w4a8-lqq"), tmp_path / "native")
    return lambda: {row.problem for row in verify(native)}


def test_a_whole_checkpoint_has_none(problems: Callable[[], set[str]]) -> None:
    assert problems() == {""}


def test_a_wrong_output(problems: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    right = QuantLinear.reference

    def wrong(self: QuantLinear, x: Tensor) -> Tensor:
        return right(self, x) * 1.001

    monkeypatch.setattr(QuantLinear, "reference", wrong)
    assert problems() == {"output differs from the float64 reference by 1.0e-03"}


def test_other_bytes_for_the_same_codes(
    problems: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LinearFormat.pack

    def wrong(self: LinearFormat, *given: object) -> dict[str, Tensor]:
        return right(self, *given) | {"s2": torch.zeros(1)}  # type: ignore[arg-type]

    monkeypatch.setattr(LinearFormat, "pack", wrong)
    assert problems() == {"packing the unpacked s2 does not give the stored bytes"}


def test_progress_counts_linears_alone(make_model: MakeModel, tmp_path: Path) -> None:
    native = quantize(Checkpoint(make_model()), recipes.load("w4a8-lqq"), tmp_path / "native")
    (native / "config.json").write_text((native / "config.json").read_text() + " ")
    seen = []
    rows = list(verify(native, progress=lambda done, total, notes: seen.append((done, total))))
    linears = [row for row in rows if row.ran]
    assert len(linears) == len(rows) - 1
    assert seen == [(number, len(linears)) for number in range(1, len(linears) + 1)]


@pytest.mark.parametrize(
    ("name", "edit"),
    [("config.json", {"rope_theta": 5e5}), (INDEX, {"metadata": {"total_size": 0}})],
)
def test_a_config_or_an_index_that_was_edited(
    name: str, edit: dict[str, object], make_model: MakeModel, tmp_path: Path
) -> None:
    """What is computed with it may be another model; it still loads, as it may be meant."""
    native = quantize(Checkpoint(make_model()), recipes.load("w4a8-lqq"), tmp_path / "native")
    content = json.loads((native / name).read_text())
    (native / name).write_text(json.dumps(content | edit))
    bad = [(row.name, row.problem) for row in verify(native) if row.problem]
    assert bad == [(name, "the file's sha256 is not the one recorded when it was written")]
    load(native)
    record = json.loads((native / "qtool.json").read_text())
    del record[name]  # as an earlier qtool wrote it
    (native / "qtool.json").write_text(json.dumps(record))
    assert not [row for row in verify(native) if row.problem]


@pytest.mark.parametrize("missing", [INDEX, "model-00002*"])
def test_every_file_that_was_edited_beside_one_without_which_no_weight_is_read(
    missing: str, make_model: MakeModel, tmp_path: Path
) -> None:
    native = quantize(Checkpoint(make_model()), recipes.load("w4a8-lqq"), tmp_path / "native")
    (lost,) = native.glob(missing)
    lost.unlink()
    (native / "config.json").write_text((native / "config.json").read_text() + " ")
    bad = {row.name: row.problem for row in verify(native)}
    assert bad.keys() == {lost.name, "config.json"}
    assert bad[lost.name] == "the file is missing"


@pytest.mark.parametrize("listed", [True, False])
def test_an_index_that_names_other_tensors_than_the_shards(
    listed: bool, make_model: MakeModel, tmp_path: Path
) -> None:
    native = quantize(Checkpoint(make_model()), recipes.load("w4a8-lqq"), tmp_path / "native")
    index = json.loads((native / INDEX).read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    if listed:
        index["weight_map"] |= {"model.norm.weight": shard, "model.norm.bias": shard}
        said = f"{INDEX}: model.norm.bias is said to be in {shard}, but is not there"
    else:
        said = f"{INDEX} does not list model.norm.weight of {shard}, "
    (native / INDEX).write_text(json.dumps(index))
    changed, named = verify(native)
    assert (changed.name, named.name) == (INDEX, str(native)) and named.problem.startswith(said)


def test_a_tokenizer_that_was_edited(make_model: MakeModel, tmp_path: Path) -> None:
    """Its other files, which decide no token ids, may be."""
    source, decides = make_model(), {"tokenizer.json", "spiece.model", "vocab.json"}
    for name in decides | (may := {"tokenizer_config.json", "chat_template.jinja"}):
        (source / name).write_text("{}")
    native = quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    assert not [row for row in verify(native) if row.problem]
    (native / "spiece.model").unlink()
    for name in decides - {"spiece.model"} | may:
        (native / name).write_text("{ }")
    bad = {row.name: row.problem for row in verify(native) if row.problem}
    assert bad.keys() == decides
    assert bad["spiece.model"] == "the file is missing"


@pytest.mark.parametrize(
    "other, problem",
    [
        ("kv8", "a tensor of the KV cache is missing"),
        ("kv4", "a tensor of the KV cache is missing"),
        ("kv9", "unknown --kv 'kv9'"),
    ],
)
def test_a_cache_that_the_checkpoint_has_no_tensors_for(
    other: str, problem: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """The config, which no hash covers, was changed."""
    found = recipes.load("w8a8")
    native = quantize(Checkpoint(make_model()), found, tmp_path / "native")
    config = json.loads((native / "config.json").read_text())
    config["quantization_config"]["kv"] = other
    (native / "config.json").write_text(json.dumps(config))
    assert any(row.problem.startswith(problem) for row in verify(native))
    with pytest.raises(QtoolError, match=problem):
        export(native, "compressed-tensors-w8a8", tmp_path / "out")
