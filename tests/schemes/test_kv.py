"""KV-cache quantizers: half a step, packed bytes, constants, appended tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import QtoolError
from qtool.schemes.kv import (
    KV4,
    KV8,
    KV_QUANTIZERS,
    KV4Channel,
    halving_sum,
    pack_nibbles,
    quantize_asymmetric,
    refit,
    rounded_on,
    static_scale,
    unpack_nibbles,
)


def heads(
    seed: int = 0, tokens: int = 128, shift: float = 0.0, spread: float = 1.0
) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    channel_shift = shift * torch.randn(1, 2, 1, 64, generator=g)
    return torch.randn(2, 2, tokens, 64, generator=g) * spread + channel_shift


@settings(max_examples=25)
@given(st.integers(0, 99), st.floats(0, 20), st.integers(-12, 10))
def test_4_bit_values_are_within_about_a_step(seed: int, shift: float, exponent: int) -> None:
    x = heads(seed, shift=shift) * 2.0**exponent
    for kv in (KV4(), KV4Channel(32)):
        packed = kv.quantize(x)
        error = (kv.dequantize(packed) - x).abs()
        per_value = (
            packed["scale"].float().repeat_interleave(x.shape[2] // packed["scale"].shape[2], 2)
        )
        # the zero point's own fp16 rounding moves the grid by up to 2**-11 of |z| steps
        zero = (
            packed["zero"].float().abs().repeat_interleave(x.shape[2] // packed["zero"].shape[2], 2)
        )
        # a twentieth of the range is clamped, the fits trade ends for the many: 1.12 at most in a
        # thousand tries
        assert (error <= per_value * (1.25 + zero * 2**-10)).all()


def squared_error(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> torch.Tensor:
    return ((codes.float() - zero.float()) * scale.float() - x).square().sum(-1)


@pytest.mark.parametrize("channels", (64, 80, 128))
def test_the_line_through_the_codes_beats_the_whole_range(channels: int) -> None:
    x = torch.randn(4000, channels, generator=torch.Generator().manual_seed(0))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, zero = (high - low) / 15, -low / (high - low) * 15
    whole = squared_error(x, rounded_on(x, scale, zero), scale, zero).sum()
    assert squared_error(x, *quantize_asymmetric(x)).sum() < 0.93 * whole


def test_a_refit_never_costs_and_leaves_residuals_that_a_line_cannot_explain() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    scale = torch.full((500, 1), 0.5, dtype=torch.float16)
    zero = torch.full((500, 1), 6.5, dtype=torch.float16)
    codes = rounded_on(x, scale, zero)
    better = refit(x, codes, scale, zero)
    assert (squared_error(x, *better) <= squared_error(x, codes, scale, zero)).all()
    # on a line that least squares would choose, codes kept, nothing of the residual goes along with
    # them
    q = codes.double()
    design = torch.stack([q, torch.ones_like(q)], -1)
    slope, start = torch.linalg.lstsq(design, x.double()[..., None]).solution[:, :, 0].T
    nearest = (q * slope[:, None] + start[:, None] - x).square().sum(-1)
    assert (squared_error(x, *better) < 1.001 * nearest + 1e-3).all()
    still = refit(x, codes, (slope[:, None]).half(), (-start / slope)[:, None].half())
    assert (squared_error(x, *still) <= 1.001 * nearest + 1e-3).all()


@pytest.mark.parametrize("channels", (1, 6, 16, 80, 256))
def test_lanes_are_summed_in_a_warps_order(channels: int) -> None:
    x = torch.randn(3, channels, generator=torch.Generator().manual_seed(0)) * 1e3
    expected = []
    for row in torch.nn.functional.pad(x, (0, 256 - channels)).view(3, 32, 8).tolist():
        a = [torch.tensor(lane) for lane in row]
        lanes = [((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])) for v in a]
        for step in (16, 8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i ^ step] for i in range(32)]
        expected.append(lanes[0])
    assert torch.equal(halving_sum(x)[:, 0], torch.stack(expected))


def test_static_8_bit_values_are_within_half_a_step_of_the_calibrated_range() -> None:
    x = heads(shift=3)
    kv = KV8(static_scale(x.abs().amax((0, 2))))
    packed = kv.quantize(x)
    assert packed["codes"].dtype == torch.int8
    assert ((kv.dequantize(packed) - x).abs() <= 0.501 * kv.scale[:, None]).all()
    # a channel that calibration never saw has steps of 1
    silent = KV8(static_scale(torch.zeros(2, 64)))
    assert torch.equal(silent.dequantize(silent.quantize(x.round())), x.round().clamp(-127, 127))
    beyond = kv.dequantize(kv.quantize(2 * x))
    assert (beyond.abs() <= 127.01 * kv.scale[:, None]).all()


@pytest.mark.parametrize("value", [0.0, 5.0, -5.0, 1e-3, 6e4, 1e-7])
def test_constant_tokens_keep_their_value(value: float) -> None:
    x = torch.full((1, 1, 64, 64), value)
    for kv in (KV4(), KV4Channel(64)):
        back = kv.dequantize(kv.quantize(x))
        assert torch.isfinite(back).all()
        assert ((back - x).abs() <= 1e-3 * abs(value) + 3e-8).all()


def test_packed_storage_is_what_it_says() -> None:
    x = heads()
    for kv, bits in (
        (KV4(), 4 + 32 / 64),
        (KV4Channel(64), 4 + 32 / 64),
        (KV8(torch.ones(2, 64)), 8),
    ):
        stored = 8 * sum(t.numel() * t.element_size() for t in kv.quantize(x).values()) / x.numel()
        assert stored == bits
    assert KV4().quantize(x)["codes"].shape == (2, 2, 128, 32)


def test_nibbles() -> None:
    codes = torch.randint(0, 16, (3, 5, 8), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert torch.equal(unpack_nibbles(packed), codes)
    assert pack_nibbles(torch.tensor([[0x3, 0xA]], dtype=torch.uint8)).item() == 0xA3
    with pytest.raises(QtoolError, match="head dimension of 5 is odd"):
        pack_nibbles(torch.zeros(2, 5, dtype=torch.uint8))


def test_tokens_are_appended_by_concatenation() -> None:
    x = heads()
    for kv in (KV4(), KV4Channel(32), KV8(torch.full((2, 64), 4 / 127))):
        whole = kv.quantize(x)
        parts = [kv.quantize(x[:, :, :64]), kv.quantize(x[:, :, 64:])]
        assert all(
            torch.equal(torch.cat([p[name] for p in parts], 2), whole[name]) for name in whole
        )


def test_channel_groups_beat_tokens_where_a_channel_is_an_outlier() -> None:
    x = heads(shift=8, spread=0.5)
    errors = [(kv.dequantize(kv.quantize(x)) - x).norm() for kv in (KV4Channel(64), KV4())]
    assert errors[0] < 0.5 * errors[1]


def test_dtype_names_and_refusals() -> None:
    x = heads().to(torch.bfloat16)
    assert KV4().dequantize(KV4().quantize(x), torch.bfloat16).dtype == torch.bfloat16
    assert set(KV_QUANTIZERS) == {"kv8", "kv4", "kv4-channel"}
    assert KV4().quantize(x.to("meta"))["codes"].shape == (2, 2, 128, 32)
    with pytest.raises(QtoolError, match="100 tokens are not whole groups of 64"):
        KV4Channel(64).quantize(heads(tokens=100))
    with pytest.raises(QtoolError, match="NaN or Inf"):
        static_scale(torch.tensor([[float("inf")]]))


def test_an_offset_is_taken_away_before_and_added_after() -> None:
    x = (heads() * 2**10).round() / 2**10  # sums are exact: no code stands on an edge
    offset = ((x.mean((0, 2)) + 3 * torch.randn(x.shape[1], x.shape[3])) * 2**10).round() / 2**10
    centred, plain = KV4(offset), KV4()
    shift = offset[:, None]
    expected = plain.dequantize(plain.quantize(x)) + shift
    assert torch.equal(centred.dequantize(centred.quantize(x + shift)), expected)
    assert (expected - x - shift).norm() < 0.5 * (
        plain.dequantize(plain.quantize(x + shift)) - x - shift
    ).norm()


def weighed(x: torch.Tensor, importance: torch.Tensor, kv: KV4) -> torch.Tensor:
    """What the error of each token counts, ``[B, H, T]``."""
    return ((kv.dequantize(kv.quantize(x)) - x).square() * importance[:, None]).sum(-1)


def test_errors_count_by_importance() -> None:
    x = heads()
    importance = torch.exp(2 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1)))
    plain, weighing = (weighed(x, importance, KV4(importance=w)) for w in (None, importance))
    assert weighing.sum() < 0.85 * plain.sum()
    alike = KV4(importance=torch.ones(2, 64)).quantize(x)
    assert all(torch.equal(alike[name], t) for name, t in KV4().quantize(x).items())
    doubled = KV4(importance=2 * importance).quantize(x)
    assert all(
        torch.equal(doubled[name], t) for name, t in KV4(importance=importance).quantize(x).items()
    )


@pytest.mark.parametrize("weighted", (False, True))
def test_a_line_is_fitted_three_times_from_nineteen_twentieths_of_the_range(weighted: bool) -> None:
    """The kernel that appends a token does the same: another count gives other bytes."""
    x = heads(tokens=512)
    importance = torch.arange(1.0, 65) if weighted else None
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) * (0.95 / 15)).half()
    zero = (7.5 - (low + high) * 0.5 / scale.float()).half()
    lines = [(rounded_on(x, scale, zero), scale, zero)]
    for _ in range(4):
        lines.append(refit(x, *lines[-1], importance))
    found = quantize_asymmetric(x, importance)
    assert [all(map(torch.equal, found, line)) for line in lines] == [0, 0, 0, 1, 0]


def test_a_refit_lowers_what_errors_count_and_rounds_go_on() -> None:
    x = heads()[0]
    importance = torch.exp(torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1)))

    def cost(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return (((codes.float() - zero.float()) * scale.float() - x).square() * importance).sum(-1)

    scale = torch.full((2, 128, 1), 0.4, dtype=torch.float16)
    zero = torch.full((2, 128, 1), 7.5, dtype=torch.float16)
    line, costs = (rounded_on(x, scale, zero), scale, zero), []
    for _ in range(3):
        costs.append(cost(*line))
        line = refit(x, *line, importance)
        assert (cost(*line) <= costs[-1]).all()
    assert (cost(*line) < costs[1]).float().mean() > 0.3
