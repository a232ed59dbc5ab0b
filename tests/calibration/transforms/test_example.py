"""The transform of examples/own_method.py leaves the model as it is."""

import runpy
from pathlib import Path

import pytest
import torch

from qtool.models import family_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_method.py"


@pytest.fixture
def equalize():
    return runpy.run_path(str(EXAMPLE))["Equalize"]()


def test_logits_stay(any_model, transformed, logits, equalize) -> None:
    linears = dict(any_model.get_submodule(family_of(any_model.config).blocks)[0].named_modules())
    if not {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} <= linears.keys():
        pytest.skip("the MLP is not Llama's")
    equal = logits(transformed(any_model, [equalize]))
    torch.testing.assert_close(equal, logits(any_model), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_ranges_are_equal_and_a_dead_channel_stays(llama, blocks, equalize) -> None:
    block, _ = blocks(llama)[0]
    up, down = block.weight("mlp.up_proj"), block.weight("mlp.down_proj")
    up[3] = 0
    down[:, 5] = 0
    equalize.apply(block, [])
    rows, columns = up.abs().amax(1), down.abs().amax(0)
    alive = torch.ones(len(rows), dtype=torch.bool)
    alive[[3, 5]] = False
    torch.testing.assert_close(rows[alive], columns[alive])
    assert torch.isfinite(up).all() and torch.isfinite(down).all()
