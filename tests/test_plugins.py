"""What another package adds: found by its entry point, and refused where the name is taken."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence  # noqa: F401  (named in a text)
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar  # noqa: F401  (named in a text)

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import qtool
from qtool import plugins, recipes
from qtool.calibration import ROUNDINGS, TRANSFORMS
from qtool.calibration.block import Block
from qtool.calibration.cost import Work
from qtool.calibration.method import Norm, Rounding, Transform
from qtool.calibration.options import check_options
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.transforms.clip import Clip
from qtool.cli import cli
from qtool.cli_errors import known
from qtool.errors import CheckFailed, QtoolError
from qtool.eval import saved
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.exchange.formats.gptq import Gptq
from qtool.format import LinearFormat, native_format
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.layouts import LAYOUTS, DigitLayout, Layout
from qtool.layouts.row_major import ROW_MAJOR
from qtool.models import FAMILIES, family_of
from qtool.pipeline.job import Job
from qtool.recipes import Step
from qtool.recipes.recipe import ADDED
from qtool.runtime.dispatch import KERNELS, W8A8, Kernel
from qtool.schemes import SCHEMES, Scheme
from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.arithmetic.grid import Grid
from qtool.schemes.base import clip_ratio
from qtool.schemes.qoq import QoQ
from qtool.schemes.w4a16 import Marlin
from qtool.schemes.w8a8 import SmoothQuant
from qtool.serving.partition import cuts_inputs
from qtool.serving.preflight import require_servable
from tests.conftest import MakeModel

OWN = Path(__file__).parents[1] / "examples" / "own_scheme"


@pytest.fixture(autouse=True)
def tables_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it, and no plugin is loaded before it."""
    tables: tuple[dict[Any, Any], ...] = (
        *(SCHEMES, LAYOUTS, TRANSFORMS, ROUNDINGS, EXPORT_FORMATS, KERNELS),
        ADDED,
    )
    before, families = [dict(table) for table in tables], list(FAMILIES)
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.setattr(plugins, "_called", set())
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    FAMILIES[:] = families


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/own_scheme as pip would install it: the module and its entry point on the path."""
    site = tmp_path / "site"
    info = site / "own_scheme-0.1.0.dist-info"
    info.mkdir(parents=True)
    (site / "own_scheme.py").write_text((OWN / "own_scheme.py").read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-scheme\nVersion: 0.1.0\n")
    group = "[qtool.plugins]\nown-scheme = own_scheme:register\n"
    assert 'own-scheme = "own_scheme:register"' in (OWN / "pyproject.toml").read_text()
    (info / "entry_points.txt").write_text(group)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "own_scheme", raising=False)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``plugged(name=register)`` installs these entry points and no others; none is loaded."""

    def install(**registers: Callable[[], object]) -> None:
        entries = [EntryPoint(name, f"{name}:register", plugins.GROUP) for name in registers]
        monkeypatch.setattr(EntryPoint, "load", lambda entry: registers[entry.name])
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
        monkeypatch.setattr(plugins, "_loaded", False)
        monkeypatch.setattr(plugins, "_called", set())

    return install


def test_a_scheme_of_another_package_goes_all_the_way(
    installed: None, tmp_path: Path, make_model: MakeModel
) -> None:
    out = tmp_path / "out"
    run = CliRunner().invoke(
        cli, ["quantize", "demo", "--scheme", "w4a16-pow2", "--out", str(out), "-q"]
    )
    assert run.exit_code == 0, run.output
    checked = CliRunner().invoke(cli, ["verify", str(out), "-q"])
    assert checked.exit_code == 0
    # nobody here knows how it multiplies
    assert "42 linears verified: w4a16-pow2 reference, its own matmul;" in checked.stdout
    model = qtool.load(out)
    scale = model.model.layers[0].mlp.up_proj.scale
    assert torch.equal(scale, scale.log2().round().exp2())
    options = ["--model", str(out), "--limit", "1", "--seqlen", "64", "-q"]
    measured = CliRunner().invoke(cli, ["eval", "demo", *options])
    assert measured.exit_code == 0 and "perplexity" in measured.stdout
    assert "w4a16-pow2" in CliRunner().invoke(cli, ["schemes"]).stdout
    assert qtool.plan("demo", "w4a16-pow2").job.format.scheme == "w4a16-pow2"
    card = (out / "README.md").read_text()
    assert "vllm serve" not in card and "qtool has no kernel for w4a16-pow2 in row-major" in card
    assert "own-scheme 0.1.0" in card  # without which nobody loads it


