"""Built-in recipes on families that cannot have all of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qtool
from qtool import recipes
from qtool.io.source import Checkpoint
from qtool.models import Fold, family_of
from qtool.pipeline.job import Job
from qtool.pipeline.planning.plan_text import as_dict, as_text
from qtool.pipeline.quantize import quantize
from qtool.pipeline.recipe_fit.family_recipe import for_tied_head
from qtool.runtime.load import load
from tests.conftest import VARIANTS, MakeModel, copy_tokenizer
from tests.models.tiny import tiny_config

CALIBRATED = [
    (scheme, v)
    for scheme, variants, _ in recipes.overview()
    for v in variants.split()
    if v != "fast"
]


def job_of(model: Path, scheme: str, variant: str) -> Job:
    """The job with every linear in 8 bits, which any shape can be."""
    recipe = recipes.load(scheme, variant)
    return Job.of(Checkpoint(model).config, replace(recipe, layers=recipes.load("w8a8").layers))


@pytest.mark.parametrize("family", VARIANTS)
def test_every_family_takes_every_built_in_recipe(family: str, make_model: MakeModel) -> None:
    model = make_model(family)
    for scheme, variant in CALIBRATED:
        job = job_of(model, scheme, variant)
        assert job.rounding.name == recipes.load(scheme, variant).rounding.name
        changed = job.recipe.transforms != recipes.load(scheme, variant).transforms
        assert bool(job.recipe.adaptations) == (changed or job.unties)


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


@pytest.mark.parametrize(
    ("model_type", "sizes", "v", "down"),
    [
        ("starcoder2", {"hidden_size": 128, "intermediate_size": 256}, "v_proj", "c_proj"),
        ("gptj", {"n_embd": 128, "n_inner": 256}, "v_proj", "fc_out"),
        ("gpt2", {"n_embd": 128, "n_inner": 256}, "attn.c_attn", "mlp.c_proj"),
        ("bert-generation", {}, "attention.self.value", "output.dense"),
    ],
)
def test_v_and_down_are_found_by_what_they_do(
    model_type: str, sizes: dict[str, int], v: str, down: str
) -> None:
    job = Job.of(tiny_config(model_type, **sizes).to_dict(), recipes.load("w4a4-mix", "best"))
    formats = {name: job.format.of(job.full(0, name)) for name in job.block_family(0).linears()}
    small = {name: f.scheme for name, f in formats.items() if f and f.group_size == 32}
    assert sorted(small.values()) == ["w4a4", "w4a8-lqq"]
    assert all(name.endswith(down if s == "w4a8-lqq" else v) for name, s in small.items())


@pytest.mark.parametrize("scheme", ["w4a4-g128", "w4a4-mix"])
@pytest.mark.parametrize("family", VARIANTS)
def test_best_of_w4a4_differs_in_the_inputs_of_down(
    family: str, scheme: str, make_model: MakeModel
) -> None:
    """They stay in 8 bits; every other linear has the scheme and group size of ``paper``."""
    config = Checkpoint(make_model(family)).config
    paper, best = (Job.of(config, recipes.load(scheme, variant)) for variant in ("paper", "best"))
    for block in range(best.blocks):
        kind = best.block_family(block)
        down = {
            n for g in kind.groups if g.fold in (Fold.PRODUCT, Fold.ACTIVATION) for n in g.linears
        }
        for name in kind.linears():
            mine, theirs = (job.format.of(job.full(block, name)) for job in (best, paper))
            assert theirs.scheme == "w4a4"  # type: ignore[union-attr]
            assert (mine != theirs) == (name in down)
            bits = mine.scheme_object.activation.bits if mine else 16  # type: ignore[attr-defined]
            assert bits == (8 if name in down else 4)


@pytest.mark.parametrize("family", ("gemma2", "gemma3_text"))
def test_what_cannot_rotate_is_smoothed_behind_its_norms(
    family: str, make_model: MakeModel
) -> None:
    job = job_of(make_model(family), "w4a8-lqq", "best")
    assert "residual stream left out" in job.recipe.adaptations[0]
    steps = {step.name: dict(step.options) for step in job.recipe.transforms}
    assert steps == {
        "norm-fusion": {},
        "rotate": {"learn_steps": 120, "residual": False},
        "smooth": {"balance": True, "shift": True},
        "online-hadamard": {},
    }


def test_what_was_adapted_is_printed_and_recorded(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, said = make_model("gemma2", vocab_size=4096), "rotate: the residual stream left out"
    copy_tokenizer(model)
    qtool.quantize(
        model,
        "w8a8",
        out=tmp_path / "out",
        recipe="best",
        calibration="demo",
        samples=2,
        seqlen=32,
    )
    assert said in caplog.text
    recorded = json.loads((tmp_path / "out/qtool.json").read_text())["recipe"]
    assert (
        said in recorded["adaptations"][0]
        and {"rotate": {"learn_steps": 120, "residual": False}} in recorded["methods"]
    )
    assert said in qtool.plan(model, "w8a8", recipe="best").job.recipe.adaptations[0]


def test_why_a_gpu_has_this_layout_is_printed(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, said = make_model(), "w4a8-lqq: the W4A8 kernel for a100 reads compute-aware"
    assert said in str(qtool.plan(model, "w4a8-lqq", target="a100", group_size=32))
    qtool.quantize(model, "w4a8-lqq", target="a100", group_size=32, out=tmp_path / "out")
    assert caplog.messages[0] == said


@pytest.mark.parametrize("family", [name for name in VARIANTS if name != "llama-tied"])
def test_untied_models_get_the_recipe_as_it_is(family: str, make_model: MakeModel) -> None:
    job = job_of(make_model(family, tie_word_embeddings=False), "w4a8-lqq", "best")
    assert job.tied or not any("tied" in sentence for sentence in job.recipe.adaptations)


@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w4a16-24"])
def test_best_keeps_the_tie_where_a_head_would_be_large(scheme: str, make_model: MakeModel) -> None:
    small, large = (
        job_of(make_model("llama-tied", name=f"of-{vocab}", vocab_size=vocab), scheme, "best")
        for vocab in (32, 4096)
    )
    assert small.unties and small.recipe.transforms == recipes.load(scheme, "best").transforms
    (sentence,) = small.recipe.adaptations
    assert sentence.startswith("the tied head is stored apart from the embedding, 16 kB (")
    assert not large.unties and large.recipe.step("norm-fusion").options == {"final": False}  # type: ignore[union-attr]
    (sentence,) = large.recipe.adaptations
    share = large.head_bytes / sum(large.shard_bytes())
    assert f"from the embedding, 2.10 MB ({share:.0%}) more" in sentence
    what = ": the residual stream left out, value heads alone are" * (scheme == "w4a8-lqq")
    assert sentence.startswith(f"rotate{what or ' left out and smooth takes'}")
    assert (large.recipe.step("rotate") is None) == (scheme == "w4a16-24")
    assert large.recipe.step("smooth").options.get("groups") is None  # type: ignore[union-attr]
    assert [*large.shards()[-1]] == ["model.norm.weight"]


def test_other_recipes_untie_and_say_what_it_takes(make_model: MakeModel) -> None:
    model = make_model("llama-tied", vocab_size=4096)
    planned = qtool.plan(model, "w4a4-g128", recipe="paper")
    job = planned.job
    assert job.unties and planned.output_bytes == sum(job.shard_bytes())
    share = job.head_bytes / (planned.output_bytes - job.head_bytes)
    said = f"stored apart from the embedding, 2.10 MB ({share:.0%}) more"
    assert said in as_text(planned) and said in as_dict(planned)["notes"][0]


def test_a_model_whose_tie_is_kept_is_the_same_in_floats(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """Norm fusion that stops before the final norm and rotated heads change no output."""
    model = make_model("llama-tied", vocab_size=4096)
    methods = job_of(model, "w4a8-lqq", "best").recipe
    steps = tuple(step for step in methods.transforms if step.name != "smooth")
    plain = recipes.parse({"layers": [{"match": ".*", "scheme": None}]}, "plain")
    recipe = replace(plain, transforms=steps)
    out = quantize(Checkpoint(model), recipe, tmp_path / "out")
    assert "lm_head.weight" not in Checkpoint(out)
    ids = torch.arange(24)[None] * 5
    torch.testing.assert_close(load(out)(ids).logits, load(model)(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("share", "kept"), [(0.04, False), (0.06, True)])
def test_best_keeps_a_tie_that_would_cost_a_twentieth(share: float, kept: bool) -> None:
    best = recipes.load("w4a8-lqq", "best")
    head = round(share * 1e6)
    adapted = for_tied_head(best, family_of({"model_type": "llama"}), head, 1_000_000 + head)
    assert (adapted.transforms != best.transforms) == kept
    assert ("would have to be" in adapted.adaptations[-1]) == kept
