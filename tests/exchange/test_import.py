"""Import: codes and scales of foreign 4-bit files become ours unchanged, or are refused with the
reason.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import qtool
from qtool import recipes
from qtool.cli import cli
from qtool.errors import CheckFailed, NoSpace, QtoolError
from qtool.exchange.export import export
from qtool.exchange.import_ import Import, import_checkpoint
from qtool.io.output import Output
from qtool.io.source import Checkpoint
from qtool.pipeline.inspect import inspect
from qtool.pipeline.planning.plan_text import as_text
from qtool.pipeline.quantize import quantize
from qtool.pipeline.verify import verify
from qtool.report.build import weight_errors
from qtool.runtime.huggingface import quantized_linears
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.exchange.test_export import native
from tests.models.tiny import save_tiny

IDS = torch.arange(48).reshape(2, 24) * 5 % 320


def w4a16(size: Any, match: str = ".*") -> dict[str, Any]:
    return {"match": match, "scheme": "w4a16", "group_size": size}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


def imported(directory: Path, out: Path, layout: str | None = None) -> Path:
    return import_checkpoint(Checkpoint(directory), out, layout).directory


def change_tensor(
    directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    (directory / "qtool.json").unlink(missing_ok=True)  # a foreign file has no recorded hashes
    path = Checkpoint(directory).entry(name).path
    held = load_file(path)
    save_file(held | {name: change(held[name]).contiguous()}, path, {"format": "pt"})


@pytest.mark.parametrize("variant", ["llama", "qwen2", "llama-tied"])
@pytest.mark.parametrize("size", [32, 128, "channel"])
@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq", "compressed-tensors"])
def test_there_and_back(
    name: str, size: Any, variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(variant, dtype=torch.bfloat16), w4a16(size))
    foreign = export(ours, name, tmp_path / "foreign").directory
    back = imported(foreign, tmp_path / "back", "row-major")
    expected, found = tensors(ours), tensors(back)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[part], tensor) for part, tensor in expected.items())
    assert layouts(back) == {"row-major"}
    assert [row.problem for row in verify(back)] == [""] * 14
    assert torch.equal(load(back)(IDS).logits, load(ours)(IDS).logits)


@pytest.mark.parametrize("kind", ["mistral3", "gptj", "mpt", "minimax_m2"])
def test_there_and_back_under_other_names(kind: str, tmp_path: Path) -> None:
    """A wrapper's, whose text model is called otherwise on disk, configs of other keys, and experts
    that transformers renames when it loads them.
    """
    ours, foreign, back = (tmp_path / name for name in ("ours", "foreign", "back"))
    source = save_tiny(kind, tmp_path / "source")
    qtool.quantize(source, "w4a16", recipe="fast", dtype="float16", out=ours)
    qtool.export(ours, "gptq", foreign)
    qtool.import_(foreign, back, layout="marlin")
    expected, found = tensors(ours), tensors(back)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[part], tensor) for part, tensor in expected.items())
    assert torch.equal(load(back)(input_ids=IDS).logits, load(ours)(input_ids=IDS).logits)


def test_what_transformers_leaves_out_goes_there_and_back(tmp_path: Path) -> None:
    ours, foreign, back = (tmp_path / name for name in ("ours", "foreign", "back"))
    source = save_tiny("glm4_moe", tmp_path / "source")
    held = load_file(source / "model.safetensors")
    extra = {"model.layers.46.eh_proj.weight": torch.randn(128, 256)}
    save_file(held | extra, source / "model.safetensors", {"format": "pt"})
    qtool.quantize(source, "w4a16", recipe="fast", dtype="float16", out=ours)
    qtool.export(ours, "gptq", foreign)
    found = tensors(imported(foreign, back, "row-major"))
    assert all(torch.equal(found[name], tensor) for name, tensor in extra.items())


@pytest.mark.parametrize("module", ["mlp", "block_sparse_moe"])
def test_experts_of_mixtral_under_the_names_of_transformers_5(module: str, tmp_path: Path) -> None:
    """As GPTQModel writes them, and AutoRound and llm-compressor."""
    ours, foreign, back = (tmp_path / name for name in ("ours", "foreign", "back"))
    source = save_tiny("mixtral", tmp_path / "source")
    qtool.quantize(source, "w4a16", recipe="fast", layout="row-major", dtype="float16", out=ours)
    qtool.export(ours, "gptq", foreign)
    spelled = {"w1.": "gate_proj.", "w2.": "down_proj.", "w3.": "up_proj."}

    def renamed(name: str) -> str:
        head, moe, tail = name.partition("block_sparse_moe.")
        for old, new in spelled.items() if moe else ():
            tail = tail.replace(old, new)
        return head + moe.replace("block_sparse_moe", module) + tail

    held = {renamed(name): tensor for name, tensor in tensors(foreign).items()}
    for path in (*foreign.glob("model*"), foreign / "qtool.json"):
        path.unlink()
    save_file(held, foreign / "model.safetensors", {"format": "pt"})
    assert f"model.layers.1.{module}.experts.3.up_proj.qweight" in held
    found = tensors(imported(foreign, back, "row-major"))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(ours).items())


def test_gptq_with_its_configuration_beside_alone(make_model: MakeModel, tmp_path: Path) -> None:
    """As AutoGPTQ wrote it: no quant_method, and nothing in config.json."""
    foreign = export(
        native(make_model(dtype=torch.float16), w4a16(128)), "gptq", tmp_path / "foreign"
    ).directory
    expected = tensors(imported(foreign, tmp_path / "expected"))
    config = json.loads((foreign / "config.json").read_text())
    del config["quantization_config"]
    (foreign / "config.json").write_text(json.dumps(config))
    told = {"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": True}
    (foreign / "quantize_config.json").write_text(json.dumps(told))
    found = tensors(imported(foreign, tmp_path / "found"))
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], t) for name, t in expected.items()
    )
    with pytest.raises(QtoolError, match=r"quantized already \(quant_method 'gptq'\)"):
        quantize(Checkpoint(foreign), recipes.load("w4a16"), tmp_path / "again")
    (foreign / "quantize_config.json").unlink()
    with pytest.raises(QtoolError, match="has no quantization_config"):
        imported(foreign, tmp_path / "none")


def test_fp16_scales_of_a_bf16_model_stay(make_model: MakeModel, tmp_path: Path) -> None:
    """Hub checkpoints have fp16 scales under any dtype: they are kept, not rounded."""
    foreign = export(
        native(make_model(dtype=torch.bfloat16), w4a16(128)), "gptq", tmp_path / "foreign"
    ).directory
    up = "model.layers.0.mlp.up_proj"
    for linear in [
        name.removesuffix(".scales")
        for name in Checkpoint(foreign).entries
        if name.endswith(".scales")
    ]:
        change_tensor(foreign, f"{linear}.scales", lambda t: (t.float() * 1.001).half())
    back = imported(foreign, tmp_path / "back", "row-major")
    assert torch.equal(
        Checkpoint(back).read(f"{up}.scale").t(), Checkpoint(foreign).read(f"{up}.scales")
    )
    assert not [row.problem for row in verify(back) if row.problem]
    again = export(back, "compressed-tensors", tmp_path / "again")
    assert again.notes == [
        "scales: float16 in the file, which loaders round to the model's bfloat16"
    ]


def test_the_recipe_is_not_read_for_each_linear(gptq: Path, tmp_path: Path) -> None:
    with mock.patch.object(recipes, "load", wraps=recipes.load) as load_recipe:
        imported(gptq, tmp_path / "out")
    assert load_recipe.call_count <= 1


def test_an_export_reports_the_linears_of_every_shard(gptq: Path, tmp_path: Path) -> None:
    """A checkpoint that was imported has the shards of its source, not one a block."""
    held = tensors(gptq)
    for path in gptq.glob("*.safetensors*"):
        path.unlink()
    save_file(held, gptq / "model.safetensors", {"format": "pt"})
    assert len(export(imported(gptq, tmp_path / "one"), "awq", tmp_path / "awq").errors) == 14


def test_mixed_groups_and_plain_layers(make_model: MakeModel, tmp_path: Path) -> None:
    rules = {"match": r"layers\.0\..*o_proj", "scheme": None}, w4a16(32, "down_proj"), w4a16(128)
    ours = native(make_model(dtype=torch.bfloat16), *rules)
    foreign = export(ours, "compressed-tensors", tmp_path / "foreign").directory
    back = imported(foreign, tmp_path / "back")
    assert torch.equal(load(back)(IDS).logits, load(ours)(IDS).logits)
    assert len(list(verify(back))) == 13
    assert weight_errors(Checkpoint(back), Checkpoint(foreign)) is None  # a report has none to show


def test_one_group_is_imported_as_a_group(make_model: MakeModel, tmp_path: Path) -> None:
    """K is one group of 128 but in down_proj, and GPTQ has one group size for the whole model."""
    ours = native(make_model(dtype=torch.bfloat16), w4a16(128))
    foreign = export(ours, "gptq", tmp_path / "foreign").directory
    back = imported(foreign, tmp_path / "back")
    assert len(export(back, "gptq", tmp_path / "again").errors) == 14


def layouts(directory: Path) -> set[str]:
    return {row.layout for row in inspect(directory) if row.layout}


@pytest.mark.parametrize(
    "layout", [None, "row-major", "marlin", "apex4", "compute-aware", "qqq-g128", "qqq"]
)
def test_every_layout_holds_the_same_weights(
    layout: str | None, make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(dtype=torch.bfloat16), w4a16(128))
    foreign = export(ours, "gptq", tmp_path / "foreign").directory
    back = imported(foreign, tmp_path / "back", layout)
    assert layouts(back) == {layout or "marlin"}
    notes = import_checkpoint(Checkpoint(foreign), tmp_path / "again", layout).notes
    without = [f"vLLM cannot serve it: qtool has no kernel for w4a16 in {layout}"]
    assert notes == ([] if layout in (None, "marlin") else without)
    assert not [row.problem for row in verify(back) if row.problem]
    expected, found = weights(ours), weights(back)
    assert expected.keys() == found.keys() and all(
        torch.equal(found[name], w) for name, w in expected.items()
    )


def test_what_a_layout_cannot_hold(make_model: MakeModel, tmp_path: Path) -> None:
    """By default such a linear is row-major; asked for by name the layout is refused."""
    # k and v have 32 outputs, MARLIN's tile 64
    small = native(make_model(num_key_value_heads=1, dtype=torch.bfloat16), w4a16(32))
    foreign = export(small, "gptq", tmp_path / "foreign").directory
    back = imported(foreign, tmp_path / "back")
    assert layouts(back) == {"row-major", "marlin"}
    assert torch.equal(load(back)(IDS).logits, load(small)(IDS).logits)
    for layout, message in {
        "marlin": "does not divide into tiles",
        "row-major-8": "8-bit codes",
        "x": "unknown",
    }.items():
        with pytest.raises(QtoolError, match=message):
            imported(foreign, tmp_path / "refused", layout)
    assert not list(tmp_path.glob("refused*"))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: module.dequantize() for name, module in quantized_linears(load(directory)).items()
    }


@pytest.mark.parametrize(
    "packing", ["auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq", None]
)
def test_scales_below_zero_stay(packing: str | None, make_model: MakeModel, tmp_path: Path) -> None:
    """AutoRound's: a group whose largest weight is positive has a negative scale and that weight at
    code 0.
    """
    ours = native(make_model(dtype=torch.bfloat16), w4a16(32))
    name = {"auto_round:gptqmodel": "gptq-v2", "auto_round:auto_awq": "awq"}.get(
        str(packing), "gptq"
    )
    foreign = export(ours, name, tmp_path / "foreign").directory
    if packing:
        config = {
            "quant_method": "auto-round",
            "packing_format": packing,
            "bits": 4,
            "sym": True,
            "group_size": 32,
        }
        change_config(foreign, **config)
    flipped, expected = [name for i, name in enumerate(weights(ours)) if i % 2], weights(ours)
    for linear in flipped:
        change_tensor(foreign, f"{linear}.scales", torch.neg)
        expected[linear] = -expected[linear]
    back = imported(foreign, tmp_path / "back")
    found = weights(back)
    assert all(torch.equal(found[linear], weight) for linear, weight in expected.items())
    assert not [row.problem for row in verify(back) if row.problem]
    again = export(back, "compressed-tensors", tmp_path / "again")
    assert set(again.errors.values()) == {0.0}


def test_quantize_reads_it_too(gptq: Path) -> None:
    out = gptq.with_name("direct")
    run = CliRunner().invoke(cli, ["quantize", str(gptq), "--scheme", "w4a16", "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert tensors(out).keys() == tensors(imported(gptq, gptq.with_name("imported"))).keys()
    for extra in (["--scheme", "w4a8-lqq"], ["--scheme", "w4a16", "--group-size", "64"]):
        run = CliRunner().invoke(
            cli, ["quantize", str(gptq), *extra, "--out", str(out.with_name("no"))]
        )
        assert isinstance(
            run.exception, QtoolError
        ) and "repack this GPTQ (gptq) with `qtool import`" in str(run.exception)


def outcome(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or the sentence that it is refused with."""
    try:
        return call()
    except QtoolError as error:
        return str(error)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("layout", [None, "row-major", "apex4", "nonesuch"])
