"""Grouped GEMMs, routing and weighted sums: their references beside loops over experts."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from qtool.errors import QtoolError
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.dtypes import FLOATS
from qtool.kernels.experts import w4a16
from qtool.kernels.experts.combine import combine_experts
from qtool.kernels.experts.gather import gather_expert_rows
from qtool.kernels.experts.grouped import TABLE_BYTES
from qtool.kernels.experts.quantize import quantize_expert_rows
from qtool.kernels.experts.route import RouteExperts, route_experts
from qtool.kernels.experts.tiles import TABLE, TABLE_HALF, TABLE_HALF_SUMS, choose_experts
from qtool.kernels.experts.w4a8 import operand
from qtool.kernels.experts.w8a8 import OPERAND
from qtool.kernels.hopper.gemm import most_token_tiles, staging_bytes
from qtool.kernels.hopper.tiles import RESIDENT, Tile
from qtool.kernels.hopper.w4a16 import EXACT_TOKENS
from qtool.layouts.marlin import MARLIN
from qtool.schemes.arithmetic.online_hadamard import rotate
from tests.kernels.experts_cases import COUNTS, SCHEMES, by_experts, exact, grouped


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_equals_the_dense_op_expert_by_expert(
    scheme: str, group: int | None, counts: list[int]
) -> None:
    op, stacked = grouped(scheme, group, counts)
    rows = sum(counts)
    for dtype in (exact(scheme), torch.bfloat16):
        given = stacked | {"out_dtype": dtype}
        y = op(**given)
        assert y.shape == (rows + 2, 192) and not y[rows:].any()
        assert torch.equal(y[:rows], by_experts(scheme, given, counts))


def test_the_tiles_of_some_rows_lie_where_the_kernel_copies_them() -> None:
    """As ``Source`` of csrc/hopper/weights_marlin.cuh counts them through a stack's matrices."""
    experts, parts, part, k, group = 2, 2, 128, 256, 64
    codes = torch.randint(0, 16, (experts * parts * part, k), dtype=torch.uint8)
    scales = torch.rand(len(codes), k // group)
    matrices = [MARLIN.pack(each)["qweight"] for each in codes.split(part)]
    boxed = torch.stack(matrices).flatten(0, 1)  # [E J K/16, 2 N/J]
    groups = torch.stack([MARLIN.pack_group(each) for each in scales.split(part)]).flatten()
    for row, step in product(range(0, len(codes), 64), range(2)):
        column, inputs = row % part, row // part * (k // 16) + step * 8
        box = boxed[inputs : inputs + 8, 2 * column : 2 * column + 128]
        own = codes[row : row + 64, 128 * step : 128 * step + 128]
        assert torch.equal(box, MARLIN.pack(own.contiguous())["qweight"])
        for j in range(128 // group):
            first = (inputs * 16 // group + j) * part + column
            own = scales[row : row + 64, 2 * step : 2 * step + 2].contiguous()
            assert torch.equal(groups[first : first + 64], MARLIN.pack_group(own)[j])


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_opcheck(scheme: str, group: int | None) -> None:
    for counts in ([3, 0, 2], [0]):
        op, given = grouped(scheme, group, counts, beyond=0)
        torch.library.opcheck(op, tuple(given[name] for name in names_of(op)))


def names_of(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


@given(
    tokens=st.integers(0, 40),
    top=st.integers(1, 8),
    experts=st.integers(1, 9),
    mapped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_are_the_pairs_in_order_of_their_experts(
    tokens: int, top: int, experts: int, mapped: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 2, (tokens, top), generator=generator).int()
    chosen, here = ids, experts
    if mapped:  # every other expert is another rank's
        here = experts // 2 + 1
        expert_map = torch.where(torch.arange(experts) % 2 == 0, torch.arange(experts) // 2, -1)
        chosen = torch.tensor([[of(expert_map, e) for e in row] for row in ids.tolist()])
        chosen = chosen.view(tokens, top).int()
    offsets, place = route_experts(ids, expert_map.int() if mapped else None, here)
    pairs = [(t, j) for t in range(tokens) for j in range(top)]
    rows = [(t, j) for e in range(here) for t, j in pairs if chosen[t, j] == e]
    assert [int(place[t, j]) for t, j in rows] == list(range(len(rows)))
    assert (place >= 0).sum() == len(rows) and (place >= -1).all()
    assert offsets.diff().tolist() == [int((chosen == e).sum()) for e in range(here)]
    assert offsets[0] == 0 and offsets.dtype == place.dtype == torch.int32


def of(expert_map: Tensor, expert: int) -> int:
    return int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1


def test_a_row_is_quantized_as_its_token_is() -> None:
    x = torch.randn(5, 64).bfloat16()
    place = torch.tensor([[1, 2], [-1, -1], [-1, 3], [-1, -1], [0, -1]]).int()
    offsets = torch.tensor([0, 1, 1, 4]).int()
    found = quantize_expert_rows(x, place, offsets, "none")
    assert all(len(each) == 10 for each in found)
    expected = quantize_activation(x[[4, 0, 0, 2]], None, None, "none", 0.0)
    assert all(torch.equal(a[:4], b) for a, b in zip(found, expected, strict=True))
    gate, up = (x := torch.randn(5, 128).bfloat16()).chunk(2, -1)
    for rotated in (False, True):
        found = quantize_expert_rows(x, None, offsets, "silu-up", rotated)
        y = (silu(gate) * up)[:4]
        given = rotate(y) if rotated else y
        expected = quantize_activation(given, None, None, "none", 0.0)
        assert all(torch.equal(a[:4], b) for a, b in zip(found, expected, strict=True))
        for fusion, rows in (("none", place), ("silu-up", None)):
            torch.library.opcheck(quantize_expert_rows, (x, rows, offsets, fusion, rotated))


def test_a_row_is_its_token() -> None:
    x = torch.randn(5, 64).bfloat16()
    place = torch.tensor([[1, 2], [-1, -1], [-1, 3], [-1, -1], [0, -1]]).int()
    offsets = torch.tensor([0, 1, 1, 4]).int()
    found = gather_expert_rows(x, place, offsets, "none")
    assert found.shape == (10, 64) and torch.equal(found[:4], x[[4, 0, 0, 2]])
    gate, up = (x := torch.randn(5, 128).bfloat16()).chunk(2, -1)
    for rotated in (False, True):
        found = gather_expert_rows(x, None, offsets, "silu-up", rotated)
        y = silu(gate) * up
        expected = rotate(y).bfloat16() if rotated else y
        assert found.shape == (5, 64) and torch.equal(found[:4], expected[:4])
        for fusion, rows in (("none", place), ("silu-up", None)):
            torch.library.opcheck(gather_expert_rows, (x, rows, offsets, fusion, rotated))


def test_the_weighted_sum_goes_by_the_tokens_own_order() -> None:
    z, weights = torch.randn(7, 16).bfloat16(), torch.rand(3, 2)
    place = torch.tensor([[6, 0], [-1, 3], [-1, -1]]).int()
    y = combine_experts(z, place, weights)
    first = z[6].float() * weights[0, 0] + z[0].float() * weights[0, 1]
    expected = torch.stack([first, z[3].float() * weights[1, 1], torch.zeros(16)]).bfloat16()
    assert torch.equal(y, expected)
    torch.library.opcheck(combine_experts, (z, place, weights))
    torch.library.opcheck(route_experts, (place, torch.tensor([1, -1, 0]).int(), 2))
    assert combine_experts(z, place[:0], weights[:0]).shape == (0, 16)


@given(
    rows=st.integers(1, 70000),
    experts=st.integers(1, 512),
    n=st.integers(1, 500),
    k=st.integers(1, 300),
    stage_bytes=st.sampled_from((8192, 8704, 16384)),
)
def test_the_choice_of_tiles_is_in_the_table_and_fits(
    rows: int, experts: int, n: int, k: int, stage_bytes: int
) -> None:
    tile = choose_experts(rows, experts, 64 * n, 64 * k, stage_bytes)
    assert tile in TABLE
    require_tile(tile, rows, experts, 64 * n, 64 * k)
    for each in (operand("w4a8-lqq", 32), OPERAND):
        beside = staging_bytes(tile, torch.float32) + TABLE_BYTES
        assert tile.stages(each.stage(tile), beside) >= 3


def require_tile(tile: Tile, rows: int, experts: int, n: int, k: int) -> None:
    """No more blocks share a sum than it has steps, or than run at once."""
    assert tile.split <= -(-k // 128)
    if tile.split > 2:  # these clusters have one tile each
        tiles = most_token_tiles(rows, experts, tile.tokens) * -(-n // 128)
        assert tiles <= RESIDENT.get(tile.split, 132 // tile.split) * tile.blocks_per_sm


@given(
    rows=st.integers(1, 70000),
    experts=st.integers(1, 512),
    n=st.integers(1, 500),
    k=st.integers(1, 150),
    group=st.sampled_from((0, 32, 64, 128)),
    dtypes=st.sampled_from(tuple(product((torch.float16, torch.bfloat16), FLOATS))),
)
def test_the_choice_for_16_bit_tokens_is_in_its_table_and_fits(
    rows: int, experts: int, n: int, k: int, group: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    tile = w4a16.choose(rows, experts, 64 * n, 128 * k, group, *dtypes)
    assert tile in (TABLE_HALF_SUMS if group and dtypes[0] != dtypes[1] else TABLE_HALF)
    require_tile(tile, rows, experts, 64 * n, 128 * k)
    beside = staging_bytes(tile, torch.float32) + TABLE_BYTES
    assert tile.stages(w4a16.operand(group, *dtypes, tile.tokens).stage(tile), beside) >= 3
    if rows <= EXACT_TOKENS and k > 1:  # of few tokens no weight is rounded
        assert tile.tokens <= EXACT_TOKENS


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9), tokens=st.integers(1, 20))
def test_no_distribution_needs_more_tiles(counts: list[int], tokens: int) -> None:
    rows = sum(counts)
    most = most_token_tiles(rows, len(counts), tokens)
    assert sum(-(-count // tokens) for count in counts) <= most
    begun = min(rows, len(counts))
    worst = [rows - begun + 1] + [1] * (begun - 1) if rows else []
    assert sum(-(-count // tokens) for count in worst) == most


def test_refuses_in_one_sentence() -> None:
    op, given = grouped("w4a8-lqq", 64, [3, 2])
    with pytest.raises(QtoolError, match=r"^w4a8_experts_gemm: sx has shape \(6,\); expected"):
        op(**given | {"sx": given["sx"][:-1]})
    with pytest.raises(QtoolError, match="expected a contiguous stack of 2 experts"):
        op(**given | {"s1": given["s1"][:1]})
    with pytest.raises(QtoolError, match=r"expert_offsets is torch\.int64; expected torch\.int32"):
        op(**given | {"expert_offsets": given["expert_offsets"].long()})
    op, given = grouped("w8a8", None, [3, 2])
    with pytest.raises(QtoolError, match=r"^w8a8_experts_gemm: 0 experts; accepted: 1 to 512"):
        op(**given | {"expert_offsets": given["expert_offsets"][:1]})
    op, given = grouped("w4a16", 128, [3, 2])
    with pytest.raises(QtoolError, match=r"^w4a16_experts_gemm: x is torch\.float32; expected"):
        op(**given | {"x": given["x"].float()})
    with pytest.raises(QtoolError, match=r"scale \(2, 1, 2, 64\); expected \[E, J, K/16, 2 N/J\]"):
        op(**given | {"scale": given["scale"][:, :1].contiguous()})
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(QtoolError, match="513 experts; accepted: 1 to 512"):
        RouteExperts(ids, None, 513).require()
    with pytest.raises(QtoolError, match=r"^route_experts: ids has shape \(2,\)"):
        route_experts(ids[0], None, 2)
    with pytest.raises(QtoolError, match=r"^route_experts: expert_map has shape \(0,\); expected"):
        route_experts(ids, ids[:0, 0], 2)
    with pytest.raises(QtoolError, match=r"expert_offsets has shape \(0,\); expected \(2,\)"):
        gather_expert_rows(torch.zeros(2, 16), None, ids[:0, 0], "none")
    with pytest.raises(QtoolError, match="N = 12; expected a multiple of 8"):
        combine_experts(torch.zeros(2, 12), ids, torch.ones(2, 2))
    with pytest.raises(QtoolError, match=r"^quantize_expert_rows: K = 12; expected a multiple"):
        quantize_expert_rows(torch.zeros(2, 12), None, ids[0], "none")
    with pytest.raises(QtoolError, match=r"K = 72; expected a multiple of 64 up to"):
        quantize_expert_rows(torch.zeros(2, 72), None, ids[0], "none", True)
    with pytest.raises(QtoolError, match=r"^gather_expert_rows: place has shape \(2,\); expected"):
        gather_expert_rows(torch.zeros(2, 16), ids[0], ids[0], "none")
    with pytest.raises(QtoolError, match="unknown fusion 'rms-norm'"):
        quantize_expert_rows(torch.zeros(2, 16), None, ids[0], "rms-norm")


def test_refuses_numbers_in_place_of_tensors() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)
    rows = dict(x=torch.zeros(2, 16), place=ids, expert_offsets=ids[0], fusion="none")
    calls = [grouped(scheme, group, [3, 2]) for scheme, group in SCHEMES]
    for op, call in (*calls, (quantize_expert_rows, rows), (gather_expert_rows, rows)):
        op(**call)
        for name, value in call.items():
            if isinstance(value, Tensor):
                with pytest.raises(QtoolError, match=rf"^{op._schema.name[7:]}: "):
                    op(**call | {name: value.flatten()[0]})
