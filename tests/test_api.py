"""The public functions: what they take, what they give, and that importing them costs nothing."""

import dataclasses
import inspect
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import qtool
from qtool.cli import cli
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.eval.checkpoints import EvaluateKeywords, evaluate_checkpoints
from qtool.eval.evaluate import load_tasks
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.pipeline import calibration_windows
from qtool.pipeline.options import QuantizeKeywords, QuantizeOptions
from qtool.pipeline.quantize import Calibration
from qtool.recipes import Recipe
from qtool.runtime.linear import QuantLinear
from tests.conftest import MakeModel

IDS = torch.arange(2, 66)[None]


def linears(model: torch.nn.Module) -> list[QuantLinear]:
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": None}, "model None: a directory, a hub id, demo or a transformers model"),
        ({"scheme": 5}, "--scheme 5: a text is expected"),
        ({"kv": 4}, r"options: kv is 4; str \| None is expected"),
        ({"layout": ["marlin"]}, r"options: layout is \['marlin'\]; str \| None is expected"),
        ({"target": 100, "scheme": "w4a4"}, r"options: target is 100; str \| None is expected"),
        ({"data_dir": 5}, r"options: data_dir is 5; str \| Path \| None is expected"),
        ({"adapter": b"x"}, r"options: adapter is b'x'; str \| PathLike\[str\] \| None is"),
        ({"calibration": 5}, r"calibration data: a corpus, .* found <class 'int'>"),
        ({"calibration": [(5.5, 8)]}, r"calibration data: .* found <class 'float'>"),
    ],
)
def test_a_value_of_another_type_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(QtoolError, match=said):
        qtool.plan(**({"model": "demo", "scheme": "w4a16"} | wrong))


@pytest.mark.parametrize("wrong", [None, 3])
@pytest.mark.parametrize(
    "call",
    [
        qtool.load,
        qtool.load_tokenizer,
        qtool.verify,
        qtool.inspect,
        qtool.write_report,
        lambda wrong: qtool.export(wrong, "gptq"),
        lambda wrong: qtool.load_as_export(wrong, "compressed-tensors"),
        lambda wrong: qtool.import_(wrong, "out"),
        lambda wrong: qtool.import_("demo", wrong),
        lambda wrong: qtool.sensitivity(wrong, ["w4a16"], 5, "out"),
        lambda wrong: qtool.sensitivity("demo", ["w4a16"], 5, wrong),
    ],
)
def test_what_is_no_path_is_named(call: Callable[[Any], object], wrong: object) -> None:
    with pytest.raises(QtoolError, match=f"{wrong}: a string or a path is expected"):
        call(wrong)


@pytest.mark.parametrize(
    "call",
    [
        qtool.verify,
        lambda model: qtool.evaluate(model, ["demo"]),
        lambda model: qtool.evaluate([model], "demo"),
        lambda model: qtool.quantize("demo", model, out="out"),
        lambda model: qtool.quantize(model.state_dict(), "w4a16"),
        lambda model: qtool.evaluate("demo", model, tokenizer=model),
    ],
)
def test_a_model_in_a_wrong_place_is_shown_in_one_line(call: Callable[[Any], object]) -> None:
    with pytest.raises(QtoolError, match=r"^.{300,400} is expected") as caught:
        call(qtool.load("demo"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["out", "recipe"])
def test_a_number_is_no_path(name: str) -> None:
    options: dict[str, Any] = {name: 3}
    with pytest.raises(QtoolError, match=f"{name} 3: a string or a path is expected"):
        qtool.quantize("demo", "w4a16", **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: qtool.quantize("demo", "w4a16", progress=wrong),
        lambda wrong: qtool.sensitivity("demo", ["w4a16"], 5, "out", progress=wrong),
        lambda wrong: qtool.verify("demo", progress=wrong),
        lambda wrong: qtool.export("demo", "gptq", progress=wrong),
        lambda wrong: qtool.import_("demo", "out", progress=wrong),
    ],
)
def test_progress_is_a_function(call: Callable[[Any], object]) -> None:
    with pytest.raises(QtoolError, match=r"^progress 3: a function of \(done, total, notes\)"):
        call(3)


