"""QServe: exact in groups; per channel the file's own rounding of z * s1 is all that differs."""

import json

import pytest
import torch

from qtool.exchange.formats.qserve import QServe
from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, stored


def test_groups_are_exact(native: Native, exported: Export) -> None:
    ours = native("w4a8-qoq-g128", 128)
    done = exported(ours, "qserve")
    assert set(done.errors.values()) == {0.0}
    assert done.notes == []
    for linear, module in linears(ours).items():
        codes, _ = module.unpack()
        tensors = stored(done.directory, linear)
        found, weight = readers.qserve(tensors)
        assert torch.equal(found, codes.long())
        assert torch.equal(weight.float(), module.dequantize())
        n, k = codes.shape
        assert {key: (t.dtype, *t.shape) for key, t in tensors.items()} == {
            "qweight": (torch.int8, n, k // 2),
            "s1_scales": (torch.float16, n),
            "s2_scales": (torch.int8, k // 128, n),
            "s2_zeros": (torch.int8, k // 128, n),
        }


def test_a_zero_product_beyond_127_wraps() -> None:
    """z * s2 up to 240 is stored modulo 256, and the kernel's bytes wrap back."""
    from qtool.format import LinearFormat

    n, k = 64, 128
    kind = LinearFormat("w4a8-qoq-g128", 128, "row-major", "float16")
    codes = torch.randint(
        8, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    params = {
        "s1": torch.rand(n).half() + 0.5,
        "s2": torch.full((n, 1), 16, dtype=torch.uint8),
        "zero": torch.full((n, 1), 15, dtype=torch.uint8),
    }
    kind.scheme_object.check(codes, params)
    _, weight = readers.qserve(QServe().tensors(kind, codes, params))
    assert torch.equal(weight.float(), kind.scheme_object.dequantize(codes, params))


def test_per_channel_moves_only_the_zero(native: Native, exported: Export) -> None:
    ours = native("w4a8-qoq", "channel")
    done = exported(ours, "qserve")
    for linear, module in linears(ours).items():
        codes, params = module.unpack()
        tensors = stored(done.directory, linear)
        found, weight = readers.qserve(tensors)
        assert torch.equal(found, codes.long())
        assert torch.equal(tensors["s1_scales"], params["s1"])
        zero = params["zero"].double() * params["s1"].double()
        assert torch.equal(tensors["s1_szeros"], zero.half())
        moved = weight - module.dequantize().double()
        assert bool((moved.abs() <= zero[:, None] * 2**-11 + 1e-9).all())
        error = float(moved.norm() / module.dequantize().norm())
        assert error == pytest.approx(done.errors[linear], rel=1e-3)


def test_kv_scales_of_a_tensor() -> None:
    k, v = torch.tensor([[1.0, 2.0], [0.5, 0.1]]), torch.tensor([[3.0, 4.0], [5.0, 0.1]])
    assert QServe().kv_tensors(k, v)["kv_scale_quant_orig"].tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    ("scheme", "size", "written"), [("w4a8-qoq", "channel", -1), ("w4a8-qoq-g128", 128, 128)]
)
def test_config_and_no_pickle(
    scheme: str, size: int | str, written: int, native: Native, exported: Export
) -> None:
    directory = exported(native(scheme, size), "qserve").directory
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "qoq", "wbits": 4, "group_size": written}
    assert not list(directory.glob("*.bin"))
