"""Fused norms compute the same function, in copies of the module too."""

import copy

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, Qwen3Config

from qtool.models.skeleton import skeleton
from qtool.runtime.fused_norms import fuse_norms
from tests.conftest import SMALL


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL), Qwen3Config(**SMALL), GemmaConfig(**SMALL)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_are_the_same_function(config, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    plain = skeleton(config).to_empty(device="cpu").to(dtype)
    for parameter in plain.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    again = copy.deepcopy(fused)
    x = torch.randn(2, 5, SMALL["hidden_size"], dtype=dtype)
    for model in (plain, fused, again):
        model.model.layers[1].input_layernorm.weight.data.mul_(2)
    expected = plain.model.layers[1].input_layernorm(x)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    )
    for model in (fused, again):
        torch.testing.assert_close(model.model.layers[1].input_layernorm(x), expected, **tolerance)
    # Gemma's multiply by 1 + weight
    assert "forward" in vars(fused.model.norm) or isinstance(config, GemmaConfig)
