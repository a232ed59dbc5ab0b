"""Recipes: every built-in one can be carried out, and what is written in one is what happens."""

import json
from pathlib import Path

import pytest

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.source import DEMO
from qtool.pipeline.commands import Wishes
from qtool.pipeline.job import Job

CONFIG = json.loads((DEMO / "config.json").read_text())
BUILT_IN = [
    (name, variant) for name, variants, _ in recipes.overview() for variant in variants.split()
]
RULES = [
    {"roles": ["down_proj"], "scheme": "w8a8"},
    {"match": r"layers\.0\.", "scheme": None},
    {"match": ".*", "scheme": "w4a16", "group_size": 64},
]


@pytest.mark.parametrize(("scheme", "variant"), BUILT_IN)
def test_every_built_in_recipe_fits_the_demo(scheme: str, variant: str) -> None:
    recipe = recipes.load(scheme, variant)
    job = Job.of(CONFIG, recipe)
    assert recipe.scheme == scheme and recipe.about
    assert all(job.format.of(job.full(0, name)) for name in job.linears(0))


def test_the_papers_schemes_are_all_there() -> None:
    names = {
        "w8a8",
        "w4a16",
        "w4a16-24",
        "w4a8-lqq",
        "w4a8-qoq",
        "w4a8-qoq-g128",
        "w4ax-fmpq",
        "w4a4-g128",
        "w4a4-mix",
    }
    assert names <= {name for name, _, _ in recipes.overview()}


def test_the_first_rule_that_matches_holds() -> None:
    job = Job.of(CONFIG, recipes.parse({"layers": RULES}, "mixed"))
    schemes = {name: (f.scheme if (f := job.format.of(job.full(block, name))) else None)
               for block in (0,) for name in job.linears(0)}  # fmt: skip
    assert schemes["mlp.down_proj"] == "w8a8"
    assert schemes["mlp.up_proj"] is None
    assert job.format.of(job.full(1, "mlp.up_proj")).group_size == 64  # type: ignore[union-attr]
    assert job.format.of(job.full(1, "mlp.down_proj")).layout == "row-major-8"  # type: ignore[union-attr]


def test_wishes_change_only_quantized_layers() -> None:
    recipe = recipes.parse({"layers": RULES}, "mixed").with_group_size(32).with_layout("marlin")
    assert [rule.group_size for rule in recipe.layers] == [32, None, 32]
    assert [rule.layout for rule in recipe.layers] == ["marlin", None, "marlin"]
    with pytest.raises(QtoolError, match="has no gather-outliers"):
        recipe.with_options("gather-outliers", max_8bit_blocks=1)


def test_a_file_wins_over_the_scheme(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "scheme: mine\nlayers: [{match: '.*', scheme: w8a8, group_size: channel}]\nkv: kv4"
    )
    recipe = recipes.load("w4a8-lqq", str(path))
    assert (recipe.scheme, recipe.kv, recipe.variant, recipe.rounding.name) == (
        "mine",
        "kv4",
        "custom",
        "rtn",
    )


@pytest.mark.parametrize(("scheme", "variant"), [pair for pair in BUILT_IN if pair[1] != "fast"])
def test_calibrated_recipes_smooth_keys_for_4_bit_caches(scheme: str, variant: str) -> None:
    recipe = Wishes(recipe=variant, kv="kv4").of(scheme)
    job = Job.of(CONFIG, recipe)  # the order is legal
    assert [t.name for t in job.transforms].count("smooth-attention") == 1
    assert [t.name for t in job.transforms].count("value-basis") == (variant == "best")
    assert recipe.for_kv4() == recipe
    for other in ("kv8", "kv4-channel"):
        assert (
            Wishes(recipe=variant, kv=other).of(scheme).transforms
            == recipes.load(scheme, variant).transforms
        )


def test_a_gpu_chooses_the_granularity() -> None:
    assert Wishes(target="a100").of("w4a4").scheme == "w4a4-mix"
    assert Wishes(target="rtx3090").of("w4a4-mix").scheme == "w4a4-g128"
    assert Wishes(target="a100").of("w4a8-qoq-g128").scheme == "w4a8-qoq"
    chosen = Wishes(target="l40s").of("w4a8-qoq")
    assert chosen.scheme == "w4a8-qoq-g128" and "l40s" in chosen.reason
    with pytest.raises(QtoolError, match="has one for every GPU"):
        Wishes(target="a100").of("w8a8")
    with pytest.raises(QtoolError, match="did you mean l40s"):
        Wishes(target="l4os").of("w4a4")


def test_the_cap_on_8_bit_blocks_reaches_the_method() -> None:
    (step,) = Wishes(max_8bit_blocks=1).of("w4ax-fmpq").transforms
    assert step.name == "gather-outliers" and step.options["max_8bit_blocks"] == 1