def test_plan_says_what_quantize_makes_of_it(gptq: Path, layout: str | None, order: bool) -> None:
    if order:
        for linear in ("q", "k", "v"):
            name = f"model.layers.1.self_attn.{linear}_proj.g_idx"
            change_tensor(gptq, name, lambda index: index.flip(0))
    made = outcome(lambda: qtool.quantize(gptq, "w4a16", layout=layout, out=gptq / "../made"))
    planned = outcome(lambda: qtool.plan(gptq, "w4a16", layout=layout))
    if isinstance(made, str):
        assert planned == made
        return
    assert planned.output_bytes == made.nbytes and planned.source_bytes == made.source_bytes
    assert len(planned.shard_bytes) == len(list(made.directory.glob("*.safetensors")))
    found = {row.name: (row.layout, row.nbytes) for row in inspect(made.directory)}
    for kind in planned.kinds:
        for linear in kind.linears:
            assert {(linear.layout, linear.nbytes)} == {
                found[f"model.layers.{block}.{linear.name}"] for block in kind.blocks
            }
    assert "repacked from GPTQ (gptq), code for code" in as_text(planned).splitlines()[0]
    assert f"on {planned.device}: time about" in as_text(planned)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w4a8-lqq"},
        {"scheme": "w4a16", "recipe": "paper"},
        {"scheme": "w4a16", "calibration": "demo"},
        {"scheme": "w4a16", "group_size": 64},
        {"scheme": "w4a16", "kv": "kv4"},
        {"scheme": "w4a16", "dtype": "float16"},
    ],
)
def test_plan_and_quantize_refuse_by_the_same_sentence(gptq: Path, options: Any) -> None:
    said = outcome(lambda: qtool.plan(gptq, **options))
    assert "repack this GPTQ (gptq) with `qtool import`" in said
    assert said == outcome(lambda: qtool.quantize(gptq, **options, out=gptq / "../made"))


