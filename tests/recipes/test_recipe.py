"""Recipes: every built-in one can be carried out, and what is written in one is what happens."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import qtool
from qtool import recipes
from qtool.calibration import ROUNDINGS, TRANSFORMS
from qtool.errors import QtoolError
from qtool.io.model_directory import DEMO
from qtool.pipeline.job import Job
from qtool.pipeline.options import RecipeOverrides

CONFIG = json.loads((DEMO / "config.json").read_text())
BUILT_IN = [
    (name, variant) for name, variants, _ in recipes.overview() for variant in variants.split()
]
RULES = [
    {"roles": ["down_proj"], "scheme": "w8a8"},
    {"match": r"layers\.0\.", "scheme": None},
    {"match": ".*", "scheme": "w4a16", "group_size": 64},
]


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "true", "-1"])
def test_no_number_of_a_recipe_is_none(number: str, tmp_path: Path) -> None:
    """Of the schema and of every method: its place is named, and what was found."""
    numbers = {"group_size": f"layers: [{{match: .*, scheme: w4a16, group_size: {number}}}]"}
    for key in ("min_expert_tokens", "scheme", "about", "kv", "windows"):
        numbers[key] = f"layers: [{{match: .*, scheme: w4a16}}]\n{key}: {number}"
    for kind, methods in (("transforms", TRANSFORMS), ("rounding", ROUNDINGS)):
        for name, method in methods.items():
            for option in fields(method):
                if option.init and option.type in (int, float, int | None, float | None):
                    step = f"{{{name}: {{{option.name}: {number}}}}}"
                    step = f"[{step}]" if kind == "transforms" else step
                    numbers[f"{name}: {option.name}"] = (
                        f"layers: [{{match: .*, scheme: w4a16}}]\n{kind}: {step}"
                    )
    assert {"clip: lowest", "gptq: damping", "smooth: alpha"} <= numbers.keys()
    for place, content in numbers.items():
        (file := tmp_path / "own.yaml").write_text(content)
        with pytest.raises(QtoolError, match=place.split()[-1]) as refused:
            Job.of(CONFIG, recipes.load(None, str(file)))
        assert repr(yaml.safe_load(number)) in str(refused.value)


def test_a_number_of_tokens_has_63_bits() -> None:
    with pytest.raises(QtoolError, match=r"min_expert_tokens is 9223372036854775808; .* 63 bits"):
        recipes.parse({"layers": RULES, "min_expert_tokens": 2**63}, "own")


@pytest.mark.parametrize(("scheme", "variant"), BUILT_IN)
def test_every_built_in_recipe_fits_the_demo(scheme: str, variant: str) -> None:
    recipe = recipes.load(scheme, variant)
    job = Job.of(CONFIG, recipe)
    assert recipe.scheme == scheme and recipe.about
    assert all(job.format.of(job.full(0, name)) for name in job.linears(0))


@pytest.mark.cuda
@pytest.mark.parametrize(("scheme", "variant"), BUILT_IN)
def test_every_built_in_recipe_runs_on_a_gpu(scheme: str, variant: str, tmp_path: Path) -> None:
    kv = {"fast": "kv4-channel", "paper": "kv8", "best": "kv4"}[variant]
    how = {"kv": kv, "calibration": "demo", "samples": 4, "seqlen": 64, "device": "cuda"}
    out = qtool.quantize("demo", scheme, recipe=variant, out=tmp_path / "out", **how).directory
    assert {row.problem for row in qtool.verify(out, device="cuda")} == {""}


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


MINE = "layers: [{match: '.*', scheme: w8a8, group_size: channel}]\nkv: kv4"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(f"scheme: my-mix\n{MINE}")
    return path


def test_a_file_alone_says_its_scheme(mine: Path) -> None:
    recipe = recipes.load(None, str(mine))
    assert (recipe.scheme, recipe.kv, recipe.variant) == ("my-mix", "kv4", "custom")
    assert recipe.rounding.name == "rtn" and not recipe.built_in
    assert recipes.load("my-mix", str(mine)) == recipe
    mine.write_text(MINE)
    assert recipes.load(None, str(mine)).scheme == recipes.load("w8a8", str(mine)).scheme == "mine"


def test_a_file_of_another_scheme_is_refused(mine: Path) -> None:
    with pytest.raises(QtoolError, match=r"a recipe of my-mix; leave --scheme out: the"):
        recipes.load("w4a16", str(mine))
    mine.write_text(MINE)
    with pytest.raises(QtoolError, match=r"--scheme w4a16: mine.yaml is a recipe of w8a8"):
        recipes.load("w4a16", str(mine))
    with pytest.raises(QtoolError, match=r"neither a scheme nor a recipe file.*w4a8-lqq"):
        recipes.load(None)


def test_a_file_with_variants_is_refused(mine: Path) -> None:
    mine.write_text(f"{MINE}\nvariants: {{fast: {{}}, best: {{rounding: gptq}}}}")
    with pytest.raises(QtoolError, match=r"mine.yaml: variants .* keep one of fast, best"):
        recipes.load(None, str(mine))
    with pytest.raises(QtoolError, match="variants are for built-in recipes"):
        RecipeOverrides().recipe(None, recipes.read(mine))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [{"roles": ["foo_proj"], "scheme": "w4a16"}],
            r"rule 1 \(roles \[foo_proj\]\) matches no linear",
        ),
        ([{"match": "lm_head", "scheme": "w8a8"}], r"lm_head.* matches no .*head stay in 16 bits"),
        ([*RULES, {"match": "lm_head", "scheme": None}], r"rule 4 .*lm_head.* matches no linear"),
        ([*RULES[1:], RULES[0], {"match": "q_proj", "scheme": "w8a8"}], r"rule 3 .*never holds"),
    ],
)
def test_a_rule_that_changes_nothing_is_refused(rules: list[object], message: str) -> None:
    with pytest.raises(QtoolError, match=message) as refused:
        Job.of(CONFIG, recipes.parse({"layers": rules}, "mine"))
    if "never" not in message:
        assert "model.layers.0.self_attn.q_proj" in str(refused.value)
        assert "roles q_proj, k_proj" in str(refused.value)


def test_a_role_among_others_that_no_linear_has_is_refused() -> None:
    rules = [{"roles": ["v_proj", "mlp.down_proj", "dwn_proj"], "scheme": "w8a8"}, RULES[-1]]
    with pytest.raises(QtoolError, match=r"rule 1 .*is called dwn_proj; did you mean down_proj\?"):
        Job.of(CONFIG, recipes.parse({"layers": rules}, "mine"))


def test_linears_that_no_rule_matches_are_named() -> None:
    def notes(*rules: object) -> tuple[str, ...]:
        return Job.of(CONFIG, recipes.parse({"layers": list(rules)}, "mine")).notes

    assert notes(*RULES) == ()
    (said,) = notes(RULES[0])  # one of seven linears in each of six blocks
    assert "model.layers.0.self_attn.q_proj and 35 more match no layer rule of mine" in said
    seven = {"match": r"layers\.[0-4]\.|[qkvo]_proj|gate|up_proj", "scheme": "w4a16"}
    (said,) = notes({**seven, "group_size": 64})
    assert "bits: model.layers.5.mlp.down_proj matches no layer rule of mine" in said


@pytest.mark.parametrize("name", ["", " ", "..", "a\nb"])
def test_a_name_that_no_directory_should_have_is_refused(name: str) -> None:
    with pytest.raises(QtoolError, match=r"mine: scheme .*: a name of printable characters"):
        recipes.parse({"scheme": name, "layers": RULES}, "mine")


def test_a_recipe_that_quantizes_nothing_is_refused() -> None:
    nothing = {"layers": [{"match": ".*", "scheme": None}]}
    with pytest.raises(QtoolError, match="nothing would be quantized"):
        RecipeOverrides().recipe(None, nothing)
    assert RecipeOverrides(kv="kv8").recipe(None, nothing).kv == "kv8"


def test_a_variant_may_have_layers_of_its_own() -> None:
    own = [{"match": ".*", "scheme": "w8a8"}]
    data = {"layers": RULES, "variants": {"fast": {}, "best": {"layers": own}}}
    assert len(recipes.parse(data, "mine", "fast").layers) == len(RULES)
    (rule,) = recipes.parse(data, "mine", "best").layers
    assert rule.scheme == "w8a8"
    data["variants"]["best"]["layers"] = []
    with pytest.raises(QtoolError, match="layers must be a list with at least one rule"):
        recipes.parse(data, "mine", "best")


def test_departures_are_mappings_of_what_and_effect() -> None:
    listed = [{"what": "clips", "effect": "lower KL"}]
    data = {"layers": RULES, "variants": {"paper": {"departures": listed}, "fast": {}}}
    (found,) = recipes.parse(data, "mine", "paper").departures
    assert (found.what, found.effect) == ("clips", "lower KL")
    assert recipes.parse(data, "mine", "fast").departures == ()
    assert recipes.parse({"layers": RULES, "departures": listed}, "mine").departures == (found,)
    for wrong in (
        "clips",
        ["clips"],
        [{"what": "clips"}],
        [listed[0] | {"why": "x"}],
        [{"what": 1}],
    ):
        with pytest.raises(QtoolError, match=r"departure|mapping|must be a text"):
            recipes.parse({"layers": RULES, "departures": wrong}, "mine")


def test_the_departures_of_built_in_recipes_are_listed() -> None:
    for scheme, variant, departure in recipes.departures():
        assert departure in recipes.load(scheme, variant).departures


@pytest.mark.parametrize(("scheme", "variant"), [pair for pair in BUILT_IN if pair[1] != "fast"])
def test_calibrated_recipes_smooth_keys_for_4_bit_caches(scheme: str, variant: str) -> None:
    recipe = RecipeOverrides(kv="kv4").recipe(scheme, variant)
    job = Job.of(CONFIG, recipe)  # the order is legal
    assert [t.name for t in job.transforms].count("smooth-attention") == 1
    assert [t.name for t in job.transforms].count("value-basis") == (variant == "best")
    assert recipe.for_kv4() == recipe
    for other in ("kv8", "kv4-channel"):
        assert (
            RecipeOverrides(kv=other).recipe(scheme, variant).transforms
            == recipes.load(scheme, variant).transforms
        )


def test_a_gpu_chooses_the_granularity() -> None:
    assert RecipeOverrides(target="a100").recipe("w4a4").scheme == "w4a4-mix"
    assert RecipeOverrides(target="rtx3090").recipe("w4a4-mix").scheme == "w4a4-g128"
    assert RecipeOverrides(target="a100").recipe("w4a8-qoq-g128").scheme == "w4a8-qoq"
    for target, layout in (
        ("a100", "compute-aware"),
        ("b200", "compute-aware"),
        ("h200", "dual-mma"),
    ):
        for scheme in ("w4a8-qoq", "w4a8-lqq"):
            assert RecipeOverrides(target=target).recipe(scheme).layers[0].layout == layout
    named = RecipeOverrides(target="a100", layout="row-major").recipe("w4a8-qoq")
    assert named.layers[0].layout == "row-major"
    rules = [
        {"roles": ["down_proj"], "scheme": "w8a8", "layout": "row-major-8"},
        {"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"},
    ]
    mixed = RecipeOverrides(target="a100").recipe("w4a8-lqq", {"layers": rules, "rounding": "rtn"})
    assert [rule.layout for rule in mixed.layers] == ["row-major-8", "compute-aware"]
    chosen = RecipeOverrides(target="l40s").recipe("w4a8-qoq")
    assert chosen.scheme == "w4a8-qoq-g128" and "l40s" in chosen.reason
    with pytest.raises(QtoolError, match="w4a8-lqq; w8a8 has no such choice"):
        RecipeOverrides(target="a100").recipe("w8a8")
    with pytest.raises(QtoolError, match="w4a8-qoq and w4a8-lqq; pass --scheme with one of them"):
        RecipeOverrides(target="a100").recipe(None)
    with pytest.raises(QtoolError, match="did you mean l40s"):
        RecipeOverrides(target="l4os").recipe("w4a4")


@pytest.mark.parametrize(
    ("asked", "overrides", "reasons"),
    [
        ("w4a8-qoq", {}, ["above 16", "reads compute-aware"]),
        ("w4a8-qoq", {"layout": "dual-mma"}, ["above 16"]),
        ("w4a8-lqq", {}, ["reads compute-aware"]),
        ("w4a8-lqq", {"layout": "dual-mma"}, []),
        ("w4a4", {}, ["above 16"]),
        ("w4a4", {"group_size": 64}, []),
    ],
)
def test_a_gpus_choice_has_a_reason_unless_it_is_overridden(
    asked: str, overrides: dict[str, Any], reasons: list[str]
) -> None:
    said = RecipeOverrides(target="a100", **overrides).recipe(asked).reason
    assert [reason for reason in ("above 16", "reads compute-aware") if reason in said] == reasons
    assert bool(said) == bool(reasons)


def test_w4a4_without_a_granularity_is_a_scheme_of_own_recipes_alone(tmp_path: Path) -> None:
    own = {"layers": [{"match": ".*", "scheme": "w4a4", "group_size": 64}]}
    (file := tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    for recipe in (own, str(file)):
        assert RecipeOverrides().recipe("w4a4", recipe).layers[0].group_size == 64
    for variant in (None, "fast"):
        with pytest.raises(QtoolError, match="w4a4 comes in two granularities"):
            RecipeOverrides().recipe("w4a4", variant)


def test_the_cap_on_8_bit_blocks_reaches_the_method() -> None:
    (step,) = RecipeOverrides(max_8bit_blocks=1).recipe("w4ax-fmpq").transforms
    assert step.name == "gather-outliers" and step.options["max_8bit_blocks"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layers: [{match: .*, scheme: w8a8}]\nkv: kv-4", "'kv-4': .*kv4"),
        ("layers: [{match: .*, scheme: w8a8}]\nlayers: []", "line 2: the key 'layers' is there"),
        ("a: " + 2000 * "[", "own.yaml: nested too deeply"),
        ("layers: [{match: .*, scheme: w4a4-g128}]", "say scheme: w4a4, group_size: 128"),
        ("layers: [{match: null, scheme: w8a8}]", r"either match or roles, found \['scheme'\]"),
        (
            "layers: [{match: .*, scheme: w8a8}]\ntransforms: [{online-hadamard: false}]",
            "a step is .*, found {'online-hadamard': False}",
        ),
    ],
)
def test_what_no_recipe_says(content: str, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "own.yaml").write_text(content)
    with pytest.raises(QtoolError, match=message):
        Job.of(CONFIG, RecipeOverrides().recipe(None, str(file)))


def test_the_content_of_a_file_is_no_name_of_one() -> None:
    content = "layers:\n" + 20 * "- {match: .*, scheme: w8a8}\n"
    with pytest.raises(QtoolError, match=r"^--recipe layers: - .*\.\.\.: neither a file nor one"):
        recipes.load(None, content)


@pytest.mark.parametrize(("recipe", "message"), [("", "it names no file"), ({}, "layers")])
def test_an_empty_recipe_is_none(recipe: object, message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        RecipeOverrides().recipe("w8a8", recipe)  # type: ignore[arg-type]


def test_variants_share_what_stands_beside_them() -> None:
    data = {
        "layers": [{"match": ".*", "scheme": "w8a8"}],
        "transforms": ["norm-fusion"],
        "rounding": "gptq",
        "variants": {"fast": {"rounding": "rtn"}, "best": {}},
    }
    fast, best = (recipes.parse(data, "mine", variant) for variant in ("fast", "best"))
    assert [step.name for step in best.transforms] == ["norm-fusion"] == [fast.transforms[0].name]
    assert (fast.rounding.name, best.rounding.name) == ("rtn", "gptq")


@pytest.mark.parametrize(("scheme", "variant"), BUILT_IN)
def test_what_is_made_for_export_has_no_rotation_at_run_time(scheme: str, variant: str) -> None:
    """And all else of the recipe: only ``best`` of quantized activations has one."""
    own, asked = (RecipeOverrides(for_export=x).recipe(scheme, variant) for x in (False, True))
    rotates = own.step("online-hadamard") is not None
    assert rotates == (variant == "best" and not scheme.startswith("w4a16"))
    assert asked.step("online-hadamard") is None
    kept = tuple(step for step in own.transforms if step.name != "online-hadamard")
    assert asked == replace(own, transforms=kept)


def test_an_alias_inside_itself_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("scheme: x\nlayers: &l\n - *l\n")
    with pytest.raises(QtoolError, match=r"an alias .* stands inside what it is an alias of"):
        recipes.load("w4a16", str(path))
