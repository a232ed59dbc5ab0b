"""What a cache layer holds: the same bytes whatever the chunks, as many as promised, in any batch
order.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.kv_cache import QuantCacheLayer
from qtool.runtime.packed_kv import PackedTokens
from qtool.schemes.kv import KV4, KV8, KV4Channel, KVQuantizer

HEADS, DIM = 2, 16
NAMES = ("kv8", "kv4", "kv4-channel")


def tokens(
    count: int, seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(batch, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


#: a value, with a scale and a zero point of 16 bits each for every token and head, or every channel
#: of 8 tokens
BITS = {"kv8": 8, "kv4": 4 + 32 / DIM, "kv4-channel": 4 + 32 / 8}


def quantizers() -> dict[str, KVQuantizer]:
    return {
        "kv8": KV8(torch.full((HEADS, DIM), 4 / 127)),
        "kv4": KV4(),
        "kv4-channel": KV4Channel(8),
    }


@settings(max_examples=20)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_any_chunking_stores_the_same_bytes_and_reads_the_same(chunks: list[int]) -> None:
    x = tokens(sum(chunks))
    for name, quantizer in quantizers().items():
        whole, grown = PackedTokens(quantizer), PackedTokens(quantizer)
        expected = whole.append(x)
        before: dict[str, torch.Tensor] = {}
        for part in x.split(chunks, 2):
            read = grown.append(part)
            assert all(
                torch.equal(grown.packed[n][:, :, : t.shape[2]], t) for n, t in before.items()
            ), name
            before = dict(grown.packed)
        assert torch.equal(read, expected), name
        assert all(torch.equal(grown.packed[n], t) for n, t in whole.packed.items()), name
        assert grown.tokens == sum(chunks) and read.dtype == x.dtype


def test_values_on_the_grid_come_back_exactly() -> None:
    codes = torch.randint(0, 16, (2, HEADS, 16, DIM), generator=torch.Generator().manual_seed(0))
    codes[..., 0], codes[..., 1] = 0, 15  # each token spans its range
    codes[:, :, 0::8], codes[:, :, 1::8] = 0, 15  # each channel of a group of 8 tokens does
    codes[:, :, 0::8, 1], codes[:, :, 1::8, 0] = 15, 0
    per_token = codes.clone()
    for quantizer, x in ((KV4(), per_token[:, :, 2:8]), (KV4Channel(8), codes[..., 2:])):
        assert torch.equal(PackedTokens(quantizer).append(x * 0.25 - 1.0), x * 0.25 - 1.0)
    kv8 = KV8(torch.full((HEADS, DIM), 1 / 64))
    assert torch.equal(PackedTokens(kv8).append((codes * 8 - 60) / 64), (codes * 8 - 60) / 64)


def held(stored: PackedTokens) -> int:
    """Bytes that are held, room for further tokens included."""
    sizes = []

    def same(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    stored.apply(same)
    return sum(sizes)


@pytest.mark.parametrize("name", NAMES)
def test_stored_bytes_are_bits_per_value_times_values(name: str) -> None:
    layer = QuantCacheLayer(quantizers()[name], quantizers()[name], heads=HEADS)
    x = tokens(64)
    layer.update(x.transpose(1, 2).contiguous().transpose(1, 2), x)
    assert [8 * held(stored) for stored in layer.stored] == 2 * [BITS[name] * x.numel()]
    # a group of 8 stays open, in 16 bits; single tokens open new room
    layer.update(tokens(3), tokens(3))
    room = layer.stored[0].capacity
    opened = 16.0 * 3 if room == 64 else BITS[name] * (room - 64)
    bits = BITS[name] * 64 + opened
    assert [8 * held(stored) for stored in layer.stored] == 2 * [bits * x.numel() // 64]


def test_room_grows_by_a_half_in_whole_tiles_and_is_not_given_back_by_a_crop() -> None:
    stored, rooms = PackedTokens(KV4()), []
    for _ in range(200):
        stored.store(tokens(1))
        rooms.append(stored.capacity)
    assert set(rooms) == {64, 128, 192, 320} and all(room >= n for n, room in enumerate(rooms, 1))
    stored.crop(5)
    assert stored.capacity == 320 and stored.tokens == 5
    codes, scale, zero = stored.kernel_arguments()
    assert (
        codes.shape == (2, HEADS, 320, DIM // 2) and zero is not None and scale.shape == zero.shape
    )


@pytest.mark.parametrize("name", NAMES)
def test_batch_order_cropping_and_reset(name: str) -> None:
    def filled() -> QuantCacheLayer:
        layer = QuantCacheLayer(quantizers()[name], quantizers()[name], heads=HEADS)
        layer.update(x, x + 1)
        return layer

    x, more = tokens(21, batch=3), tokens(4, seed=1, batch=3)
    read = filled().stored[0].read()
    for change, expected in (
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 1])), read[[2, 0, 1]]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), read[[1]]),
        (lambda layer: layer.batch_repeat_interleave(2), read.repeat_interleave(2, 0)),
        (lambda layer: (layer.offload(), layer.prefetch()), read),
        *((lambda layer, n=n: layer.crop(-n), read[:, :, : 21 - n]) for n in (0, 1, 5, 6, 13, 20)),
    ):
        layer = filled()
        change(layer)
        assert torch.equal(layer.stored[0].read(), expected)
        assert layer.get_seq_length() == expected.shape[2]
    layer = filled()
    layer.crop(-5)
    again = layer.update(more, more)[0]
    assert torch.equal(again[:, :, :16], read[:, :, :16]) and again.shape[2] == 20
    layer.crop(-50)
    assert layer.get_seq_length() == 0 and layer.update(x, x)[0].shape == x.shape
    layer.reset()
    assert list(map(held, layer.stored)) == [0, 0]
    assert layer.get_seq_length() == 0 and not layer.is_initialized
    with pytest.raises(ValueError, match="minus the number"):
        layer.crop(3)