@pytest.mark.parametrize("options", [{"gpus": 0}, {"device": "tpu"}, {"gpus": 2, "device": "cpu"}])
def test_plan_refuses_the_devices_that_it_refuses_for_any_model(gptq: Path, options: Any) -> None:
    said = outcome(lambda: qtool.plan(gptq, "w4a16", **options))
    assert said == outcome(lambda: qtool.plan("demo", "w4a16", **options))
    assert isinstance(said, str)


def test_what_repacking_does_not_use_is_said(gptq: Path, caplog: pytest.LogCaptureFixture) -> None:
    unused: Any = {"samples": 3, "seed": 5, "activations": "disk", "keep_unknown": True}
    qtool.quantize(gptq, "w4a16", layout="row-major", resume=True, **unused, out=gptq / "../made")
    said = "repacked as it is: --samples 3, --seed 5, --activations disk, --keep-unknown not used"
    assert f"a quantized model is {said}" in caplog.messages


@pytest.mark.parametrize(
    ("export_format", "said"), [("nonsense", "unknown format"), ("awq", "made-awq exists already")]
)
def test_a_later_export_is_refused_before_repacking(
    gptq: Path, export_format: str, said: str
) -> None:
    out = gptq.with_name("made")
    (out.with_name("made-awq") / "before").mkdir(parents=True)
    with pytest.raises(QtoolError, match=said):
        qtool.quantize(gptq, "w4a16", out=out, export_format=export_format)
    assert not out.exists()