def test_a_checkpoint_names_the_packages_that_it_was_made_with(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = qtool.quantize("demo", "w4a16", recipe="fast", out=tmp_path / "built-in").directory
    config = json.loads((built_in / "config.json").read_text())
    assert "plugins" not in config["quantization_config"]
    qtool.quantize("demo", "w4a16-pow2", out=tmp_path / "out")
    del SCHEMES["w4a16-pow2"]
    with pytest.raises(QtoolError, match=r"does .plugins where it was made: own-scheme 0\.1\.0.$"):
        qtool.load(tmp_path / "out")


@pytest.mark.parametrize("look", [qtool.load, qtool.inspect, lambda path: [*qtool.verify(path)]])
def test_a_checkpoint_of_a_plugins_architecture_names_the_packages_too(
    look: Callable[[Path], object], installed: None, tmp_path: Path
) -> None:
    out = qtool.quantize("demo", "w4a16", recipe="fast", out=tmp_path / "out").directory
    config = json.loads((out / "config.json").read_text())
    mine = native_format(config).in_config(config | {"model_type": "mine"})
    (out / "config.json").write_text(json.dumps(mine))
    with pytest.raises(QtoolError, match=r"'mine': .* .plugins where it was made: own-scheme 0"):
        look(out)
    mine["quantization_config"]["plugins"] = ["own-scheme"]
    (out / "config.json").write_text(json.dumps(mine))
    with pytest.raises(QtoolError, match=r"damaged: plugins is \['own-scheme'\]"):
        look(out)


def test_transformers_knows_a_plugins_architecture_after_one_import(
    plugged: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    plugged(mine=lambda: called.append("mine"))
    monkeypatch.delitem(sys.modules, "qtool.transformers", raising=False)
    importlib.import_module("qtool.transformers")
    assert called == ["mine"]


@pytest.mark.parametrize("missing", [SCHEMES, LAYOUTS])
def test_a_checkpoint_of_a_plugin_that_is_not_here_says_so(
    missing: dict[str, Any], make_model: MakeModel, tmp_path: Path
) -> None:
    scheme = type("Mine", (SmoothQuant,), {"name": "mine"})
    qtool.register_layout(DigitLayout(name="mine", n="n", k="k", order="n, k"))
    qtool.register_scheme(scheme, {"layers": [{"match": ".*", "scheme": "mine", "layout": "mine"}]})
    qtool.quantize(make_model(), "mine", out=tmp_path / "out")
    qtool.load(tmp_path / "out")
    del missing["mine"]
    with pytest.raises(QtoolError, match=r"'mine', which is not built in .* no installed plugin"):
        qtool.load(tmp_path / "out")


def test_a_plugin_that_fails_while_a_command_runs_is_named(
    installed: None, tmp_path: Path, make_model: MakeModel
) -> None:
    out = qtool.quantize(make_model(), "w4a16-pow2", out=tmp_path / "out").directory
    module = tmp_path / "site" / "own_scheme.py"
    good = "return (self.groups(codes).float() * params["
    module.write_text(
        module.read_text().replace(good, f"if len(codes) > 64: raise KeyError(3)\n        {good}")
    )
    code = "from qtool.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "verify", str(out)],
        env=os.environ | {"PYTHONPATH": str(module.parent)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    assert "the plugin 'own-scheme' fails in PowerOfTwo.dequantize (" in ran.stderr
    assert ran.stderr.endswith("): KeyError: 3\n")


def test_only_a_plugins_own_errors_are_laid_to_it(installed: None) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    assert plugins.raised_in(raised.value) is None and known(raised.value) is raised.value
    stopped = KeyboardInterrupt()
    assert known(stopped) is stopped


def test_a_plugin_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "broken", "broken:register"

        def load(self) -> None:
            raise ImportError("No module named 'broken'")

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry()])
    with pytest.raises(QtoolError, match=r"plugin 'broken' .* No module named 'broken' .*_plugins"):
        recipes.load("w2a2")


def test_the_line_of_a_plugin_that_fails_is_named(plugged: Callable[..., None]) -> None:
    wrong = type("Wrong", (Marlin,), {"name": "wrong", "matmul": lambda *given: None})

    def register() -> None:
        qtool.register_scheme(wrong)

    plugged(broken=register)
    line = register.__code__.co_firstlineno + 1
    with pytest.raises(QtoolError, match=rf"matmul gives None.* \({__file__}, line {line}\)$"):
        recipes.load("w2a2")


@pytest.mark.parametrize("order", [("kernel", "scheme"), ("scheme", "kernel")])
@pytest.mark.parametrize("fails", [False, True])
def test_a_plugin_gets_what_another_adds_in_any_order(
    order: tuple[str, str], fails: bool, plugged: Callable[..., None]
) -> None:
    def scheme() -> None:
        if fails:
            raise KeyError(3)
        qtool.register_scheme(type("Mine", (SmoothQuant,), {"name": "mine"}))

    register = {
        "kernel": lambda: qtool.register_kernel("mine", "row-major-8", W8A8),
        "scheme": scheme,
    }
    plugged(**{name: register[name] for name in order})
    if fails:
        with pytest.raises(QtoolError, match=r"^the plugin 'scheme' .*cannot be loaded: KeyError"):
            plugins.load()
        fails = False  # as in a notebook where it was mended
    plugins.load()
    assert KERNELS["mine", "row-major-8"] == (W8A8,)


@pytest.mark.parametrize("module", ["def register(:", "x = 1", "raise SystemExit(3)"])
def test_a_plugin_that_cannot_be_imported_is_named_and_not_what_imports_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unloadable.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("unloadable", "unloadable:register", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    with pytest.raises(QtoolError, match=r"'unloadable' .*cannot be loaded: \w+") as raised:
        recipes.load("w2a2")
    assert "importlib" not in str(raised.value)


def test_what_a_plugin_adds_to_built_in_schemes_takes_part(
    plugged: Callable[..., None], tmp_path: Path, make_model: MakeModel
) -> None:
    """No name is looked up that qtool does not have."""
    made = qtool.quantize(make_model(), "w4a16", layout="row-major", out=tmp_path / "out")
    out = made.directory

    def register() -> None:
        qtool.register_kernel("w4a16", "row-major", dataclasses.replace(W8A8, name="mine"))
        qtool.register_export(
            type(EXPORT_FORMATS["gptq"])("gptq-of-mine", "gptq", "the same again")
        )

    with pytest.raises(QtoolError, match=r"w4a16 in layout row-major.* it has no kernel"):
        require_servable(out, 1, (9, 0))
    plugged(mine=register)
    require_servable(out, 1, (9, 0))
    with pytest.raises(QtoolError, match=r"formats that can: .*gptq-of-mine"):
        qtool.export(out, "qserve")


def test_a_rounding_without_data_or_transforms_runs(make_model: MakeModel, tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Zero(RoundToNearest):
        name = "zero"

        def round(self, block, batches):  # type: ignore[no-untyped-def]
            found = super().round(block, batches)
            for rounded in found.values():
                rounded.codes.zero_()
            return found

    qtool.register_method(Zero)
    recipe = {"layers": [{"match": ".*", "scheme": "w8a8"}], "rounding": "zero"}
    out = qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")
    assert not qtool.load(out).model.layers[0].mlp.up_proj.dequantize().any()


def test_a_bias_that_a_rounding_corrects_is_stored(make_model: MakeModel, tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Corrected(RoundToNearest):
        name = "corrected"

        def round(self, block, batches):  # type: ignore[no-untyped-def]
            block.bias("self_attn.q_proj").fill_(3)
            return super().round(block, batches)

    qtool.register_method(Corrected)
    recipe = {"layers": [{"match": ".*", "scheme": "w8a8"}], "rounding": "corrected"}
    source = make_model("qwen2", dtype=torch.bfloat16)
    out = qtool.quantize(source, recipe=recipe, out=tmp_path / "out")
    assert (qtool.load(out).model.layers[1].self_attn.q_proj.bias == 3).all()


def test_a_bias_that_a_rounding_adds_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    """The checkpoint has no place for it, and the blocks behind would have seen it."""

    @dataclasses.dataclass
    class Shifted(RoundToNearest):
        name = "shifted"

        def round(self, block, batches):  # type: ignore[no-untyped-def]
            biased(block)
            return super().round(block, batches)

    qtool.register_method(Shifted)
    recipe = {"layers": [{"match": ".*", "scheme": "w8a8"}], "rounding": "shifted"}
    with pytest.raises(QtoolError, match=r"^shifted: round adds model.layers.0.mlp.up_proj.bias;"):
        qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")


def transform(do: Callable[[Block], object]) -> dict[str, Any]:
    """A recipe with a transform ``mine``, new each time, that does ``do``."""

    @dataclasses.dataclass
    class Mine(Transform):
        name = "mine"
        needs_data = False

        def apply(self, block, batches):  # type: ignore[no-untyped-def]
            do(block)

    TRANSFORMS.pop("mine", None)
    qtool.register_method(Mine)
    layers = [{"match": ".*", "scheme": "w8a8"}]
    return {"layers": layers, "transforms": ["mine"], "rounding": "rtn"}


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (
            lambda block: block.permute("mlp.up_proj", torch.arange(block.config.hidden_size)),
            "layers.0.mlp.up_proj: a transform permutes its inputs, and none names it in permutes",
        ),
        (
            lambda block: block.rotate_inputs("mlp.up_proj"),
            "layers.0.mlp.up_proj: a transform rotates its inputs, and none names it in rotates",
        ),
        (
            lambda block: block.clips.update({"up_proj": (0.5, 0.5)}),
            "a clip for 'up_proj', no linear of block 0: did you mean mlp.up_proj",
        ),
        (
            lambda block: block.clips.update({"mlp.up_proj": 0.5}),
            r"the clip 0.5 for .*layers.0.mlp.up_proj; a pair .clip, group_clip. is expected",
        ),
        (
            lambda block: block.clips.update({"mlp.up_proj": ("0.5", 1.0)}),
            "a pair .clip, group_clip. is expected, each of them a float or a tensor",
        ),
        (
            lambda block: block.clips.update({"mlp.up_proj": (torch.ones(3), 1.0)}),
            r"clips of shapes .3. and .. for .*layers.0.mlp.up_proj; .384. and .384, 1., or a",
        ),
        (
            lambda block: block.clips.update({"mlp.up_proj": (1.0, torch.ones(384))}),
            r"clips of shapes .. and .384. for .*layers.0.mlp.up_proj; .384. and .384, 1., or a",
        ),
        (
            lambda block: block.clips.update({"mlp.up_proj": (1.0, torch.tensor(torch.nan))}),
            "a transform chooses a clip of NaN or Inf for model.layers.0.mlp.up_proj$",
        ),
        (
            lambda block: block.weight("input_layernorm").fill_(torch.inf),
            "layers.0.input_layernorm.weight: its values are too large: the methods make NaN or",
        ),
        (
            lambda block: block.weight("mlp.up").mul_(2),
            "'mlp.up': no module of block 0: did you mean mlp.up_proj",
        ),
        (
            lambda block: block.weight("mlp").mul_(2),
            "^'mlp': a module of block 0 without a weight$",
        ),
        (
            lambda block: block.notes.update({"mine": torch.ones(1)}),
            "mine: its notes of a block cannot be written as JSON: .*Tensor",
        ),
        (
            lambda block: block.notes.update({"mine": {"error": [torch.inf]}}),
            "mine: its notes of a block cannot be written as JSON: Out of range float values",
        ),
        (
            lambda block: block.notes.update({("mine", 1): 0.5}),
            r"\('mine', 1\): its notes of a block cannot be written as JSON: keys must be",
        ),
    ],
)
def test_what_a_transform_notes_and_nothing_would_come_of_is_refused(
    do: Callable[[Block], object], said: str, make_model: MakeModel, tmp_path: Path
) -> None:
    with pytest.raises(QtoolError, match=said):
        qtool.quantize(make_model(), recipe=transform(do), out=tmp_path / "out")


def biased(block: Block) -> None:
    block.get("mlp.up_proj").bias = torch.nn.Parameter(torch.ones(384))


def widened(block: Block) -> None:
    up = block.get("mlp.up_proj")
    up.weight = torch.nn.Parameter(up.weight[:, 1:])  # type: ignore[index]


@pytest.mark.parametrize(
    ("function", "returns", "said"),
    [
        ("apply", lambda *_: {}, "mine: apply gives dict; NoneType is expected"),
        (
            "apply",
            lambda _, block, batches: widened(block),
            r"mine: apply gives float32 \[384, 127\] for .*0.mlp.up_proj.weight; Tensor \[384",
        ),
        (
            "apply",
            lambda _, block, batches: biased(block),
            r"mine: apply adds model.layers.0.mlp.up_proj.bias; the same tensors are expected",
        ),
        (
            "apply",
            lambda _, block, batches: delattr(block.get("mlp"), "up_proj"),
            "mine: apply removes model.layers.0.mlp.up_proj.weight; the same tensors are expected",
        ),
        ("learn", lambda *_: None, "mine: learn gives NoneType; dict.str, Any. is expected"),
        ("learn", lambda *_: {1: torch.ones(1)}, "mine: learn gives dict; dict.str, Any. is exp"),
        ("learn", lambda *_: {"x": 1.0}, "mine: learn gives float for 'x'; Tensor is expected"),
        (
            "embedding",
            lambda *_: None,
            r"mine: embedding gives NoneType; Tensor \[\d+, 128\] is expected",
        ),
        (
            "embedding",
            lambda _, rows: rows[:, 1:],
            r"mine: embedding gives float32 \[\d+, 127\]; Tensor \[\d+, 128\] is expected",
        ),
        ("embedding", lambda _, rows: rows / 0, "mine: embedding gives NaN or Inf"),
        (
            "head",
            lambda _, rows, norm: rows[1:],
            r"mine: head gives float32 \[\d+, 128\]; Tensor \[",
        ),
        (
            "final_norm",
            lambda _, norm: norm.gain,
            r"mine: final_norm gives float32 \[128\]; Norm is",
        ),
        (
            "final_norm",
            lambda _, norm: Norm(norm.gain[1:]),
            r"final_norm gives float32 \[127\]; Tensor \[128\] is expected",
        ),
        (
            "permutes",
            lambda *_: None,
            "mine: permutes gives NoneType; Sequence.str. is",
        ),
        ("rotates", lambda *_: "mlp.up_proj", r"mine: rotates gives str; Sequence.str. is"),
        ("work", lambda *_: None, "mine: work gives NoneType; Work is expected"),
        ("held_bytes", lambda *_: None, "mine: held_bytes gives NoneType; int is expected"),
        ("spare_bytes", lambda *_: None, "mine: spare_bytes gives NoneType; int is expected"),
        ("held_bytes", lambda *_: -5, "mine: held_bytes -5: a whole number of at least 0 is"),
        ("spare_bytes", lambda *_: -5, "mine: spare_bytes -5: a whole number of at least 0 is"),
        ("work", lambda *_: Work(read_bytes=-1), "work gives -1 as read_bytes; a finite number"),
        ("work", lambda *_: Work(search_tries="1"), "mine: work gives '1' as search_tries; a "),
        ("work", lambda *_: Work(search_tries=torch.nan), "work gives nan as search_tries; a fini"),
    ],
)
def test_what_a_method_returns_wrongly_is_named(
    function: str, returns: Any, said: str, make_model: MakeModel, tmp_path: Path
) -> None:
    recipe = transform(lambda _: None)
    mine: Any = TRANSFORMS["mine"]
    mine.learns, mine.needs_data, mine.rewrites_embedding = True, True, True
    setattr(mine, function, returns)
    ids = torch.arange(64).view(2, 32)
    with pytest.raises(QtoolError, match=said):
        if function in ("work", "held_bytes", "spare_bytes"):
            qtool.plan("demo", recipe=recipe)
        else:
            qtool.quantize(make_model(), recipe=recipe, calibration=ids, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("base", "name", "value", "said"),
    [
        (Clip, "learns", None, "learns is None; bool"),
        (Clip, "rewrites_embedding", property(lambda _: 1), "rewrites_embedding is 1; bool"),
        (RoundToNearest, "compares", property(lambda _: "no"), "compares is 'no'; bool"),
        (RoundToNearest, "iteration", 1.5, "iteration is 1.5; int"),
        (RoundToNearest, "iteration", 0, "iteration 0: a whole number of at least 1"),
    ],
)
def test_a_property_of_another_type_is_named(base: Any, name: str, value: Any, said: str) -> None:
    qtool.register_method(type("Mine", (base,), {"name": "mine", name: value}))
    used = {"transforms": ["mine"]} if base is Clip else {"rounding": "mine"}
    recipe = {"layers": [{"match": ".*", "scheme": "w8a8"}], "rounding": "rtn"} | used
    with pytest.raises(QtoolError, match=f"^mine: {said} is expected$"):
        qtool.plan("demo", recipe=recipe)


def test_a_transform_that_fails_before_any_work_is_named() -> None:
    recipe = transform(lambda _: None)
    TRANSFORMS["mine"].prepare = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(QtoolError, match=r"^mine: prepare fails on \w+ models \(ZeroDivisi"):
        qtool.plan("demo", recipe=recipe)


@pytest.mark.parametrize("function", ["permutes", "rotates", "work", "held_bytes"])
def test_a_method_that_fails_in_a_plan_is_named(function: str) -> None:
    recipe = transform(lambda _: None)
    setattr(TRANSFORMS["mine"], function, lambda *_: 1 / 0)
    said = rf"^mine: {function} fails( on \w+ models)? \(ZeroDivisionError: division by zero\)$"
    with pytest.raises(QtoolError, match=said):
        qtool.plan("demo", recipe=recipe)


@pytest.mark.parametrize("function", ["learn", "embedding", "final_norm", "head"])
def test_a_transform_that_fails_outside_of_blocks_is_named_and_can_be_corrected(
    function: str, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = transform(lambda _: None)
    model, out, kind = make_model(), tmp_path / "out", TRANSFORMS["mine"]
    kind.learns = kind.rewrites_embedding = True  # type: ignore[method-assign, assignment]
    right = getattr(kind, function)
    monkeypatch.setattr(kind, function, lambda *_: 1 / 0)
    said = rf"^mine: {function} fails \(ZeroDivisionError: division by zero\)$"
    with pytest.raises(QtoolError, match=said):
        qtool.quantize(model, recipe=recipe, out=out)
    monkeypatch.setattr(kind, function, right)
    qtool.quantize(model, recipe=recipe, out=out, resume=True)


@pytest.mark.parametrize("function", ["announce", "apply", "round"])
def test_a_method_that_fails_is_named_and_what_is_written_is_kept(
    function: str, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = transform(lambda _: None)
    kind: Any = RoundToNearest if function == "round" else TRANSFORMS["mine"]
    right = getattr(kind, function)

    def fails(method: Any, block: Block, *batches: Any) -> Any:
        return right(method, block, *batches) if block.index < 1 else 1 / 0

    model, out = make_model(), tmp_path / "out"
    monkeypatch.setattr(kind, function, fails)
    said = rf"(mine|rtn): {function} fails on block 1 \(ZeroDivisionError: division by zero\)"
    with pytest.raises(QtoolError, match=said) as raised:
        qtool.quantize(model, recipe=recipe, out=out)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(QtoolError, match="holds an unfinished run"):
        qtool.quantize(model, recipe=recipe, out=out)
    monkeypatch.setattr(kind, function, right)
    qtool.quantize(model, recipe=recipe, out=out, resume=True)


def test_an_order_of_inputs_in_16_bits_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    recipe = transform(lambda block: block.permute("mlp.up_proj", torch.arange(128)))
    recipe["layers"] = [{"match": "up_proj", "scheme": None}, *recipe["layers"]]
    TRANSFORMS["mine"].permutes = lambda *_: ("mlp.up_proj",)  # type: ignore[method-assign]
    with pytest.raises(QtoolError, match="its inputs, and it stays in 16 bits"):
        qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")


def test_an_export_does_not_name_the_wrong_transform_for_an_order(
    make_model: MakeModel, tmp_path: Path
) -> None:
    recipe = transform(lambda block: block.permute("mlp.down_proj", torch.arange(384).flip(0)))
    recipe["layers"] = [{"match": ".*", "scheme": "w4a16", "group_size": 64}]
    TRANSFORMS["mine"].permutes = lambda *_: ("mlp.down_proj",)  # type: ignore[method-assign]
    out = qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")
    with pytest.raises(QtoolError, match="without the transform that reorders them, such as"):
        qtool.export(out, "gptq")


def test_inputs_that_only_one_side_would_rotate_are_refused(
    make_model: MakeModel, tmp_path: Path
) -> None:
    recipe = transform(lambda block: block.rotate_inputs("mlp.up_proj"))
    TRANSFORMS["mine"].rotates = lambda *_: ("mlp.up_proj",)  # type: ignore[method-assign]
    assert qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")
    recipe["layers"] = [{"match": "up_proj", "scheme": None}, *recipe["layers"]]
    with pytest.raises(QtoolError, match="rotates its inputs, and it stays in 16 bits"):
        qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "other")
    recipe = transform(lambda _: None)
    TRANSFORMS["mine"].rotates = lambda *_: ("mlp.up_proj",)  # type: ignore[method-assign]
    said = "up_proj: a transform names it in rotates, and none rotates its inputs"
    with pytest.raises(QtoolError, match=said):
        qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "other")


def test_a_transform_that_names_what_is_not_there_is_refused_before_any_work() -> None:
    recipe = transform(lambda _: None)
    mine = TRANSFORMS["mine"]
    mine.after = {"rotat": "it would be undone"}
    with pytest.raises(QtoolError, match=r"mine: it comes after 'rotat', .* did you mean rotate"):
        qtool.plan("demo", recipe=recipe)
    mine.after = {}
    for named in ("permutes", "rotates"):
        mine = transform(lambda _: None) and TRANSFORMS["mine"]
        setattr(mine, named, lambda *_: ("mlp.up",))
        with pytest.raises(
            QtoolError, match=rf"{named} the inputs of 'mlp.up', no .* did you mean mlp.up_proj"
        ):
            qtool.plan("demo", recipe=recipe)


@pytest.mark.parametrize("name", ["smooth-atention", "gptq"])
def test_a_family_refuses_transforms_alone(name: str) -> None:
    own = dataclasses.replace(FAMILIES[0], name="Own", model_types=("own",), refuses={name: "why"})
    qtool.register_family(own)
    config = Checkpoint(DEMO).config | {"model_type": "own"}
    with pytest.raises(QtoolError, match=f"^family Own: it refuses '{name}', which is no transfo"):
        Job.of(config, recipes.load("w8a8"))


def test_a_family_without_a_kv_cache_has_no_quantized_one() -> None:
    own = dataclasses.replace(FAMILIES[0], name="Own", model_types=("own",), kv_cache=None)
    qtool.register_family(own)
    config = Checkpoint(DEMO).config | {"model_type": "own"}
    recipe = dataclasses.replace(recipes.load("w8a8"), kv="kv8")
    with pytest.raises(QtoolError, match=r"^kv8: Own models declare no kv_cache$"):
        Job.of(config, recipe)


def method(base: type, **body: Any) -> type:
    return type("Mine", (base,), {"name": "mine", "needs_data": False, **body})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (method(Transform), "Mine does not define apply"),
        (method(RoundToNearest, name=5), "Mine: name is 5; str is expected"),
        (method(Clip, permutes=("x",)), r"Mine: permutes is .'x',.; Callable is expected"),
        (method(RoundToNearest, needs_data="yes"), "Mine: needs_data is 'yes'; bool is expected"),
        (method(Clip, after=["rotate"]), r"Mine: after is .'rotate'.; dict.str, str. is expected"),
        (method(Clip, requires={"rotate": 1}), "Mine: requires is .'rotate': 1.; dict.str, str."),
        (method(Clip, most={"x": "5"}), "Mine: most is .'x': '5'.; Mapping.str, float. is"),
        (method(Clip, positive="x"), r"Mine: positive is 'x'; tuple.str, .... is expected"),
        (method(Clip, positive=("step",)), "Mine: positive names the option 'step': did you mean"),
        (method(Clip, most={"low": 1}), "Mine: most names the option 'low': did you mean lowest"),
        (method(RoundToNearest, __annotations__={"x": float}, x=1.0), "Mine is no dataclass"),
        (
            dataclasses.dataclass(method(RoundToNearest, __annotations__={"x": float})),
            "Mine.x has no default",
        ),
        (
            dataclasses.dataclass(method(RoundToNearest, __annotations__={"x": list[int]}, x=None)),
            r"Mine.x is a list\[int\]; an option is a bool",
        ),
        (
            dataclasses.dataclass(method(RoundToNearest, __annotations__={"x": "Later"}, x=None)),
            "Mine: the types of its options: name 'Later' is not defined",
        ),
    ],
)
def test_a_method_whose_options_no_recipe_could_give_is_refused(wrong: type, said: str) -> None:
    with pytest.raises(QtoolError, match=said):
        qtool.register_method(wrong)


