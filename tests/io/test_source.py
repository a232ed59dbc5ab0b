"""What a hub id is downloaded of: the weights once, and what belongs to a model beside them."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from qtool.errors import QtoolError
from qtool.io.model_directory import directory_of

WANTED = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.model",
]
OTHERS = [
    "consolidated.safetensors",
    "onnx/model.safetensors",
    "original/tokenizer.model",
    "model.bin",
    "run.py",
]


@pytest.mark.parametrize(("weights", "wanted"), [(True, WANTED), (False, ["config.json"])])
def test_a_download_has_the_weights_once(
    weights: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def download(model: str, **patterns: list[str]) -> str:
        taken.extend(filter_repo_objects(WANTED + OTHERS, **patterns))  # type: ignore[arg-type]
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert directory_of("owner/name", weights=weights) == Path("/somewhere")
    assert taken == wanted


def test_a_path_that_would_be_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of hub models often lie in a directory of the owner's name."""

    def download(model: str, **patterns: list[str]) -> str:
        if model == "models/llama":
            raise OSError("no network")
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QtoolError, match=r"^models/llama is not a local directory and could"):
        directory_of("models/llama")
    (tmp_path / "models").mkdir()
    said = r"^models/llama does not exist: models has no .* llama; as a hub id it could not be down"
    with pytest.raises(QtoolError, match=said):
        directory_of("models/llama")
    assert directory_of("models/other") == Path("/somewhere")