@pytest.mark.parametrize("damage", ["zero point", "shape", "lost"])
def test_plan_refuses_what_only_the_files_show(gptq: Path, damage: str) -> None:
    up = "model.layers.0.mlp.up_proj"
    if damage == "lost":
        path = Checkpoint(gptq).entry(f"{up}.scales").path
        held = load_file(path)
        del held[f"{up}.scales"]
        save_file(held, path, {"format": "pt"})
    else:
        change_tensor(gptq, f"{up}.{'qzeros' if damage == 'zero point' else 'scales'}", {
            "zero point": lambda zeros: zeros + 1, "shape": lambda scales: scales[:, :-1],
        }[damage])  # fmt: skip
    said = outcome(lambda: qtool.plan(gptq, "w4a16"))
    assert isinstance(said, str)
    assert said == outcome(lambda: qtool.quantize(gptq, "w4a16", out=gptq / "../made"))


def test_plan_of_a_config_alone_says_what_it_lacks(gptq: Path, tmp_path: Path) -> None:
    (alone := tmp_path / "alone" / "config.json").parent.mkdir()
    alone.write_bytes((gptq / "config.json").read_bytes())
    with pytest.raises(QtoolError, match="how it is packed stands in its safetensors files"):
        qtool.plan(alone, "w4a16")
    assert qtool.plan(gptq / "config.json", "w4a16").repacked == "GPTQ (gptq)"


