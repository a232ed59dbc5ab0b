"""Paged caches: the references are the dense ones under any table; on a GPU, if any, the kernels
are the references.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_append_paged import kv_append_paged
from qtool.kernels.attention.kv_attention import KvAttention
from qtool.kernels.attention.kv_attention_paged import kv_attention_paged
from qtool.kernels.attention.kv_gather import kv_gather
from qtool.kernels.attention.kv_plan import MOST_SPLITS, Plan
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import PagedCache, head_bytes
from qtool.schemes.kv import KV4, KV8, static_scale
from tests.kernels.test_kv_attention import random

HEADS, LENGTHS = 2, (130, 1, 64, 0)
WIDTH = 3  #: pages a sequence
NAMES = ("kv4", "kv8")


class Filled:
    """A paged cache of sequences of LENGTHS, under a random table, filled by appends in chunks."""

    def __init__(
        self, name: str, dim: int = 32, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS
    ) -> None:
        bits, self.heads = int(name[2:]), heads
        order = torch.randperm(4 * WIDTH + 3, generator=torch.Generator().manual_seed(3))
        self.table = order[: 4 * WIDTH].view(4, WIDTH).int()
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        capacity = WIDTH * TOKENS
        self.x = [(random(4, capacity, heads, dim, seed=s) * 2 + s).to(dtype) for s in (1, 2)]
        self.scales: list[Tensor | None] = [None, None]
        self.offset: Tensor | None = None
        self.importance: Tensor | None = None
        if bits == 8:
            self.scales = [static_scale(x.float().abs().amax((0, 1))) for x in self.x]
        else:
            self.offset = random(heads, dim, seed=5) + 1
            self.importance = torch.exp(random(heads, dim, seed=6))
        shape = (len(order), heads, head_bytes(bits, dim))
        self.pages = torch.full(shape, 77, dtype=torch.uint8)
        self.slots = self.table.long().repeat_interleave(TOKENS, 1) * TOKENS + torch.arange(
            capacity
        ).remainder(TOKENS)  # [4, capacity]
        self.slots[torch.arange(capacity) >= self.lengths[:, None]] = -1

    def to(self, device: str) -> "Filled":
        moved = object.__new__(Filled)
        for name, value in vars(self).items():
            at = [v if v is None else v.to(device) for v in value] if type(value) is list else value
            setattr(moved, name, at.to(device) if isinstance(at, Tensor) else at)
        return moved

    def append(self, first: int, last: int) -> None:
        new = [x[:, first:last].flatten(0, 1) for x in self.x]
        slots = self.slots[:, first:last].flatten()
        kv_append_paged(*new, self.pages, slots, *self.scales, self.offset, self.importance)

    def fill(self) -> "Filled":
        for first, last in ((0, 5), (5, 64), (64, WIDTH * TOKENS)):
            self.append(first, last)
        return self

    def call(self, query: Tensor, **changes: Any) -> dict[str, Any]:
        given = {
            "query": query,
            "pages": self.pages,
            "table": self.table,
            "lengths": self.lengths,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
            "k_offset": self.offset,
            "out": torch.full_like(query.contiguous(), 7),
            "tokens": WIDTH * TOKENS,
            "scaling": query.shape[2] ** -0.5,
            "softcap": 0.0,
            "window": 0,
        }
        return given | changes

    def attended(self, query: Tensor, **changes: Any) -> Tensor:
        call = self.call(query, **changes)
        kv_attention_paged(**call)
        return call["out"]

    def dense(self) -> list[dict[str, Tensor]]:
        """The scheme's own tensors of all tokens, ``[4, H, capacity, ...]``."""
        keys, values = (x.transpose(1, 2) for x in self.x)
        if self.scales[0] is not None and self.scales[1] is not None:
            each = zip(self.scales, (keys, values), strict=True)
            return [KV8(s).quantize(x) for s, x in each if s is not None]
        return [KV4(self.offset, self.importance).quantize(keys), KV4().quantize(values)]


