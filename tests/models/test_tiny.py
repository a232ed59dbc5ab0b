"""A sample of the classes of ``make families``: quantized, loaded and held against their own."""

from pathlib import Path

import pytest

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.pipeline.quantize import quantize
from tests.models.proof import check, transforms_keep_logits
from tests.models.tiny import save_tiny

#: post-norms, layers without RoPE, parallel branches, by-head fused rows, stacked, transposed,
#: interleaved and biased experts, names of its own on disk, MLA, Gated DeltaNet, convolutions that
#: are joined at load, infinite numbers in config.json
SAMPLE = (
    *("olmo2", "smollm3", "cohere", "gpt_neox", "gpt_oss", "phimoe", "deepseek_v3", "qwen3_next"),
    *("nanochat", "olmo_hybrid", "falcon_h1"),
)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_class_is_quantized_end_to_end(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["granite", "stablelm", "glm4_moe", "xlnet"])
def test_transforms_leave_the_logits_as_they_were(model_type: str, tmp_path: Path) -> None:
    """XLNet norms a norm's output again: nothing may be folded into the first."""
    transforms_keep_logits(save_tiny(model_type, tmp_path / "source"), tmp_path / "out")


def test_what_depends_on_more_than_hidden_states_is_only_streamed(tmp_path: Path) -> None:
    source = Checkpoint(save_tiny("hy_v4", tmp_path / "source"))
    assert family_of(source.config).streamed_only
    with pytest.raises(QtoolError, match=r"activations, which a .* pass --recipe fast"):
        quantize(source, recipes.load("w4a16", "paper"), tmp_path / "out")
