"""A model published in FP8, MXFP4 or NVFP4 is quantized to the bytes that its plain twin gives."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qtool
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from tests.io.published import CASES, FP8
from tests.models import proof

#: what may differ: where the result came from, and what follows from it
PROVENANCE = {"source", "job"}
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def content(directory: Path) -> dict[str, object]:
    """All files of a result; of qtool.json what is not provenance."""
    found: dict[str, object] = {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name != "README.md"
    }
    record = json.loads((directory / "qtool.json").read_text())
    return found | {"qtool.json": {k: v for k, v in record.items() if k not in PROVENANCE}}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_the_plain_model(case: str, tmp_path: Path) -> None:
    published, plain = CASES[case].make(tmp_path)
    results = [tmp_path / "of-published", tmp_path / "of-plain"]
    for source, out in zip((published, plain), results, strict=True):
        proof.quantize(source, out, "fast")
    assert content(results[0]) == content(results[1])
    record = json.loads((results[0] / "qtool.json").read_text())
    assert record["source"]["dequantized from"] == Checkpoint(published).published.about  # type: ignore[union-attr]
    assert not [row for row in qtool.verify(results[0]) if row.problem]
    with torch.no_grad():
        same = [proof.logits(qtool.load(source)) for source in (published, plain)]
    assert torch.equal(*same)


def test_it_generates_as_the_plain_model(tmp_path: Path) -> None:
    """As its generation_config.json says."""
    for source in CASES["fp8"].make(tmp_path):
        told = {"eos_token_id": [7, 8], "do_sample": True, "temperature": 0.5}
        (source / "generation_config.json").write_text(json.dumps(told))
        model = qtool.load(source)
        assert {name: getattr(model.generation_config, name) for name in told} == told
        assert model.name_or_path == model.config.name_or_path == str(source)


@pytest.mark.parametrize("case", ["fp8-edges", "mxfp4-gpt-oss"])
def test_a_calibrated_run_is_resumed_to_the_same_bytes(case: str, tmp_path: Path) -> None:
    published, plain = CASES[case].make(tmp_path)
    results = [tmp_path / "of-published", tmp_path / "of-plain"]
    for source, out in zip((published, plain), results, strict=True):
        proof.quantize(source, out, "paper")
    assert content(results[0]) == content(results[1])
    proof.resumes(published, tmp_path / "cut", results[0])


def test_the_plan_is_that_of_the_plain_model_and_says_so(tmp_path: Path) -> None:
    published, plain = CASES["fp8"].make(tmp_path)
    planned, other = (qtool.plan(source, "w4a16") for source in (published, plain))
    assert planned.shard_bytes == other.shard_bytes
    assert planned.source_bytes == other.source_bytes
    assert planned.job.notes == (
        "the weights are FP8 in blocks of 128 x 128, dequantized when they are read",
    )
    done = qtool.quantize(published, "w4a16", out=tmp_path / "out")
    assert done.source_bytes < planned.source_bytes
    assert done.nbytes == planned.output_bytes


def test_unknown_weights_are_kept_dequantized(tmp_path: Path) -> None:
    """As those of a layer that predicts further tokens (DeepSeek-V3)."""
    published, _ = CASES["fp8"].make(tmp_path)
    extra, scale = "model.layers.2.eh_proj.weight", torch.rand(1, 2)
    codes = torch.randn(128, 256).to(torch.float8_e4m3fn)
    edit(published, {extra: codes, f"{extra}_scale_inv": scale})
    with pytest.raises(QtoolError, match="pass --keep-unknown"):
        qtool.quantize(published, "w4a16", out=tmp_path / "out")
    qtool.quantize(published, "w4a16", out=tmp_path / "out", keep_unknown=True)
    expected = codes.float() * scale.repeat_interleave(128, 1)
    found = Checkpoint(tmp_path / "out")
    assert torch.equal(found.read(extra), expected.bfloat16())
    assert f"{extra}_scale_inv" not in found


def edit(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Change or remove (None) tensors of a checkpoint of two files; it becomes one of one."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    tensors |= {name: tensor for name, tensor in change.items() if tensor is not None}
    kept = {name: tensor for name, tensor in tensors.items() if change.get(name, 0) is not None}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "change, said",
    [
        ({f"{WEIGHT}_scale_inv": None}, "q_proj.weight: its codes have no scales"),
        ({f"{WEIGHT}_scale_inv": torch.ones(3, 1)}, r"scales \[3, 1\] found; .* block of 128 x 12"),
        ({WEIGHT: None}, "q_proj.weight_scale_inv: these scales belong to no weight in FP8"),
        (
            {WEIGHT: torch.ones(128, 128)},
            "q_proj.weight_scale_inv: these scales belong to no weight",
        ),
        ({f"{WEIGHT}_scale_inv": torch.full((1, 1), torch.nan)}, "q_proj.weight: holds .* NaN"),
        ({f"{WEIGHT}_scale_inv": torch.ones(1, 1).int()}, "its scales are torch.int32"),
        ({f"{UP}_scale_inv": torch.ones(1, 2)}, r"scales \[1, 2\] found"),  # [2, 1] turned
    ],
)
def test_codes_and_scales_that_do_not_fit(
    change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    published, _ = CASES["fp8"].make(tmp_path)
    edit(published, change)
    with pytest.raises(QtoolError, match=said):
        qtool.quantize(published, "w4a16", out=tmp_path / "out", keep_unknown=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"global_scale": None}, "weight_packed: its codes have no .*q_proj.weight_global_scale"),
        ({"global_scale": torch.ones(8)}, r"a global scale torch.float32 \[8\] found; one float"),
        ({"global_scale": torch.ones(128, 1)}, r"a global scale torch.float32 \[128, 1\] found"),
        ({"scale": torch.ones(128, 8, dtype=torch.uint8)}, "a block of 1 x 32 .* expected"),
        ({"": torch.ones(128, 128)}, "both .*q_proj.weight and its codes .* are there"),
    ],
)
def test_codes_and_global_scales_that_do_not_fit(
    change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    published, _ = CASES["ct-nvfp4"].make(tmp_path)
    edit(published, {f"{WEIGHT}_{end}".rstrip("_"): tensor for end, tensor in change.items()})
    with pytest.raises(QtoolError, match=said):
        Checkpoint(published)


@pytest.mark.parametrize(
    "quantization, said",
    [
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": 3}},
            "quantization_config is damaged",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}},
                "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}},
            },
            "a transform_config",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "g": {"weights": {"type": "float", "strategy": "group", "group_size": 0}}
                },
            },
            "group_size is .* expected",
        ),
    ],
)
def test_settings_that_are_not_known(
    quantization: dict[str, object], said: str, tmp_path: Path
) -> None:
    published, _ = CASES["fp8"].make(tmp_path)
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization})
    )
    for call in (Checkpoint, lambda model: qtool.plan(model, "w4a16")):
        with pytest.raises(QtoolError, match=said):
            call(published)  # type: ignore[operator]
