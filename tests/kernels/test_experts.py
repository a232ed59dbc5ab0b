"""Grouped GEMMs, routing and weighted sums: their references beside loops over experts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from qtool.errors import QtoolError
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.experts.combine import combine_experts
from qtool.kernels.experts.grouped import TABLE_BYTES
from qtool.kernels.experts.quantize import quantize_expert_rows
from qtool.kernels.experts.route import RouteExperts, route_experts
from qtool.kernels.experts.tiles import TABLE, choose_experts
from qtool.kernels.experts.w4a8 import operand
from qtool.kernels.experts.w8a8 import OPERAND
from qtool.kernels.hopper.gemm import most_token_tiles, staging_bytes
from qtool.kernels.hopper.tiles import RESIDENT
from qtool.kernels.hopper.w4a8 import w4a8_gemm
from qtool.kernels.hopper.w8a8 import w8a8_gemm
from tests.kernels.experts_cases import COUNTS, SCHEMES, grouped


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_equals_the_dense_op_expert_by_expert(
    scheme: str, group: int | None, counts: list[int]
) -> None:
    op, stacked = grouped(scheme, group, counts)
    offsets = stacked["expert_offsets"].tolist()
    rows = ("x", "sx", "token_sum")
    for dtype in (torch.int32, torch.bfloat16):
        y = op(**stacked | {"out_dtype": dtype})
        assert y.shape == (offsets[-1] + 2, 192) and not y[offsets[-1] :].any()
        for expert, count in enumerate(counts):
            own: dict[str, Any] = {
                name: value
                if not isinstance(value, Tensor)
                else value[offsets[expert] :][:count]
                if name in rows
                else value[expert]
                for name, value in stacked.items()
                if name != "expert_offsets"
            }
            dense = w8a8_gemm if scheme == "w8a8" else w4a8_gemm
            expected = dense(**own | {"bias": None, "out_dtype": dtype})
            assert torch.equal(y[offsets[expert] :][:count], expected)


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
    found = quantize_expert_rows(x, None, offsets, "silu-up")
    gate, up = x[:4].chunk(2, -1)
    expected = quantize_activation(silu(gate) * up, None, None, "none", 0.0)
    assert all(torch.equal(a[:4], b) for a, b in zip(found, expected, strict=True))
    for fusion, rows in (("none", place), ("silu-up", None)):
        torch.library.opcheck(quantize_expert_rows, (x, rows, offsets, fusion))


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
    assert tile.split <= -(-k // 2)
    if tile.split > 2:  # these clusters have one tile each
        tiles = most_token_tiles(rows, experts, tile.tokens) * -(-n // 2)
        assert tiles <= RESIDENT.get(tile.split, 132 // tile.split) * tile.blocks_per_sm
    for each in (operand("w4a8-lqq", 32), OPERAND):
        beside = staging_bytes(tile, torch.float32) + TABLE_BYTES
        assert tile.stages(each.stage(tile), beside) >= 3


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
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(QtoolError, match="513 experts; accepted: 1 to 512"):
        RouteExperts(ids, None, 513).require()
    with pytest.raises(QtoolError, match=r"^route_experts: ids has shape \(2,\)"):
        route_experts(ids[0], None, 2)
    with pytest.raises(QtoolError, match="N = 12; expected a multiple of 8"):
        combine_experts(torch.zeros(2, 12), ids, torch.ones(2, 2))
    with pytest.raises(QtoolError, match=r"^quantize_expert_rows: K = 12; expected a multiple"):
        quantize_expert_rows(torch.zeros(2, 12), None, ids[0], "none")
    with pytest.raises(QtoolError, match="unknown fusion 'rms-norm'"):
        quantize_expert_rows(torch.zeros(2, 16), None, ids[0], "rms-norm")
