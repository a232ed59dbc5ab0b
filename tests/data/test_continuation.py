"""Windows that the model continues: sampled from its own distribution, token by token."""

import pytest
import torch
from torch import Tensor

from qtool.data.continuation import continued
from qtool.errors import QtoolError
from qtool.runtime.load import load
from tests.conftest import VARIANTS, MakeModel


def texts(windows: int = 4, length: int = 5) -> Tensor:
    return torch.randint(0, 320, (windows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", VARIANTS)
def test_tokens_are_drawn_from_what_the_model_says_of_all_before(
    family: str, make_model: MakeModel
) -> None:
    """Drawn again without a cache, from the logits of the whole beginning: also where a window
    slides.
    """
    model, random = load(make_model(family), dtype=torch.float32), torch.Generator().manual_seed(7)
    wanted = texts()
    with torch.no_grad():
        while wanted.shape[1] < 40:
            p = model(wanted, use_cache=False).logits[:, -1].softmax(-1)
            wanted = torch.cat([wanted, torch.multinomial(p, 1, generator=random)], 1)
    assert torch.equal(continued(model, texts(), 40, seed=7), wanted)


def test_parts_are_written_one_after_another(make_model: MakeModel) -> None:
    model = load(make_model("llama"), dtype=torch.float32)
    whole, parts = (
        continued(model, texts(), 40, seed=0),
        continued(model, texts(), 40, seed=0, at_once=3),
    )
    assert whole.shape == parts.shape == (4, 40)
    assert torch.equal(continued(model, texts()[:3], 40, seed=0), parts[:3])
    assert torch.equal(parts[:, :5], texts())
    assert torch.equal(whole, continued(model, texts(), 40, seed=0))
    assert not torch.equal(whole, continued(model, texts(), 40, seed=1))


def test_no_text_from_nan(make_model: MakeModel) -> None:
    model = load(make_model("llama"), dtype=torch.float32)
    model.lm_head.weight.data[0] = float("nan")
    with pytest.raises(QtoolError, match="NaN or Inf in the model's logits"):
        continued(model, texts(), 40, seed=0)
