"""The report: one file that needs nothing else, gaps that say what fills them, records that cannot
act.
"""

import copy
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import qtool
from qtool import recipes
from qtool.calibration import ROUNDINGS, TRANSFORMS
from qtool.cli import cli
from qtool.errors import CheckFailed, QtoolError
from qtool.eval import saved
from qtool.eval.channel_range import ChannelRange
from qtool.eval.results import Metric, TaskResult
from qtool.eval.saved import SavedResult
from qtool.exchange.export import export
from qtool.exchange.import_ import import_checkpoint
from qtool.io.integrity import read_record
from qtool.io.run_record import record_path
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.quantize import quantize
from qtool.report import build, glossary
from qtool.report import commands as report_commands
from qtool.report.build import collect, report, weight_errors
from qtool.report.data import Expert, Size, experts, gains, quality, recorded_errors
from qtool.report.page import ranges, render, verdict
from qtool.runtime.load import load
from qtool.schemes.kv import KV_QUANTIZERS
from tests.conftest import copy_tokenizer, save_model
from tests.models.tiny import save_tiny

RECIPE = {
    "scheme": "w4a8-lqq",
    "layers": [
        {"match": "mlp.down_proj$", "scheme": None},
        {"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"},
    ],
    "rounding": {"rtn": {}},
    "kv": "kv4",
}
URLS = {"src", "href", "xlink:href", "srcset", "action"}


