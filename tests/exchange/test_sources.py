"""A model that is quantized already, or is no safetensors at all, is told how to go on."""

from pathlib import Path
from typing import Any

import pytest

from qtool import recipes
from qtool.errors import QtoolError
from qtool.exchange.sources import describe
from qtool.io.source import Checkpoint, resolve
from qtool.pipeline.job import Job

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    "quantization, said",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8 .*blocks of 128 x 128"),
        ({"quant_method": "fp8"}, r"FP8 .*FineGrainedFP8Config\(dequantize=True\)"),
        ({"quant_method": "mxfp4"}, r"MXFP4 .*Mxfp4Config\(dequantize=True\)"),
        (GPTQ, r"quantized already .*'gptq'.*, or repack this GPTQ \(gptq\) with `qtool import`"),
        (GPTQ | {"bits": 8}, "pass the original checkpoint .GPTQ with bits=8 cannot be imported"),
        ({"quant_method": "hqq"}, "pass the original checkpoint .*'hqq' cannot be imported"),
        ({"quant_method": "qtool"}, "it is a native checkpoint already"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            r"float-quantized with 8-bit float .*CompressedTensorsConfig\(dequantize=True\)",
        ),
    ],
)
def test_a_quantized_model_is_not_quantized_again(quantization: Any, said: str) -> None:
    config = {"model_type": "llama", "quantization_config": quantization}
    with pytest.raises(QtoolError, match=said):
        Job.of(config, recipes.load("w4a16"))
    if quantization is not GPTQ:
        with pytest.raises(QtoolError):
            describe(config)


def test_what_transformers_is_said_to_dequantize_it_can() -> None:
    import transformers

    from qtool.exchange.sources import FLOATS

    for _, name in FLOATS.values():
        assert getattr(transformers, name)(dequantize=True).dequantize
    assert transformers.CompressedTensorsConfig(dequantize=True).dequantize


def test_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for call in (lambda: resolve(str(file)), lambda: Checkpoint(tmp_path)):
        with pytest.raises(QtoolError, match=r"model\.gguf is GGUF, .*gguf_file='model\.gguf'"):
            call()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(QtoolError, match=r"model\.gguf is GGUF"):
        Checkpoint(tmp_path)
