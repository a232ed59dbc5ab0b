"""The model that continues windows where the float one does not fit is its checkpoint, loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool import recipes
from qtool.data.continuation import continued
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.models.auto import text_model
from qtool.pipeline.planning.memory import ROUNDED_SCHEME
from qtool.pipeline.quantize import quantize
from qtool.pipeline.rounded_model import load_rounded
from qtool.runtime.linear import QuantLinear
from qtool.runtime.load import load
from tests.conftest import MakeModel


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "mixtral"])
def test_it_is_the_rounded_checkpoint(variant: str, make_model: MakeModel, tmp_path: Path) -> None:
    """A tensor without dimensions, which its loader ignores, is no obstacle."""
    model = make_model(variant)
    path = model / "model.safetensors"
    save_file(load_file(path) | {"unknown": torch.tensor(1.0)}, path, {"format": "pt"})
    source = Checkpoint(model)
    quantize(source, recipes.load(ROUNDED_SCHEME), tmp_path / "rounded", keep_unknown=True)
    found = load_rounded(source, torch.device("cpu"))
    expected = load(tmp_path / "rounded")
    tensors = expected.state_dict()
    assert found.state_dict().keys() == tensors.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name
    ids = torch.arange(16)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    assert not found.training


def test_kernels_are_compiled_for_all_linears(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each shape, for both numbers of tokens."""
    ran: list[tuple[int, int, int]] = []

    def product(linear: QuantLinear, x: torch.Tensor) -> None:
        ran.append((linear.out_features, *x.shape))

    monkeypatch.setattr(QuantLinear, "product", product)
    model = load_rounded(Checkpoint(make_model("llama")), torch.device("cpu"), (5, 40))
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    wanted = {(x.out_features, count, x.in_features) for x in linears for count in (5, 40)}
    assert len(ran) == len(wanted) and set(ran) == wanted


@pytest.mark.cuda
def test_it_continues_windows_on_a_gpu(tmp_path: Path) -> None:
    """As the model of a checkpoint does that was rounded on a CPU."""
    source, expected = Checkpoint(DEMO), tmp_path / "rounded"
    quantize(source, recipes.load(ROUNDED_SCHEME), expected)
    models = load_rounded(source, torch.device("cuda")), load(expected, device="cuda")
    prompts = torch.arange(64).view(4, 16)
    written = [continued(text_model(model), prompts, 64, seed=0) for model in models]
    assert torch.equal(*written)