class Page(HTMLParser):
    """What a browser would load, which tags are open, the words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.loads, self.words = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [
            v for k, v in attributes if (k in URLS and v[0] != "#") or k.startswith("on")
        ]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny random Llama that speaks the demo's tokens."""
    directory = tmp_path_factory.mktemp("base") / "llama"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 4096}
    save_model(directory, **sizes)
    copy_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def made(base, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "quantized"
    return quantize(Checkpoint(base), recipes.parse(RECIPE, "test"), out)


@pytest.fixture
def quantized(made, tmp_path) -> Path:
    """A copy that a test may damage."""
    for path in (made, record_path(made)):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    return tmp_path / made.name


@pytest.fixture(scope="module", autouse=True)
def one_short_window():
    """Ranges and errors are measured on as little as shows them."""
    with mock.patch.multiple(build, WINDOWS=1, TOKENS=32):
        yield


def page_of(directory: Path) -> Page:
    return Page(render(collect(directory, None, "cpu")))


@pytest.fixture(scope="module")
def page(made) -> Page:
    return page_of(made)


def test_it_is_one_file_that_loads_nothing_and_runs_nothing(page):
    assert page.loads == [] and page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "url(" not in page.words and "@import" not in page.words


def test_missing_parts_name_the_command_that_fills_them(page, made):
    directory = made
    assert f"qtool eval wikitext2 piqa --model {directory} --compare BASE --save" in page.words
    assert page.words.count(f"qtool report {directory} --compare BASE") >= 1
    assert "12 of 12" in page.words and "All checks passed." in page.words


def test_commands_quote_a_path(made, tmp_path):
    spaced = shutil.copytree(made, tmp_path / "a b;c")
    words = page_of(spaced).words
    commands = re.findall(r"qtool (?:eval|report|verify|bench)[^.]*? \S*/.*a b;c", words)
    assert len(commands) > 3 and all(" '/" in command for command in commands)


def test_a_context_and_sizes_by_other_names(tmp_path):
    for name, layers in (("gpt2", 1), ("deeper", 2)):
        config = GPT2Config(vocab_size=4096, n_embd=64, n_layer=layers, n_head=2, n_positions=24)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        copy_tokenizer(tmp_path / name)
    recipe = {"scheme": "w8a8", "layers": [{"match": ".*", "scheme": "w8a8"}], "rounding": "rtn"}
    recipe["layers"][0]["layout"] = "row-major-8"
    source = Checkpoint(tmp_path / "gpt2")
    made = quantize(source, recipes.parse(recipe, "test"), tmp_path / "quantized")
    options = {"out": tmp_path / "r.html", "data_dir": None, "device": "cpu"}
    assert report(made, str(tmp_path / "gpt2"), [], **options).is_file()  # windows of 24 tokens
    with pytest.raises(QtoolError, match="num_hidden_layers is 2 there and 1 here"):
        report(made, str(tmp_path / "deeper"), [], **options)


def test_a_baseline_that_is_not_the_source_is_told(base, quantized, make_model, tmp_path):
    other = make_model("qwen2", name="unrelated")
    with pytest.raises(
        QtoolError, match=r"--compare .*unrelated: model_type is 'qwen2' there and 'llama' here"
    ):
        report(quantized, str(other), [], out=tmp_path / "r.html", data_dir=None, device="cpu")
    sibling = shutil.copytree(base, tmp_path / "sibling")
    (sibling / "model.safetensors").touch()
    doubt = "sibling (not the files of the source: another model, or copied or changed since)"
    assert doubt in Page(render(collect(quantized, str(sibling), "cpu"))).words
    assert (
        "not the files of the source"
        not in Page(render(collect(quantized, str(base), "cpu"))).words
    )


def test_a_baseline_that_is_not_the_source_is_not_what_was_quantized(base, quantized, tmp_path):
    """It may be another quantized checkpoint, which no command quantizes."""
    other = shutil.copytree(quantized, tmp_path / "other")  # of the same identity
    saved.save(quantized, answer(saved.identity(quantized), 0.5))
    compared = collect(quantized, str(other), "cpu")
    first, _, third, _ = report_commands.commands(compared)
    assert first.startswith(f"qtool quantize {base.name} ") and f"--compare {other}" in third
    assert f"+0.0 points from {other} (t)" in [text for text, _ in verdict(compared)]


def test_a_hostile_record_is_text(quantized):
    directory = quantized
    record = json.loads((directory / "qtool.json").read_text())
    evil = '<script>alert(1)</script>"><img src=x onerror=y>'
    record["source"]["directory"] = record["calibration"]["text"] = evil
    record["recipe"]["methods"] = [{evil: {evil: evil}}]
    (directory / "qtool.json").write_text(json.dumps(record))
    page = page_of(directory)
    assert page.loads == [] and "script" not in page.tags and "img" not in page.tags
    assert evil in page.words


@pytest.mark.parametrize("damage", ["", "{}"])
def test_without_provenance_it_says_so(quantized, damage):
    (quantized / "qtool.json").write_text(damage)
    words = page_of(quantized).words
    assert "qtool.json is missing or damaged" in words


def test_what_a_recipe_says_about_itself_is_told(base, tmp_path):
    """A sensitivity's says what it measured."""
    said = "schemes by sensitivity: 5.000 bits a weight diverge by <0.1> nats a token"
    recipe = recipes.parse(RECIPE | {"about": said}, "test")
    out = quantize(Checkpoint(base), recipe, tmp_path / "out")
    assert said in page_of(out).words
    written = yaml.safe_load(report_commands.recipe_file(collect(out, None, "cpu")))
    assert written["about"] == said


def test_what_the_recipe_left_out_is_told(make_model, tmp_path):
    source = make_model(num_key_value_heads=1, vocab_size=4096)
    copy_tokenizer(source)
    out = quantize(Checkpoint(source), recipes.load("w4a8-lqq"), tmp_path / "out")
    assert (
        "layout row-major for self_attn.k_proj, self_attn.v_proj: dual-mma's tile"
        in page_of(out).words
    )


def test_every_word_that_occurs_is_explained(page):
    assert glossary.METHODS.keys() == {*TRANSFORMS, *ROUNDINGS}
    assert glossary.KV.keys() == KV_QUANTIZERS.keys()
    assert glossary.METHODS["rtn"] in page.words and glossary.METHODS["gptq"] not in page.words
    assert {name: about for name, _, about in recipes.overview()}["w4a8-lqq"] in page.words


def test_a_cache_s_float32_tensors_do_not_speak_for_the_rest(make_model, tmp_path):
    source = make_model(dtype=torch.bfloat16, head_dim=64, vocab_size=4096)
    copy_tokenizer(source)
    page = page_of(quantize(Checkpoint(source), recipes.parse(RECIPE, "test"), tmp_path / "out"))
    assert "The rest, not quantized, has 16.0 bits a weight." in page.words
    assert "self_attn.k_offset" in page.words and glossary.STORED["k_offset"] in page.words
    assert glossary.STORED["k_scale"] not in page.words


def test_an_imported_model_says_so(base, tmp_path):
    native = quantize(Checkpoint(base), recipes.load("w4a16"), tmp_path / "native")
    foreign = export(native, "gptq", tmp_path / "foreign").directory
    back = import_checkpoint(Checkpoint(foreign), tmp_path / "back").directory
    words = page_of(back).words
    assert "Imported code for code from GPTQ (gptq); nothing was quantized here." in words
    assert f"qtool import foreign --out {back} --layout marlin" in words
    assert "checkpoint_format" in words and "missing or damaged" not in words


def test_a_damaged_checkpoint_is_told_not_hidden(quantized):
    shard = next(path for path in sorted(quantized.glob("*.safetensors")) if "00002" in path.name)
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    words = page_of(quantized).words
    assert "All checks passed" not in words and "1 check FAILED" in words
    assert words.index("FAILED") < words.index("than 16 bits")  # what failed is told first
    assert f"{shard.name}: the file's sha256 is not the one recorded" in words
    with pytest.raises(CheckFailed, match=rf"{shard.name}: the file's sha256 is not"):
        report(quantized, None, [], out=None, data_dir=None, device="cpu")
    assert (quantized / "report.html").exists()


def test_the_written_recipe_makes_the_same_format(quantized):
    found = collect(quantized, None, "cpu")
    text = report_commands.recipe_file(found)
    again = recipes.parse(yaml.safe_load(text), "again")
    config = {k: v for k, v in found.config.items() if k != "quantization_config"}
    assert Job.of(config, again).format.to_dict() == found.config["quantization_config"]
    assert f"--recipe {report_commands.RECIPE}" in report_commands.commands(found)[0]
    found.provenance["recipe"]["min_expert_tokens"] = 20  # which a mixture's has
    again = recipes.parse(yaml.safe_load(report_commands.recipe_file(found)), "again")
    assert again.min_expert_tokens == 20


def test_every_expert_has_its_tokens_and_its_error(made):
    found = collect(made, None, "cpu")
    tokens = {"moe.1": {"routed": 0, "added": 8}, "moe.10": {"routed": 1234, "added": 0}}
    linears = {"moe.1.up": 0.25, "moe.1.down": 0.5, "moe.10.up": 0.125, "q": 0.75}
    errors = {name: {"error": error} for name, error in linears.items()}
    found.provenance["blocks"] = [{}, {"expert tokens": tokens, "gptq": errors}]
    assert experts(found.provenance["blocks"]) == [
        Expert(1, "moe.1", 0, 8, 0.5),
        Expert(1, "moe.10", 1234, 0, 0.125),
    ]
    page = Page(render(found))
    assert not page.open
    assert "Calibration routed tokens to 1 of 2 experts. 1 of them had few, or none" in page.words
    for shown in ("moe.10", "1,234", "0.5000", "0.1250"):
        assert shown in page.words


def test_a_built_in_recipe_needs_no_file(base, tmp_path):
    out = quantize(Checkpoint(base), recipes.load("w4a8-lqq", "fast"), tmp_path / "out")
    found = collect(out, None, "cpu")
    assert report_commands.recipe_file(found) == ""
    command = f"qtool quantize {base.name} --scheme w4a8-lqq --recipe fast --out {out}"
    assert report_commands.commands(found)[0] == command
    found.provenance["job"]["device"] = "cuda"
    assert report_commands.commands(found)[0] == command.replace(" --out", " --device cuda --out")
    for key, other in (("match", "v_proj"), ("group_size", 32), ("layout", "other")):
        changed = copy.deepcopy(found)
        changed.quantization["rules"][-1][key] = other
        assert report_commands.recipe_file(changed), key
    found.provenance["recipe"]["min_expert_tokens"] = 128  # which a mixture's has
    assert report_commands.recipe_file(found) == ""
    found.provenance["recipe"]["min_expert_tokens"] = 20  # replaced in Python
    assert yaml.safe_load(report_commands.recipe_file(found))["min_expert_tokens"] == 20


def test_the_commands_say_all_that_was_asked(base, tmp_path):
    out = quantize(
        Checkpoint(base), recipes.load("w4a8-lqq", "fast"), tmp_path / "an out", dtype="float16"
    )
    found = collect(out, None, "cpu")
    found.provenance["source"] |= {"hub id": "acme/Tiny", "adapter": {"directory": "my lora"}}
    found.provenance["unknown_tensors"] = ["extra"]
    assert report_commands.commands(found) == [
        "qtool quantize acme/Tiny --scheme w4a8-lqq --recipe fast --adapter 'my lora'"
        f" --dtype float16 --keep-unknown --out '{out}'",
        f"qtool verify '{out}'",
        f"qtool eval wikitext2 piqa --model '{out}' --compare acme/Tiny --save",
        f"qtool report '{out}' --compare acme/Tiny",
    ]
    found.provenance["calibration"] = {"text": "texts", "samples": 2, "data_dir": "my data"}
    told = report_commands.commands(found)[0]
    assert "--calib FILE --samples 2 --data-dir 'my data' " in told
    found.provenance["imported from"] = {"format": "GPTQ"}
    assert report_commands.commands(found)[0].startswith(f"qtool import acme/Tiny --out '{out}'")


def test_weight_error_is_that_of_the_stored_weight(base, quantized):
    directory = quantized
    errors = weight_errors(Checkpoint(directory), Checkpoint(base))
    name = "model.layers.1.self_attn.q_proj"
    weight = load(base).get_submodule(name).weight.detach().float()
    stored = load(directory).get_submodule(name).dequantize()
    assert errors.by_role["self_attn.q_proj"][1] == pytest.approx(
        float((stored - weight).norm() / weight.norm()), rel=1e-5
    )
    assert "mlp.down_proj" not in errors.by_role  # it stays in 16 bits
    assert errors.what == "weight"


def test_weight_errors_of_rotated_inputs(make_model, tmp_path):
    """Where the rounding recorded none, as a plugin's may."""
    source = make_model()
    recipe = {"layers": [{"match": ".*", "scheme": "w8a8"}], "transforms": ["online-hadamard"]}
    made = quantize(Checkpoint(source), recipes.parse(recipe, "test"), tmp_path / "made")
    recorded = recorded_errors(read_record(made)["blocks"]).by_role
    with mock.patch.multiple(build, recorded_errors=lambda _: None, _measured=lambda *_: {}):
        found = collect(made, str(source), "cpu").errors
    assert found.what == "weight" and found.by_role.keys() == recorded.keys()
    assert found.by_role["mlp.down_proj"] == pytest.approx(recorded["mlp.down_proj"], rel=1e-4)


def test_a_baseline_whose_weights_are_zeros_has_no_relative_error(make_model, tmp_path):
    """A linear that is zeros in both is equal."""

    def zeroed(name: str, *linears: str) -> Path:
        directory = make_model(name=name)
        tensors = load_file(directory / "model.safetensors")
        for linear in linears:
            tensors[f"model.layers.{linear}.weight"].zero_()
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory

    up, down = "0.mlp.up_proj", "1.mlp.down_proj"
    baseline = zeroed("baseline", up, down)
    made = qtool.quantize(zeroed("source", up), "w8a8", recipe="fast", out=tmp_path / "made")
    with mock.patch.multiple(build, recorded_errors=lambda _: None, _measured=lambda *_: {}):
        found = collect(made.directory, str(baseline), "cpu")
        assert found.errors.by_role["mlp.up_proj"][0] == 0
        assert found.errors.by_role["mlp.down_proj"].keys() == {0}
        assert found.errors.undefined == [f"model.layers.{down}"]
        text = render(found)
    assert f"in the baseline are all zeros and those here are not: model.layers.{down}." in text
    assert "inf in block" not in text
    nothing = replace(found, errors=replace(found.errors, by_role={}))
    section = re.findall('<section id="errors">.*?</section>', render(nothing), re.DOTALL)[0]
    assert down in section and "Not measured" not in section


def test_inputs_of_which_half_are_zeros_have_no_outlier():
    amax = torch.tensor([0.0, 0.0, 3.0])
    sides = ranges(ChannelRange("mlp.down_proj", amax, amax + 1))["sides"]
    assert sides[0]["reading"] == "The median channel is 0; the largest value is 3."
    assert sides[1]["reading"].startswith("The largest channel is 4.0 × the median one;")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_activations_that_overflow_are_told(bad):
    amax, overflowing = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, bad])
    for before, after in ((amax, overflowing), (overflowing, amax)):
        sides = ranges(ChannelRange("mlp.down_proj", before, after))["sides"]
        assert any(f"the largest value is {bad}." in side["reading"] for side in sides)


