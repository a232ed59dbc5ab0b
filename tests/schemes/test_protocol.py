"""What every scheme promises, on ordinary and on adversarial weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool import schemes
from qtool.calibration.rounding.scales import float_scale
from qtool.errors import CheckFailed, QtoolError
from qtool.schemes import Scheme, base
from qtool.schemes.protocol import channels, require_sound
from qtool.schemes.w4a4 import Apex4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def legal_codes(scheme: Scheme, params: base.Params, where: Tensor) -> Tensor:
    """Codes ``[N, K]`` at ``where [N, K]`` (0..1) of the way from the lowest to the highest legal
    one.
    """
    grid = scheme.grid(params)
    width = (grid.high - grid.low + 1)[..., None]
    codes = grid.low[..., None] + (scheme.groups(where) * width).long().clamp(max=width - 1)
    return codes.flatten(1).to(scheme.code_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adversarial_weights(
    case: tuple[str, int | None], bad_weights: dict[str, Tensor], dtype: torch.dtype
) -> None:
    for what, weight in bad_weights.items():
        try:
            require_sound(schemes.get(*case, dtype), weight)
        except Exception as error:
            error.add_note(f"weight: {what}")
            raise


def test_a_stored_scale_keeps_fp16s_subnormals_and_is_never_zero() -> None:
    least = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
    for dtype, floor in least.items():
        scales = torch.tensor([0.0, floor / 2, floor, 3 * floor, 1.0])
        stored = base.stored_scale(scales, dtype)
        assert stored.dtype == dtype
        assert stored.double().tolist() == [floor, floor, floor, 3 * floor, 1.0]


def test_a_small_row_keeps_its_fp16_scale() -> None:
    """A row of 2**-10 has a scale of 2**-10 / 119 = 8.2e-6, a subnormal of fp16."""
    weight = torch.linspace(-1, 1, 1024).repeat(2, 1) * 2.0**-10
    scheme = schemes.get("w4a8-lqq", 64, torch.float16)
    params = scheme.fit(weight)
    error = scheme.dequantize(scheme.quantize(weight, params), params) - weight
    assert error.abs().max() < 2.0**-10 / 50


def test_ten_thousand_groups(scheme: Scheme, many_groups: Tensor) -> None:
    require_sound(scheme, many_groups)


def test_dequantize_leaves_float_codes_alone(scheme: Scheme, k: int) -> None:
    """GPTQ and distillation hold their codes in float32."""
    weight = torch.randn(4, k)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params).float()
    before = codes.clone()
    scheme.dequantize(codes, params)
    assert torch.equal(codes, before)


def test_every_code_of_the_grid_is_legal(scheme: Scheme, bad_weights: dict[str, Tensor]) -> None:
    """GPTQ and distillation choose codes that rounding to nearest would not."""
    if scheme.sparsity is None:
        for weight in bad_weights.values():
            params = scheme.fit(weight)
            for where in (
                torch.zeros_like(weight),
                torch.rand_like(weight),
                torch.ones_like(weight),
            ):
                scheme.check(legal_codes(scheme, params, where), params)


def test_a_code_beyond_the_grid_is_refused(scheme: Scheme, bad_weights: dict[str, Tensor]) -> None:
    """Though the scheme's bits hold it."""
    least = -(2 ** (scheme.code_bits - 1)) if scheme.signed else 0
    ends = ((torch.zeros, least, -1), (torch.ones, least + 2**scheme.code_bits - 1, 1))
    for weight in bad_weights.values() if scheme.sparsity is None else ():
        params = scheme.fit(weight)
        for where, end, step in ends:
            codes = legal_codes(scheme, params, where(weight.shape))
            if (narrow := codes != end).any():
                with pytest.raises(CheckFailed):
                    scheme.check(codes + step * narrow.to(codes.dtype), params)


def outer_values(scheme: Scheme, params: base.Params) -> Tensor:
    """The values ``[2, N, G]`` of the lowest and the highest code that has the scheme's bits."""
    grid, low = scheme.grid(params), -(2 ** (scheme.code_bits - 1)) if scheme.signed else 0
    codes = (low, low + 2**scheme.code_bits - 1)
    return torch.stack([grid.offset + code * grid.step for code in codes])