def test_a_page_has_the_size_of_the_engines() -> None:
    for dim in (64, 96, 128, 256):
        assert head_bytes(4, dim) == TOKENS * 2 * (dim // 2 + 4)
        assert head_bytes(8, dim) == TOKENS * 2 * (dim + 4)
        assert head_bytes(4, dim) % 128 == head_bytes(8, dim) % 128 == 0


@pytest.mark.parametrize("name", NAMES)
def test_appends_write_the_schemes_bytes_to_their_slots_and_no_others(name: str) -> None:
    filled = Filled(name).fill()
    cache = PagedCache("test", filled.pages, 32, *filled.scales)
    for found, expected in zip(cache.dense(filled.table), filled.dense(), strict=True):
        for row, length in enumerate(LENGTHS):
            for part, tensor in expected.items():
                stored = getattr(found, part)
                assert torch.equal(stored[row, :, :length], tensor[row, :, :length])
            assert (found.codes[row, :, length:] == 77).all()
    used = torch.cat([row[: -(-n // TOKENS)] for row, n in zip(filled.table, LENGTHS, strict=True)])
    others = torch.ones(len(filled.pages), dtype=torch.bool)
    others[used.long()] = False
    assert (filled.pages[others] == 77).all()


@pytest.mark.parametrize("name, softcap", list(product(NAMES, (0.0, 5.0))))
def test_attention_is_the_dense_one_over_the_tables_tokens(name: str, softcap: float) -> None:
    filled = Filled(name).fill()
    query = random(4, 6, 32, seed=9).to(torch.bfloat16)
    quantized = filled.dense()
    dense = KvAttention(
        query.unsqueeze(2),
        *(quantized[0].get(p, filled.scales[0] if p == "scale" else None) for p in PARTS),
        *(quantized[1].get(p, filled.scales[1] if p == "scale" else None) for p in PARTS),
        *(WIDTH * TOKENS, filled.lengths, None, 32**-0.5, softcap, 40),
    )
    expected = dense.attended(filled.offset)[:, :, 0]
    out = filled.attended(query, softcap=softcap, window=40)
    torch.testing.assert_close(out, expected)
    assert not out[3].any()
    if not softcap and filled.offset is not None:  # it moves all scores of a query alike
        torch.testing.assert_close(
            filled.attended(query, window=40, k_offset=None), out, rtol=2e-2, atol=2e-2
        )


PARTS = ("codes", "scale", "zero")


@pytest.mark.parametrize("name, window, back", list(product(NAMES, (0, 30), (False, True))))
def test_gather_gives_cached_tokens_then_new_ones(name: str, window: int, back: bool) -> None:
    filled = Filled(name).fill()
    keys, values, given, expected = gathered(filled, window, back)
    kv_gather(**given)
    for found, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(found[: given["total"]], wanted)
        assert (found[given["total"] :] == 7).all()


def gathered(
    filled: Filled, window: int, back: bool
) -> tuple[Tensor, Tensor, dict[str, Any], list[Tensor]]:
    """Arguments of a gather of 9, 1, 64 and 0 new tokens, and what it must give."""
    queries = torch.tensor([9, 1, 64, 0], dtype=torch.int32)
    lengths = filled.lengths.cpu()
    before = lengths - queries
    zero = torch.zeros(1, dtype=torch.int32)
    starts, fresh = (torch.cat([zero, n.cumsum(0, dtype=torch.int32)]) for n in (lengths, queries))
    new = [
        torch.cat([x[b, s:e] for b, (s, e) in enumerate(zip(before, lengths, strict=True))])
        for x in filled.x
    ]
    cached, total, device = lengths if back else before, int(starts[-1]), filled.pages.device
    room = [torch.full((total + 5, *new[0].shape[1:]), 7).to(new[0]) for _ in new]
    cpu = filled.to("cpu")
    quantizers = [KV4(cpu.offset), KV4()]
    if cpu.scales[0] is not None and cpu.scales[1] is not None:
        quantizers = [KV8(scale) for scale in cpu.scales]
    expected = []
    for quantizer, packed, x, n in zip(quantizers, cpu.dense(), cpu.x, new, strict=True):
        read, rows = quantizer.dequantize(packed, x.dtype).transpose(1, 2), []
        for b in range(4):
            row = torch.cat([read[b, : cached[b]], n.cpu()[fresh[b] : fresh[b + 1]]])
            row = row[: lengths[b]]
            if window:
                row[: max(0, int(before[b]) - window + 1)] = 0
            rows.append(row)
        expected.append(torch.cat(rows))
    given = {
        "key": new[0],
        "value": new[1],
        "pages": filled.pages,
        "table": filled.table,
        "k_scale": filled.scales[0],
        "v_scale": filled.scales[1],
        "k_offset": filled.offset,
        "starts": starts.to(device),
        "fresh": fresh.to(device),
        "cached": cached.to(device, torch.int32),
        "keys": room[0],
        "values": room[1],
        "total": total,
        "window": window,
    }
    return room[0], room[1], given, expected


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    filled = Filled(name).fill()
    query = random(4, 6, 32, seed=9).to(torch.bfloat16)
    torch.library.opcheck(kv_attention_paged, (), filled.call(query))
    new = [x[:, :2].flatten(0, 1) for x in filled.x]
    slots = torch.arange(8)
    append = (*new, filled.pages, slots, *filled.scales, filled.offset, filled.importance)
    torch.library.opcheck(kv_append_paged, append)
    torch.library.opcheck(kv_gather, (), gathered(filled, 0, False)[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 6, 32)}, "query is torch.float32"),
        ({"table": torch.zeros(4, 3)}, "table is torch.float32"),
        ({"table": torch.zeros(3, 3, dtype=torch.int32)}, r"expected int32 \[4, M\]"),
        ({"tokens": 193}, "193 tokens; the table has room for 192"),
        ({"pages": torch.zeros(15, 2, 65, dtype=torch.uint8)}, r"expected uint8 \[N, 2, 2560\]"),
        ({"lengths": torch.zeros(4)}, "lengths is torch.float32"),
        ({"k_offset": torch.zeros(2, 16)}, "k_offset has shape"),
        ({"window": -1}, "kv_attention_paged: softcap 0.0 and window -1"),
    ],
)
def test_refuses_in_one_sentence(change: dict[str, Any], message: str) -> None:
    filled = Filled("kv4")
    call = filled.call(torch.zeros(4, 6, 32, dtype=torch.bfloat16)) | change
    with pytest.raises(QtoolError, match=message) as error:
        kv_attention_paged(**call)
    assert "\n" not in str(error.value)


def test_keys_and_values_must_be_alike() -> None:
    filled = Filled("kv4").fill()
    gather = gathered(filled, 0, False)[2]
    key, value = (x[:, :2].flatten(0, 1) for x in filled.x)
    slots = torch.arange(len(key))
    constants = (*filled.scales, filled.offset, filled.importance)
    for other in (value[:1], value[:, :1], value.half()):
        with pytest.raises(QtoolError, match=r"kv_append_paged: key is .*both must be alike"):
            kv_append_paged(key, other, filled.pages, slots, *constants)
        with pytest.raises(QtoolError, match=r"kv_gather: key is .*both must be alike"):
            kv_gather(**gather | {"value": other})


@pytest.mark.parametrize("negative", ["total", "window"])
def test_gathering_refuses_numbers_below_0(negative: str) -> None:
    gather = gathered(Filled("kv4").fill(), 0, False)[2]
    with pytest.raises(QtoolError, match=rf"kv_gather: .*{negative} -1.*; expected 0 or more"):
        kv_gather(**gather | {negative: -1})


def test_gathering_refuses_numbers_in_place_of_tensors() -> None:
    gather = gathered(Filled("kv4").fill(), 0, False)[2]
    for name in (name for name, value in gather.items() if isinstance(value, Tensor)):
        with pytest.raises(QtoolError, match=r"^kv_gather: "):
            kv_gather(**gather | {name: gather[name].flatten()[0]})


def test_a_long_sequence_among_short_ones_is_split() -> None:
    for bits, group in product((4, 8), (1, 8, 16)):
        plan = Plan.of(bits, 128, group)
        assert plan.paged_splits(512, 4096, 132) == (plan.splits(512, 4096, 132),) * 2
        fewest, splits = plan.paged_splits(512, 1 << 17, 132)
        assert fewest == plan.splits(512, 1 << 17, 132) < splits <= MOST_SPLITS


VARIANTS = list(product(NAMES, (64, 96, 128, 256), (1, 4, 16), (torch.bfloat16, torch.float16)))


@pytest.mark.cuda
@pytest.mark.parametrize("name, dim, group, dtype", VARIANTS)
def test_the_kernels_are_the_references(
    name: str, dim: int, group: int, dtype: torch.dtype
) -> None:
    here = Filled(name, dim, dtype)
    there = here.to("cuda").fill()
    here.fill()
    assert torch.equal(there.pages.cpu(), here.pages)
    query = random(4, 2 * HEADS * group, dim, seed=9).to(dtype)[:, : HEADS * group]
    for softcap, window in ((0.0, 0), (0.0, 30), (5.0, 0)):
        given = {"softcap": softcap, "window": window}
        out = there.attended(query.cuda(), **given)
        wanted = here.attended(query, **given)
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-2, atol=1e-2)
    for window, back in product((0, 30), (False, True)):
        keys, values, call, expected = gathered(there, window, back)
        kv_gather(**call)
        for found, wanted in zip((keys, values), expected, strict=True):
            assert torch.equal(found[: call["total"]].cpu(), wanted)
            assert (found[call["total"] :] == 7).all()


@pytest.mark.cuda
@pytest.mark.parametrize("name, window", list(product(NAMES, (0, 9000))))
def test_more_room_changes_nothing(name: str, window: int) -> None:
    """However many splits a capacity asks for, sequences of all lengths are attended to."""
    bits, lengths = int(name[2:]), (40000, 17, 8192, 0, 1000)
    width = lengths[0] // TOKENS
    pages = torch.randint(0, 256, (5 * width, 1, head_bytes(bits, 128)), dtype=torch.uint8).cuda()
    scales: list[Tensor | None] = [None, None]
    if bits == 8:
        scales = [torch.rand(1, 128, device="cuda") * 0.02 for _ in range(2)]
    else:
        for part in PagedCache("test", pages, 128, None, None).parts():
            part["scale"].uniform_(0.1, 0.2)
            part["zero"].uniform_(6.0, 9.0)
    table = torch.randperm(5 * width, device="cuda").view(5, width).int()
    query = random(5, 4, 128).bfloat16().cuda()
    call = (torch.tensor(lengths, dtype=torch.int32, device="cuda"), *scales, None)
    cache = PagedCache("test", pages, 128, *scales)
    for row, length in enumerate(lengths):
        keys, values = (part.dequantize() for part in cache.dense(table[row, None]))
        first = max(0, length - window) if window else 0
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[row, None, :, None].float(),
            keys[:, :, first:length].expand(-1, 4, -1, -1),
            values[:, :, first:length].expand(-1, 4, -1, -1),
        )[0, :, 0]
        for tokens in (lengths[0], 1 << 20):
            wide = torch.nn.functional.pad(table, (0, tokens // TOKENS - width))
            out = torch.full_like(query, 7)
            kv_attention_paged(query, pages, wide, *call, out, tokens, 128**-0.5, 0.0, window)
            wanted = expected.nan_to_num(0.0).bfloat16()
            torch.testing.assert_close(out[row], wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_follows_the_table_and_the_lengths(name: str) -> None:
    there = Filled(name, 128).to("cuda").fill()
    query = random(4, 8, 128, seed=9).bfloat16().cuda()
    call = there.call(query)
    kv_attention_paged(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_attention_paged(**call)
    for order, lengths in (([0, 1, 2, 3], LENGTHS), ([2, 0, 3, 1], (64, 100, 0, 1))):
        table = there.table[order].clone()
        new = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        expected = there.attended(query, table=table, lengths=new)
        there.table.copy_(table)
        there.lengths.copy_(new)
        call["out"].fill_(7)
        graph.replay()
        assert torch.equal(call["out"], expected)
