"""Every layout: unpack(pack(x)) = x, each address hit once, the parameters' round trip, and what is
refused.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool import layouts
from qtool.errors import QtoolError
from qtool.layouts import LAYOUTS, DigitLayout, Layout
from qtool.layouts.marlin_24 import METADATA, VALUES
from qtool.layouts.protocol import require_sound

DIGIT_LAYOUTS = [layout for layout in LAYOUTS.values() if isinstance(layout, DigitLayout)] + [
    VALUES,
    METADATA,
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
every_digit_layout = pytest.mark.parametrize(
    "layout", DIGIT_LAYOUTS, ids=lambda layout: layout.name
)
tiles = st.tuples(st.integers(1, 3), st.integers(1, 3))
seeds = st.integers(0, 2**31)


def random_codes(layout: Layout, n: int, k: int, seed: int, *, signed: bool) -> Tensor:
    """Legal codes of the layout's width; of a sparse one with two zeros in every four inputs."""
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (layout.bits - 1)) if signed else 0
    high = low + 2**layout.bits
    dtype = torch.int8 if signed else torch.uint8
    codes = torch.randint(low, high, (n, k), generator=generator).to(dtype)
    if layout.sparsity == (2, 4):
        ranks = torch.rand(n, k // 4, 4, generator=generator).argsort(-1).flatten(1)
        codes[ranks < 2] = 0 if signed else 8
    return codes


@every_layout
@settings(max_examples=8)
@given(tiles=tiles, seed=seeds, signed=st.booleans())
def test_unpack_inverts_pack(
    layout: Layout, tiles: tuple[int, int], seed: int, signed: bool
) -> None:
    n, k = (count * size for count, size in zip(tiles, layout.tile, strict=True))
    codes = random_codes(layout, n, k, seed, signed=signed)
    packed = layout.pack(codes)
    assert tuple(packed) == layout.tensors
    restored = layout.unpack(packed, n, k, signed=signed)
    assert restored.dtype == codes.dtype
    assert torch.equal(restored, codes)


@every_digit_layout
def test_space_around_an_order_means_nothing(layout: DigitLayout) -> None:
    codes = random_codes(layout, *layout.tile, 0, signed=False)
    spaced = replace(layout, order=f" {layout.order}  ")
    assert torch.equal(spaced.pack(codes)["qweight"], layout.pack(codes)["qweight"])


@every_layout
def test_every_layout_could_be_registered(layout: Layout) -> None:
    require_sound(layout)


@every_layout
def test_rows_come_one_after_another_where_a_layout_says_so(layout: Layout) -> None:
    n, k = layout.tile[0], 2 * layout.tile[1]
    codes = [random_codes(layout, n, k, seed, signed=False) for seed in (0, 1)]
    groups = [torch.rand(n, 3) for _ in codes]
    channels = [torch.rand(n) for _ in codes]
    whole = [*layout.pack(torch.cat(codes)).values()]
    whole += [layout.pack_group(torch.cat(groups)), layout.pack_channel(torch.cat(channels))]
    apart = list(zip(*(layout.pack(one).values() for one in codes), strict=True))
    apart += [[*map(layout.pack_group, groups)], [*map(layout.pack_channel, channels)]]
    same = all(
        torch.equal(a.flatten(), torch.cat([part.flatten() for part in b]))
        for a, b in zip(whole, apart, strict=True)
    )
    assert same or not layout.by_rows
    assert same == layout.by_rows or not isinstance(layout, DigitLayout)
    assert same or layout.name not in ("dual-mma", "row-major", "row-major-8")


@every_layout
def test_the_packed_bytes_are_the_codes_bits(layout: Layout) -> None:
    n, k = (2 * size for size in layout.tile)
    packed = layout.pack(torch.empty(n, k, dtype=torch.uint8, device="meta"))
    # 2:4 keeps half of the codes, and 4 bits of metadata a quad
    bits = 3 if layout.sparsity == (2, 4) else layout.bits
    assert sum(tensor.nbytes for tensor in packed.values()) * 8 == n * k * bits
    assert layout.unpack(packed, n, k, signed=True).shape == (n, k)


@every_digit_layout
@settings(max_examples=5)
@given(tiles=tiles)
def test_every_address_is_hit_exactly_once(layout: DigitLayout, tiles: tuple[int, int]) -> None:
    n, k = (count * size for count, size in zip(tiles, layout.tile, strict=True))
    byte, nibble = layout.address(torch.arange(n)[:, None], torch.arange(k), (n, k))
    nibbles = 8 // layout.bits
    hits = torch.bincount((byte * nibbles + nibble).flatten(), minlength=n * k)
    assert torch.equal(hits, torch.ones(n * k, dtype=torch.long))


@every_digit_layout
@settings(max_examples=5)
@given(tiles=tiles, seed=seeds)
def test_pack_puts_each_code_at_its_address(
    layout: DigitLayout, tiles: tuple[int, int], seed: int
) -> None:
    n, k = (count * size for count, size in zip(tiles, layout.tile, strict=True))
    codes = random_codes(layout, n, k, seed, signed=False)
    stored = layout.pack(codes)["qweight"].view(torch.uint8).flatten()
    byte, nibble = layout.address(torch.arange(n)[:, None], torch.arange(k), (n, k))
    assert torch.equal(stored[byte] >> 4 * nibble & (2**layout.bits - 1), codes)


@every_layout
@settings(max_examples=8)
@given(tiles=st.integers(1, 3), groups=st.integers(1, 4))
def test_parameters_return(layout: Layout, tiles: int, groups: int) -> None:
    n = tiles * layout.tile[0]
    per_group = torch.arange(n * groups, dtype=torch.float32).reshape(n, groups)
    stored = layout.pack_group(per_group)
    assert stored.is_contiguous()
    assert torch.equal(stored.flatten().sort().values, per_group.flatten())
    assert torch.equal(layout.unpack_group(stored, n), per_group)
    per_channel = torch.arange(n, dtype=torch.float32)
    assert torch.equal(layout.unpack_channel(layout.pack_channel(per_channel)), per_channel)


@every_layout
def test_strided_and_misaligned_codes_pack_the_same(layout: Layout) -> None:
    n, k = layout.tile[0], 2 * layout.tile[1]
    codes = random_codes(layout, n, k, 0, signed=False)
    expected = layout.pack(codes)
    buffer = torch.empty(n * k + 1, dtype=torch.uint8)
    misaligned = buffer[1:].view(n, k).copy_(codes)
    for same in (codes.t().contiguous().t(), misaligned):
        packed = layout.pack(same)
        assert all(torch.equal(packed[name], expected[name]) for name in expected)


@pytest.mark.cuda
@every_layout
def test_a_gpu_packs_the_same_bytes(layout: Layout) -> None:
    n, k = (3 * size for size in layout.tile)
    codes = random_codes(layout, n, k, 1, signed=True)
    packed = layout.pack(codes.cuda())
    assert all(
        torch.equal(packed[name].cpu(), stored) for name, stored in layout.pack(codes).items()
    )
    assert torch.equal(layout.unpack(packed, n, k, signed=True).cpu(), codes)


@every_layout
def test_a_weight_that_is_no_whole_number_of_tiles_is_refused(layout: Layout) -> None:
    n, k = layout.tile
    bad = [(0, k), (n, 0)] + [(n + 1, k)] * (n > 1) + [(n, k + k // 2)] * (k > 1)
    for rows, columns in bad:
        with pytest.raises(QtoolError, match=f"{layout.name}.*{rows} x {columns}.*{n} x {k}"):
            layout.pack(torch.zeros(rows, columns, dtype=torch.uint8))
        with pytest.raises(QtoolError, match="does not divide"):
            layout.unpack(
                {name: torch.zeros(8) for name in layout.tensors}, rows, columns, signed=False
            )


@every_layout
def test_what_is_no_code_matrix_is_refused(layout: Layout) -> None:
    for bad in (torch.zeros(*layout.tile), torch.zeros(1, *layout.tile, dtype=torch.uint8)):
        with pytest.raises(QtoolError, match="uint8 or int8 matrix"):
            layout.pack(bad)


@every_layout
def test_a_truncated_tensor_is_refused(layout: Layout) -> None:
    n, k = layout.tile[0] * 2, layout.tile[1] * 8
    packed = layout.pack(torch.full((n, k), 8, dtype=torch.uint8))
    for name in layout.tensors:
        with pytest.raises(QtoolError, match="bytes was found where"):
            layout.unpack(packed | {name: packed[name][:-1]}, n, k, signed=False)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(QtoolError, match="did you mean dual-mma"):
        layouts.get("dual_mma")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"order": "nt, kt"}, "order 'nt, kt': each of nt, a, kt is expected once"),
        ({"order": "nt, kt a a"}, "order"),
        ({"order": "nt, kt a h"}, "order"),
        ({"group_order": "nt, g"}, "group_order 'nt, g': each of nt, a, g"),
        ({"channel_order": "nt"}, "channel_order"),
        ({"nibble": "q"}, "nibble 'q' is no digit of size 2"),
        ({"k": "kt h:4"}, "nibble 'h'"),
        ({"n": "a:8"}, "n is 'a:8'; names of digits are expected, all but the first with a size"),
        ({"k": "kt m h:2"}, "k is 'kt m h:2'"),
        ({"n": "nt a:x"}, "n is 'nt a:x'"),
        ({"n": "nt a:1٣"}, "n is 'nt a:1٣'"),
        ({"n": ""}, "n is ''"),
        ({"k": "kt a:2 h:2"}, "a digit is twice in 'nt a:8' and 'kt a:2 h:2'"),
        (
            {"dtype": torch.int32, "n": "nt a:2"},
            "the last dimension of .* 'nt, kt a' goes by 2 bytes",
        ),
        ({"low": 2}, "low is 2 and dtype torch.uint8"),
        ({"dtype": torch.float16}, "low is 0 and dtype torch.float16"),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(wrong: dict[str, Any], said: str) -> None:
    right = {"n": "nt a:8", "k": "kt h:2", "order": "nt, kt a", "nibble": "h"}
    DigitLayout(name="mine", **right)  # type: ignore[arg-type]
    DigitLayout(name="mine", n="N  A:8", k="K\nH:2", order="N, K A", nibble="H")
    with pytest.raises(QtoolError, match=f"layout mine: {said}"):
        DigitLayout(name="mine", **right | wrong)  # type: ignore[arg-type]