@pytest.mark.parametrize("kind", ["gpt2", "mistral3"])
def test_weight_errors_of_a_source_with_other_names_or_forms(kind, tmp_path):
    source = save_tiny(kind, tmp_path / "source")
    made = qtool.quantize(source, "w4a16", recipe="fast", out=tmp_path / "made").directory
    recorded = recorded_errors(read_record(made)["blocks"]).by_role
    found = weight_errors(Checkpoint(made), Checkpoint(source)).by_role
    assert found.keys() == recorded.keys()
    for role, blocks in recorded.items():
        assert found[role] == pytest.approx(blocks, rel=1e-4), role


def test_recorded_errors_and_gains():
    notes = {
        "gptq": {
            "mlp.experts.0.up": {"error": 0.1},
            "mlp.experts.1.up": {"error": 0.3},
            "q": {"error": 0.2},
        }
    }
    notes["smooth"] = {
        "q": {"error": 1.0, "error_unsmoothed": 4.0},
        "o": {"error": 3.0, "error_unsmoothed": 3.0},
    }
    notes["smooth-attention"] = {"alpha": 0.5, "error": 1.0, "error_unsmoothed": 2.0}
    notes["batches halved for lack of memory"] = 1
    notes["of a plugin"] = {"loss": 0.5}
    errors = recorded_errors([notes, {"gptq": {"q": {"error": 0.5}}}])
    assert errors.by_role == {"mlp.experts.up": {0: 0.3}, "q": {0: 0.2, 1: 0.5}}
    found = {gain.method: gain for gain in gains([notes])}
    assert (found["smooth"].choices, found["smooth"].least, found["smooth"].greatest) == (
        2,
        0.25,
        1.0,
    )
    assert found["smooth-attention"].median == 0.5
    assert found.keys() == {"smooth", "smooth-attention"}
    assert recorded_errors([{"distill": {"loss": [3.0, 1.0, 2.0], "epoch": 1}}]).by_role == {
        "whole block": {0: 1.0}
    }
    for noted in (7, {"loss": 0.5}, {"steps": 3}):  # what a method from outside may note
        assert recorded_errors([{"distill": noted}]) is None
    assert (
        gains([{"distill": {"loss": [4.0, 1.0, 2.0], "epoch": 1}, "rotate": {"order": 8}}])[
            0
        ].median
        == 0.25
    )
    weights = recorded_errors(
        [{"rtn": {"mlp.up": {"weight_error": 0.1}}}, {"rtn": {"mlp.up": {"weight_error": 0.2}}}]
    )
    assert (weights.what, weights.by_role) == ("weight", {"mlp.up": {0: 0.1, 1: 0.2}})
    assert recorded_errors([]) is None


