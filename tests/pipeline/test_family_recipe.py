"""Built-in recipes on families that cannot have all of them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qtool import recipes
from qtool.io.source import DEMO, Checkpoint
from qtool.models import Fold
from qtool.pipeline import commands
from qtool.pipeline.job import Job
from tests.conftest import VARIANTS, MakeModel

CALIBRATED = [
    (scheme, v)
    for scheme, variants, _ in recipes.overview()
    for v in variants.split()
    if v != "fast"
]


def job_of(model: Path, scheme: str, variant: str) -> Job:
    """The job with every linear in 8 bit, which any shape can be."""
    recipe = recipes.load(scheme, variant)
    return Job.of(Checkpoint(model).config, replace(recipe, layers=recipes.load("w8a8").layers))


@pytest.mark.parametrize("family", VARIANTS)
def test_every_family_takes_every_built_in_recipe(family: str, make_model: MakeModel) -> None:
    model = make_model(family)
    for scheme, variant in CALIBRATED:
        job = job_of(model, scheme, variant)
        assert job.rounding.name == recipes.load(scheme, variant).rounding.name
        assert bool(job.recipe.left_out) == (
            job.recipe.transforms != recipes.load(scheme, variant).transforms
        )


@pytest.mark.parametrize("family", VARIANTS)
def test_v_and_down_have_small_groups_in_w4a4_mix(family: str, make_model: MakeModel) -> None:
    """APEX4 section 3.2.2, whatever a family calls them."""
    job = Job.of(Checkpoint(make_model(family)).config, recipes.load("w4a4-mix"))
    for block in range(job.blocks):
        kind = job.block_family(block)
        v = kind.owner(kind.attention.v)
        down = {
            n for g in kind.groups if g.fold in (Fold.PRODUCT, Fold.ACTIVATION) for n in g.linears
        }
        sizes = {name: job.format.of(job.full(block, name)).group_size for name in kind.linears()}  # type: ignore[union-attr]
        assert down and {name for name, size in sizes.items() if size == 32} == {v, *down}
        assert set(sizes.values()) == {32, None}


@pytest.mark.parametrize("family", ("gemma2", "gemma3_text"))
def test_what_cannot_rotate_is_smoothed_behind_its_norms(
    family: str, make_model: MakeModel
) -> None:
    job = job_of(make_model(family), "w4a8-lqq", "best")
    assert "residual stream left out" in job.recipe.left_out[0]
    steps = {step.name: dict(step.options) for step in job.recipe.transforms}
    assert steps == {"norm-fusion": {}, "rotate": {"residual": False}, "smooth": {}}


def test_what_was_left_out_is_printed_and_recorded(
    make_model: MakeModel, tmp_path: Path, capsys
) -> None:  # type: ignore[no-untyped-def]
    model, said = make_model("gemma2", vocab_size=4096), "rotate: the residual stream left out"
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, model)
    commands.quantize(
        str(model),
        "w8a8",
        tmp_path / "out",
        recipe="best",
        calib="demo",
        data_dir=None,
        samples=2,
        seqlen=32,
        seed=0,
        device="cpu",
        resume=False,
        progress=None,
    )
    assert said in capsys.readouterr().err
    recorded = json.loads((tmp_path / "out/qtool.json").read_text())["recipe"]
    assert (
        said in recorded["left_out"][0] and {"rotate": {"residual": False}} in recorded["methods"]
    )
    assert said in commands.plan(str(model), "w8a8", recipe="best").job.recipe.left_out[0]
