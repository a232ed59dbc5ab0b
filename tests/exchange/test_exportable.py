"""What an export refuses and recommends is decided by one check, from config.json, before any
work.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import qtool
from qtool import recipes
from qtool.cli import cli
from qtool.errors import CheckFailed, QtoolError
from qtool.exchange import export_formats
from qtool.exchange.as_export import load_as_export
from qtool.exchange.export import export
from qtool.exchange.export_format import ExportFormat
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.exchange.exportable import exported_formats, formats_that_take
from qtool.exchange.formats.gptq import Gptq
from qtool.exchange.import_ import import_checkpoint
from qtool.format import CheckpointFormat, LinearFormat, native_format
from qtool.io.output import Output
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.planning.plan_text import as_dict, as_text
from qtool.pipeline.quantize import Calibration, quantize
from qtool.schemes import Params
from tests.conftest import MakeModel
from tests.exchange.conftest import recipe_of, rule
from tests.models.tiny import save_tiny

TOKENS = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0)).split(2)


def refusals(directory: Path) -> dict[str, str]:
    """What each format says to the checkpoint; "" if it takes it."""
    config = Checkpoint(directory).config
    return refusals_of(native_format(config), config)


def refusals_of(native: CheckpointFormat, config: dict[str, Any]) -> dict[str, str]:
    said = {}
    for name, target in EXPORT_FORMATS.items():
        try:
            exported_formats(target, native, config)
            said[name] = ""
        except QtoolError as error:
            said[name] = str(error)
    return said


RECIPES = {
    "FMPQ": recipe_of([rule("w4ax-fmpq", 128)], transforms=["gather-outliers"]),
    "W4A16": recipe_of([rule("w4a16", 128)]),
    "mixed": recipe_of([rule("w4a16", 32, "down_proj"), rule("w4a16", 128)]),
    "QoQ": recipe_of([rule("w4a8-qoq-g128", 128)]),
    "W4A4 mixed": recipes.load("w4a4-mix"),
}
TAKE_NOTHING = ("FMPQ", "W4A4 mixed")


@pytest.mark.parametrize("name", RECIPES)
def test_formats_that_are_recommended_take_it(
    name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """Each recommended format exports it, and no other format does."""
    source = Checkpoint(make_model(hidden_size=256, head_dim=64, dtype=torch.float16))
    native = quantize(source, RECIPES[name], tmp_path / "native", calibration=Calibration(TOKENS))
    said = refusals(native)
    takes = [format for format, message in said.items() if not message]
    config = Checkpoint(native).config
    assert formats_that_take(native_format(config), config) == takes
    can = f"formats that can: {', '.join(takes)}" if takes else "no format of a serving stack can"
    assert all(message.endswith(can) for message in said.values() if message)
    for format in said:
        if format in takes:
            assert export(native, format, tmp_path / format).errors
        else:
            with pytest.raises(QtoolError):
                export(native, format, tmp_path / format)
    assert bool(takes) == (name not in TAKE_NOTHING)


@pytest.mark.parametrize(
    "variant, transforms",
    [
        ("gemma", ["norm-fusion", "rotate"]),
        ("gemma", ["norm-fusion", {"rotate": {"residual": False}}]),
        ("llama-tied", ["norm-fusion", "rotate"]),
        ("qwen3_moe", []),
        ("falcon", []),
    ],
)
def test_a_plan_is_told_what_the_export_is_told(
    variant: str, transforms: list[Any], make_model: MakeModel, tmp_path: Path
) -> None:
    """Of a job, before it runs, and of its result: the same formats, or the same sentence."""
    source = Checkpoint(make_model(variant, dtype=torch.float16))
    job = Job.of(source.config, recipe_of([rule("w4a16", 64)], transforms=transforms))
    native = quantize(source, job.recipe, tmp_path / "native")
    done = Checkpoint(native).config
    untied = {"tie_word_embeddings": False} if job.unties else {}
    before = outcome(job.format, source.config | untied)
    assert before == outcome(native_format(done), done)
    headless = "the head is not the embedding any more" in str(before)
    assert headless == (variant == "gemma" and job.unties)
    planned = plan(job)
    last, found = as_text(planned).splitlines()[-1], as_dict(planned)
    assert before == (found["not_exported"] or found["export_formats"])
    told = before if isinstance(before, list) else [f"none, {before}"]
    assert last == f"export formats: {', '.join(told)}"


DOWN = "model.layers.0.mlp.down_proj"
ROTATED = (
    f"{DOWN}: its inputs are rotated at run time (online-hadamard), which no loader of another "
    "format does: quantize with --for-export"
)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-lqq", "w4a8-qoq-g128"])
def test_inputs_that_are_rotated_are_not_exported(
    scheme: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """Nor by the plan, which says what to do; without the rotation formats take it."""
    source = make_model(dtype=torch.float16)
    options: dict[str, Any] = {"recipe": "best", "calibration": TOKENS[0], "seqlen": 64}
    options["windows"] = "given"
    native = qtool.quantize(source, scheme, out=tmp_path / "native", **options).directory
    config = Checkpoint(native).config
    assert "as those of `mlp.down_proj` are here" in (native / "README.md").read_text()
    assert config["quantization_config"]["rotated"] == ["mlp.down_proj"]
    takes = "compressed-tensors-w8a8"
    for refuses in (
        partial(formats_that_take, native_format(config), config),
        partial(load_as_export, native, takes),
        partial(export, native, takes, tmp_path / "out"),
    ):
        with pytest.raises(QtoolError) as refused:
            refuses()
        assert str(refused.value) == ROTATED
    assert not (tmp_path / "out").exists()
    with pytest.raises(QtoolError, match=f"that can, quantized with --for-export: .*{takes}"):
        export(native, "gptq", tmp_path / "out")
    plans = [qtool.plan(source, scheme, recipe="best", for_export=asked) for asked in (False, True)]
    said = [as_text(planned).splitlines()[-1] for planned in plans]
    assert said[0] == f"export formats: none, {ROTATED}" and "compressed-tensors" in said[1]
    plain = qtool.quantize(source, scheme, out=tmp_path / "plain", for_export=True, **options)
    assert "`qtool export -h` lists" in (plain.directory / "README.md").read_text()
    config = Checkpoint(plain.directory).config
    assert "rotated" not in config["quantization_config"]
    for format in formats_that_take(native_format(config), config):
        assert export(plain.directory, format, tmp_path / format).errors


def test_mixtures_whose_experts_are_rotated_are_not_exported(make_model: MakeModel) -> None:
    source = make_model("qwen3_moe", dtype=torch.float16)
    own, without = (
        qtool.plan(source, "w8a8", recipe="best", for_export=asked).job for asked in (False, True)
    )
    assert own.format.rotated == ("mlp.experts.*.down_proj",) and not without.format.rotated
    with pytest.raises(QtoolError, match=r"experts.0.down_proj: .*: quantize with --for-export"):
        formats_that_take(own.format, own.config)
    assert "compressed-tensors-w8a8" in formats_that_take(without.format, without.config)


def test_a_rotation_is_no_reason_where_no_format_takes_the_scheme(make_model: MakeModel) -> None:
    job = qtool.plan(make_model(dtype=torch.float16), "w4a4-mix", recipe="best").job
    assert job.format.rotated and formats_that_take(job.format, job.config) == []
    assert not any("--for-export" in said for said in refusals_of(job.format, job.config).values())


def test_quantize_refuses_the_export_before_it_calibrates(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """Gemma 1 rotated: the sentence comes before a tokenizer is looked for, which is not there."""
    recipe, out = tmp_path / "mine.yaml", tmp_path / "out"
    recipe.write_text(
        "transforms: [norm-fusion, rotate]\nrounding: gptq\n"
        "layers: [{match: '.*', scheme: w4a16, group_size: 64}]"
    )
    arguments = ["quantize", str(make_model("gemma", dtype=torch.float16)), "--out", str(out)]
    arguments += ["--scheme", "w4a16", "--recipe", str(recipe), "--format", "gptq"]
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, QtoolError)
    assert "the head is not the embedding any more" in str(result.exception)
    assert not list(tmp_path.glob("out*"))


def outcome(checkpoint_format: Any, config: dict[str, Any]) -> Any:
    try:
        return formats_that_take(checkpoint_format, config)
    except QtoolError as error:
        return str(error)


@pytest.mark.parametrize(
    "scheme, size, name, said",
    [
        ("w8a8", "channel", "compressed-tensors", "in 8 bits"),
        ("w4a8-lqq", 64, "compressed-tensors-w8a8", "in 8 bits"),
        ("w4a8-qoq-g128", 128, "compressed-tensors-w4a16", "with zero points"),
        ("w4a16", 128, "compressed-tensors", ""),
        ("w4a16", 128, "gptq", ""),
    ],
)
def test_experts_that_transformers_cannot_load_are_said(
    scheme: str, size: Any, name: str, said: str, make_model: MakeModel, tmp_path: Path
) -> None:
    for variant in ("qwen3_moe", "llama"):
        source = Checkpoint(make_model(variant, dtype=torch.float16))
        native = quantize(source, recipe_of([rule(scheme, size)]), tmp_path / f"{variant}-native")
        notes = export(native, name, tmp_path / f"{variant}-out").notes
        expected = [f"experts: transformers cannot load them {said}"] * bool(said)
        found = [note.partition(";")[0] for note in notes if note.startswith("experts")]
        assert found == (expected if variant == "qwen3_moe" else [])


def flip(directory: Path, shard: str) -> None:
    path = next(path for path in directory.glob("*.safetensors") if shard in path.name)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_flipped_byte_stops_an_export(
    number: int, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards before it are kept, and used once the file is replaced."""
    source = Checkpoint(make_model(dtype=torch.float16))
    native = quantize(source, recipe_of([rule("w4a16", 32)]), tmp_path / "native")
    whole = export(native, "gptq", tmp_path / "whole").directory
    flip(native, f"{number:05d}-of")
    damaged = f"model-{number:05d}-of-00004.safetensors"
    with pytest.raises(CheckFailed, match=f"{damaged}: its sha256 is not"):
        export(native, "gptq", tmp_path / "out")
    kept = sorted(path.name for path in tmp_path.glob("out.partial/*.safetensors"))
    assert len(kept) == number - 1 and bool(kept) == (tmp_path / "out.run.json").exists()
    assert not (tmp_path / "out").exists() and bool(kept) == (tmp_path / "out.partial").exists()
    result = CliRunner().invoke(
        cli, ["export", str(native), "--format", "gptq", "--out", str(tmp_path / "out")]
    )
    assert isinstance(result.exception, CheckFailed)
    flip(native, f"{number:05d}-of")
    written, put = [], Output.write_shard

    def counted(self: Output, shard: int, *rest: Any) -> None:
        written.append(shard)
        put(self, shard, *rest)

    monkeypatch.setattr(Output, "write_shard", counted)
    done = export(native, "gptq", tmp_path / "out").directory
    assert written == list(range(number, 5))
    assert {p.name: p.read_bytes() for p in done.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


def test_a_flipped_byte_stops_an_import(make_model: MakeModel, tmp_path: Path) -> None:
    """Of an export that qtool made, whose hashes are recorded."""
    source = Checkpoint(make_model(dtype=torch.float16))
    native = quantize(source, recipe_of([rule("w4a16", 32)]), tmp_path / "native")
    foreign = export(native, "gptq", tmp_path / "foreign").directory
    flip(foreign, "00002-of")
    with pytest.raises(CheckFailed, match="its sha256 is not"):
        import_checkpoint(Checkpoint(foreign), tmp_path / "out")
    assert [path.name for path in tmp_path.glob("out.partial/*.safetensors")] == [
        "model-00001-of-00004.safetensors"
    ]
    flip(foreign, "00002-of")
    import_checkpoint(Checkpoint(foreign), tmp_path / "out")
    assert not list(tmp_path.glob("out.partial"))


def test_how_transformers_loads_is_said_of_exports_that_it_loads(tmp_path: Path) -> None:
    """It loads no experts with zero points, whatever it is told."""
    source = Checkpoint(save_tiny("mixtral", tmp_path / "source"))
    recipe = recipe_of([rule("w4a8-qoq", "channel")])
    ours = quantize(source, recipe, tmp_path / "native", dtype=torch.float16)
    notes = export(ours, "compressed-tensors-w4a16", tmp_path / "out").notes
    said = [note for note in notes if "zero points" in note]
    assert said == [
        "experts: transformers cannot load them with zero points; serve this export with vLLM"
    ]


def test_a_damaged_file_does_not_decide_the_format_of_others(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """A zero point that is not 8 makes another scheme of all linears."""
    source = Checkpoint(make_model(dtype=torch.float16))
    ours = quantize(source, recipe_of([rule("w4a16", "channel")]), tmp_path / "native")
    foreign = export(ours, "gptq", tmp_path / "foreign").directory
    zeros = Checkpoint(foreign).entry("model.layers.1.mlp.up_proj.qzeros")
    whole = zeros.path.read_bytes()
    damaged = bytearray(whole)
    damaged[zeros.start] ^= 0xFF
    zeros.path.write_bytes(damaged)
    with pytest.raises(CheckFailed, match="its sha256 is not"):
        import_checkpoint(Checkpoint(foreign), tmp_path / "out", "row-major")
    zeros.path.write_bytes(whole)
    with pytest.raises(QtoolError, match="was started with another import"):
        import_checkpoint(Checkpoint(foreign), tmp_path / "out", "row-major")


def test_a_format_from_outside(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_formats, "EXPORT_FORMATS", dict(EXPORT_FORMATS))
    mine = Gptq("mine", "gptq_v2", "GPTQ under a name of its own, for a test")
    qtool.register_export(mine)
    qtool.register_export(mine)
    source = Checkpoint(make_model(dtype=torch.float16))
    native = quantize(source, recipe_of([rule("w4a16", 32)]), tmp_path / "native")
    done = export(native, "mine", tmp_path / "out")
    assert set(done.errors.values()) == {0.0}
    assert str(done).endswith(f"\nnext: vllm serve {done.directory}")
    assert json.loads((tmp_path / "out/qtool.json").read_text())["format"] == "mine"
    config = Checkpoint(native).config
    assert "mine" in formats_that_take(native_format(config), config)
    with pytest.raises(QtoolError, match="the format 'gptq' is registered already"):
        qtool.register_export(Gptq("gptq", "gptq", "another of the same name"))
    with pytest.raises(QtoolError, match="'gptq' is no instance of ExportFormat"):
        qtool.register_export("gptq")  # type: ignore[arg-type]

    class Flat(Gptq):
        def weight(self, *given: Any) -> torch.Tensor:
            return super().weight(*given).flatten()

    qtool.register_export(Flat("flat", "gptq_v2", "its weights have another shape"))
    with pytest.raises(
        QtoolError, match=r"flat: weight gives float32 \[\d+\] for model.* is expected"
    ):
        export(native, "flat", tmp_path / "flat")

    class Listed(Gptq):
        def tensors(self, *given: Any) -> dict[str, Any]:
            return {name: list(tensor.shape) for name, tensor in super().tensors(*given).items()}

    qtool.register_export(Listed("listed", "gptq_v2", "its tensors are lists"))
    with pytest.raises(QtoolError, match="listed: tensors gives list for 'qweight'; Tensor is"):
        export(native, "listed", tmp_path / "listed")


def test_a_format_has_no_bias_beside_the_linears_own(make_model: MakeModel, tmp_path: Path) -> None:
    class Biased(Gptq):
        def tensors(self, found: LinearFormat, codes: Tensor, params: Params) -> dict[str, Tensor]:
            bias = torch.zeros(len(codes), device=codes.device)
            return super().tensors(found, codes, params) | {"bias": bias}

    qtool.register_export(Biased("biased", "gptq_v2", "it has biases of its own"))
    native = qtool.quantize(make_model("qwen2"), "w4a16", out=tmp_path / "native")
    said = r"biased: tensors returns a bias for \S*q_proj, whose own bias is stored under that name"
    with pytest.raises(QtoolError, match=said):
        export(Path(native), "biased", tmp_path / "biased")


class Dense(ExportFormat):
    """The weights themselves, which a loader reads as they lie there."""

    name, about, tile, expressible = "dense", "no codes", (1, 1), {"w4a16": (32,)}
    factor: float = 1.0
    written: Any = 1.0

    def tensors(self, found: LinearFormat, codes: Tensor, params: Params) -> dict[str, Tensor]:
        return {"dense": found.scheme_object.dequantize(codes, params) * self.factor}

    def weight(self, found: LinearFormat, tensors: Any, n: int, k: int) -> Tensor:
        return tensors["dense"]

    def quantization_config(self, formats: Any, kv: str | None) -> dict[str, Any]:
        return {"quant_method": "dense", "factor": self.written}


def test_a_format_whose_weight_is_a_tensor_that_it_stores(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_formats, "EXPORT_FORMATS", dict(EXPORT_FORMATS))
    qtool.register_export(Dense())
    native = quantize(Checkpoint(make_model()), recipe_of([rule("w4a16", 32)]), tmp_path / "native")
    done = export(native, "dense", tmp_path / "out")
    assert set(done.errors.values()) == {0.0}
    assert Checkpoint(done.directory).read("model.layers.0.mlp.up_proj.dense").any()
    for no_json in (torch.ones(1), float("nan")):
        monkeypatch.setattr(Dense, "written", no_json)
        with pytest.raises(QtoolError, match="dense: its quantization_config cannot be written as"):
            export(native, "dense", tmp_path / "tensor")
    monkeypatch.setattr(Dense, "factor", float("nan"))
    with pytest.raises(QtoolError, match="proj: dense reads NaN or Inf from its tensors"):
        export(native, "dense", tmp_path / "nan")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"about": None}, "Wrong has no about, tile"),
        ({"expressible": ["w4a16"]}, r"Wrong: expressible is \['w4a16'\]; Mapping.str"),
        ({"expressible": {"w4a16": 64}}, r"Wrong: expressible is \{'w4a16': 64\}; Mapping"),
        ({"tile": 8}, r"Wrong: tile is 8; tuple\[int, int\] is expected"),
        ({"tile": ("8", 8)}, r"Wrong: tile is \('8', 8\); tuple\[int, int\] is expected"),
        ({"dtype": "float16"}, "Wrong: dtype is 'float16'; dtype | None is expected"),
        ({"weight": 8}, "Wrong: weight is 8; Callable is expected"),
    ],
)
def test_a_format_whose_attributes_are_wrong_is_refused(wrong: dict[str, Any], said: str) -> None:
    body = {name: getattr(Gptq, name) for name in ExportFormat.__abstractmethods__}
    body |= {"name": "wrong", "expressible": {}}
    body |= {} if "about" in wrong else {"about": "it", "tile": (1, 1)} | wrong
    with pytest.raises(QtoolError, match=said):
        qtool.register_export(type("Wrong", (ExportFormat,), body)())