def test_an_evaluation_is_repeated_as_it_was_asked(quantized):
    identity, metric = saved.identity(quantized), {"acc": Metric(0.5, 0.1, True)}
    for task, facts in (
        ("t", {"limit": 9}),
        ("u", {"limit": 9}),
        ("v", {"seqlen": 64}),
        ("t", {"limit": 9, "kv": "kv4", "dtype": "float32", "deterministic": True}),
        ("u", {"device": "cuda", "limit": 9}),
        ("u", {"device": "cuda", "engine": "vllm 0.26.0", "limit": 9}),
    ):
        result = TaskResult(task, "zero_shot", "f", 9, metric)
        saved.save(quantized, SavedResult(identity, {"task": task} | facts, [result]))
    told = [
        line
        for line in report_commands.commands(collect(quantized, None, "cpu"))
        if line.startswith("qtool eval")
    ]
    common = f"--model {quantized} --compare llama"
    assert [line.replace(common, "...") for line in told] == [
        "qtool eval t u ... --limit 9 --save",
        "qtool eval v ... --seqlen 64 --save",
        "qtool eval t ... --limit 9 --kv kv4 --dtype float32 --deterministic --save",
        "qtool eval u ... --limit 9 --device cuda --save",
        "qtool eval u ... --limit 9 --engine vllm --save",
    ]