def test_a_transform_of_the_embedding_says_that_it_is_one() -> None:
    def embedding(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return 2 * rows

    body = {"name": "doubled", "needs_data": False, "apply": lambda *given: None}
    told = type("Doubled", (Transform,), body | {"embedding": embedding})
    with pytest.raises(QtoolError, match="Doubled defines embedding, but not rewrites_embedding"):
        qtool.register_method(told)
    qtool.register_method(type("Doubled", (told,), {"rewrites_embedding": True}))


def test_options_may_be_annotated_by_texts() -> None:
    kinds = {"x": "float | None", "y": "ClassVar[int]", "z": "Sequence[str]"}
    own = method(RoundToNearest, __annotations__=kinds, x=None, y=3, z=(), __module__=__name__)
    qtool.register_method(dataclasses.dataclass(own))
    check_options(ROUNDINGS["mine"], {"x": 0.5, "z": ["a"]})
    with pytest.raises(QtoolError, match="x is 'a'; expected a number of 0 or more"):
        check_options(ROUNDINGS["mine"], {"x": "a"})


def test_a_field_that_is_not_given_is_no_option() -> None:
    @dataclasses.dataclass
    class Mine(RoundToNearest):
        name = "mine"
        seen: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict, init=False)

    qtool.register_method(Mine)
    with pytest.raises(QtoolError, match="mine: unknown option 'seen'"):
        check_options(Mine, {"seen": 1})


