"""Every tensor of the source is in the result: packed, bit for bit, or cast where that is asked."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qtool
from qtool import recipes
from qtool.calibration.block import Block
from qtool.calibration.kv.cache import kv_constants
from qtool.errors import QtoolError
from qtool.exchange.export import export
from qtool.io.source import Checkpoint
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.quantize import Calibration, quantize
from qtool.pipeline.streaming import built_blocks, shards
from qtool.pipeline.verify import verify
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.models.tiny import save_tiny, tiny_config

ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"
EXTRA = "model.layers.0.mlp.steering"
NORM = "model.layers.0.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"
#: one path streams weights, the other builds blocks
STREAMED = {"layers": [{"match": ".*", "scheme": "w4a16", "group_size": 64}]}
BUILT = STREAMED | {"rounding": {"gptq": {"rounds": 0, "residual": 0, "clip_steps": 2}}}
TOKENS = torch.arange(64).view(2, 32) * 7 % 320


def add(model: Path, **tensors: torch.Tensor) -> None:
    path = model / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


def run(model: Path, recipe: dict[str, object], out: Path, **options: object) -> Checkpoint:
    calibration = Calibration([TOKENS], {"text": "numbers"})
    made = recipes.parse(recipe, "test")
    return Checkpoint(
        quantize(Checkpoint(model), made, out, calibration=calibration, **options)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [STREAMED, BUILT], ids=["streamed", "built"])
def test_every_tensor_is_there(  # type: ignore[no-untyped-def]
    recipe, computed, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms in float32 stay so in a bfloat16 model, and what nobody knows is copied.

    Also where forwards are in 16 bits, as on a GPU.
    """
    for module in (built_blocks, shards):
        monkeypatch.setattr(module, "compute_dtype", lambda *_: computed)
    model = make_model("llama-biases", dtype=torch.bfloat16)
    norm = load_file(model / "model.safetensors")[NORM].float() + 1e-6
    extra = torch.tensor([1, 2, 300], dtype=torch.int16)
    add(model, **{NORM: norm, ROTARY: torch.rand(16), EXTRA: extra})
    source, made = Checkpoint(model), run(model, recipe, tmp_path / "out", keep_unknown=True)
    for name in source.entries:
        if f"{name.removesuffix('.weight')}.qweight" not in made:
            assert made.entry(name).dtype == source.entry(name).dtype
            assert torch.equal(made.read(name), source.read(name)), name
    assert not [row for row in verify(made.directory) if row.problem]
    recorded = json.loads((made.directory / "qtool.json").read_text())
    assert sorted(recorded["unknown_tensors"]) == sorted([EXTRA, ROTARY])
    assert load(made.directory)(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("recipe", ["paper", "best"])
def test_a_router_computes_in_float32_among_16_bits(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers has it: on a GPU too it chooses the experts that it chooses when served."""
    config, float32 = tiny_config("deepseek_v3"), ("gate.weight", "e_score_correction_bias")
    model = save_tiny("deepseek_v3", tmp_path / "source", dtype="bfloat16")
    tensors = load_file(model / "model.safetensors")
    tensors = {
        n: t.float() + 8 + 1e-4 if n.endswith("bias") else t.bfloat16() for n, t in tensors.items()
    }
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    seen: list[dict[str, torch.Tensor]] = []

    def constants(block: Block, *rest: object) -> dict[str, torch.Tensor]:
        block.update_module()
        seen.append(block.module.state_dict())
        return kv_constants(block, *rest)  # type: ignore[arg-type]

    for module in (built_blocks, shards):
        monkeypatch.setattr(module, "compute_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(built_blocks, "kv_constants", constants)
    calibration = Calibration([TOKENS], {"text": "numbers"})
    out = tmp_path / "out"
    quantize(Checkpoint(model), recipes.load("w4a16", recipe), out, calibration=calibration)
    assert len(seen) == config.num_hidden_layers
    for name, tensor in seen[-1].items():
        assert tensor.dtype == (torch.float32 if name.endswith(float32) else torch.bfloat16), name
    bias = "mlp.gate.e_score_correction_bias"
    assert torch.equal(seen[-1][bias], tensors[f"model.layers.1.{bias}"])


def test_what_nobody_knows_and_transforms_leave_behind_is_said(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that predicts a second token reads an embedding that is rotated."""
    model = make_model()
    add(model, **{EXTRA: torch.ones(3, 3)})
    rotated = STREAMED | {"transforms": ["norm-fusion", {"rotate": {"learn_steps": 0}}]}
    for recipe, said in ((STREAMED, False), (rotated, True)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            qtool.quantize(model, recipe=recipe, out=tmp_path / str(said), keep_unknown=True)
        assert (f"{EXTRA} and all else that no Llama model has is copied" in caplog.text) is said


def test_what_transformers_leaves_out_is_copied(tmp_path: Path) -> None:
    """The class of DeepSeek-V3 names a block for a second token, and none of another number."""
    model = save_tiny("deepseek_v3", tmp_path / "source")
    named, other = (f"model.layers.{number}.eh_proj.weight" for number in (61, 62))
    add(model, **{named: torch.ones(3, 3)})
    qtool.quantize(model, "w4a16", recipe="fast", out=tmp_path / "out")
    assert torch.equal(Checkpoint(tmp_path / "out").read(named), torch.ones(3, 3))
    add(model, **{other: torch.ones(3, 3)})
    with pytest.raises(QtoolError, match=f"{other}: not a tensor of DeepseekV3"):
        qtool.quantize(model, "w4a16", recipe="fast", out=tmp_path / "again")


def test_an_export_keeps_what_is_no_weight(make_model: MakeModel, tmp_path: Path) -> None:
    """Exports to marlin are float16 throughout, but ids and fp8 tensors are copied as they are."""
    model = make_model(dtype=torch.bfloat16)
    ids, fp8 = torch.tensor([1, 2, 70001]), torch.ones(3).to(torch.float8_e4m3fn)
    add(model, ids=ids, fp8=fp8)
    recipe = {"layers": [{"match": ".*", "scheme": "w4a16", "group_size": "channel"}]}
    made = run(model, recipe, tmp_path / "out", keep_unknown=True)
    exported = Checkpoint(export(made.directory, "marlin", tmp_path / "marlin").directory)
    assert torch.equal(exported.read("ids"), ids) and exported.entry("fp8").dtype == fp8.dtype
    assert exported.entry("model.norm.weight").dtype == torch.float16


def test_an_unknown_tensor_is_refused_with_a_way_on(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    add(model, **{EXTRA: torch.ones(3)})
    with pytest.raises(QtoolError, match=rf"{EXTRA}: not a tensor of Llama .*--keep-unknown"):
        run(model, STREAMED, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("recipe", [STREAMED, BUILT], ids=["streamed", "built"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_source_is_cast(dtype, recipe, make_model: MakeModel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, kind = make_model(), getattr(torch, dtype)
    source, made = Checkpoint(model), run(model, recipe, tmp_path / "out", dtype=dtype)
    plain = [name for name in made.entries if name in source]
    assert plain and all(torch.equal(made.read(n), source.read(n).to(kind)) for n in plain)
    assert made.config["dtype"] == dtype and "torch_dtype" not in made.config
    recorded = json.loads((made.directory / "qtool.json").read_text())
    assert recorded["dtype"] == {"source": "float32", "stored": dtype}
    assert load(made.directory).dtype == kind
    assert not [row for row in verify(made.directory) if row.problem]
    kept = run(model, recipe, tmp_path / "kept")
    assert "dtype" not in json.loads((kept.directory / "qtool.json").read_text())


def test_what_cannot_be_cast_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    add(model, **{NORM: torch.full((128,), 70000.0)})
    with pytest.raises(QtoolError, match=rf"{NORM}: .*7e\+04 is beyond float16.*--dtype bfloat16"):
        run(model, STREAMED, tmp_path / "out", dtype="float16")
    add(model, **{NORM: torch.ones(128), UP: torch.full((384, 128), 1e6)})
    for recipe in (STREAMED, BUILT):
        with pytest.raises(QtoolError, match=r"mlp.up_proj: a scale .* is beyond float16's 65504"):
            run(model, recipe, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    with pytest.raises(QtoolError, match=r"--dtype 'bfloat': did you mean bfloat16\?"):
        QuantizeOptions(dtype="bfloat")


def test_float64_weights_are_refused_before_any_work(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(dtype=torch.float64)
    with pytest.raises(QtoolError, match=r"its dtype is 'float64'; weights in one of float32, "):
        run(model, STREAMED, tmp_path / "out")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for recipe in (STREAMED, BUILT):
        with pytest.raises(QtoolError, match=r"dtype torch.float64 found; a float16, bfloat16 or"):
            run(model, recipe, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_resuming_with_another_dtype_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stop

    model = make_model()
    with pytest.raises(Stop):
        run(model, STREAMED, tmp_path / "out", progress=stop)
    with pytest.raises(QtoolError, match=r"another recipe .*bfloat16"):
        run(model, STREAMED, tmp_path / "out", resume=True, dtype="bfloat16")
