"""AWQ: codes, zero points and scales of every 4-bit scheme; only a product of scales is rounded."""

import json

import pytest
import torch

from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, stored


@pytest.mark.parametrize(
    ("scheme", "size"),
    [("w4a16", 32), ("w4a16", 128), ("w4a16", "channel"), ("w4a8-qoq", "channel"), ("w4a4", 64)],
)
def test_exact(scheme: str, size: int | str, native: Native, exported: Export) -> None:
    ours = native(scheme, size)
    done = exported(ours, "awq")
    assert set(done.errors.values()) == {0.0}
    for linear, module in linears(ours).items():
        codes, params = module.unpack()
        found, scales, zeros = readers.awq(stored(done.directory, linear))
        assert torch.equal(found, codes.long() + (8 if codes.dtype == torch.int8 else 0))
        if scheme == "w4a8-qoq":
            assert torch.equal(zeros[:, 0], params["zero"].long())
            assert torch.equal(scales[:, 0], params["s1"].float())
        else:
            assert torch.equal(scales, params["scale"].float())
            assert bool((zeros == 8).all())


def test_two_levels_become_one_scale(native: Native, exported: Export) -> None:
    ours = native("w4a8-qoq-g128", 128)
    done = exported(ours, "awq")
    assert 0 < max(done.errors.values()) < 2**-11
    for linear, module in linears(ours).items():
        codes, params = module.unpack()
        found, scales, zeros = readers.awq(stored(done.directory, linear))
        assert torch.equal(found, codes.long())
        assert torch.equal(zeros, params["zero"].long())
        assert torch.equal(scales, (params["s1"].float()[:, None] * params["s2"]).half().float())
        weight = (found - readers.per_input(zeros, codes.shape[1])) * readers.per_input(
            scales, codes.shape[1]
        )
        error = (weight - module.dequantize()).norm() / module.dequantize().norm()
        assert float(error) == pytest.approx(done.errors[linear], rel=1e-3)


def test_what_changes_is_said(native: Native, exported: Export) -> None:
    assert exported(native("w4a16", 32), "awq").notes == []
    (note,) = exported(native("w4a8-qoq", "channel"), "awq").notes
    assert note == "activations of w4a8-qoq: int8 per token here, 16-bit there"


def test_config(native: Native, exported: Export) -> None:
    directory = exported(native("w4a16", 128), "awq").directory
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }


def test_the_word_of_the_description() -> None:
    from qtool.exchange.formats.awq import WORDS

    assert WORDS.pack(torch.arange(8, dtype=torch.uint8)[:, None])["qweight"][0, 0] == 0x75316420
