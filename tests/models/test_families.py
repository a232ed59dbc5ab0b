"""What families refuse, before any work, and that a declaration fits together for every variant."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool import recipes
from qtool.errors import QtoolError
from qtool.models import FAMILIES, family_of
from qtool.pipeline.job import Job
from tests.conftest import VARIANTS, MakeModel


def config_of(source: Path, **changes: Any) -> dict[str, Any]:
    return {**json.loads((source / "config.json").read_text()), **changes}


def refusal(config: dict[str, Any], transforms: list[Any] = [], **recipe: Any) -> str:  # noqa: B006
    data = {
        "scheme": "test",
        "transforms": transforms,
        "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"}],
    }
    with pytest.raises(QtoolError) as caught:
        Job.of(config, recipes.parse(data | recipe, "test"))
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_a_declaration_fit_together(variant: str, make_model: MakeModel) -> None:
    config = config_of(make_model(variant))
    family = family_of(config["model_type"])
    settings = family.settings(config)
    for block in range(config["num_hidden_layers"]):
        own = family.at(settings, block)
        assert own is family.at(settings, block)
        shapes, linears = own.block_shapes(settings), list(own.linears())
        assert len(linears) == len(set(linears))
        parts = {part for fused in own.fused.values() for part in fused}
        for group in own.groups:
            assert len({shapes[f"{name}.weight"][1] for name in group.linears}) == 1
            assert f"{own.owner(group.source)}.weight" in shapes
            assert group.gate is None or group.gate in parts or f"{group.gate}.weight" in shapes
        for name in parts | {own.attention.q, own.attention.k, own.attention.v}:
            assert f"{own.owner(name)}.weight" in shapes
        for linear, fused in own.fused.items():
            rows = torch.arange(shapes[f"{linear}.weight"][0])
            assert torch.equal(
                torch.cat([rows[own.rows(part, settings)] for part in fused]).sort().values, rows
            )
        for readers in own.readers.values():
            assert not set(readers) & set(linears)


def test_an_unknown_architecture_is_named_with_the_supported_ones() -> None:
    message = refusal({"model_type": "mamba"})
    assert all(name in message for family in FAMILIES for name in family.model_types)
    assert "one declarative file" in message
    for asked, need in {
        "deepseek_v3": "MLA",
        "llama4": "router that scales",
        "gemma3": "vision tower",
    }.items():
        assert need in (message := refusal({"model_type": asked})) and "qwen3_moe" in message


@pytest.mark.parametrize("variant", ["gemma2", "gemma3_text"])
def test_post_norms_cannot_be_rotated_through(variant: str, make_model: MakeModel) -> None:
    config = config_of(make_model(variant))
    assert "post_attention_layernorm acts on what is written" in refusal(
        config, ["norm-fusion", "rotate"]
    )
    Job.of(
        config,
        recipes.parse(
            {
                "scheme": "test",
                "layers": [{"match": ".*", "scheme": None}],
                "transforms": ["norm-fusion", {"rotate": {"residual": False}}],
            },
            "test",
        ),
    )


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"word_embed_proj_dim": 64}, "project_in"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before false"),
    ],
)
def test_opt_that_is_built_otherwise_is_refused(
    changes: dict[str, Any], reason: str, make_model: MakeModel
) -> None:
    assert reason in refusal(config_of(make_model("opt"), **changes))


def test_a_config_may_leave_out_what_transformers_knows(make_model: MakeModel) -> None:
    config = config_of(make_model("gemma2"))
    del config["tie_word_embeddings"]
    assert Job.of(config, recipes.load("w4a16")).tied