@pytest.mark.parametrize("out", [".", "..", Path("/")])
@pytest.mark.parametrize(
    "call",
    [
        lambda out: qtool.quantize("demo", "w4a16", out=out),
        lambda out: qtool.import_("demo", out),
        lambda out: qtool.sensitivity("demo", ["w4a16"], 5, out),
    ],
)
def test_an_output_has_a_name(call: Callable[[Any], object], out: str | Path) -> None:
    with pytest.raises(QtoolError, match=f"^out '{out}': the name of a new file"):
        call(out)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("é" * 118, "its name has 236 bytes; at most 234 leave room"),
        ("x" * 256 + "/out", "^out '.*out': a name in it has 256 bytes; at most 255"),
    ],
)
def test_an_output_with_a_long_name_is_refused_before_any_work(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = qtool.quantize("demo", "w4a16", recipe="fast", out="q")
    for call in (
        partial(qtool.quantize, "demo", "w4a16"),
        partial(qtool.export, done, "gguf"),
        partial(qtool.write_report, done, tasks="demo"),
    ):
        with pytest.raises(QtoolError, match=message):
            call(out=out)


def test_a_model_with_a_name_that_no_file_has_is_refused() -> None:
    name = "x" * 256
    for call in (
        partial(qtool.quantize, name, "w4a16"),
        partial(qtool.plan, name, "w4a16"),
        partial(qtool.inspect, name),
        partial(qtool.load, name),
        partial(qtool.evaluate, "demo", name),
    ):
        with pytest.raises(QtoolError, match=f"^model '{name}': a name in it has 256 bytes"):
            call()


def test_an_output_is_made_without_directories_that_its_path_leaves_again(tmp_path: Path) -> None:
    out = tmp_path / "missing" / ".." / "q"
    qtool.quantize("demo", "w4a16", recipe="fast", out=out)
    assert {path.name for path in tmp_path.iterdir()} == {"q", "q.run.json"}


def test_dir_lists_what_can_be_called() -> None:
    assert set(qtool.__all__) <= set(dir(qtool))
    for name in qtool.__all__:
        assert callable(getattr(qtool, name)) and getattr(qtool, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = qtool.quantise


def test_qtool_alone_has_the_module_that_the_reference_names() -> None:
    code = "import qtool; print(qtool.api.schemes()[0][0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in {name for name, *_ in qtool.api.schemes()}


def test_importing_qtool_imports_nothing_heavy_and_no_hook() -> None:
    code = (
        "import sys; hooks = list(sys.meta_path)\n"
        "import qtool, qtool.cli\n"
        "dir(qtool)\n"
        "assert sys.meta_path == hooks\n"
        "print([n for n in ('torch', 'transformers', 'datasets', 'rich') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_directory_becomes_a_checkpoint(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "out"
    done = qtool.quantize(source, "w4a16", out=out)
    assert done.directory == out and Path(done) == out
    stored = Checkpoint(out).entries.values()
    assert done.nbytes == sum(entry.nbytes for entry in stored)
    assert done.ratio == done.source_bytes / done.nbytes > 1
    assert len(done.errors) == 14 and all(0 < error < 0.5 for error in done.errors.values())
    worst = max(done.errors, key=done.errors.__getitem__)
    assert worst in str(done) and str(done).splitlines()[1] == f"next: qtool verify {out}"
    assert json.loads(json.dumps(done.as_dict()))["directory"] == str(out)
    assert len(linears(qtool.load(done))) == 14
    assert not [row for row in qtool.verify(out) if row.problem]
    assert sum(bool(row.layout) for row in qtool.inspect(out)) == 14


def test_a_device_may_be_torchs_own(make_model: MakeModel, tmp_path: Path) -> None:
    out, device = tmp_path / "out", torch.device("cpu")
    assert qtool.quantize(make_model(), "w8a8", out=out, device=device).directory == out
    assert all(not row.problem for row in qtool.verify(out, device=device))
    assert qtool.plan("demo", "w8a8", device=device) == qtool.plan("demo", "w8a8", device="cpu")


def test_a_dtype_is_torchs_own_or_its_name(tmp_path: Path) -> None:
    for index, dtype in enumerate(("float32", torch.float32)):
        assert qtool.load("demo", dtype=dtype).dtype is torch.float32
        out = qtool.quantize("demo", "w4a16", dtype=dtype, out=tmp_path / str(index))
        assert '"float32"' in (out.directory / "config.json").read_text()
        results, _ = qtool.evaluate("demo", out, dtype=dtype, limit=1, seqlen=16)
        assert results.tasks


def test_a_device_of_an_evaluation_may_be_torchs_own(tmp_path: Path) -> None:
    out = qtool.quantize("demo", "w8a8", out=tmp_path / "out")
    options: dict[str, Any] = {"save": True, "limit": 1, "seqlen": 32}
    found = [
        qtool.evaluate(["demo"], out, device=d, **options) for d in ("cpu", torch.device("cpu"))
    ]
    assert found[0] == found[1]


def test_a_model_in_memory_becomes_one_with_packed_linears(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model()
    model = AutoModelForCausalLM.from_pretrained(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = qtool.quantize(model, "w4a8-lqq")
    assert len(linears(made)) == 14 and not linears(model)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    qtool.quantize(source, "w4a8-lqq", out=tmp_path / "out")
    assert torch.equal(made(IDS).logits, qtool.load(tmp_path / "out")(IDS).logits)


def test_a_quantized_model_in_memory_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    made = qtool.quantize(make_model(), "w8a8", out=tmp_path / "out")
    with pytest.raises(QtoolError, match="quantized already"):
        qtool.quantize(qtool.load(made), "w8a8")


def test_a_model_in_memory_without_a_head_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(QtoolError, match=r"is a LlamaModel, .* load it by AutoModelForCausalLM"):
        qtool.quantize(AutoModel.from_pretrained(make_model()), "w8a8")


def test_a_model_in_memory_without_weights_is_refused(make_model: MakeModel) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(make_model()))
    with pytest.raises(QtoolError, match="has no weights"):
        qtool.quantize(model, "w8a8")


def test_a_model_in_memory_is_not_called_by_its_temporary_directory(make_model: MakeModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model())
    model.model.layers = model.model.layers[:1]  # but config.json has two
    missing = r"^the model in memory: tensor model\.layers\.1\..* is missing$"
    with pytest.raises(QtoolError, match=missing):
        qtool.quantize(model, "w8a8")


def test_what_a_caller_set_in_torch_changes_nothing(tmp_path: Path) -> None:
    def shards(name: str) -> list[bytes]:
        how: dict[str, Any] = {"calibration": "demo", "samples": 2, "seqlen": 16}
        qtool.quantize("demo", "w4a16", recipe="paper", out=tmp_path / name, **how)
        assert not [row for row in qtool.verify(tmp_path / name) if row.problem]
        return [file.read_bytes() for file in sorted((tmp_path / name).glob("*.safetensors"))]

    plain = shards("plain")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert shards("set") == plain
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_default_device_of_the_caller_is_not_that_of_a_run(tmp_path: Path) -> None:
    native, gptq = tmp_path / "native", tmp_path / "gptq"
    how: dict[str, Any] = {"calibration": "demo", "samples": 2, "seqlen": 16}
    torch.set_default_device("meta")  # stands for a GPU
    try:
        qtool.quantize("demo", "w4a16", recipe="paper", kv="kv8", out=native, **how)
        assert not [row for row in qtool.verify(native) if row.problem]
        exported = qtool.export(native, "gptq", gptq)
        qtool.import_(exported, tmp_path / "imported")
        results, _ = qtool.evaluate(["demo"], native, limit=1, seqlen=64)
        qtool.write_report(native)
        assert qtool.load(native).device.type == "cpu"
        assert qtool.plan("demo", "w4a8-lqq", recipe="best", calibration="demo").output_bytes
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert results == qtool.evaluate(["demo"], native, limit=1, seqlen=64)[0]


@pytest.mark.parametrize("room", [100, 10_000])  # not for config.json, not for the weights
def test_a_disk_without_room_for_a_model_in_memory_is_named(
    room: int, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, full = AutoModelForCausalLM.from_pretrained(make_model()), tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(QtoolError, match=f"cannot be saved in {full}/.*File too large"):
            qtool.quantize(model, "w4a16", device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(full.iterdir())


def test_a_model_in_memory_that_transformers_does_not_save(make_model: MakeModel) -> None:
    """Older models come with settings that it takes when it loads, and refuses when it saves."""
    model = AutoModelForCausalLM.from_pretrained(make_model())
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    with pytest.raises(QtoolError, match=r"cannot save the model in memory \(GenerationConfig is"):
        qtool.quantize(model, "w4a16")


def test_a_model_in_memory_is_refused_by_several_processes_and_runs(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"))
    with pytest.raises(QtoolError, match="no run of it can be resumed: save it"):
        qtool.quantize(model, "w8a8", recipe="fast", resume=True)
    monkeypatch.setattr(ranks, "size", lambda: 2)
    with pytest.raises(QtoolError, match="pass its directory to several"):
        qtool.quantize(model, "w8a8", recipe="fast")


def test_a_sensitivity_is_refused_by_several_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "size", lambda: 2)
    with pytest.raises(QtoolError, match="measured by one process"):
        qtool.sensitivity("demo", ["w4a16", "w8a8"], 5.0, tmp_path / "mixed.yaml")


def test_a_model_in_memory_is_calibrated_by_its_own_tokenizer(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    done = qtool.quantize(
        model, "w8a8", out=tmp_path / "out", calibration="demo", samples=2, seqlen=16
    )
    assert json.loads((done.directory / "qtool.json").read_text())["calibration"]["samples"] == 2
    assert qtool.load_tokenizer(done)("It was")["input_ids"]
    assert str(done).splitlines()[1] == f"next: qtool eval wikitext2 --model {done.directory}"


def test_a_model_in_memory_has_the_tokenizer_of_its_own_directory(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has none here, also where it is called as qtool's demo is."""
    make_model(name="demo")
    monkeypatch.chdir(tmp_path)
    done = qtool.quantize(AutoModelForCausalLM.from_pretrained("demo"), "w4a16", out="out")
    assert not list(done.directory.glob("tokenizer*"))


@pytest.mark.parametrize(
    "data", ["demo", Path("text.txt"), ["a text", "another"], [[1, 2], [3, 4]], torch.ones(2, 4)]
)
def test_calibration_data_goes_on_as_it_is(
    data: object, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def cut(source: object, job: object, text: object, *others: object) -> Calibration:
        given.append(text)
        return Calibration([torch.ones(1, 16, dtype=torch.long)], {"samples": 1})

    monkeypatch.setattr(calibration_windows, "Windows", cut)
    qtool.quantize(make_model(), "w8a8", calibration=data, out=tmp_path / "out")
    assert len(given) == 1 and given[0] is data


def test_a_recipe_in_every_form(make_model: MakeModel, tmp_path: Path) -> None:
    layers = [{"match": ".*", "scheme": "w8a8"}]
    content = {"scheme": "mine", "layers": layers, "rounding": "rtn"}
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(content))
    source = make_model()
    results = []
    for form in (content, file, str(file), QuantizeOptions().recipe(None, content)):
        assert isinstance(form, dict | str | Path | Recipe)
        out = tmp_path / str(len(results))
        qtool.quantize(source, recipe=form, out=out)
        results.append((out / "config.json").read_text())
    assert len(set(results)) == 1 and '"w8a8"' in results[0]


def test_numbers_may_be_numpys(tmp_path: Path) -> None:
    one, two, size = np.int64(1), np.int64(2), np.int64(32)
    recipe = {
        "layers": [{"match": ".*", "scheme": "w4a16", "group_size": size}],
        "transforms": [{"smooth": {"steps": two}}],
        "min_expert_tokens": two,
    }
    given: Any = {"samples": two, "seqlen": size, "seed": one}
    made = qtool.quantize("demo", recipe=recipe, out=tmp_path / "out", **given)
    asked: Any = {"limit": one, "seqlen": size, "save": True}
    results, _ = qtool.evaluate("demo", made.directory, **asked)
    assert results["demo"].samples == 1
    assert qtool.plan("demo", "w4a16", gpus=two).output_bytes  # type: ignore[arg-type]
    assert qtool.verify(made, tensor_parallel=one)  # type: ignore[arg-type]
    qtool.export(made, "compressed-tensors", tensor_parallel=two)  # type: ignore[arg-type]


def test_what_a_model_in_memory_is_evaluated_with(make_model: MakeModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model())
    with pytest.raises(QtoolError, match=r"with its tokenizer: pass tokenizer=$"):
        qtool.evaluate("demo", model)
    tokenizer = qtool.load_tokenizer("demo")
    with pytest.raises(QtoolError, match=r"baseline alone, .* by qtool.eval.compare.compare$"):
        qtool.evaluate("demo", model, "demo", tokenizer=tokenizer)


def test_a_plan_of_a_directory_and_of_a_model_in_memory(make_model: MakeModel) -> None:
    source = make_model(dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(source)
    by_path, by_config = (
        qtool.plan(form, "w4a8-lqq") for form in (source, str(source / "config.json"))
    )
    in_memory = qtool.plan(model, "w4a8-lqq")
    assert by_path.output_bytes == by_config.output_bytes == in_memory.output_bytes


def test_what_functions_give_prints_as_their_commands_do(tmp_path: Path) -> None:
    def said(*arguments: str) -> list[str]:
        return CliRunner().invoke(cli, arguments).stdout.splitlines()

    assert str(qtool.plan("demo", "w4a8-lqq")).splitlines() == said(
        "plan", "demo", "--scheme", "w4a8-lqq"
    )
    results, _ = qtool.evaluate("demo", "demo", limit=2, seqlen=16)
    command = ("eval", "demo", "--model", "demo", "--limit", "2", "--seqlen", "16")
    assert str(results).splitlines() == said(*command)
    choices, short = ["w4a16", "w8a8"], {"samples": 2, "seqlen": 16}
    found = qtool.sensitivity("demo", choices, 5.0, tmp_path / "api.yaml", **short)
    command = ("sensitivity", "demo", "--choices", "w4a16,w8a8", "--budget-bits", "5")
    command += ("--out", str(tmp_path / "cli.yaml"), "--samples", "2", "--seqlen", "16")
    assert str(found).splitlines() == said(*command)


def test_what_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    with pytest.raises(QtoolError, match=r"unknown option 'sample': did you mean samples\?"):
        qtool.quantize(source, "w8a8", sample=4)
    with pytest.raises(
        QtoolError, match="neither a scheme nor a recipe file is given: pass --scheme"
    ):
        qtool.quantize(source)
    with pytest.raises(QtoolError, match="write w4a4-g128 or w4a4-mix"):
        qtool.plan(source, "w4a4")
    with pytest.raises(QtoolError, match="the model that is read lies there"):
        qtool.quantize(source, "w8a8", out=source)
    assert (source / "config.json").exists()
    for function in (qtool.verify, qtool.inspect, qtool.write_report):
        with pytest.raises(QtoolError, match="demo: the model is not quantized; make a quantized"):
            function("demo")
    with pytest.raises(QtoolError, match="demo: the model is not quantized"):
        qtool.export("demo", "gptq", tmp_path / "out")
    with pytest.raises(QtoolError, match="data_dir 3: a string or a path is expected"):
        qtool.api.all_tasks(3)  # type: ignore[arg-type]
    with pytest.raises(QtoolError, match="--engine 'tgi': vllm is expected"):
        qtool.verify(qtool.quantize(source, "w8a8", out=tmp_path / "out"), engine="tgi")
    with pytest.raises(QtoolError, match="--engine 'tgi': vllm is expected"):
        qtool.evaluate("demo", engine="tgi")


def test_load_by_name_and_by_device_map() -> None:
    assert torch.equal(qtool.load("demo")(IDS).logits, qtool.load(DEMO)(IDS).logits)
    mapped = qtool.load("demo", device_map={"": "cpu"})
    assert torch.equal(mapped(IDS).logits, qtool.load("demo")(IDS).logits)
    with pytest.raises(QtoolError, match="transformers cannot load it"):
        qtool.load("demo", device_map="nowhere")


@pytest.mark.parametrize(
    "ask",
    [
        lambda absent: qtool.export(absent, "no-format"),
        lambda absent: qtool.quantize(absent, "w8a8", export_format="no-format"),
        lambda absent: qtool.verify(absent, engine="no-engine"),
    ],
)
def test_a_wrong_name_is_refused_before_a_model_is_looked_for(ask: Callable[[str], Any]) -> None:
    with pytest.raises(QtoolError, match=r"'no-(format|engine)'"):
        ask("absent/")


def test_export_and_import_report_progress(make_model: MakeModel, tmp_path: Path) -> None:
    native = qtool.quantize(make_model(), "w4a16", out=tmp_path / "q").directory
    seen: dict[str, list[tuple[int, int]]] = {"export": [], "import": [], "verify": []}

    def into(name: str):  # type: ignore[no-untyped-def]
        return lambda done, total, notes: seen[name].append((done, total))

    qtool.export(native, "gptq", tmp_path / "gptq", progress=into("export"))
    back = qtool.import_(tmp_path / "gptq", tmp_path / "back", progress=into("import"))
    qtool.verify(back, progress=into("verify"))
    for steps in seen.values():
        assert steps[-1][0] == steps[-1][1] == len(steps)
    assert back.imported and str(back).splitlines()[1] == f"next: qtool verify {back.directory}"


def test_an_export_lands_beside_the_model(make_model: MakeModel, tmp_path: Path) -> None:
    native = qtool.quantize(make_model(), "w4a16", out=tmp_path / "q")
    assert qtool.export(native, "gptq").directory == tmp_path / "q-gptq"
    shutil.rmtree(tmp_path / "q-gptq")
    with pytest.raises(QtoolError, match="the model that is read lies there"):
        qtool.export(native, "gptq", native)
    with pytest.raises(QtoolError, match="unknown format 'some/path'"):
        qtool.export(native, "some/path")


def test_keywords_are_those_of_an_evaluation() -> None:
    # an engine: by its name in the API, by its class below
    asked = [
        parameter
        for function in (evaluate_checkpoints, load_tasks)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "engine"
    ]
    assert EvaluateKeywords.__annotations__ == {p.name: p.annotation for p in asked}


def test_keywords_are_the_fields_of_the_options() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(QuantizeOptions)}
    del fields["kv"]
    assert QuantizeKeywords.__annotations__ == fields


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (qtool.quantize, {"samples": -1}, "--samples -1: a whole number of at least 1"),
        (qtool.quantize, {"samples": "8"}, "samples is '8'; int . None is expected"),
        (qtool.quantize, {"seqlen": 1}, "--seqlen 1: a whole number of at least 2"),
        (
            qtool.quantize,
            {"seed": 1 << 64},
            "--seed 18446744073709551616: a whole number",
        ),
        (qtool.quantize, {"activations": "hots"}, "--activations 'hots': did you mean host"),
        (qtool.quantize, {"calibration": 5, "recipe": "fast"}, "calibration data: a corpus, "),
        (qtool.quantize, {"resume": "yes"}, "resume is 'yes'; bool is expected"),
        (qtool.quantize, {"windows": "continue"}, "given or continued is expected"),
        (qtool.quantize, {"device": "tpu"}, "device 'tpu': cpu, cuda or cuda:N"),
        (qtool.quantize, {"calibration": torch.zeros(0, 4).long()}, r"token ids of shape \[0, 4\]"),
        (qtool.plan, {"gpus": 0}, "--gpus 0: a whole number of at least 1"),
        (qtool.plan, {"device": "tpu"}, "a plan is of cuda or cpu"),
        (qtool.plan, {"device": "cpu", "gpus": 2}, "--gpus 2 needs --device cuda; --device cpu is"),
    ],
)
def test_a_value_that_an_option_cannot_have(
    function: Callable[..., object], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if function is qtool.quantize:
        options = options | {"out": tmp_path / "out"}
    with pytest.raises(QtoolError, match=message):
        function("demo", "w4a16", **{"recipe": "paper"} | options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tasks", "named"), [(None, "None"), (3, "3"), (["demo", 3], "3"), ({}, "{}")]
)
def test_what_is_no_name_of_a_task_is_refused(tasks: Any, named: str) -> None:
    with pytest.raises(QtoolError, match=rf"tasks {named}: a name or a list of names is expected"):
        qtool.evaluate(tasks, "demo")


def test_names_may_be_one_text_with_commas(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The captain went on deck.")
    results, _ = qtool.evaluate(f"demo, {tmp_path / 'a.txt'}", "demo", seqlen=64, limit=1)
    assert [task.task for task in results.tasks] == ["demo", "a.txt"]
    with pytest.raises(QtoolError, match="--choices w4a4-mix: one scheme is expected"):
        qtool.sensitivity("demo", "w8a8,w4a4-mix", 5.0, tmp_path / "mixed.yaml")
    with pytest.raises(QtoolError, match="no task: name one"):
        qtool.evaluate("", "demo")


def test_a_file_to_evaluate_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The captain went on deck.")
    results, _ = qtool.evaluate(tmp_path / "a.txt", "demo")
    assert results["a.txt"].samples == 1


def test_a_name_that_is_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which "" is not
    (tmp_path / "config.json").write_text("{}")
    done = qtool.quantize("demo", "w8a8", out=tmp_path / "w8a8")
    for call in (
        partial(qtool.evaluate, "demo", ""),
        partial(qtool.evaluate, "demo", "demo", ""),
        partial(qtool.write_report, done, ""),
        partial(qtool.inspect, ""),
    ):
        with pytest.raises(QtoolError, match="model '': it names no file"):
            call()


def test_a_tokenizer_is_not_taken_in_vain(tmp_path: Path) -> None:
    tokenizer = qtool.load_tokenizer("demo")
    for call in (
        partial(qtool.evaluate, "demo", "demo", tokenizer=tokenizer),
        partial(qtool.quantize, "demo", "w8a8", out=tmp_path / "out", tokenizer=tokenizer),
    ):
        with pytest.raises(QtoolError, match="tokenizer is for a model in memory"):
            call()


def test_a_tokenizer_is_no_name(tmp_path: Path) -> None:
    model: Any = qtool.load("demo")
    for call in (
        partial(qtool.evaluate, "demo", model, tokenizer="demo"),
        partial(qtool.quantize, model, "w8a8", out=tmp_path / "out", tokenizer="demo"),
    ):
        with pytest.raises(QtoolError, match="tokenizer 'demo': a transformers tokenizer is"):
            call()


def test_values_that_evaluation_and_export_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="unknown task 'dmeo'"):
        qtool.evaluate("dmeo", "demo")
    with pytest.raises(QtoolError, match="model None: a directory, a hub id"):
        qtool.evaluate("demo", None)  # type: ignore[arg-type]
    with pytest.raises(QtoolError, match="batch_size 0: a whole number"):
        qtool.evaluate("demo", "demo", batch_size=0)
    with pytest.raises(QtoolError, match="--tensor-parallel True: a whole number of at least 1"):
        qtool.verify("demo", tensor_parallel=True)
    with pytest.raises(QtoolError, match="options: seqlen is '64'; int is expected"):
        qtool.evaluate("demo", "demo", seqlen="64")  # type: ignore[arg-type]
    with pytest.raises(QtoolError, match="options: deterministic is 5; bool is expected"):
        qtool.evaluate("demo", "demo", deterministic=5)  # type: ignore[arg-type]
    qtool.quantize("demo", "w8a8", out=tmp_path / "w8a8")
    with pytest.raises(QtoolError, match="'dmeo'"):
        qtool.write_report(tmp_path / "w8a8", tasks="dmeo")
    with pytest.raises(QtoolError, match="'w4a17': did you mean w4a16"):
        qtool.sensitivity("demo", "w4a17", 5.0, tmp_path / "mixed.yaml")
    with pytest.raises(QtoolError, match="unknown option 'limits': did you mean limit"):
        qtool.evaluate("demo", "demo", limits=1)  # type: ignore[call-arg]
    with pytest.raises(QtoolError, match="unknown option 'device': known: batch_size"):
        qtool.evaluate("demo", qtool.load("demo"), device="cpu")
    with pytest.raises(QtoolError, match="--dtype 'bf16'"):
        qtool.evaluate("demo", "demo", dtype="bf16")
    with pytest.raises(QtoolError, match=r"dtype torch\.int8: known: bfloat16, float16"):
        qtool.load("demo", dtype=torch.int8)
    with pytest.raises(QtoolError, match="transformers model is expected"):
        qtool.quantize(3, "w4a16", out=tmp_path / "out")