@pytest.mark.parametrize(
    ("task", "origin", "told"),
    [
        ("a b.txt", "texts/a b.txt", "'texts/a b.txt' ... --save"),
        ("c4", "/data/c4.txt", "c4 ... --data-dir /data --save"),
        ("own", "my data/tasks/own.jsonl", "own ... --data-dir 'my data' --save"),
        ("piqa", "lm-eval", "piqa ... --save"),
    ],
)
def test_what_was_evaluated_is_named_by_its_path_and_directory(quantized, task, origin, told):
    perplexity = origin.endswith(".txt")
    kind, name = ("perplexity", "perplexity") if perplexity else ("zero_shot", "acc")
    result = TaskResult(task, kind, origin, 9, {name: Metric(0.5, 0.1, not perplexity)})
    saved.save(quantized, SavedResult(saved.identity(quantized), {"task": task}, [result]))
    common = f"--model {quantized} --compare llama"
    commands = report_commands.commands(collect(quantized, None, "cpu"))
    assert f"qtool eval {told.replace('...', common)}" in commands


def test_a_missing_baseline_names_the_evaluation_that_lacks_it(quantized):
    identity, metric = saved.identity(quantized), {"acc": Metric(0.5, 0.1, True)}
    for facts in ({"limit": 9}, {"kv": "kv4"}):
        result = TaskResult("t", "zero_shot", "f", 9, metric)
        saved.save(quantized, SavedResult(identity, {"task": "t"} | facts, [result]))
    collected = collect(quantized, None, "cpu")
    beside = replace(collected.quality[1], baseline=Metric(0.75, 0.1, True))
    words = Page(render(replace(collected, quality=[collected.quality[0], beside]))).words
    [command] = re.findall(r"baseline's result is missing. Fill it with (.*)", words)
    assert command == f"qtool eval t --model {quantized} --compare BASE --limit 9 --save"


