"""GPTQ v1 and v2: the codes and scales of the file are ours, element by element."""

import json

import pytest
import torch

from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, stored

SIZES = [32, 64, 128, "channel"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "offset", "word"), [("gptq", 1, 0x77777777), ("gptq-v2", 0, 0x88888888 - (1 << 32))]
)
def test_codes_and_scales_are_ours(
    name: str, offset: int, word: int, size: int | str, native: Native, exported: Export
) -> None:
    ours = native("w4a16", size)
    done = exported(ours, name)
    assert set(done.errors.values()) == {0.0}
    assert done.notes == []
    for linear, module in linears(ours).items():
        tensors = stored(done.directory, linear)
        codes, params = module.unpack()
        found, scales, zeros = readers.gptq(tensors, offset)
        assert torch.equal(found, codes.long())
        assert torch.equal(scales, params["scale"].float())
        assert torch.equal(zeros, torch.full_like(zeros, 8))
        assert torch.equal(tensors["qzeros"], torch.full_like(tensors["qzeros"], word))
        groups = params["scale"].shape[1]
        assert torch.equal(
            tensors["g_idx"].long(), torch.arange(codes.shape[1]) // (codes.shape[1] // groups)
        )
        assert {key: (t.dtype, *t.shape) for key, t in tensors.items()} == {
            "qweight": (torch.int32, codes.shape[1] // 8, codes.shape[0]),
            "qzeros": (torch.int32, groups, codes.shape[0] // 8),
            "scales": (torch.float16, groups, codes.shape[0]),
            "g_idx": (torch.int32, codes.shape[1]),
        }


def test_config(native: Native, exported: Export) -> None:
    directory = exported(native("w4a16", "channel"), "gptq").directory
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    expected = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }
    assert expected.items() <= config.items()
    assert json.loads((directory / "quantize_config.json").read_text()) == config


@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)]
)
def test_scales_keep_sixteen_bits(
    dtype: torch.dtype, scales: torch.dtype, native: Native, exported: Export
) -> None:
    """bf16 scales stay exact; a float32 model's are rounded to fp16, and the export says so."""
    done = exported(native("w4a16", 128, dtype=dtype), "gptq")
    assert stored(done.directory, "model.layers.0.mlp.up_proj")["scales"].dtype == scales
    errors = done.errors.values()
    assert max(errors) == 0 if dtype == torch.bfloat16 else 0 < min(errors) < max(errors) < 2**-11
    assert ("largest relative error" in str(done)) == (dtype == torch.float32)


def test_the_words_of_the_description() -> None:
    from qtool.exchange.formats.gptq import WORDS

    codes = torch.arange(8, dtype=torch.uint8).expand(8, 8)
    assert WORDS.pack(codes)["qweight"][0, 0] == 0x76543210