@pytest.mark.parametrize("end", [KeyboardInterrupt, NoSpace("no space left")])
def test_a_killed_import_continues(end: Any, gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = imported(gptq, gptq.with_name("whole"))
    killed = gptq.with_name("killed")
    put = Output.write_shard

    def once(self: Output, shard: int, *rest: Any) -> None:
        if shard == 2:
            raise end
        put(self, shard, *rest)

    monkeypatch.setattr(Output, "write_shard", once)
    with pytest.raises((KeyboardInterrupt, NoSpace)):
        imported(gptq, killed)
    monkeypatch.undo()
    assert killed.with_name("killed.partial").exists()
    imported(gptq, killed)
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == {
        p.name: p.read_bytes() for p in killed.iterdir()
    }


def test_a_source_that_changes_meanwhile_makes_no_result(gptq: Path) -> None:
    def touch(done: int, *_: object) -> None:
        if done == 1:
            for file in gptq.glob("*.safetensors"):
                os.utime(file, ns=(0, 0))

    out = gptq.with_name("changed")
    with pytest.raises(QtoolError, match="foreign changed while it was read"):
        import_checkpoint(Checkpoint(gptq), out, progress=touch)
    assert not list(gptq.parent.glob("changed*"))


@pytest.fixture
def gptq(make_model: MakeModel, tmp_path: Path) -> Path:
    return export(
        native(make_model(dtype=torch.bfloat16), w4a16(32)), "gptq", tmp_path / "foreign"
    ).directory


def refused(directory: Path, message: str, error: type[QtoolError] = QtoolError) -> None:
    out = directory.with_name("refused")
    with pytest.raises(error, match=message):
        imported(directory, out)
    assert not out.exists() and not out.with_name("refused.partial").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "GPTQ with bits=8 cannot be imported, only bits=4"),
        ({"bits": "4"}, "GPTQ with bits='4' cannot be imported, only bits=4"),
        ({"lm_head": True}, "lm_head is quantized"),
        ({"activation": {"mode": "w4afp8"}}, "GPTQ with activation={'mode': 'w4afp8'}: w4a16's"),
        (
            {"checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' cannot be imported; known: gptq, gptq_v2",
        ),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "per-module settings"),
        (
            {"quant_method": "qqq"},
            "quant_method 'qqq' cannot be imported; known: gptq, awq, auto-round, compressed",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "x"},
            "AutoRound packing_format 'x' cannot be imported",
        ),
        ({"quant_method": "auto-round", "act_bits": 8}, "AutoRound with act_bits=8"),
        (
            {"quant_method": "auto-round", "data_type": "mx_fp"},
            "data_type='mx_fp' cannot be imported",
        ),
        (
            {"quant_method": "auto-round", "extra_config": {"x": {"bits": 8}}},
            "settings of its own for x",
        ),
        ({"quant_method": "qtool", "scheme": "w8a8"}, "a qtool checkpoint already, in w8a8: "),
        ({"checkpoint_format": "gptq_v2"}, "512 of 512 zero points are not 8"),
        ({"quant_method": ["gptq"]}, r"quant_method \['gptq'\] cannot be imported"),
        ({"dynamic": ["-:lm_head"]}, "quantization_config is damaged: AttributeError"),
        ({"quant_method": "auto-round", "act_bits": "x"}, "quantization_config is damaged: Value"),
        (
            {"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": None}}},
            "quantization_config is damaged: TypeError",
        ),
    ],
)
def test_configs_that_do_not_fit(changes: dict[str, Any], message: str, gptq: Path) -> None:
    change_config(gptq, **changes)
    refused(gptq, f"{message}.* the original model")