def test_a_registered_recipe_without_variants() -> None:
    layers = [{"match": ".*", "scheme": "w8a8"}]
    qtool.register_recipe("mine", {"layers": layers, "rounding": "gptq"})
    for default in (qtool.plan("demo", "mine"), qtool.plan("demo", "mine", calibration="demo")):
        assert default.job.recipe.rounding.name == "gptq"
    with pytest.raises(QtoolError, match="'mine' has no variants: leave --recipe best out"):
        qtool.plan("demo", "mine", recipe="best")


def test_variants_that_a_registered_recipe_lacks() -> None:
    """``paper`` stands for them, else the first there is, unless one is asked for by name."""
    layers, fast, paper = [{"match": ".*", "scheme": "w8a8"}], {"rounding": "rtn"}, {}
    qtool.register_recipe("two", {"layers": layers, "variants": {"fast": fast, "paper": paper}})
    qtool.register_recipe("one", {"layers": layers, "variants": {"best": {}}})
    found = [recipes.load(of, default=of_these).variant for of in ("two", "one")
             for of_these in recipes.VARIANTS]  # fmt: skip
    assert found == ["fast", "paper", "paper", "best", "best", "best"]
    with pytest.raises(QtoolError, match="two: no variant 'best'; it has fast, paper"):
        recipes.load("two", "best")


def test_sensitivity_takes_the_variant_that_a_registered_recipe_has(
    make_model: MakeModel, tmp_path: Path
) -> None:
    layers = [{"match": ".*", "scheme": "w8a8"}]
    variants = {"fast": {"rounding": "rtn"}, "paper": {"rounding": "gptq"}}
    qtool.register_recipe("two", {"layers": layers, "variants": variants})
    ids = torch.arange(64).view(2, 32)
    found = qtool.sensitivity(make_model(), ["two", "none"], 9.0, tmp_path / "a.yaml",
                              calibration=ids, samples=2, seqlen=32)  # fmt: skip
    assert found.recipe.rounding.name == "gptq"


class Eight(SmoothQuant):
    """Eight bits again."""

    name = "eight"


def test_inputs_that_groups_of_activations_do_not_divide_are_refused_before_any_work() -> None:
    class Grouped(Marlin):
        """Groups of 48 inputs, which need not be those of the weights."""

        name = "grouped"
        activation = Activation(8, 48)

        def matmul(self, x, *given):  # type: ignore[no-untyped-def]
            return super().matmul(self.activation.fake(x), *given)

    qtool.register_scheme(Grouped)
    said = (
        "model.layers.0.self_attn.q_proj: grouped: 256 input channels are not divisible by 48, "
        "the group size of its activations"
    )
    with pytest.raises(QtoolError, match=said):
        qtool.plan("demo", "grouped")


