"""A scheme for each layer, chosen by what it costs the model's output."""

import errno
import json
import re
import shutil
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import qtool
from qtool import recipes
from qtool.calibration.rounding.gptq.gptq import GptqOptions, gptq
from qtool.calibration.rounding.rtn import round_to_nearest
from qtool.cli import cli
from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint, read_config
from qtool.models.experts import separate_experts
from qtool.pipeline.divergence import Probe
from qtool.pipeline.inspect import total
from qtool.pipeline.job import Job
from qtool.pipeline.sensitivity import Candidates, _pattern, recipes_of
from qtool.pipeline.sensitivity_recipe import fewest_bits
from qtool.pipeline.trial_rounding import rounded
from qtool.schemes.arithmetic.online_hadamard import rotate
from tests.conftest import MakeModel
from tests.models.tiny import save_tiny

CHOICES = ["w4a16:32", "w8a8", "none"]
IDS = torch.arange(96).view(3, 32)
GIVEN: dict[str, Any] = {"calibration": IDS, "samples": 3, "seqlen": 32, "recipe": "fast"}


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "w4a8-lqq", "w4a4-g128"])
def test_what_is_measured_is_what_quantize_gives(
    scheme: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """All linears at once diverge as the checkpoint that rounds them to nearest."""
    model = make_model()
    float_model = qtool.load(model, dtype=torch.float32)
    source, probe = Checkpoint(model), Probe(float_model, [IDS])
    job = Job.of(source.config, recipes.load(scheme))
    names = [job.full(b, name) for b in range(job.blocks) for name in job.linears(b)]
    before = float_model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    formats = {name: job.format.of(name) for name in names}
    each = {name: {of} for name, of in formats.items() if of}
    probe.rounded = rounded(float_model, [[name] for name in names], each, [], None)
    found = probe.divergence(formats)
    assert all(torch.equal(before[name], t) for name, t in float_model.state_dict().items())
    assert probe.divergence({}) == probe.divergence(dict.fromkeys(names)) == 0.0
    probe.model = qtool.load(
        qtool.quantize(model, scheme, out=tmp_path / "out"), dtype=torch.float32
    )
    assert found > 0 and found == pytest.approx(probe.divergence({}), rel=0.02)


def test_gptq_looks_at_the_inputs_that_the_float_model_gives(make_model: MakeModel) -> None:
    """As each format quantizes them, rotated where the linear rotates them."""
    model, down = qtool.load(make_model(), dtype=torch.float32), "model.layers.1.mlp.down_proj"
    of = [LinearFormat("w4a16", 32, "row-major"), LinearFormat("w4a16", 64, "row-major")]
    of += [LinearFormat("w4a8-lqq", 64, "row-major", rotated=turned) for turned in (False, True)]
    options = GptqOptions(rounds=1)
    with mock.patch.object(model.lm_head, "forward", side_effect=AssertionError):  # too far
        found = rounded(model, [[down]], {down: of}, list(IDS.split(1)), options)
    linear, seen = model.get_submodule(down), []
    with linear.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        model(IDS)
    inputs = seen[0].flatten(0, 1)
    for linear_format in of:
        turn = rotate if linear_format.rotated else lambda tensor: tensor
        weight, scheme = turn(linear.weight.detach()), linear_format.scheme_object
        codes, params = gptq(weight, scheme, inputs=turn(inputs), options=options)
        value = scheme.dequantize(codes, params)
        one = found[down, linear_format]
        close = scheme.dequantize(one.codes, one.params) - value
        assert close.norm() < 0.02 * (value - weight).norm()  # a code may differ by order of sums


def test_an_expert_that_sees_no_token_is_rounded_to_nearest(tmp_path: Path) -> None:
    model = qtool.load(save_tiny("qwen3_moe", tmp_path / "model"), dtype=torch.float32)
    separate_experts(model)
    names = [f"model.layers.1.mlp.experts.{e}.down_proj" for e in range(model.config.num_experts)]
    of = LinearFormat("w8a8", None, "row-major")
    found = rounded(
        model, [[n] for n in names], {n: {of} for n in names}, [IDS[:1, :2]], GptqOptions()
    )
    for name in names:
        nearest = round_to_nearest(of.scheme_object, model.get_submodule(name).weight.detach())
        assert torch.equal(found[name, of].codes, nearest.codes)


def test_what_gptq_loses_is_measured_on_windows_that_it_has_not_seen(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth window is measured, the others calibrate."""
    seen: dict[str, list[Tensor]] = {}

    def sensitivity(
        job: Job, model: object, measured: Any, windows: Any, *_: Any, **__: Any
    ) -> None:
        seen.update(measured=measured, windows=windows)
        raise QtoolError("enough")

    monkeypatch.setattr("qtool.pipeline.sensitivity_recipe.sensitivity", sensitivity)
    ids = torch.arange(6 * 32).view(6, 32)
    options = {"calibration": ids, "samples": 6, "seqlen": 32}
    for recipe, measured in (("best", [0, 4]), ("fast", [*range(6)])):
        with pytest.raises(QtoolError, match="enough"):
            qtool.sensitivity(
                make_model(), CHOICES, 6.0, tmp_path / "a.yaml", recipe=recipe, **options
            )
        assert torch.equal(torch.cat(seen["measured"]), ids[measured])
        others = [i for i in range(6) if i not in measured]
        assert torch.equal(torch.cat([ids[:0], *seen["windows"]]), ids[others])


def test_methods_with_data_need_two_windows(make_model: MakeModel, tmp_path: Path) -> None:
    options = {"calibration": IDS, "samples": 1, "seqlen": 32}
    with pytest.raises(QtoolError, match="1 calibration window: two or more are expected"):
        qtool.sensitivity(make_model(), CHOICES, 6.0, tmp_path / "a.yaml", **options)


def test_gptq_costs_less_than_rounding_to_nearest() -> None:
    """A block of the demo, on windows that GPTQ has not seen."""
    model, of = qtool.load("demo", dtype=torch.float32), LinearFormat("w4a16", 32, "row-major")
    text = (DEMO / "calibration.txt").read_text()[:20000]
    ids = torch.tensor(qtool.load_tokenizer("demo")(text).input_ids)[:4096].view(16, 256)
    probe, names = Probe(model, ids[:2].split(1)), ["mlp.gate_proj", "mlp.up_proj"]
    formats = {f"model.layers.1.{name}": of for name in names}
    lost = []
    for options in (None, GptqOptions()):
        each = {name: {of} for name in formats}
        probe.rounded = rounded(model, [[*formats]], each, ids[2:].split(1), options)
        lost.append(probe.divergence(formats))
    assert lost[1] < 0.8 * lost[0]


def test_its_gpu_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, current_gpus: list[object]
) -> None:
    """Triton launches on that, whatever GPU the tensors are on."""

    def load(*_: Any, device: str, **options: Any) -> None:
        raise QtoolError(f"loaded on {device} beside {current_gpus}")

    monkeypatch.setattr("qtool.pipeline.sensitivity_recipe.load", load)
    with pytest.raises(QtoolError, match=r"loaded on cuda:1 beside \['cuda:1'\]"):
        qtool.sensitivity("demo", CHOICES, 8.0, tmp_path / "mix.yaml", device="cuda:1", **GIVEN)


def test_input_orders_count_as_bits(make_model: MakeModel, tmp_path: Path) -> None:
    """What gathers a linear's input at run time is stored beside its weight."""
    model, out = make_model(), tmp_path / "mixed.yaml"
    choices = ["none", "w4ax-fmpq", "w8a8"]
    found = qtool.sensitivity(model, choices, 7.0, out, **{**GIVEN, "recipe": "best"})
    assert found.recipe.step("gather-outliers")  # of the choice with the fewest bits
    stored, weights = 0, 0
    for kind in qtool.plan(model, recipe=out).kinds:
        stored += len(kind.blocks) * sum(linear.nbytes for linear in kind.linears)
        weights += len(kind.blocks) * sum(prod(linear.shape) for linear in kind.linears)
    assert found.chosen.bits == 8 * stored / weights


@pytest.mark.parametrize(
    ("choices", "methods"),
    [
        (["w8a8", "w4a16:32", "none"], "w4a16"),
        (["w4a8-lqq", "w8a8", "w4a4-g128", "w4a16"], "w4a4-g128"),
    ],
)
def test_the_methods_are_those_of_the_fewest_bits(choices: list[str], methods: str) -> None:
    """The order of the choices has no part in it."""
    assert fewest_bits(choices).scheme == fewest_bits(choices[::-1]).scheme == methods


def test_a_recipe_rotates_at_run_time_unless_it_is_for_export(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """It has the methods of ``best``; linears in 16 bits are not rotated."""
    model, out = make_model(), tmp_path / "mixed.yaml"
    options = GIVEN | {"recipe": "best"}
    found = qtool.sensitivity(model, ["w8a8", "w4a8-lqq", "none"], 9.0, out, **options)
    assert found.recipe.step("online-hadamard")
    rotated, plain = (
        qtool.quantize(
            model, recipe=out, calibration=IDS, seqlen=32, out=tmp_path / name, for_export=asked
        ).directory
        for name, asked in (("rotated", False), ("plain", True))
    )
    fields = [Checkpoint(made).config["quantization_config"] for made in (rotated, plain)]
    assert [of.get("rotated") for of in fields] == [["mlp.down_proj"], None]
    exact = qtool.load(model)(IDS).logits
    for made in (rotated, plain):
        assert (qtool.load(made)(IDS).logits - exact).norm() < 0.2 * exact.norm()
        assert not [row for row in qtool.verify(made) if row.problem]


def test_the_recipe_stays_under_the_budget(make_model: MakeModel, tmp_path: Path) -> None:
    """And it is one that quantize reads; what it predicts falls along the curve.

    Its weights are float32, which they stay where nothing quantizes them.
    """
    model, out = make_model(), tmp_path / "mixed.yaml"
    found = qtool.sensitivity(model, CHOICES, 6.0, out, **GIVEN)
    bits = [point.bits for point in found.curve]
    predicted = [point.predicted for point in found.curve]
    assert bits == sorted(bits) and predicted == sorted(predicted, reverse=True)
    assert found.chosen.bits <= 6.0 < bits[bits.index(found.chosen.bits) + 1]
    assert [*found.uniform] == CHOICES and found.uniform["none"].bits == 32
    assert found.uniform["w4a16:32"] == found.curve[0]
    assert found.curve[-1].bits == 32 and found.curve[-1].measured == 0
    assert recipes.load(None, str(out)) == found.recipe
    of_all = found.uniform["w4a16:32"]
    for said in (
        f"{found.chosen.bits:.3f} bits a weight diverge by {found.chosen.measured:.5f} nats",
        f"; all w4a16:32: {of_all.bits:.3f} bits a weight diverge by {of_all.measured:.5f}",
    ):
        assert said in found.recipe.about
    done = qtool.quantize(model, recipe=out, out=tmp_path / "out")
    stored_bits = total("", (row for row in qtool.inspect(done.directory) if row.layout))
    assert stored_bits.bits <= 6.0
    stored = json.loads(out.with_suffix(".json").read_text())
    assert stored["chosen"]["bits"] == found.chosen.bits and stored["calibration"]["samples"] == 3
    for name, options in stored["options"].items():
        assert [option["choice"] for option in options] == CHOICES, name


def test_linears_that_a_choice_does_not_fit_are_written_as_they_were_measured(
    tmp_path: Path,
) -> None:
    """Marlin's tile does not divide Falcon-H1's fused rows, which are then row-major."""
    model, out = save_tiny("falcon_h1", tmp_path / "model"), tmp_path / "mixed.yaml"
    found = qtool.sensitivity(model, ["w4a16:32", "w8a8"], 5.0, out, **GIVEN)
    assert {(rule.scheme, rule.layout) for rule in found.recipe.layers} == {
        ("w4a16", "marlin"),
        ("w4a16", "row-major"),
    }
    done = qtool.quantize(model, recipe=out, out=tmp_path / "out")
    stored = total("", (row for row in qtool.inspect(done.directory) if row.layout))
    assert stored.bits == found.chosen.bits


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama4_text", "gpt2"])
def test_linears_that_transformers_holds_otherwise_are_measured(kind: str, tmp_path: Path) -> None:
    """Stacked experts, those of a block in one group, and ``Conv1D``."""
    model, out = save_tiny(kind, tmp_path / "model"), tmp_path / "mixed.yaml"
    found = qtool.sensitivity(model, ["w4a16:32", "w8a8"], 6.0, out, **GIVEN)
    done = qtool.quantize(model, recipe=out, out=tmp_path / "out")
    rows = [row for row in qtool.inspect(done.directory) if row.layout]
    assert total("", rows).bits == found.chosen.bits
    of_block = {(row.name.split(".")[2], row.scheme) for row in rows if ".experts." in row.name}
    assert len(of_block) == (0 if kind == "gpt2" else 2)
    assert out.read_text().count("experts") < 10
    probe = Probe(qtool.load(model, dtype=torch.float32), [IDS])
    probe.model = qtool.load(done.directory, dtype=torch.float32)
    assert found.chosen.measured == pytest.approx(probe.divergence({}), rel=0.05)


@pytest.mark.parametrize(("routed", "numbers"), [(True, r"\d+"), (False, "0")])
def test_only_routed_experts_share_a_pattern(routed: bool, numbers: str) -> None:
    family = SimpleNamespace(group_of=lambda _: SimpleNamespace(routed=routed))
    assert _pattern(family, "mlp.experts.0.up") == rf"mlp\.experts\.{numbers}\.up"  # type: ignore[arg-type]


def test_the_command_prints_the_curve(make_model: MakeModel, tmp_path: Path) -> None:
    model, out = make_model(vocab_size=4096, num_hidden_layers=1), tmp_path / "mixed.yaml"
    for file in DEMO.glob("*token*"):
        shutil.copy(file, model)
    arguments = "--choices w4a16:32,w8a8 --budget-bits 7 --calib demo --samples 2 --seqlen 16"
    done = CliRunner().invoke(
        cli, ["sensitivity", str(model), "--out", str(out), *arguments.split()]
    )
    assert done.exit_code == 0, done.output
    assert "KL predicted" in done.stdout and "chosen" in done.stdout and "all w8a8" in done.stdout
    assert recipes.load(None, str(out)).step("rotate")  # of w4a16's best
    again = ["--out", str(tmp_path / "again.yaml"), "--seed", "1", "--json"]
    done = CliRunner().invoke(cli, ["sensitivity", str(model), *again, *arguments.split()])
    stored = json.loads((tmp_path / "again.json").read_text())
    assert stored.pop("source")["directory"] == model.name and stored.pop("budget_bits") == 7
    assert stored.pop("calibration")["seed"] == 1 and "torch" in stored.pop("versions")
    assert json.loads(done.stdout) == stored
    qtool.quantize(
        model, recipe=out, out=tmp_path / "out", calibration="demo", samples=2, seqlen=16
    )


@pytest.mark.parametrize(
    ("calibration", "windows"),
    [(torch.arange(1280).view(40, 32) % 256, 32), ([(IDS, 2), (IDS + 1, 1)], 3)],
)
def test_a_mix_has_its_own_numbers_of_windows(
    calibration: Any, windows: int, make_model: MakeModel, tmp_path: Path
) -> None:
    given = {"calibration": calibration, "seqlen": 32, "recipe": "fast"}
    qtool.sensitivity(make_model(), CHOICES, 6.0, tmp_path / "mixed.yaml", **given)
    measured_on = json.loads((tmp_path / "mixed.json").read_text())["calibration"]
    assert measured_on["samples"] == windows


@pytest.mark.parametrize("first", [0, 1])
def test_each_choice_fits_by_its_own_group_size(
    first: int, make_model: MakeModel, tmp_path: Path
) -> None:
    """160 channels are not divisible by w4a16's own groups of 128."""
    model, choices = make_model(hidden_size=160, intermediate_size=320), ["w4a16:32", "w8a8"]
    choices = choices[first:] + choices[:first]
    found = qtool.sensitivity(model, choices, 7.0, tmp_path / "mixed.yaml", **GIVEN)
    assert {rule.scheme for rule in found.recipe.layers} <= {"w4a16", "w8a8"}


def test_a_directory_that_takes_no_file_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("qtool.pipeline.sensitivity_recipe.TemporaryFile", refuse)
    with pytest.raises(QtoolError, match="cannot be written there: Read-only file system"):
        qtool.sensitivity(tmp_path / "no-model", CHOICES, 6.0, tmp_path / "a.yaml", **GIVEN)


@pytest.mark.parametrize(
    ("choices", "budget", "message"),
    [
        (["w4a16:32"], 6.0, "--choices 'w4a16:32': two or more"),
        (["w4a16:32", "w9"], 6.0, "unknown scheme 'w9'"),
        (["w4a16:x", "w8a8"], 6.0, "--choices w4a16:x: group size 'x': a number"),
        (["w4a16:²", "w8a8"], 6.0, "--choices w4a16:²: group size '²': a number"),
        (["none"], 6.0, "--choices 'none': two or more"),
        (["none", "none"], 6.0, "--choices 'none,none': two or more"),
        ("", 6.0, "--choices '': two or more are expected, with commas between"),
        (["w8a8", "none:64"], 9.0, "--choices none:64: none has no group size"),
        (["w4a4-mix", "w8a8"], 6.0, "--choices w4a4-mix: one scheme"),
        (["w4a16:32", "w8a8"], 4.0, r"--budget-bits 4.0: at least 5.000 are needed"),
        (["w8a8", "none"], 32.0, r"--budget-bits 32.0: every linear fits in 32 bits"),
    ],
)
def test_what_cannot_be_chosen(
    choices: list[str], budget: float, message: str, make_model: MakeModel, tmp_path: Path
) -> None:
    with pytest.raises(QtoolError, match=message):
        qtool.sensitivity(make_model(), choices, budget, tmp_path / "a.yaml", **GIVEN)
    assert not list(tmp_path.glob("a.*"))


def test_a_budget_below_the_smallest_choice_is_refused_before_anything_is_measured(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.pipeline.sensitivity.Probe", None)
    with pytest.raises(QtoolError, match="at least 5"):
        qtool.sensitivity(make_model(), ["w4a16:32", "w8a8"], 4.9, tmp_path / "a.yaml", **GIVEN)


def test_a_budget_is_enough_that_was_said_to_be() -> None:
    choices = recipes_of(["w4a16:channel", "w8a8"])
    job = Job.of(read_config(DEMO), recipes.load("w8a8"))
    groups = [(0, group.linears) for group in job.block_family(0).groups]
    candidates = Candidates(job, groups, choices)
    with pytest.raises(QtoolError) as refused:
        candidates.require_budget(1.0)
    said = re.search(r"at least (\S+) are needed", str(refused.value))
    assert said is not None
    candidates.require_budget(float(said[1]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.json", "--out .*a.json: a YAML file in a directory that exists"),
        ("absent/a.yaml", "--out .*a.yaml: a YAML file in a directory that exists"),
        ("kept.yaml", "kept.json exists already; choose another --out"),
        ("kept.json", "kept.json exists already; choose another --out"),
        (251 * "x", "x: its name has 251 bytes; at most 234 leave room"),
    ],
)
def test_files_are_refused_before_anything_is_measured(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(QtoolError, match=message):
        qtool.sensitivity(tmp_path / "no-model", CHOICES, 6.0, tmp_path / name, **GIVEN)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_a_model_whose_output_is_not_finite_is_refused(make_model: MakeModel) -> None:
    float_model = qtool.load(make_model(), dtype=torch.float32)
    float_model.get_output_embeddings().weight.data[0] = float("inf")
    with pytest.raises(QtoolError, match=r"the model's output .* has NaN or Inf"):
        Probe(float_model, [IDS]).divergence({})


def test_tokens_that_a_model_never_gives_add_nothing(make_model: MakeModel) -> None:
    """As those with which a vocabulary is padded, if their logits are -inf."""
    model = qtool.load(make_model(), dtype=torch.float32)

    def without_last(_: object, inputs: object, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([logits.shape[-1] - 1]), -torch.inf)

    model.get_output_embeddings().register_forward_hook(without_last)
    assert Probe(model, [IDS]).divergence({}) == 0


def test_sixteen_bits_are_a_choice() -> None:
    assert recipes_of(["none", "w4a16:64"])["none"] is None