def test_a_bad_scale(gptq: Path) -> None:
    change_tensor(gptq, "model.layers.1.mlp.up_proj.scales", torch.zeros_like)
    refused(gptq, "layers.1.mlp.up_proj: invariant scale finite and not 0", CheckFailed)
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        change_tensor(gptq, "model.layers.1.mlp.up_proj.scales", lambda t, d=dtype: t.to(d))
        found = str(dtype).removeprefix("torch.")
        refused(gptq, f"up_proj.scales: {found} found, one of .*float16.* expected")


def test_other_group_sizes(gptq: Path) -> None:
    def wider(t: torch.Tensor) -> torch.Tensor:
        return t[:2]

    for part in ("scales", "qzeros"):
        change_tensor(gptq, f"model.layers.0.self_attn.q_proj.{part}", wider)
    change_tensor(gptq, "model.layers.0.self_attn.q_proj.g_idx", lambda t: t // 2)
    back = imported(gptq, gptq.with_name("back"))  # 64 in one linear, 32 in the others
    assert not [row.problem for row in verify(back) if row.problem]
    for part in ("scales", "qzeros"):
        change_tensor(gptq, f"model.layers.0.mlp.down_proj.{part}", lambda t: t[:2])
    refused(
        gptq, "down_proj: group size 192 is not one of w4a16's: 32, 64, 128, channel; quantize the"
    )
    change_tensor(gptq, "model.layers.0.mlp.down_proj.scales", lambda t: t[:, :-8])
    refused(
        gptq, r"down_proj.scales: shape \[2, 120\] is not that of a weight \[128, 384\]; quantize"
    )


def test_compressed_tensors_that_do_not_fit(make_model: MakeModel, tmp_path: Path) -> None:
    def made(scheme: str, name: str) -> Path:
        layout = "row-major-8" if scheme == "w8a8" else "row-major"
        rule = {"match": ".*", "scheme": scheme, "layout": layout}
        rule |= {"group_size": "channel"} if scheme in ("w8a8", "w4a8-qoq") else {}
        source = make_model(name=scheme + name, dtype=torch.bfloat16)
        return export(native(source, rule), name, tmp_path / f"{scheme}-{name}-out").directory

    refused(
        made("w8a8", "compressed-tensors"),
        "int-quantized with 8-bit int weights cannot be imported",
    )
    refused(made("w4a16", "compressed-tensors-w4a8"), "its activations are quantized")
    transformed = made("w4a16", "compressed-tensors")
    groups = Checkpoint(transformed).config["quantization_config"]["config_groups"]
    int8 = {"num_bits": 8, "type": "int"}
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": int8}
    outputs = groups["group_0"] | {"output_activations": int8}
    for more in (attention | {"format": "dense"}, outputs):
        change_config(transformed, config_groups=groups | {"group_1": more})
        refused(transformed, "group_1: its activations are quantized")
    change_config(transformed, config_groups=groups)
    offline = [{"location": "weight_output", "targets": ["re:.*v_proj$"]}]
    offline += [{"location": "weight_input", "targets": ["re:.*o_proj$"], "inverse": True}]
    change_config(transformed, transform_config={"config_groups": {"R2": {"apply": offline}}})
    back = imported(transformed, tmp_path / "rotated")  # the stored weights are rotated already
    assert not [row.problem for row in verify(back) if row.problem]
    online = {"R4": {"apply": [*offline, {"location": "input", "targets": ["re:.*down_proj$"]}]}}
    change_config(transformed, transform_config={"config_groups": online})
    refused(transformed, "transform_config")
    change_config(
        transformed, transform_config=None, kv_cache_scheme={"num_bits": 8, "type": "float"}
    )
    refused(transformed, "kv_cache_scheme")


def test_missing_tensor_and_plain_model(gptq: Path, make_model: MakeModel) -> None:
    path = Checkpoint(gptq).entry("model.layers.0.mlp.up_proj.scales").path
    (gptq / "qtool.json").unlink()
    index = json.loads((gptq / "model.safetensors.index.json").read_text())
    held = load_file(path)
    del (
        held["model.layers.0.mlp.up_proj.scales"],
        index["weight_map"]["model.layers.0.mlp.up_proj.scales"],
    )
    save_file(held, path, {"format": "pt"})
    (gptq / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(gptq, "tensor model.layers.0.mlp.up_proj.scales is missing")
    plain = make_model(name="plain")
    refused(plain, "not quantized: .*use qtool quantize")
    config = Checkpoint(plain).config
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (plain / "config.json").write_text(json.dumps(config))
    refused(plain, "hold no qweight: .* take quantization_config out of config.json")


QKV = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.embed_tokens.weight", lambda t: t[:-1], r"shape \[319, 128\] found"),
        ("model.norm.weight", lambda t: t * torch.nan, "holds 128 NaN or Inf"),
        (
            f"{QKV}.qweight",
            lambda t: t.float(),
            r"torch.float32 .* found; int32 words \[16, 128\] of 128 x 128 codes",
        ),
        (f"{QKV}.qzeros", lambda t: t[:, :-1], r"int32 \[4, 15\] found, int32 words of 128 x 4"),
        (f"{QKV}.qzeros", lambda t: t.short(), r"int16 \[4, 16\] found, int32 words of 128 x 4"),
        (f"{QKV}.qweight", lambda t: t[:-1], r"\[15, 128\] found; int32 .* original model"),
        (f"{QKV}.qweight", lambda t: t.view(128, 16), r"\[128, 16\] found; int32 words \[16"),
    ],
)
def test_damaged_tensors(
    name: str, change: Callable[..., torch.Tensor], message: str, gptq: Path
) -> None:
    change_tensor(gptq, name, change)
    with pytest.raises(QtoolError, match=message):
        imported(gptq, gptq.with_name("out"))
    assert not list(gptq.parent.glob("out*"))