def test_the_tests_of_schemes_run_on_one_of_ones_own() -> None:
    """At groups that do not divide the 1024 channels of the built-in schemes' weights."""
    code = """
import pytest, qtool
from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.w4a16 import Marlin

class Own(Marlin):
    name, group_sizes, default_group_size, activation = "own", (25,), 25, Activation(8, 40)

    def matmul(self, x, *given):
        return super().matmul(self.activation.fake(x), *given)

qtool.register_scheme(Own)
options = ["-q", "-p", "no:cacheprovider", "-k", "own-25"]
raise SystemExit(pytest.main(["tests/schemes", *options]))
"""
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_names_that_are_taken_are_refused() -> None:
    with pytest.raises(QtoolError, match="the recipe 'w8a8' is built in"):
        qtool.register_scheme(SmoothQuant)
    qtool.register_scheme(Eight)
    qtool.register_scheme(Eight)  # the same again changes nothing
    assert recipes.load("eight", "paper").rounding.name == "gptq"
    assert recipes.load("eight").about == "Eight bits again"
    taken = type("Other", (SmoothQuant,), {"name": "eight"})
    with pytest.raises(QtoolError, match="'eight' is registered already"):
        qtool.register_scheme(taken)
    taken = type("Taken", (SmoothQuant,), {"name": "w4a16"})
    with pytest.raises(QtoolError, match=r"registered already, by qtool\.schemes\.w4a16; choose"):
        qtool.register_scheme(taken)
    with pytest.raises(QtoolError, match="'row-major' is registered already; choose"):
        qtool.register_layout(DigitLayout(name="row-major", n="n", k="k", order="n, k"))
    with pytest.raises(QtoolError, match="Llama covers model_type 'llama' already"):
        qtool.register_family(dataclasses.replace(FAMILIES[0], name="Mine"))
    three = type("Three", (SmoothQuant,), {"name": "three", "code_bits": 3})
    with pytest.raises(QtoolError, match="3-bit codes, the row-major layouts hold"):
        qtool.register_scheme(three)
    with pytest.raises(QtoolError, match="5 is no subclass of Scheme"):
        qtool.register_scheme(5)  # type: ignore[arg-type]
    for register in (qtool.register_layout, partial(qtool.register_kernel, "w8a8", "row-major-8")):
        with pytest.raises(QtoolError, match=r"5 is no instance of (Layout|Kernel)"):
            register(5)
    for name in ("a/../b", "", "two words", ".."):
        with pytest.raises(QtoolError, match=r"has the name .*expected"):
            qtool.register_scheme(type("Named", (SmoothQuant,), {"name": name}))
    with pytest.raises(
        QtoolError, match="the recipe to register for 'one' says scheme: other; expected one"
    ):
        qtool.register_recipe(
            "one", {"scheme": "other", "layers": [{"match": ".*", "scheme": None}]}
        )
    with pytest.raises(QtoolError, match="5 is no instance of Mapping"):
        qtool.register_recipe("five", 5)  # type: ignore[arg-type]
    with pytest.raises(QtoolError, match="Bare has no code_bits, signed, group_sizes, default"):
        qtool.register_scheme(type("Bare", (Scheme,), {"name": "bare"}))


@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_a_scheme_may_be_declared_as_a_built_in_one(scheme: str) -> None:
    """The activation of w4a4 follows its group size."""
    own = type("Own", (SCHEMES[scheme],), {"name": "own"})
    qtool.register_scheme(own)
    assert SCHEMES["own"] is own


@pytest.mark.parametrize(
    ("function", "wrong", "said"),
    [
        (
            "dequantize",
            lambda self, codes, params: Marlin.dequantize(self, codes, params) * 2,
            "dequantize.codes. = grid.value.codes. broken at",
        ),
        (
            "grid",
            lambda self, params: dataclasses.replace(
                Marlin.grid(self, params), offset=params["scale"].float()
            ),
            "dequantize.codes. = grid.value.codes. broken at",
        ),
        (
            "round_groups",
            lambda self, *given: Marlin.round_groups(self, *given).sub_(3).clamp_(0),
            "round_groups gives codes as near as grid.nearest broken at",
        ),
        (
            "round_groups",
            lambda self, *given: Marlin.round_groups(self, *given) + 1,
            "codes of round_groups: invariant codes of 4 bits broken at",
        ),
        (
            "round_groups",
            lambda self, groups, params: Marlin.round_groups(self, groups.zero_(), params),
            "fit and quantize leave the weight as it is broken at",
        ),
        (
            "fit_range",
            lambda self, *given, **clips: {
                "scale": Marlin.fit_range(self, *given, **clips)["scale"][..., None]
            },
            r"fit_range gives scale .5, 32, 1.; .N. or .N, G., which is one of .*5, 32",
        ),
        (
            "fit_range",
            lambda self, *given, clip=1.0, group_clip=1.0: Marlin.fit_range(
                self, *given, group_clip=group_clip
            ),
            "fit_range lowers no step at a clip of 0.5, as if it ignored it",
        ),
        (
            "fit_range",
            lambda self, *given, clip=1.0, group_clip=1.0: Marlin.fit_range(
                self, *given, clip=clip
            ),
            "fit_range lowers no step at a group_clip of 0.5, as if it ignored it",
        ),
        (
            "quantize",
            lambda self, *given: Marlin.quantize(self, *given).float(),
            r"quantize gives float32 .5, 1024.; uint8 .5, 1024. is expected",
        ),
        (
            "fake_activation",
            lambda self, x, params: x.double(),
            r"fake_activation gives float64 .3, 1024.; bfloat16 .3, 1024.",
        ),
        ("fake_activation", lambda self, x, params: None, "fake_activation gives NoneType;"),
        (
            "round_groups",
            lambda self, *given: Marlin.round_groups(self, *given).flatten(1),
            r"round_groups gives float32 .5, 1024.; float32 .5, 32, 32. is expected",
        ),
        (
            "dequantize",
            lambda self, *given: Marlin.dequantize(self, *given).half(),
            r"dequantize gives float16 .5, 1024.; float32 .5, 1024. is expected",
        ),
        (
            "grid",
            lambda self, params: dataclasses.replace(
                Marlin.grid(self, params), low=Marlin.grid(self, params).low.float()
            ),
            r"grid's low gives float32 .5, 32.; int32 .5, 32. is expected",
        ),
        (
            "matmul",
            lambda self, *given: Marlin.matmul(self, *given).t(),
            r"matmul gives float32 .5, 3.; float32 .3, 5.",
        ),
        (
            "matmul",
            lambda self, x, codes, params, bias=None: Marlin.matmul(self, x, codes, params),
            r"matmul.x. = fake_activation.x. dequantize.codes..T . bias broken at",
        ),
        (
            "fake_activation",
            lambda self, x, params: x.mul_(2),
            "fake_activation and matmul leave the input as it is broken at",
        ),
    ],
)
def test_a_scheme_whose_functions_contradict_each_other_is_refused(
    function: str, wrong: Any, said: str
) -> None:
    scheme = type("Wrong", (Marlin,), {"name": "wrong", function: wrong})
    with pytest.raises(CheckFailed, match=f"^wrong at group size 32: .*{said}"):
        qtool.register_scheme(scheme)
    assert "wrong" not in SCHEMES and "wrong" not in ADDED


@pytest.mark.parametrize(
    ("function", "wrong", "said"),
    [
        (
            "clip_bounds",
            lambda self, params: QoQ.clip_bounds(self, params).movedim(0, 2),
            r"clip_bounds gives float32 .5, 1, 2.; float32 .2, 5, 1. is expected",
        ),
        (
            "clip_bounds",
            lambda self, params: QoQ.clip_bounds(self, params) * self.grid(params).step,
            "clip_bounds, in units of the float scale, stays if that is doubled broken at",
        ),
        (
            "with_clip_bounds",
            lambda self, params, bounds: QoQ.with_clip_bounds(self, params, bounds - 3),
            "with_clip_bounds is the inverse of clip_bounds broken at",
        ),
        (
            "with_clip_bounds",
            lambda self, params, bounds: params | {"zero": params["zero"].float()},
            r"with_clip_bounds, for zero, gives float32 .5.; uint8 .5. is expected",
        ),
    ],
)
def test_bounds_of_zero_points_that_contradict_each_other_are_refused(
    function: str, wrong: Any, said: str
) -> None:
    scheme = type("Wrong", (QoQ,), {"name": "wrong", function: wrong})
    with pytest.raises(CheckFailed, match=f"^wrong at group size channel: .*{said}"):
        qtool.register_scheme(scheme)


def test_a_scheme_with_zero_points_has_clip_bounds() -> None:
    bare = {name: getattr(Scheme, name) for name in ("clip_bounds", "with_clip_bounds")}
    with pytest.raises(CheckFailed, match="one zero point for all groups, as there are no clip_b"):
        qtool.register_scheme(type("Wrong", (QoQ,), {"name": "wrong", **bare}))


class PowerOfTwo(Marlin):
    """Codes Q of ``2**exponent * Q + low``: the one floating-point parameter is no scale."""

    name = "power-of-two"
    group_sizes, default_group_size = (32,), 32
    negative_scales = False

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: Any = 1.0, group_clip: Any = 1.0
    ) -> dict[str, Tensor]:
        ratio = clip_ratio(clip, group_clip)
        exponent = ((high - low).clamp(1e-9) * ratio / 15).log2().round()
        return {"exponent": exponent.to(torch.int8), "low": low * ratio}

    def grid(self, params: dict[str, Tensor]) -> Grid:
        step = params["exponent"].float().exp2()
        low = torch.zeros_like(step, dtype=torch.int32)
        return Grid(step, params["low"], low, low + 15)

    def round_groups(self, groups: Tensor, params: dict[str, Tensor]) -> Tensor:
        return self.grid(params).nearest(groups)

    def dequantize(self, codes: Tensor, params: dict[str, Tensor]) -> Tensor:
        return self.grid(params).value(self.groups(codes.float())).flatten(1)

    def clip_bounds(self, params: dict[str, Tensor]) -> Tensor:
        grid = self.grid(params)
        return torch.stack([grid.offset, grid.offset + 15 * grid.step])

    def with_clip_bounds(self, params: dict[str, Tensor], bounds: Tensor) -> dict[str, Tensor]:
        return PowerOfTwo.fit_range(self, *bounds)


