"""Where a run writes if it is not told."""

from pathlib import Path

import pytest

import qtool
from qtool.pipeline.run import default_out
from tests.conftest import MakeModel


def test_the_result_stands_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "store" / "abc"
    model.mkdir(parents=True)
    (tmp_path / "llama").symlink_to(model)
    assert default_out(model, "w4a16") == model.with_name("abc-w4a16")
    assert default_out(tmp_path / "llama", "w4a16") == tmp_path / "llama-w4a16"
    monkeypatch.chdir(model)
    assert default_out(".", "w4a16") == model.with_name("abc-w4a16")
    assert default_out("demo", "w4a16") == Path("demo-w4a16")
    assert default_out("some/llama", "w4a16") == Path("llama-w4a16")
    assert default_out("missing/", "w4a16") == Path("-w4a16")  # the model is refused later
    assert default_out("/", "w4a16") == Path("/-w4a16")


def test_of_the_hubs_cache_the_result_lies_in_the_working_directory(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert default_out(snapshot, "w4a16") == Path("llama-w4a16")


def test_the_dot_in_a_recipes_name_stays_in_that_of_the_result(make_model: MakeModel) -> None:
    """As in a recipe of ``qtool sensitivity``: two budgets are two directories."""
    model = make_model()
    recipe = {"scheme": "w8a8-8.25", "layers": [{"match": ".*", "scheme": "w8a8"}]}
    done = qtool.quantize(model, recipe=recipe)
    assert Path(done) == model.with_name(f"{model.name}-w8a8-8.25")
