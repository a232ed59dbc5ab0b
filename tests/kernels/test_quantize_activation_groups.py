"""Activation quantization by groups on a CPU, fused and not."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from qtool.errors import QtoolError
from qtool.kernels.activation.arrangement import arrange
from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
from qtool.kernels.activation.quantize_packed_groups import pack_tokens, quantize_packed_groups
from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.arithmetic.online_hadamard import rotate
from qtool.schemes.fmpq import Fmpq


def plain(x: Tensor, group: int | None, arrangement: str = "none") -> tuple[Tensor, Tensor]:
    return quantize_activation_groups(x, None, None, None, "none", 0.0, group, arrangement)


@pytest.mark.parametrize("group", [32, 128, 512, None])
def test_is_the_activation_of_w4a4(group: int | None) -> None:
    x = torch.randn(6, 1024)
    x[2] = 0
    codes, scale = plain(x, group)
    want_codes, want_scale = Activation(4, group).quantize(x)
    assert torch.equal(codes, want_codes) and torch.equal(scale[:, :6].t(), want_scale)
    assert (
        scale.shape == (1024 // (group or 1024), 8)
        and (scale[:, 6:] == 1).all()
        and (scale[:, 2] == 1).all()
    )
    assert torch.equal(plain(x, group, "apex4")[0], arrange(codes, "apex4"))


def test_follows_the_block_map_and_the_permutation() -> None:
    x, order = torch.randn(3, 256), torch.randperm(256)
    blocks = torch.tensor([1, 0], dtype=torch.uint8)
    codes, scale = quantize_activation_groups(
        x, order.int(), None, blocks, "none", 0.0, 128, "none"
    )
    want_codes, want_scale = Fmpq().quantize_activation(x[:, order], {"eight_bit": blocks})
    assert torch.equal(codes, want_codes) and torch.equal(scale[:, :3].t(), want_scale)
    assert codes[:, :128].abs().max() == 127 and codes[:, 128:].abs().max() == 7


def test_fused_is_the_unfused_model() -> None:
    x, norm = torch.randn(3, 128).bfloat16(), torch.rand(128).bfloat16()
    rms = torch.nn.functional.rms_norm(x.float(), (128,), eps=1e-5).bfloat16() * norm
    fused = quantize_activation_groups(x, None, norm, None, "rms-norm", 1e-5, 32, "none")
    assert (fused[0].int() - plain(rms, 32)[0].int()).abs().max() <= 1
    gate, up = x.chunk(2, -1)
    fused = quantize_activation_groups(x, None, None, None, "silu-up", 0.0, 32, "none")
    assert torch.equal(fused[0], plain(silu(gate) * up, 32)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_gathered_is_rotated_without_rounding(dtype: torch.dtype) -> None:
    x, order = torch.randn(3, 256).to(dtype), torch.randperm(256)
    given = (x, order.int(), None, None, "none", 0.0, 64, "apex4")
    unpacked = quantize_activation_groups(*given, True)
    assert all(map(torch.equal, unpacked, plain(rotate(x[:, order]), 64, "apex4")))
    packed, scale = quantize_packed_groups(*given, True)
    assert torch.equal(packed, pack_tokens(unpacked[0], None)) and torch.equal(scale, unpacked[1])
    with pytest.raises(QtoolError, match="K = 96; expected a multiple of 64"):
        quantize_activation_groups(x[:, :96], None, None, None, "none", 0.0, 32, "none", True)


@pytest.mark.parametrize(
    ("fusion", "norm", "order", "arrangement", "rotated"),
    [
        ("none", False, False, "none", False),
        ("rms-norm", True, False, "apex4", False),
        ("silu-up", False, True, "w4ax-interleaved", True),
    ],
)
def test_opcheck(fusion: str, norm: bool, order: bool, arrangement: str, rotated: bool) -> None:
    k = 128 if fusion == "silu-up" else 256
    arguments = (
        torch.randn(3, 256),
        torch.randperm(k).int() if order else None,
        torch.ones(k) if norm else None,
        torch.ones(k // 128, dtype=torch.uint8) if order else None,
        fusion,
        1e-6,
        128,
        arrangement,
        rotated,
    )
    torch.library.opcheck(quantize_activation_groups, arguments)


def test_refuses_in_one_sentence() -> None:
    x = torch.randn(2, 256)
    with pytest.raises(QtoolError, match="did you mean apex4"):
        plain(x, 128, "apex")
    with pytest.raises(QtoolError, match="no group size 48"):
        plain(x, 48)
    with pytest.raises(QtoolError, match="K = 256; expected a multiple of 512"):
        plain(x, 512)
    with pytest.raises(QtoolError, match=r"eight_bit has shape \(3,\); expected \(2,\)"):
        quantize_activation_groups(x, None, None, torch.zeros(3).byte(), "none", 0.0, 128, "none")
