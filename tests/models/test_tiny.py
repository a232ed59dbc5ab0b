"""A sample of the classes of ``make families``: quantized, loaded and held against their own."""

from pathlib import Path

import pytest
import torch

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load
from tests.models.proof import check
from tests.models.tiny import save_tiny

#: post-norms, layers without RoPE, parallel branches, by-head fused rows, stacked, transposed,
#: interleaved and biased experts, names of its own on disk, MLA, Gated DeltaNet
SAMPLE = ("olmo2", "smollm3", "cohere", "gpt_neox", "gpt_oss", "phimoe", "deepseek_v3")


@pytest.mark.parametrize("model_type", (*SAMPLE, "qwen3_next", "nanochat"))
def test_a_class_is_quantized_end_to_end(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["granite", "stablelm", "glm4_moe"])
def test_transforms_leave_the_logits_as_they_were(model_type: str, tmp_path: Path) -> None:
    """Eight bits of 128 channels are nearly exact: what a transform broke would show."""
    source = save_tiny(model_type, tmp_path / "source")
    recipe = recipes.parse(
        {
            "scheme": "test",
            "transforms": ["norm-fusion", "rotate", "smooth"],
            "layers": [{"match": ".*", "scheme": None}],
        },
        "test",
    )
    tokens = torch.randint(3, 320, (2, 32), generator=torch.Generator().manual_seed(0))
    calibration = Calibration([tokens])
    out = quantize(Checkpoint(source), recipe, tmp_path / "out", calibration=calibration)
    ids = tokens[:1, :16]
    torch.testing.assert_close(
        load(out)(ids).logits, load(source)(ids).logits, rtol=1e-3, atol=1e-3
    )


def test_what_depends_on_more_than_hidden_states_is_only_streamed(tmp_path: Path) -> None:
    source = Checkpoint(save_tiny("hy_v4", tmp_path / "source"))
    assert family_of(source.config).streamed_only
    with pytest.raises(QtoolError, match=r"activations, which a .* pass --recipe fast"):
        quantize(source, recipes.load("w4a16", "paper"), tmp_path / "out")
