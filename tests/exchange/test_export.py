"""What an export refuses, before any work, and how it continues; what it says it changed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import qtool
from qtool import recipes
from qtool.errors import CheckFailed, NoSpace, QtoolError
from qtool.exchange.export import export
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.linear import QuantLinear
from qtool.units import bytes_text
from tests.conftest import MakeModel
from tests.exchange.conftest import recipe_of, rule


def native(source: Path, *rules: dict[str, Any], **more: Any) -> Path:
    recipe = recipe_of(list(rules), **more)
    return quantize(Checkpoint(source), recipe, source.with_name(source.name + "-native"))


def refused(directory: Path, name: str, message: str, **options: Any) -> None:
    out = directory.with_name("refused")
    with pytest.raises(QtoolError, match=message):
        export(directory, name, out, **options)
    assert not out.exists()
    assert not out.with_name("refused.partial").exists()


@pytest.mark.parametrize(
    ("scheme", "size", "name", "message"),
    [
        (
            "w4a8-lqq",
            64,
            "gptq",
            "gptq cannot express w4a8-lqq .*formats that can: compressed-tensors-w8a8$",
        ),
        ("w4a8-lqq", 64, "compressed-tensors", "formats that can: compressed-tensors-w8a8$"),
        (
            "w4a16",
            64,
            "marlin",
            "group size 64; it takes group size 128, channel; formats that can: compressed-tensors",
        ),
        ("w4a16", 32, "qqq", "it takes group size 128, channel"),
        ("w4a16", 128, "qserve", "it takes w4a8-qoq, w4a8-qoq-g128"),
        ("w4a8-qoq-g128", 64, "qserve", "it takes group size 128"),
        ("w4a16", 64, "compressed-tensors-w4a8-fp8", "it takes group size 128"),
        ("w4a16", 128, "marlin-24", "it takes w4a16-24"),
        (
            "w4a8-qoq",
            "channel",
            "gptq",
            "formats that can: compressed-tensors-w4a16, compressed-tensors-w4a8, awq$",
        ),
    ],
)
def test_schemes_that_do_not_fit(
    scheme: str, size: Any, name: str, message: str, make_model: MakeModel
) -> None:
    refused(
        native(make_model(), rule(scheme, size)),
        name,
        "model.layers.0.self_attn.q_proj: .*" + message,
    )


@pytest.mark.parametrize(
    ("scheme", "size", "name", "message"),
    [
        (
            "w4a16-24",
            128,
            "marlin-24",
            r"k_proj: marlin-24 needs .*N a multiple of 128 .*found \[64, 128\]",
        ),
        (
            "w4a8-qoq",
            "channel",
            "qserve",
            r"k_proj: qserve needs .*N a multiple of 128 .*found \[64, 128\]",
        ),
        (
            "w4a16",
            128,
            "compressed-tensors-w4a8-fp8",
            r"k_proj: .*N a multiple of 128 .*found \[64, 128\]",
        ),
        ("w4a16", 128, "qqq", "reads one group of 128 as a channel; quantize it per channel"),
    ],
)
def test_shapes_that_do_not_fit(
    scheme: str, size: Any, name: str, message: str, make_model: MakeModel
) -> None:
    refused(native(make_model(), rule(scheme, size)), name, message)


def test_tensor_parallel(make_model: MakeModel) -> None:
    directory = native(make_model(), rule("w4a16", 128))
    refused(
        directory,
        "compressed-tensors",
        r"o_proj on one of 2 GPUs: .* with K a multiple of 128, found \[128, 64\]",
        tensor_parallel=2,
    )
    refused(directory, "gptq", "4 attention heads cannot be split over 3 GPUs", tensor_parallel=3)
    out = export(directory, "gptq", directory.with_name("ok"), tensor_parallel=1)
    assert out.directory.exists()


def test_a_group_that_fits_on_each_gpu(make_model: MakeModel, tmp_path: Path) -> None:
    directory = native(make_model(), rule("w4a16", 32))
    assert export(directory, "gptq", tmp_path / "out", tensor_parallel=4).errors
    qoq = native(make_model(name="other", num_key_value_heads=4), rule("w4a8-qoq-g128", 128))
    refused(qoq, "qserve", "loader runs on one GPU", tensor_parallel=2)


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq", "awq"])
def test_fused_shards_must_agree(name: str, make_model: MakeModel) -> None:
    directory = native(make_model(), rule(None, match="k_proj"), rule("w4a16", 128))
    refused(
        directory,
        name,
        "k_proj is in 16 bits, .*q_proj is w4a16 with group size 128: serving stacks run the two",
    )
    directory = native(make_model(name="b"), rule("w4a16", 64, match="up_proj"), rule("w4a16", 128))
    refused(
        directory,
        name,
        "up_proj is w4a16 with group size 64, .*gate_proj is w4a16 with group size 128",
    )


def test_an_export_is_not_exported_again(make_model: MakeModel, tmp_path: Path) -> None:
    exported = export(native(make_model(), rule("w4a16", 32)), "gptq", tmp_path / "gptq").directory
    refused(
        exported,
        "compressed-tensors",
        "is quantized by 'gptq', not by qtool: .*from the native checkpoint",
    )


@pytest.mark.parametrize(("scheme", "name"), [("w4a16", "compressed-tensors"), ("w4a16", "gptq"),
                                             ("w4a8-lqq", "compressed-tensors-w8a8")])  # fmt: skip
def test_shards_that_differ_in_our_layout_alone_agree(
    scheme: str, name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """One kv head of 48 rows: no tile of the recipe's layout, so k and v are stored row-major and q
    is not.
    """
    source = make_model(
        dtype=torch.float16, head_dim=48, num_attention_heads=8, num_key_value_heads=1
    )
    ours = quantize(Checkpoint(source), recipes.load(scheme), tmp_path / "native")
    rules = Checkpoint(ours).config["quantization_config"]["rules"]
    assert len({rule["layout"] for rule in rules}) == 2
    done = export(ours, name, tmp_path / "out")
    assert set(done.errors.values()) == {0.0}
    if name != "gptq":
        config = json.loads((done.directory / "config.json").read_text())["quantization_config"]
        assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]


def test_one_group_size_for_all_or_a_format_that_mixes(
    make_model: MakeModel, tmp_path: Path
) -> None:
    rules = rule("w4a16", 32, match="down_proj"), rule("w4a16", "channel", match="o_proj")
    directory = native(make_model(), *rules, rule("w4a16", 128))
    refused(
        directory,
        "gptq",
        "one scheme and group size for the whole model, .*mixes w4a16 128, w4a16 32, w4a16 channel",
    )
    assert set(export(directory, "compressed-tensors", tmp_path / "out").errors.values()) == {0.0}


def test_layers_in_16_bit(make_model: MakeModel, tmp_path: Path) -> None:
    directory = native(make_model(), rule(None, match="layers.0.mlp.down_proj"), rule("w4a16", 128))
    out = export(directory, "gptq", tmp_path / "gptq").directory
    dynamic = json.loads((out / "config.json").read_text())["quantization_config"]["dynamic"]
    (pattern,) = dynamic
    assert re.match(pattern.removeprefix("-:"), "model.layers.0.mlp.down_proj")
    assert not re.match(pattern.removeprefix("-:"), "model.layers.0.mlp.down_proj2")
    out = export(directory, "awq", tmp_path / "awq").directory
    skipped = json.loads((out / "config.json").read_text())["quantization_config"][
        "modules_to_not_convert"
    ]
    assert skipped == ["lm_head", "model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize(
    ("scheme", "size", "name"),
    [("w4a16", 128, "marlin"), ("w4a16", None, "qqq"), ("w4a8-qoq-g128", 128, "qserve")],
)
def test_formats_without_an_ignore_list_refuse_layers_in_16_bit(
    scheme: str, size: int | None, name: str, make_model: MakeModel
) -> None:
    directory = native(make_model(), rule(None, match="layers.1.mlp.down_proj"), rule(scheme, size))
    refused(directory, name, f"layers.1.mlp.down_proj is in 16 bits: {name} has no ignore list")


def test_nothing_quantized(make_model: MakeModel) -> None:
    refused(native(make_model(), rule(None)), "gptq", "no linear of the checkpoint is quantized")


def test_unknown_format_and_plain_model(make_model: MakeModel) -> None:
    refused(native(make_model(), rule("w4a16", 128)), "gptqq", "did you mean gptq")
    refused(make_model(name="plain"), "gptq", "not quantized")


def test_scales_that_fp16_cannot_hold(make_model: MakeModel) -> None:
    """bf16 reaches further down than fp16: a scale that would become zero is refused, nothing is
    left behind.
    """
    from safetensors.torch import load_file, save_file

    source = make_model(dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][:, :] *= 1e-9
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    directory, out = native(source, rule("w4a16", 128)), source.with_name("out")
    with pytest.raises(CheckFailed, match=r"up_proj: scales: \d+ are too small for float16"):
        export(directory, "marlin", out)
    assert not out.exists() and not out.with_name("out.partial").exists()
    assert export(directory, "gptq", source.with_name("gptq")).errors  # keeps bf16


def test_a_linear_is_unpacked_once(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, unpacked = native(make_model(), rule("w4a16", 128)), list[QuantLinear]()
    unpack = QuantLinear.unpack
    monkeypatch.setattr(
        QuantLinear, "unpack", lambda linear: unpacked.append(linear) or unpack(linear)
    )
    assert len(export(directory, "gptq", directory.with_name("out")).errors) == len(unpacked) > 0


@pytest.mark.parametrize("end", [KeyboardInterrupt, NoSpace("no space left")])
def test_a_killed_export_continues(
    end: Any, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = native(make_model(num_hidden_layers=3), rule("w4a16", 128))
    whole = export(directory, "gptq", tmp_path / "whole")
    target, calls, shapes = type(EXPORT_FORMATS["gptq"]), list[Any](), list[Any]()
    convert = target.tensors

    def killed(self: Any, linear_format: Any, codes: torch.Tensor, params: Any) -> Any:
        (shapes if codes.is_meta else calls).append(tuple(codes.shape))
        if len(calls) == 16 and not codes.is_meta:
            raise end
        return convert(self, linear_format, codes, params)

    monkeypatch.setattr(target, "tensors", killed)
    with pytest.raises((KeyboardInterrupt, NoSpace)):
        export(directory, "gptq", tmp_path / "cut")
    assert sorted(shapes) == sorted(set(calls))  # asked once, not for each linear
    assert not (tmp_path / "cut").exists()
    assert (tmp_path / "cut.partial/model-00002-of-00005.safetensors").exists()
    done = export(directory, "gptq", tmp_path / "cut")
    assert len(calls) == 16 + 7  # the last block alone is converted again
    assert done.errors == whole.errors
    for path in whole.directory.iterdir():
        assert (tmp_path / "cut" / path.name).read_bytes() == path.read_bytes()
    assert export(directory, "gptq", tmp_path / "cut").errors == whole.errors  # done already


def test_an_export_of_another_qtool_is_not_taken_for_this_ones(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, out = native(make_model(), rule("w4a16", 32)), tmp_path / "out"
    assert export(ours, "gptq", out).directory == export(ours, "gptq", out).directory == out
    monkeypatch.setattr(qtool, "__version__", "0.0.1")
    with pytest.raises(QtoolError, match="exists already"):
        export(ours, "gptq", out)


@pytest.mark.parametrize(
    ("scheme", "size", "takes", "refuses"),
    [
        ("w4a8-qoq-g128", 128, "compressed-tensors-w8a8", "qserve"),
        ("w4a8-lqq", 64, "compressed-tensors-w8a8", None),
        ("w4a8-qoq", "channel", "awq", None),
        ("w4a16", "channel", "gptq", None),
        ("w4a16", 128, None, "gptq"),
    ],
)
def test_reordered_inputs(
    scheme: str,
    size: Any,
    takes: str | None,
    refuses: str | None,
    make_model: MakeModel,
    tmp_path: Path,
) -> None:
    """One scale a channel: columns go back to the model's order. Groups would be torn apart."""
    source = make_model(dtype=torch.bfloat16, num_key_value_heads=4)
    recipe = recipe_of([rule(scheme, size)], transforms=[{"reorder": {"groups": ["norm"]}}])
    tokens = torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(0)).split(2)
    directory = quantize(
        Checkpoint(source), recipe, tmp_path / "native", calibration=Calibration(tokens)
    )
    permutation = Checkpoint(directory).read("model.layers.0.self_attn.q_proj.permutation")
    assert not torch.equal(permutation, torch.arange(128, dtype=torch.int32))
    if takes:
        assert set(export(directory, takes, tmp_path / "out").errors.values()) == {0.0}
    if refuses:
        refused(
            directory,
            refuses,
            "q_proj: its input channels are reordered and its groups follow that order",
        )