def test_zero_points_that_are_missing_are_refused_before_any_work(gptq: Path) -> None:
    source = Checkpoint(gptq)
    del source.entries[f"{QKV}.qzeros"]
    with pytest.raises(QtoolError, match=f"tensor {QKV}.qzeros is missing"):
        Import(source, None)


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize(
    "name", [f"{QKV}.bias", "model.layers.0.odd.weight", "model.rotary_emb.inv_freq"]
)
def test_tensors_that_the_model_does_not_have(name: str, value: float, gptq: Path) -> None:
    """GPTQ's tools wrote biases of zeros, old checkpoints the angles of RoPE; anything else would
    be lost.
    """
    path = Checkpoint(gptq).entry(f"{QKV}.qweight").path
    (gptq / "qtool.json").unlink()
    save_file(load_file(path) | {name: torch.full((128,), value)}, path, {"format": "pt"})
    index = json.loads((gptq / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = path.name
    (gptq / "model.safetensors.index.json").write_text(json.dumps(index))
    if "odd" in name or ("bias" in name and value):
        sentence = f"{name}: not a tensor of Llama models.* quantize the original model"
        with pytest.raises(QtoolError, match=sentence):
            imported(gptq, gptq.with_name("out"))
    else:
        assert name not in tensors(imported(gptq, gptq.with_name("out")))


def test_quantize_names_import(gptq: Path) -> None:
    with pytest.raises(QtoolError, match=r"repack this GPTQ \(gptq\) with `qtool import`"):
        quantize(Checkpoint(gptq), recipes.load("w4a16"), gptq.with_name("q"))