def float_scale_of_groups(params: base.Params) -> Tensor:
    """The float scale ``[N, G]``, or ``[N, 1]``, in whose units bounds are."""
    if sum(t.is_floating_point() for t in params.values()) > 1:
        pytest.skip("gptq and distill take no scheme of several scales")
    scale = params[float_scale(params)].float()
    return scale.view(len(scale), -1)


def test_ends_are_the_values_of_the_outer_codes_and_give_the_parameters_back(
    scheme: Scheme, bad_weights: dict[str, Tensor]
) -> None:
    for weight in bad_weights.values():
        params = scheme.fit(weight)
        if (ends := scheme.clip_bounds(params)) is None:
            zero = scheme.grid(params).offset / scheme.grid(params).step
            assert (zero == zero.flatten()[0]).all(), "a scheme with zero points has clip_bounds"
            continue
        again = scheme.with_clip_bounds(params, ends)
        torch.testing.assert_close(again, params, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            ends * float_scale_of_groups(params), outer_values(scheme, params)
        )


def test_ends_move_apart_from_each_other_and_stay_legal_wherever_they_go(
    scheme: Scheme, k: int
) -> None:
    weight = torch.randn(64, k)
    params = scheme.fit(weight)
    if (ends := scheme.clip_bounds(params)) is None:
        return
    width = ends[1] - ends[0]
    for end, direction in ((0, 1), (0, -1), (1, 1), (1, -1)):
        moved = ends.clone()
        moved[end] += direction * 0.2 * width
        now = outer_values(scheme, scheme.with_clip_bounds(params, moved))
        change = now / float_scale_of_groups(params) - ends
        change = change.mean((1, 2)) / width.mean() * direction
        # integers: not just where it was asked to be
        assert change[end] > 0.1 and change[1 - end].abs() < 0.1
    for reach in (1, 10, 1000):
        params = scheme.with_clip_bounds(params, ends + reach * width * torch.randn_like(ends))
        scheme.check(legal_codes(scheme, params, torch.rand_like(weight)), params)


@settings(max_examples=25)
@given(
    st.integers(0, 2**31),
    st.floats(-12, 12),
    st.floats(-4, 4),
    st.sampled_from(DTYPES),
    st.floats(0.3, 1),
)
def test_any_distribution(
    seed: int, exponent: float, shift: float, dtype: torch.dtype, clip: float
) -> None:
    for name, kind in schemes.SCHEMES.items():
        scheme = schemes.get(name, kind.group_sizes[0], dtype)
        random = torch.Generator().manual_seed(seed)
        weight = (torch.randn(3, channels(scheme), generator=random) + shift) * 2.0**exponent
        require_sound(scheme, weight)
        params = scheme.fit(weight, clip=clip, group_clip=clip)
        scheme.check(scheme.quantize(weight, params), params)


def test_every_legal_code_passes_check(scheme: Scheme, many_groups: Tensor) -> None:
    weight = many_groups[:256]
    params = scheme.fit(weight)
    for where in (torch.zeros_like(weight), torch.ones_like(weight), torch.rand_like(weight)):
        codes = legal_codes(scheme, params, where)
        if scheme.sparsity:
            codes[:, 0::4] = codes[:, 2::4] = 8
        scheme.check(codes, params)


def test_check_refuses_codes_beyond_the_bounds(scheme: Scheme, many_groups: Tensor) -> None:
    weight = many_groups[:256]
    params = scheme.fit(weight)
    codes, grid = scheme.quantize(weight, params), scheme.grid(params)
    for beyond in (grid.low - 1, grid.high + 1):
        group = int((beyond >= -128).flatten().nonzero()[-1])
        broken = codes.clone()
        scheme.groups(broken).view(-1, scheme.groups(codes).shape[-1])[group, 5] = beyond.flatten()[
            group
        ]
        with pytest.raises(CheckFailed):
            scheme.check(broken, params)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 1023), (1, 517)])
def test_refuses_what_is_not_finite(
    scheme: Scheme, k: int, bad: float, place: tuple[int, int]
) -> None:
    weight = torch.randn(4, k)
    weight[place] = bad
    with pytest.raises(
        QtoolError, match=f"{scheme.name}.*NaN or Inf, first in output channel {place[0]}"
    ):
        scheme.fit(weight)