@pytest.mark.parametrize("bare", [False, True])
def test_a_float_zero_point_alone_is_no_scale(bare: bool) -> None:
    """Such a scheme is rounded to nearest; GPTQ would fit the zero point as if it were a scale."""
    bounds = {name: getattr(Scheme, name) for name in ("clip_bounds", "with_clip_bounds")}
    scheme = type("Own", (PowerOfTwo,), bounds if bare else {})
    qtool.register_scheme(scheme)
    assert recipes.load("power-of-two").rounding.name == "rtn"
    recipe = dataclasses.replace(recipes.load("power-of-two"), rounding=Step("gptq", {}))
    with pytest.raises(
        QtoolError, match=r"^power-of-two: gptq .* proportional to, and low is none"
    ):
        Job.of(Checkpoint(DEMO).config, recipe)


@pytest.mark.parametrize(
    ("function", "returns", "said"),
    [
        ("fit_range", None, "fit_range gives NoneType; dict.str, Tensor. is expected"),
        ("fit_range", {"scale": 1.0}, "fit_range gives dict; dict.str, Tensor. is expected"),
        ("grid", (0, 15), "grid gives tuple; Grid is expected"),
    ],
)
def test_what_a_scheme_returns_wrongly_is_named(function: str, returns: Any, said: str) -> None:
    body = {"name": "wrong", function: lambda *given, **clips: returns}
    with pytest.raises(QtoolError, match=f"^wrong: {said}$"):
        qtool.register_scheme(type("Wrong", (Marlin,), body))


def test_a_scheme_or_layout_whose_attributes_are_wrong_is_refused() -> None:
    def scheme(**body: Any) -> type[Scheme]:
        return type("Wrong", (SmoothQuant,), {"name": "wrong", **body})

    for wrong, said in (
        (scheme(matmul=Scheme.matmul), "Wrong does not define matmul"),
        (scheme(code_bits="4"), "Wrong: code_bits is '4'; int is expected"),
        (scheme(code_bits=9), "Wrong: code_bits is 9; a whole number of 1 to 8"),
        (scheme(group_sizes=64), r"Wrong: group_sizes is 64; tuple.int . None, .... is expected"),
        (
            scheme(group_sizes=(0,), default_group_size=0),
            r"Wrong: group_sizes is .0,.; a tuple of positive whole numbers and None is expected",
        ),
        (scheme(shared_params=["x"]), r"Wrong: shared_params is .'x'.; frozenset.str. is"),
        (scheme(default_group_size=48), "that holds default_group_size, 48, is expected"),
        (scheme(activation=8), "Wrong: activation is 8; Activation is expected"),
        (scheme(check_range=8), "Wrong: check_range is 8; Callable is expected"),
        (scheme(clip_bounds=lambda self, params: None), "Wrong defines clip_bounds alone"),
    ):
        with pytest.raises(QtoolError, match=said):
            qtool.register_scheme(wrong)
    bare = {name: getattr(DigitLayout, name) for name in ("pack", "unpack")}
    with pytest.raises(QtoolError, match="Bare has no name, bits, tile"):
        qtool.register_layout(type("Bare", (Layout,), bare)())
    for facts, said in (
        ({"bits": "3", "tile": (1, 8)}, "Bare: bits is '3'; int is expected"),
        ({"bits": 9, "tile": (1, 8)}, "Bare: bits is 9; a whole number of 1 to 8 is expected"),
        ({"bits": 3, "tile": 8}, "Bare: tile is 8; tuple.int, int. is expected"),
        ({"bits": 3, "tile": (1, 8), "by_rows": 1}, "Bare: by_rows is 1; bool is expected"),
        ({"bits": 3, "tile": (1, 8), "sparsity": 2}, "Bare: sparsity is 2; tuple.int, int. . None"),
        ({"bits": 3, "tile": (1, 8), "tensors": ["qweight"]}, "Bare: tensors is .'qweight'.; tup"),
        ({"bits": 3, "tile": (0, 8)}, r"Bare: tile is \(0, 8\); a pair of positive whole"),
    ):
        with pytest.raises(QtoolError, match=said):
            qtool.register_layout(type("Bare", (Layout,), {"name": "bare", **bare, **facts})())
    told = {"name": "bare", "bits": 3, "tile": (1, 8), "pack_group": 8}
    with pytest.raises(QtoolError, match=r"Bare: pack_group is 8; Callable"):
        qtool.register_layout(type("Bare", (Layout,), bare | told)())
    with pytest.raises(QtoolError, match=r"absent.yaml: cannot be read: No such file"):
        qtool.register_recipe("wrong", "absent.yaml")
    with pytest.raises(QtoolError, match="wrong: variants is empty"):
        qtool.register_recipe(
            "wrong", {"layers": [{"match": ".*", "scheme": None}], "variants": {}}
        )


