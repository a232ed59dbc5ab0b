"""The ``paper`` variants do what their papers do, and list where they do not."""

from pathlib import Path

import pytest
import torch
import yaml

from qtool import recipes
from qtool.recipes import recipe as schema
from qtool.schemes.fmpq_blocks import plan_blocks

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"
PAPERS = {
    path.stem: yaml.safe_load(path.read_text())["variants"]["paper"]
    for path in Path(schema.__file__).parent.glob("*.yaml")
}


def transforms(scheme: str) -> dict[str, dict[str, object]]:
    return {step.name: dict(step.options) for step in recipes.load(scheme, "paper").transforms}


def test_smoothquant_smooths_behind_norms_with_one_alpha() -> None:
    assert transforms("w8a8") == {"smooth": {"groups": ["norm"], "alpha": 0.5}}


def test_liquidgemm_smooths_and_does_not_clip() -> None:
    """Section 6: SmoothQuant with a grid search, then the two levels of section 4."""
    assert transforms("w4a8-lqq") == {"smooth": {}}
    assert recipes.load("w4a8-lqq", "paper").rounding.name == "rtn"


@pytest.mark.parametrize("scheme", ["w4a8-qoq", "w4a8-qoq-g128"])
def test_qserve_rotates_smooths_reorders_and_clips(scheme: str) -> None:
    """Section 3.2 and appendix B.2, where the rotation is of the residual stream alone."""
    assert transforms(scheme) == {
        "norm-fusion": {},
        "rotate": {},
        "smooth": {"groups": ["heads", "product"]},
        "smooth-attention": {"alphas": [0.5], "steps": 0},
        "reorder": {},
        "clip": {},
    }
    left = [departure["what"] for departure in PAPERS[scheme]["departures"]]
    assert any("value heads" in what for what in left)


def test_comet_gives_8_bits_to_blocks_with_an_outlier_alone() -> None:
    """Section 3.2; weights by OmniQuant's learned clipping, which leaves them as they are."""
    assert transforms("w4ax-fmpq") == {"gather-outliers": {}}
    assert recipes.load("w4ax-fmpq", "paper").rounding.options["weight_lr"] == 0
    amax = torch.rand(512) + 1
    assert not plan_blocks(amax).eight_bit.any()
    amax[7] = 100
    assert plan_blocks(amax).eight_bit.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("scheme", ["w4a4-g128", "w4a4-mix"])
def test_apex4_minimizes_the_cosine_with_constant_steps(scheme: str) -> None:
    """Equation 9 and section 5.1."""
    rounding = recipes.load(scheme, "paper").rounding
    assert dict(rounding.options) == {"loss": "cosine", "decay": False}
    left = " ".join(departure["what"] for departure in PAPERS[scheme]["departures"])
    assert all(what in left for what in ("step for a weight", "step for a scale", "balanced"))


@pytest.mark.parametrize("scheme", PAPERS)
def test_departures_are_listed_with_their_effect(scheme: str) -> None:
    text = DOCUMENT.read_text()
    for departure in PAPERS[scheme].get("departures", ()):
        assert departure.keys() == {"what", "effect"}
        row = f"| `{scheme}` | {departure['what']} | {departure['effect']} |"
        assert text.splitlines().count(row) == 1