def answer(model: str, value: float, **facts) -> SavedResult:
    result = TaskResult("t", "zero_shot", "f", 9, {"acc": Metric(value, 0.1, True)})
    return SavedResult(model, {"task": "t"} | facts, [result])


def test_only_answers_to_the_same_question_are_compared():
    rows = quality(
        [answer("m", 0.5), answer("m", 0.4, limit=2), answer("base", 0.75), answer("x", 0.9)],
        "m",
        "base",
    )
    assert [(r.value.value, r.baseline and r.baseline.value) for r in rows] == [
        (0.5, 0.75),
        (0.4, None),
    ]
    assert rows[0].change.change == -0.25


def test_kept_results_stand_in_the_page_with_their_intervals(base, quantized):
    directory = quantized
    for model, value in ((directory, 0.5), (base, 0.75)):
        saved.save(directory, answer(saved.identity(model), value))
    words = re.sub(r"\s+", " ", Page(render(collect(directory, None, "cpu"))).words)
    assert (
        "50.00 ± 19.60 %" in words
        and "75.00 ± 19.60 %" in words
        and "−25.00 ± 27.72 points" in words
    )


def test_an_infinite_perplexity_stands_in_the_page(base, quantized):
    for model, nll in ((quantized, [math.inf, 2.0]), (base, [1.0, 2.0])):
        details = {"nll": sum(nll), "tokens": 2, "window_nll": nll}
        metric = {"perplexity": Metric(math.exp(sum(nll) / 2), None, False)}
        result = TaskResult("t", "perplexity", "f", 2, metric, details)
        saved.save(quantized, SavedResult(saved.identity(model), {"task": "t"}, [result]))
    words = page_of(quantized).words
    assert "inf nats" in words and "nan" not in words


