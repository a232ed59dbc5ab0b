"""Linears that a built-in recipe's layout does not fit become row-major; others stay."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.pipeline.inspect import inspect
from qtool.pipeline.job import Job
from qtool.pipeline.options import RecipeOverrides
from qtool.pipeline.quantize import quantize
from qtool.pipeline.verify import verify
from qtool.runtime.huggingface import quantized_linears
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.models.tiny import tiny_config

FAMILIES = ("llama", "opt", "phi3", "gemma2", "falcon", "falcon-new", "mixtral", "qwen3_moe")
SCHEMES = ("w4a8-lqq", "w4a8-qoq-g128", "w4a4-g128", "w4a16")
IDS = torch.arange(48).reshape(2, 24) * 5 % 320


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variant", FAMILIES)
def test_heads_of_sixteen_channels(
    variant: str, scheme: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(
        variant, num_attention_heads=8, head_dim=None if variant.startswith("falcon") else 16
    )
    out = quantize(Checkpoint(source), recipes.load(scheme), tmp_path / "out")
    assert not [row.problem for row in verify(out) if row.problem]
    assert torch.isfinite(load(out)(IDS).logits).all()


def test_only_what_does_not_fit(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(num_key_value_heads=1)
    recipe = recipes.load("w4a8-lqq")
    job = Job.of(Checkpoint(source).config, recipe)
    assert job.recipe.adaptations == (
        "layout row-major for self_attn.k_proj, self_attn.v_proj: dual-mma's tile does not "
        "divide their weights",
    )
    out = quantize(Checkpoint(source), recipe, tmp_path / "out")
    stored = {row.name.rpartition(".")[2]: row.layout for row in inspect(out) if row.layout}
    assert stored == dict.fromkeys(
        ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "dual-mma"
    ) | dict.fromkeys(("k_proj", "v_proj"), "row-major")
    plain = quantize(Checkpoint(source), recipe.with_layout("row-major"), tmp_path / "plain")
    found, expected = (quantized_linears(load(directory)) for directory in (out, plain))
    assert all(
        torch.equal(found[name].dequantize(), linear.dequantize())
        for name, linear in expected.items()
    )


def test_experts_are_one_role(make_model: MakeModel) -> None:
    config = Checkpoint(make_model("qwen3_moe")).config | {
        "moe_intermediate_size": 320,
        "head_dim": 64,
    }
    job = Job.of(config, recipes.load("w4a8-qoq-g128").with_group_size(64))
    assert job.recipe.adaptations == ()
    job = Job.of(
        config | {"moe_intermediate_size": 96}, recipes.load("w4a8-qoq-g128").with_group_size(32)
    )
    assert (
        "mlp.experts.*.gate_proj, mlp.experts.*.up_proj, mlp.experts.*.down_proj"
        in job.recipe.adaptations[0]
    )
    formats = {job.format.of(f"model.layers.1.mlp.experts.{e}.gate_proj") for e in (0, 3)}
    assert [made.layout for made in formats if made] == ["row-major"]


def test_a_name_that_ends_like_another_keeps_its_layout() -> None:
    """BERT's blocks have ``attention.output.dense`` beside ``output.dense``."""
    config = tiny_config("bert-generation", intermediate_size=192).to_dict()
    job = Job.of(config, recipes.load("w4a16").with_group_size(64))
    found = {name: linear_format.layout for name, linear_format in job.formats(0).items()}
    assert (found["output.dense"], found["attention.output.dense"]) == ("row-major", "marlin")


def test_a_layout_that_was_asked_for_stays(make_model: MakeModel) -> None:
    config, recipe = Checkpoint(make_model(num_key_value_heads=1)).config, recipes.load("w4a8-lqq")
    named = recipe.with_layout("marlin"), recipe.with_layout("dual-mma")  # the recipe's own too
    for asked in (*named, replace(recipe, variant="custom")):
        with pytest.raises(QtoolError, match=r"k_proj: layout .* does not divide into tiles"):
            Job.of(config, asked)


def test_a_layout_that_a_target_chose_gives_way(make_model: MakeModel) -> None:
    config = Checkpoint(make_model(num_key_value_heads=1)).config | {"head_dim": 16}
    job = Job.of(config, RecipeOverrides(target="a100").recipe("w4a8-lqq"))
    (sentence,) = job.recipe.adaptations
    assert sentence.startswith("layout row-major for self_attn.k_proj, self_attn.v_proj: compute-")