def test_kv_scales(make_model: MakeModel, tmp_path: Path) -> None:
    """kv8's maxima become fp8 scales of a tensor where the format has them; else the export says
    they are gone.
    """
    from safetensors.torch import load_file, save_file

    directory = native(make_model(), rule("w4a16", 128))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["kv"] = "kv8"
    (directory / "config.json").write_text(json.dumps(config))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    for block in range(2):
        shard = directory / index["weight_map"][f"model.layers.{block}.input_layernorm.weight"]
        scales = {f"model.layers.{block}.self_attn.{x}_scale": torch.rand(2, 32) for x in "kv"}
        save_file(load_file(shard) | scales, shard, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(scales, shard.name)
    (directory / "qtool.json").unlink()  # whose hashes are those of the shards before
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    ct = export(directory, "compressed-tensors", tmp_path / "ct")
    ours, theirs = Checkpoint(directory), Checkpoint(ct.directory)
    for name in (f"model.layers.{block}.self_attn.{x}_scale" for block in range(2) for x in "kv"):
        assert theirs.read(name).shape == (1,)
        assert float(theirs.read(name)) == pytest.approx(float(ours.read(name).max()) * 127 / 448)
    assert theirs.config["quantization_config"]["kv_cache_scheme"]["type"] == "float"
    assert "one scale for all keys" in ct.notes[-1]
    gptq = export(directory, "gptq", tmp_path / "gptq")
    assert not any(name.endswith("k_scale") for name in Checkpoint(gptq.directory).entries)
    assert "kv8 left out" in gptq.notes[-1]


def test_falcon_leaves_kv_scales_out(make_model: MakeModel, tmp_path: Path) -> None:
    """vLLM's Falcon looks each name of the file up among its own, and has none for them."""
    source = Checkpoint(make_model("falcon", dtype=torch.float16))
    recipe = recipe_of([rule("w4a16", 128)], kv="kv8")
    tokens = (torch.arange(128).view(2, 64) % 320).split(1)
    ours = quantize(source, recipe, tmp_path / "native", calibration=Calibration(tokens))
    assert any(name.endswith("k_scale") for name in Checkpoint(ours).entries)
    done = export(ours, "compressed-tensors", tmp_path / "out")
    theirs = Checkpoint(done.directory)
    assert not any(name.endswith("_scale") and "weight" not in name for name in theirs.entries)
    assert theirs.config["quantization_config"]["kv_cache_scheme"] is None
    assert "kv8 left out" in done.notes[0]


def test_every_format_is_described() -> None:
    for name, target in EXPORT_FORMATS.items():
        assert target.name == name
        assert 20 < len(target.about) < 120
        assert "DIR" in target.next_step


def test_quantize_with_format(make_model: MakeModel, tmp_path: Path) -> None:
    """Refused before quantizing; else both directories are there and named."""
    from click.testing import CliRunner

    from qtool.cli import cli

    source, out = make_model(dtype=torch.bfloat16), tmp_path / "my q"
    arguments = ["quantize", str(source), "--out", str(out)]
    result = CliRunner().invoke(cli, [*arguments, "--scheme", "w4a8-lqq", "--format", "gptq"])
    assert isinstance(result.exception, QtoolError) and "compressed-tensors-w8a8" in str(
        result.exception
    )
    assert not out.exists() and not out.with_name("my q.partial").exists()
    result = CliRunner().invoke(cli, [*arguments, "--scheme", "w4a16", "--format", "gptq"])
    assert result.exit_code == 0, result.output
    made, following, path, summary, served = result.stdout.splitlines()
    assert made.startswith(f"{out}: ") and following == f"next: qtool verify '{out}'"
    assert path == f"{out}-gptq" and served == f"next: vllm serve '{path}'"
    exported = Checkpoint(tmp_path / "my q-gptq")
    size = re.escape(bytes_text(exported.nbytes))
    assert re.fullmatch(
        rf"gptq: 14 of 14 linears exact; {size}, 1\.0\d times the native checkpoint", summary
    )
    assert exported.config["quantization_config"]["quant_method"] == "gptq"


def test_a_directory_that_an_export_would_have_is_seen_before_the_work(
    make_model: MakeModel, tmp_path: Path
) -> None:
    (tmp_path / "out-gptq").mkdir()
    (tmp_path / "out-gptq" / "letter.txt").write_text("kept")
    with pytest.raises(QtoolError, match="out-gptq exists already"):
        qtool.quantize(make_model(), "w4a16", out=tmp_path / "out", export_format="gptq")
    assert {path.name for path in tmp_path.glob("out*")} == {"out-gptq"}
