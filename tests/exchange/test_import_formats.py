"""A model that is quantized already, or is no safetensors at all, is told how to go on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qtool import recipes
from qtool.errors import QtoolError
from qtool.exchange.import_ import import_checkpoint
from qtool.exchange.import_formats import import_format_of
from qtool.io.model_directory import DEMO, directory_of
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from tests.conftest import MakeModel
from tests.io.published import CASES

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    "quantization, said",
    [
        (GPTQ, r"quantized already .*'gptq'.*, or repack this GPTQ \(gptq\) with `qtool import`"),
        (GPTQ | {"bits": 8}, "already .* GPTQ with bits=8 cannot be imported.* dequantize this"),
        ({"quant_method": "hqq"}, "already .*'hqq' cannot be imported.* the original model"),
        ({"quant_method": "qtool", "scheme": "w8a8"}, "a qtool checkpoint already, in w8a8: "),
        ({"quant_method": "modelopt"}, "'modelopt' cannot be imported; .* dequantize this one"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}},
            },
            "int-quantized with 8-bit int weights cannot be imported",
        ),
    ],
)
def test_a_quantized_model_is_not_quantized_again(quantization: Any, said: str) -> None:
    config = {"model_type": "llama", "quantization_config": quantization}
    with pytest.raises(QtoolError, match=said):
        Job.of(config, recipes.load("w4a16"))
    if quantization is not GPTQ:
        with pytest.raises(QtoolError):
            import_format_of(config)


def test_a_model_that_is_dequantized_is_not_imported(tmp_path: Path) -> None:
    published, _ = CASES["fp8"].make(tmp_path)
    with pytest.raises(QtoolError, match=r"weights are FP8 .* pass the model to qtool quantize"):
        import_checkpoint(Checkpoint(published), tmp_path / "out")


def test_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for call in (lambda: directory_of(str(file)), lambda: Checkpoint(tmp_path)):
        with pytest.raises(QtoolError, match=r"model\.gguf is GGUF, .*gguf_file='model\.gguf'"):
            call()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(QtoolError, match=r"model\.gguf is GGUF"):
        Checkpoint(tmp_path)


def test_the_command_that_converts_a_pickle_does(make_model: MakeModel) -> None:
    model = make_model("llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, model / file)
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(QtoolError, match=r"pytorch_model\.bin is a pickle") as refused:
        Checkpoint(model)
    exec(str(refused.value).split('python -c "')[1].removesuffix('"'), {})
    converted = Checkpoint(model.with_name(f"{model.name}-safetensors"))
    assert converted.entries.keys() == tensors.keys()
    assert all(torch.equal(converted.read(name), tensor) for name, tensor in tensors.items())
    assert "tokenizer.json" in converted.side_files()


def test_of_a_hub_model_the_command_names_its_id(tmp_path: Path) -> None:
    """Only safetensors were downloaded: its pickle is not there."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    said = r"from_pretrained\('owner/name'\).*save_pretrained\('name-safetensors'\)"
    with pytest.raises(QtoolError, match=said):
        Checkpoint(snapshot)
