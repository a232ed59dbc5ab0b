"""What enters the residual stream beside text is rotated with it."""

from pathlib import Path

import pytest
import torch

import qtool
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.derived.entering import ENTERING, entering
from tests.models import pictures
from tests.models.proof import TOLERANCE, distance, transforms_keep_logits
from tests.models.tiny import save_tiny


@pytest.mark.parametrize("kind", [kind for kind, names in ENTERING.items() if names])
def test_logits_of_pictures_stay(kind: str, tmp_path: Path) -> None:
    source = save_tiny(kind, tmp_path / "source")
    family = family_of(Checkpoint(source).config)
    assert not family.why_fixed
    transforms_keep_logits(source, tmp_path / "out")
    before, after = (qtool.load(path) for path in (source, tmp_path / "out"))
    for name in family.entering:
        assert not torch.equal(before.state_dict()[name], after.state_dict()[name]), name
    assert distance(pictures.logits(after), pictures.logits(before)) < TOLERANCE


@pytest.mark.parametrize("kind", ["phi4_multimodal", "janus"])
def test_the_stream_of_an_unlisted_model_stays(kind: str, tmp_path: Path) -> None:
    """Of Phi-4, whose config.json has no part of its own for text, too."""
    source = save_tiny(kind, tmp_path / "source")
    reason = "pictures or sound enter it by linears that qtool does not know"
    assert family_of(Checkpoint(source).config).why_fixed == reason


@pytest.mark.parametrize("shapes", [{}, {"model.multi_modal_projector.linear_2.weight": (32, 64)}])
def test_a_projector_that_is_absent_or_narrow_is_not_known(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    assert entering("llava", {}, shapes, 64) is None