def test_the_headline_says_each_task_once_for_its_options(base, quantized):
    own, other = saved.identity(quantized), saved.identity(base)
    for facts in ({"torch": "1"}, {"torch": "2"}, {"limit": 2}):
        for model, value in ((own, 0.5 + 0.1 * ("limit" in facts)), (other, 0.75)):
            saved.save(quantized, answer(model, value, **facts))
    found = [text for text, _ in verdict(collect(quantized, None, "cpu"))]
    assert found[1:-1] == ["-25.0 points (t)", "-15.0 points (t, the first 2 only)"]


def test_an_empty_tensor_has_a_row(quantized):
    empty = Size("w", "float32", 1, 0, 0, packed=False)
    collected = collect(quantized, None, "cpu")
    assert "0.000" in Page(render(replace(collected, sizes=[*collected.sizes, empty]))).words


def test_the_headline_says_if_the_checkpoint_is_larger(quantized):
    collected = collect(quantized, None, "cpu")
    kept = Size("w", "float32", 1, 1000, 4000, packed=False)
    text, _ = verdict(replace(collected, sizes=[kept]))[0]
    assert text == "2.00 times larger than 16 bits"


def test_the_command_measures_what_a_baseline_allows(base, quantized, tmp_path):
    options = ["--compare", str(base), "--out", str(tmp_path / "r.html")]
    done = CliRunner().invoke(cli, ["report", str(quantized), *options])
    assert done.exit_code == 0, done.output
    page = Page((tmp_path / "r.html").read_text())
    # quantized roles, pairs of ranges, keys and values
    assert page.tags.count("svg") == 6 + 2 * 4 + 2
    assert page.words.count("The largest channel is") == 8
    assert page.loads == [] and page.open == []


def test_refusals(make_model, quantized):
    with pytest.raises(QtoolError, match="the model is not quantized"):
        qtool.write_report(make_model(name="plain"))
    with pytest.raises(QtoolError, match="is no directory"):
        report(quantized, None, [], out=Path("/absent/x.html"), data_dir=None, device="cpu")
    with pytest.raises(QtoolError, match="is a directory: a file to write is expected"):
        report(quantized, None, ["unknown"], out=quantized, data_dir=None, device="cpu")


@pytest.mark.parametrize("spelling", ["same", "dots", "link", "relative"])
def test_a_model_is_not_compared_with_itself(quantized, tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(quantized)
    spelled = {
        "same": str(quantized),
        "dots": f"{quantized}/../{quantized.name}/",
        "link": str(tmp_path / "link"),
        "relative": f"./{quantized.name}",
    }[spelling]
    with pytest.raises(QtoolError, match="is the model of the report itself: pass the model that"):
        report(quantized, spelled, [], out=None, data_dir=None, device="cpu")
    assert not (quantized / "report.html").exists()


def test_the_run_is_told_or_said_to_be_unknown(quantized):
    words = page_of(quantized).words
    assert "wall time" in words and "peak host memory" in words and "device" in words
    moved = quantized.rename(quantized.with_name("moved"))
    assert (
        "moved.run.json" in page_of(moved).words and "peak host memory" not in page_of(moved).words
    )