def test_refuses_what_does_not_divide(scheme: Scheme) -> None:
    if scheme.group_size:
        with pytest.raises(QtoolError, match="1009 input channels are not divisible by"):
            scheme.fit(torch.randn(4, 1009))
    with pytest.raises(QtoolError, match=r"not divisible .*\(none of its sizes divides them\)"):
        scheme.fit(torch.randn(4, 0))


@pytest.mark.parametrize("name", schemes.SCHEMES)
def test_refuses_an_unsupported_group_size(name: str) -> None:
    with pytest.raises(QtoolError, match="group size 7 is not supported; accepted: "):
        schemes.get(name, 7)


def test_a_whole_channel_is_named_as_it_is_given() -> None:
    with pytest.raises(QtoolError, match="group size channel is not supported; accepted: 32, 64"):
        schemes.get("w4a8-lqq", None)


def test_unknown_name_suggests() -> None:
    with pytest.raises(QtoolError, match="did you mean w4a8-lqq"):
        schemes.get("w4a8-lq")


def test_meta_gives_the_real_shapes(scheme: Scheme, k: int) -> None:
    weight, x = torch.randn(8, k), torch.randn(3, k)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    meta = scheme.fit(weight.to("meta"))
    meta_codes = scheme.quantize(weight.to("meta"), meta)
    described = [
        {name: (t.shape, t.dtype) for name, t in found.items()} for found in (meta, params)
    ]
    assert described[0] == described[1]
    assert (meta_codes.shape, meta_codes.dtype) == (codes.shape, codes.dtype)
    assert scheme.dequantize(meta_codes, meta).shape == weight.shape
    assert scheme.matmul(x.to("meta"), meta_codes, meta).shape == (3, 8)
    assert scheme.fake_activation(x.to("meta"), meta).shape == x.shape


def test_matmul_is_the_product_of_the_quantized_operands(scheme: Scheme, k: int) -> None:
    weight, x = torch.randn(8, k), torch.randn(5, k) * 3
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    y = scheme.matmul(x, codes, params)
    exact = (
        scheme.fake_activation(x, params).double() @ scheme.dequantize(codes, params).double().t()
    )
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_weights_are_their_float32_values(
    scheme: Scheme, k: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(4, k).to(dtype)
    params, wide = scheme.fit(weight), scheme.fit(weight.float())
    assert all(torch.equal(params[name], wide[name]) for name in wide)
    assert torch.equal(scheme.quantize(weight, params), scheme.quantize(weight.float(), wide))


def test_rows_are_independent(scheme: Scheme, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, k)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    monkeypatch.setattr(base, "SLAB", 2048)
    again = scheme.fit(weight)
    assert all(torch.equal(params[name], again[name]) for name in params)
    assert torch.equal(scheme.quantize(weight, again), codes)
    row = scheme.fit(weight[5:6])
    assert torch.equal(scheme.quantize(weight[5:6], row)[0], codes[5])


def test_clip_by_number_and_by_tensor(scheme: Scheme, k: int) -> None:
    weight = torch.randn(4, k)
    groups = scheme.groups(weight).shape[1]
    number = scheme.fit(weight, clip=0.75, group_clip=0.5)
    tensor = scheme.fit(
        weight, clip=torch.full((4,), 0.75), group_clip=torch.full((4, groups), 0.5)
    )
    searched = scheme.fit_range(*scheme.range(weight), clip=0.75, group_clip=0.5)
    whole = scheme.fit(weight)
    assert all(torch.equal(number[name], tensor[name]) for name in number)
    assert all(torch.equal(number[name], searched[name]) for name in number)
    assert (scheme.grid(number).step < scheme.grid(whole).step).float().mean() > 0.9


def test_a_scheme_says_whether_a_scale_below_0_is_legal() -> None:
    signed = type("Signed", (Apex4,), {"negative_scales": True})
    weight = torch.randn(4, 256)
    for scheme, refusal in ((Apex4(), "finite and above 0"), (signed(), "finite and not 0")):
        params = scheme.fit(weight, group_clip=-1.0)
        codes = scheme.quantize(weight, params)
        if scheme.negative_scales:
            scheme.check(codes, params)
            params["scale"][1, 1] = 0
        with pytest.raises(CheckFailed, match=refusal):
            scheme.check(codes, params)