class ThreePlanes(Layout):
    """Bit planes: bit b of columns 8 j .. 8 j + 7 is byte ``3 j + b`` of a row."""

    name, bits, tile, by_rows = "three-planes", 3, (1, 8), True

    def pack(self, codes: torch.Tensor) -> dict[str, torch.Tensor]:
        columns = codes.unflatten(1, (-1, 1, 8)).int()  # [N, K / 8, 1, 8]
        planes = columns >> torch.arange(3, device=codes.device)[:, None] & 1
        places = 1 << torch.arange(8, device=codes.device)
        return {"qweight": (planes * places).sum(-1).to(torch.uint8).flatten(1)}

    def unpack(
        self, packed: dict[str, torch.Tensor], n: int, k: int, *, signed: bool
    ) -> torch.Tensor:
        planes = packed["qweight"].view(n, k // 8, 3, 1).int()
        bits = planes >> torch.arange(8, device=planes.device) & 1
        places = 1 << torch.arange(3, device=planes.device)[:, None]
        codes = (bits * places).sum(2).view(n, k)
        return ((codes ^ 4) - 4).to(torch.int8) if signed else codes.to(torch.uint8)


class ThreeBit(Marlin):
    """Three bits."""

    name, code_bits, divisor, zero, high = "three-bit", 3, 3.0, 4, 7


def test_codes_of_three_bits_in_a_layout_of_their_own(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(QtoolError, match="register a layout too, and pass its name as layout"):
        qtool.register_scheme(ThreeBit)
    with pytest.raises(QtoolError, match="a recipe and the layout 'three-planes' are given"):
        qtool.register_scheme(ThreeBit, {}, layout="three-planes")
    qtool.register_scheme(ThreeBit, layout="three-planes")  # before or after the layout
    qtool.register_layout(ThreePlanes())
    rule = qtool.plan("demo", "three-bit", recipe="paper").job.recipe.layers[0]
    assert (rule.group_size, rule.layout) == (ThreeBit.default_group_size, "three-planes")
    out = qtool.quantize(make_model(), "three-bit", out=tmp_path / "out")
    assert not [row for row in qtool.verify(out) if row.problem]
    with pytest.raises(QtoolError, match="three-bit, whose 3-bit codes no row-major layout holds"):
        qtool.plan("demo", recipe={"layers": [{"match": ".*", "scheme": "three-bit"}]})
    monkeypatch.setattr(ThreePlanes, "tile", (7, 8))
    with pytest.raises(
        QtoolError, match=r"three-planes: a weight of .* does not divide into tiles"
    ):
        qtool.plan("demo", "three-bit")
    monkeypatch.setattr(ThreePlanes, "tile", (1, 8))
    monkeypatch.setattr(ThreeBit, "high", 9)
    monkeypatch.setattr(ThreeBit, "zero", 6)
    with pytest.raises(CheckFailed, match=r"^model\.layers\.0\.\S+: .* codes of 3 bits"):
        qtool.quantize(make_model(), "three-bit", out=tmp_path / "wide")


class Float8Scales(Marlin):
    """Four bits, with scales in float8."""

    name = "float8-scales"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.scale_dtype = torch.float8_e5m2

    def fit_range(self, *given: Any, **clips: Any) -> dict[str, torch.Tensor]:
        scale = Marlin(self.group_size).fit_range(*given, **clips)["scale"]
        return {"scale": scale.clamp(2.0**-16, 2.0**15).to(torch.float8_e5m2)}


def test_parameters_may_be_stored_in_float8(make_model: MakeModel, tmp_path: Path) -> None:
    qtool.register_scheme(Float8Scales)
    out = qtool.quantize(make_model(), "float8-scales", recipe="fast", out=tmp_path / "out")
    config = json.loads((out.directory / "config.json").read_text())
    assert config["quantization_config"]["rules"][0]["scale_dtype"] == "float8_e5m2"
    rows = qtool.verify(out)
    assert not [row for row in rows if row.problem]
    inherited = "float8-scales reference, int4 weights, 16-bit activations, float32 sums"
    assert {row.ran for row in rows} == {inherited}
    assert cuts_inputs(LinearFormat("float8-scales", None, "row-major", "bfloat16"), 256, 2)


def test_a_scheme_that_gptq_cannot_take_has_no_recipe_with_it() -> None:
    def fit_range(self: Marlin, *given: Any, **clips: Any) -> dict[str, torch.Tensor]:
        scale = Marlin.fit_range(self, *given, **clips)["scale"]
        return {"scale": scale, "unused": torch.ones_like(scale)}

    qtool.register_scheme(type("Two", (Marlin,), {"name": "two", "fit_range": fit_range}))
    qtool.plan("demo", "two", recipe="fast")
    with pytest.raises(QtoolError, match="two: no variant 'paper'; it has fast"):
        qtool.plan("demo", "two", recipe="paper")
    for rounding in ("gptq", "distill"):
        own = {"layers": [{"match": ".*", "scheme": "two", "group_size": 128}]}
        with pytest.raises(QtoolError, match=r"two: gptq and distill .* has scale, unused"):
            qtool.plan("demo", recipe=own | {"rounding": rounding})


@pytest.mark.parametrize("function", ["tensors", "weight", "quantization_config"])
def test_what_an_export_format_returns_wrongly_is_named(
    function: str, make_model: MakeModel, tmp_path: Path
) -> None:
    gptq = EXPORT_FORMATS["gptq"]
    kind = type("Mine", (type(gptq),), {function: lambda *_: None})
    qtool.register_export(kind("mine", "gptq", "a format that returns nothing"))
    native = qtool.quantize(make_model(), "w4a16", out=tmp_path / "w4a16")
    with pytest.raises(QtoolError, match=f"mine: {function} gives NoneType"):
        qtool.export(native, "mine")


def test_an_export_format_without_a_tile_is_refused() -> None:
    kind = type("Mine", (Gptq,), {"tile": (0, 8)})
    with pytest.raises(QtoolError, match=r"^Mine: tile is \(0, 8\); a pair of positive whole"):
        qtool.register_export(kind("mine", "gptq", "a format that divides by 0"))


class Packed(Gptq):
    """The codes and parameters as they are, with the order in which an input is gathered."""

    def takes_gathered(self, found: LinearFormat) -> bool:
        return True

    def tensors(self, linear_format: LinearFormat, codes: Any, params: Any) -> Any:
        return {"codes": codes, **params}

    def weight(self, linear_format: LinearFormat, tensors: Any, n: int, k: int) -> Any:
        params = {"scale": tensors["scale"]}
        weight = linear_format.scheme_object.dequantize(tensors["codes"], params)
        order = tensors.get("permutation")
        return weight if order is None else weight[:, order.argsort()]


def test_an_export_may_store_the_order_of_gathered_inputs(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qtool.register_export(Packed("packed", "packed", "as it is"))
    recipe = transform(lambda block: block.permute("mlp.down_proj", torch.arange(384).flip(0)))
    recipe["layers"] = [{"match": ".*", "scheme": "w4a16", "group_size": 64}]
    monkeypatch.setattr(TRANSFORMS["mine"], "permutes", lambda *_: ("mlp.down_proj",))
    out = qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")
    assert set(qtool.export(out, "packed").errors.values()) == {0}


def test_an_export_format_that_gives_other_tensors_than_it_says_is_refused(
    make_model: MakeModel, tmp_path: Path
) -> None:
    class Doubled(Packed):
        def weight(self, linear_format: LinearFormat, tensors: Any, n: int, k: int) -> Any:
            tensors["scale"].mul_(2)
            return super().weight(linear_format, tensors, n, k)

    class Halved(Packed):
        def tensors(self, linear_format: LinearFormat, codes: Any, params: Any) -> Any:
            scale = params["scale"]
            return {"codes": codes, "scale": scale if scale.is_meta else scale.bfloat16()}

    class Paired(Packed):
        def kv_tensors(self, key: Any, value: Any) -> Any:
            return key, value

    native = qtool.quantize(make_model(), "w4a16", out=tmp_path / "w4a16")
    for kind, said in (
        (Paired, "^paired: kv_tensors gives tuple; dict.str, Tensor. is expected$"),
        (Doubled, "^doubled: weight changes the tensors that it is given$"),
        (Halved, r"scale, bfloat16 .*, was given where .*scale, float.* was declared$"),
    ):
        qtool.register_export(kind(kind.__name__.lower(), "mine", "wrong"))
        with pytest.raises(QtoolError, match=said):
            qtool.export(native, kind.__name__.lower())


@pytest.mark.parametrize(
    ("function", "device"), [("tensors", "meta"), ("tensors", "cpu"), ("weight", "cpu")]
)
def test_an_export_format_that_fails_is_named(
    function: str, device: str, make_model: MakeModel, tmp_path: Path
) -> None:
    def fails(self: Packed, linear_format: LinearFormat, codes: Any, *given: Any) -> Any:
        if function == "weight" or codes.device.type == device:
            raise KeyError("scales")
        return Packed.tensors(self, linear_format, codes, *given)

    native = qtool.quantize(make_model(), "w4a16", recipe="fast", out=tmp_path / "w4a16")
    qtool.register_export(type("Mine", (Packed,), {function: fails})("mine", "mine", "wrong"))
    said = rf"^mine: {function} fails for model\.layers\.0\.\S+ \(KeyError: 'scales'\)$"
    with pytest.raises(QtoolError, match=said):
        qtool.export(native, "mine")


def test_a_layout_a_family_a_method_a_format_and_a_kernel(
    make_model: MakeModel, tmp_path: Path
) -> None:
    column = DigitLayout(name="column-major-8", n="n", k="k", order="k, n")
    qtool.register_layout(column)
    qtool.register_family(dataclasses.replace(FAMILIES[0], model_types=("llama_of_mine",)))
    assert family_of({"model_type": "llama_of_mine"}).blocks == "model.layers"

    @dataclasses.dataclass
    class Halved(RoundToNearest):
        name = "halved"

    qtool.register_method(Halved)
    with pytest.raises(QtoolError, match="int'> is no subclass of Transform or Rounding"):
        qtool.register_method(int)  # type: ignore[arg-type]

    @dataclasses.dataclass
    class Nothing(Transform):
        name = "nothing"
        needs_data = False

        def apply(self, block, batches):  # type: ignore[no-untyped-def]
            pass

    qtool.register_method(Nothing)
    gptq = EXPORT_FORMATS["gptq"]
    mine = type(gptq)("gptq-of-mine", "gptq", "the same under another name")
    qtool.register_export(mine)
    recipe = {
        "layers": [{"match": ".*", "scheme": "w8a8", "layout": "column-major-8"}],
        "transforms": ["nothing"],
        "rounding": "halved",
    }
    out = qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")
    assert not [row for row in qtool.verify(out) if row.problem]
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stored["rules"][0]["layout"] == "column-major-8"
    native = qtool.quantize(make_model(), "w4a16", out=tmp_path / "w4a16")
    assert max(qtool.export(native, "gptq-of-mine").errors.values()) < 1e-3  # scales in 16 bits
    qtool.register_kernel("w8a8", "column-major-8", W8A8)
    qtool.register_kernel("w8a8", "column-major-8", W8A8)
    assert KERNELS["w8a8", "column-major-8"] == (W8A8,)
    for wrong in ({"capabilities": (9, 0)}, {"multiply": None}):
        with pytest.raises(QtoolError, match=rf"kernel {W8A8.name}: {next(iter(wrong))} is "):
            qtool.register_kernel("w8a8", "row-major-8", dataclasses.replace(W8A8, **wrong))
    with pytest.raises(QtoolError, match="unknown scheme 'w8a9': did you mean w8a8"):
        qtool.register_kernel("w8a9", "row-major-8", W8A8)
    with pytest.raises(QtoolError, match="unknown layout 'column-majr-8': did you mean column-maj"):
        qtool.register_kernel("w8a8", "column-majr-8", W8A8)


@pytest.mark.parametrize("notes", [{}, {"weight_error": 0.25}, {"steps": 3}])
def test_the_weight_errors_of_a_rounding_from_outside_are_shown(
    notes: dict[str, float], make_model: MakeModel, tmp_path: Path
) -> None:
    """From what it returns, or from its own notes, if it has any."""

    @dataclasses.dataclass
    class Nearest(Rounding):
        name = "nearest"
        needs_data = False

        def round(self, block, batches):  # type: ignore[no-untyped-def]
            found = RoundToNearest().round(dataclasses.replace(block, notes={}), batches)
            for number, name in enumerate(found if notes else ()):
                noted = {key: value / (1 + number) for key, value in notes.items()}
                block.notes.setdefault(self.name, {})[name] = noted
            return {name: dataclasses.replace(one, weight_error=0.5) for name, one in found.items()}

    qtool.register_method(Nearest)
    layers = [{"match": ".*", "scheme": "w8a8", "layout": "row-major-8"}]
    recipe = {"layers": layers, "rounding": "nearest"}
    done = qtool.quantize(make_model(), recipe=recipe, out=tmp_path / "out")
    shown = {"weight_error": 0.25, "steps": None}.get(next(iter(notes), ""), 0.5)
    assert max(done.errors.values(), default=None) == shown
    assert ("largest relative error of a weight" in str(done)) == bool(shown)


def test_what_the_same_lines_make_again_takes_the_place_of_the_first() -> None:
    """As a cell of a notebook does, or ``register()`` by hand beside the entry point."""

    def run() -> None:
        class Mine(SmoothQuant):
            name = "mine"

        qtool.register_scheme(Mine)
        qtool.register_layout(DigitLayout(name="rows-of-mine", n="n", k="k", order="n, k"))
        sizes = {"own": lambda config: config.hidden_size}
        family = dataclasses.replace(FAMILIES[0], name="Mine", model_types=("mine",), sizes=sizes)
        qtool.register_family(family)

        class Planes(ThreePlanes):
            name = "planes-of-mine"

        def multiply(call: Any) -> torch.Tensor:
            return torch.empty(0)

        qtool.register_layout(Planes())
        kernel = Kernel("mine", "exact", frozenset({(9, 0)}), multiply)
        qtool.register_kernel("mine", "rows-of-mine", kernel)

    run()
    first = SCHEMES["mine"], KERNELS["mine", "rows-of-mine"], LAYOUTS["planes-of-mine"]
    families = len(FAMILIES)
    run()
    assert SCHEMES["mine"] is not first[0] and family_of({"model_type": "mine"}).name == "Mine"
    assert len(FAMILIES) == families and LAYOUTS["planes-of-mine"] is not first[2]
    (kernel,) = KERNELS["mine", "rows-of-mine"]
    assert kernel is not first[1][0]
    recipe = {"layers": [{"match": ".*", "scheme": "mine"}]}
    qtool.register_recipe("another", recipe)
    qtool.register_recipe("another", dict(recipe))
    with pytest.raises(QtoolError, match="the recipe 'another' is registered already"):
        qtool.register_recipe("another", recipe | {"about": "something else"})


def test_what_takes_the_place_of_a_scheme_has_its_own_tensors() -> None:
    def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        class Mine(Marlin):
            name = "mine"

            def fit_range(self, *given: Any, **clips: Any) -> Any:
                found = super().fit_range(*given, **clips)
                return {name: param.to(dtype) for name, param in found.items()}

        qtool.register_scheme(Mine)
        return LinearFormat("mine", 128, "row-major").tensors(128, 128)

    for dtype in (torch.float32, torch.float16):
        assert tensors(dtype)["scale"].dtype == dtype


def test_after_a_plugin_failed_the_others_are_not_called_again(
    plugged: Callable[..., None],
) -> None:
    calls: list[str] = []

    def bad() -> None:
        calls.append("bad")
        if calls.count("bad") == 1:
            raise ValueError("not yet")

    plugged(good=lambda: calls.append("good"), bad=bad)
    with pytest.raises(QtoolError, match=r"'bad' .*ValueError: not yet"):
        plugins.load()
    plugins.load()
    assert calls == ["good", "bad", "bad"]


def test_plugins_are_there_before_a_model_is_made(
    plugged: Callable[..., None], make_model: MakeModel, tmp_path: Path
) -> None:
    """One may hold its class, and one that is imported while it is made on meta is on meta too."""
    found: list[torch.device] = []
    native = qtool.quantize(make_model(), "w8a8", out=tmp_path / "out").directory
    plugged(constants=lambda: found.append(torch.zeros(1).device))
    qtool.load(native)
    assert found == [torch.device("cpu")]


def test_a_layout_without_codes_or_with_other_tensors_than_it_packs() -> None:
    @dataclasses.dataclass(frozen=True)
    class Planes(DigitLayout):
        tensors = ("planes",)

    with pytest.raises(QtoolError, match="layout 'planes' has no tensor qweight"):
        qtool.register_layout(Planes(name="planes", n="n", k="k", order="n, k"))

    for taken in ("bias", "q.high"):
        named = type("Named", (ThreePlanes,), {"name": "n", "tensors": ("qweight", taken)})
        with pytest.raises(QtoolError, match=f"layout 'n' has a tensor '{taken}'; a name of"):
            qtool.register_layout(named())

    @dataclasses.dataclass(frozen=True)
    class More(DigitLayout):
        tensors = ("qweight", "more")

    with pytest.raises(CheckFailed, match=r"pack gives .'qweight'.; a dict of qweight, more is"):
        qtool.register_layout(More(name="more", n="n", k="k", order="n, k"))


@pytest.mark.parametrize(
    ("function", "wrong", "said"),
    [
        ("pack", lambda self, codes: ROW_MAJOR.pack(codes)["qweight"], "pack gives Tensor; a dict"),
        ("pack", lambda self, codes: {"qweight": [1]}, "pack gives dict; a dict of qweight"),
        ("unpack", lambda *_, signed: None, "unpack gives NoneType; uint8 .2, 4. is expected"),
        (
            "unpack",
            lambda self, *given, signed: ROW_MAJOR.unpack(*given, signed=False),
            r"unpack gives uint8 .2, 4.; int8 .2, 4. is expected",
        ),
        ("pack_group", lambda self, param: param.t().contiguous(), "unpack_group gives"),
        (
            "pack_channel",
            lambda self, param: param + 1,
            r"unpack_channel gives 1.* at .0., where 0",
        ),
    ],
)
def test_a_layout_that_does_not_give_back_what_it_packed_is_refused(
    function: str, wrong: Any, said: str
) -> None:
    facts = {field.name: getattr(ROW_MAJOR, field.name) for field in dataclasses.fields(ROW_MAJOR)}
    layout = type("Wrong", (DigitLayout,), {function: wrong})(**{**facts, "name": "wrong"})
    with pytest.raises(CheckFailed, match=f"^layout wrong: {said}"):
        qtool.register_layout(layout)
    assert "wrong" not in LAYOUTS


@pytest.mark.parametrize(
    ("function", "orders"),
    [
        ("pack", {"order": "k, nt half"}),
        ("pack_group", {"group_order": "g nt half"}),
        ("pack_channel", {"channel_order": "half nt"}),
    ],
)
def test_a_layout_that_says_wrongly_that_it_packs_by_rows_is_refused(
    function: str, orders: dict[str, str]
) -> None:
    """Weights that are packed together would get each other's rows."""
    facts = {"name": "own", "n": "nt half:2", "k": "k", "order": "nt half, k"} | orders
    wrong = type("Wrong", (DigitLayout,), {"by_rows": True})(**facts)
    with pytest.raises(CheckFailed, match=f"own: by_rows is true, and {function} does not store"):
        qtool.register_layout(wrong)
    qtool.register_layout(DigitLayout(**facts))


def test_a_parameter_has_a_name_that_a_module_takes() -> None:
    def fit_range(self: Any, *given: Any, **clips: Any) -> Any:
        return {f"a.{name}": t for name, t in Marlin.fit_range(self, *given, **clips).items()}

    dotted = type("Dotted", (Marlin,), {"name": "dotted", "fit_range": fit_range})
    with pytest.raises(CheckFailed, match=r"fit_range gives a parameter 'a.scale'; a name of"):
        qtool.register_scheme(dotted)


def test_a_parameter_cannot_be_called_as_what_a_linear_stores() -> None:
    class Shifted(Marlin):
        name = "shifted"

        def fit_range(self, *given: Any, **clips: Any) -> Any:
            found = super().fit_range(*given, **clips)
            return found | {"bias": found["scale"]}

    qtool.register_scheme(Shifted)
    with pytest.raises(QtoolError, match="shifted: no parameter can be called bias"):
        LinearFormat("shifted", 128, "row-major").tensors(128, 128)


def test_bytes_of_a_layout_whose_tile_does_not_divide_256() -> None:
    qtool.register_layout(DigitLayout(name="wide", n="nt a:96", k="k", order="nt a, k"))
    found = LinearFormat("w4a16", 128, "wide")
    stored = found.tensors(768, 256).values()
    assert found.nbytes(768, 256) == sum(tensor.nbytes for tensor in stored)


def test_the_versions_of_plugins_are_those_of_their_packages(installed: None) -> None:
    """And a result that another one computed is not used again."""
    assert plugins.versions()["own-scheme"] == "0.1.0"
    assert "own-scheme 0.1.0" in saved.environment("cpu")["plugins"]
