"""Attention over a packed cache and the append: the CPU reference, the kernel's index maps,
refusals, a GPU if any.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_append import kv_append
from qtool.kernels.attention.kv_attention import kv_attention
from qtool.kernels.attention.kv_plan import MOST_SPLITS, WARPS, Plan
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.schemes.kv import KV4, KV8, KVQuantizer, static_scale, unpack_nibbles

BATCH, HEADS, GROUP, CAPACITY = 2, 2, 3, 64
NAMES = ("kv4", "kv8")
Cache = dict[str, Any]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantizer(name: str, x: Tensor) -> KVQuantizer:
    return KV4() if name == "kv4" else KV8(static_scale(x.float().abs().amax((0, 2))))


def room(name: str, x: Tensor) -> Cache:
    """Arguments of an append after ``x``: tensors full of 77 with room for CAPACITY tokens."""
    heads, dim = x.shape[1], x.shape[3]
    if name == "kv8":
        codes = torch.full((x.shape[0], heads, CAPACITY, dim), 77, dtype=torch.int8)
        scale = quantizer(name, x).scale  # type: ignore[attr-defined]
        return {"codes": codes, "scale": None, "zero": None, "channel": scale}
    codes = torch.full((x.shape[0], heads, CAPACITY, dim // 2), 77, dtype=torch.uint8)
    scale, zero = (
        torch.full((x.shape[0], heads, CAPACITY, 1), 77.0, dtype=torch.float16) for _ in range(2)
    )
    return {"codes": codes, "scale": scale, "zero": zero, "channel": None}


def arguments(
    name: str, tokens: int = 50, queries: int = 1, dim: int = 32, **changes: Any
) -> dict[str, Any]:
    """The attention's arguments for random keys and values of ``tokens`` tokens."""
    parts: dict[str, Any] = {}
    for seed, prefix in enumerate(("k_", "v_"), 1):
        x = random(BATCH, HEADS, tokens, dim, seed=seed) + 1
        cache = room(name, x)
        kv_append(x, **cache, tokens=tokens, lengths=None)
        parts[f"{prefix}codes"] = cache["codes"]
        parts[f"{prefix}scale"] = cache["scale"] if name == "kv4" else cache["channel"]
        parts[f"{prefix}zero"] = cache["zero"]
    query = random(BATCH, HEADS * GROUP, queries, dim).half()
    call = {
        "query": query,
        **parts,
        "tokens": tokens,
        "lengths": None,
        "mask": None,
        "scaling": dim**-0.5,
    }
    return call | {"softcap": 0.0, "window": 0} | changes


def dequantized(call: dict[str, Any], prefix: str) -> Tensor:
    codes, scale, zero = (call[prefix + part] for part in ("codes", "scale", "zero"))
    if zero is None:
        return KV8(scale).dequantize({"codes": codes})
    return KV4().dequantize({"codes": codes, "scale": scale, "zero": zero})


def sdpa(call: dict[str, Any], mask: Tensor) -> Tensor:
    """torch's attention over what the codes stand for, ``mask [B, Tq, CAPACITY]``."""
    keys, values = dequantized(call, "k_"), dequantized(call, "v_")
    return scaled_dot_product_attention(
        call["query"].float(),
        keys,
        values,
        attn_mask=mask[:, None],
        enable_gqa=True,
        scale=call["scaling"],
    )


def causal(tokens: int, queries: int, lengths: tuple[int, ...]) -> Tensor:
    ends = torch.tensor(lengths)[:, None, None] - queries + torch.arange(queries)[:, None]
    return torch.arange(CAPACITY) <= ends


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("queries", [1, 4])
def test_reference_is_sdpa_on_the_dequantized_cache(name: str, queries: int) -> None:
    plain = arguments(name, queries=queries)
    full = causal(50, queries, (50, 50))
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    close(kv_attention(**plain).float(), sdpa(plain, full))
    ragged = plain | {"lengths": torch.tensor([50, 17], dtype=torch.int32)}
    close(kv_attention(**ragged).float(), sdpa(plain, causal(50, queries, (50, 17))))
    shown = random(BATCH, queries, 45) < 0.5
    shown[:, :, 0] = True
    masked = full & torch.nn.functional.pad(shown, (0, CAPACITY - 45))
    close(kv_attention(**plain | {"mask": shown}).float(), sdpa(plain, masked))
    near = full & ~causal(50, queries, (40, 40))
    close(kv_attention(**plain | {"window": 10}).float(), sdpa(plain, near))


@pytest.mark.parametrize("name", NAMES)
def test_a_query_that_sees_nothing_gives_zeros_and_soft_capping_bends_scores(name: str) -> None:
    call = arguments(name, queries=2)
    out = kv_attention(**call | {"lengths": torch.tensor([1, 0], dtype=torch.int32)})
    assert not out[0, :, 0].any() and out[0, :, 1].any() and not out[1].any()
    wide, narrow = (kv_attention(**call | {"softcap": cap}).float() for cap in (1e4, 1e-3))
    torch.testing.assert_close(wide, kv_attention(**call).float(), rtol=2e-3, atol=2e-3)
    # all scores nearly equal
    mean = dequantized(call, "v_")[:, :, :50].mean(2).repeat_interleave(GROUP, 1)
    torch.testing.assert_close(narrow[:, :, 1], mean, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_append_writes_the_schemes_bytes_and_no_others(name: str) -> None:
    x = random(BATCH, HEADS, 40, 32) * 2 - 1
    cache = room(name, x)
    at = 0
    for chunk in (1, 7, 32):
        part, at = x[:, :, at : at + chunk], at + chunk
        kv_append(part, **cache, tokens=at, lengths=None)
    for part_name, expected in quantizer(name, x).quantize(x).items():
        assert torch.equal(cache[part_name][:, :, :40], expected)
        assert (cache[part_name][:, :, 40:] == 77).all()
    ragged = room(name, x)
    kv_append(x[:, :, :3], **ragged, tokens=20, lengths=torch.tensor([20, 5], dtype=torch.int32))
    for row, end in enumerate((20, 5)):
        assert torch.equal(ragged["codes"][row, :, end - 3 : end], cache["codes"][row, :, :3])
        assert (ragged["codes"][row, :, end:] == 77).all() and (
            ragged["codes"][row, :, : end - 3] == 77
        ).all()


def test_append_weighs_errors_by_the_importance_of_their_channels() -> None:
    x, importance = random(BATCH, HEADS, 40, 32), torch.exp(2 * random(HEADS, 32, seed=1))
    weighed, plain = room("kv4", x), room("kv4", x)
    kv_append(x, **weighed | {"channel": importance}, tokens=40, lengths=None)
    kv_append(x, **plain, tokens=40, lengths=None)
    for part_name, expected in KV4(importance=importance).quantize(x).items():
        assert torch.equal(weighed[part_name][:, :, :40], expected)
    assert not torch.equal(weighed["codes"], plain["codes"])


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    lengths = torch.tensor([50, 9], dtype=torch.int32)
    mask = torch.ones(BATCH, 2, 50, dtype=torch.bool)
    torch.library.opcheck(kv_attention, (), arguments(name, queries=2, lengths=lengths, mask=mask))
    x = random(BATCH, HEADS, 3, 32)
    torch.library.opcheck(kv_append, (x,), {**room(name, x), "tokens": 20, "lengths": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"query": c["query"][0]}, r"query is 3-D; expected \[B, Hq, Tq, D\]"),
        (
            lambda c: {"query": c["query"].float()},
            "query is torch.float32; expected torch.float16 or torch.bfloat16",
        ),
        (lambda c: {"query": c["query"][:, :5].contiguous()}, "5 query heads over 2 kv heads"),
        (lambda c: {"k_codes": c["k_codes"].to(torch.int16)}, "k_codes is torch.int16"),
        (
            lambda c: {"k_codes": c["k_codes"][:, :, :32]},
            "room for 32 tokens; expected a multiple of 64",
        ),
        (lambda c: {"v_scale": c["v_scale"].float()}, "v_scale is torch.float32"),
        (lambda c: {"v_zero": None}, "v_zero is missing"),
        (lambda c: {"tokens": 65}, "65 tokens; the cache has room for 64"),
        (
            lambda c: {"lengths": torch.tensor([1, 2])},
            "lengths is torch.int64; expected torch.int32",
        ),
        (
            lambda c: {"mask": torch.ones(2, 1, 1, 50, dtype=torch.bool)},
            r"mask has shape \(2, 1, 1, 50\); expected \(2, 1, 50\)",
        ),
        (
            lambda c: {"lengths": torch.zeros(2, dtype=torch.int32, device="meta")},
            "lengths is on meta, the first tensor on cpu; all must be on one device",
        ),
        (lambda c: {"softcap": -1.0}, "softcap -1.0"),
    ],
)
def test_attention_refuses_in_one_sentence(
    change: Callable[[Any], dict[str, Any]], message: str
) -> None:
    call = arguments("kv4")
    with pytest.raises(QtoolError, match=message) as error:
        kv_attention(**call | change(call))
    assert "\n" not in str(error.value)


def test_head_dimensions_and_appends_that_do_not_fit_are_refused() -> None:
    with pytest.raises(QtoolError, match="head dimension 24; expected a multiple of 16 up to 256"):
        arguments("kv8", dim=24)
    x = random(BATCH, HEADS, 3, 32)
    for cache, tokens, message in (
        (room("kv4", x), 2, "2 tokens, 3 of them new"),
        (room("kv8", x) | {"channel": None}, 3, "kv8's scales are given as channel"),
        (room("kv8", x) | {"scale": torch.ones(1)}, 3, "as channel; scale must be None"),
        (room("kv4", x) | {"channel": torch.ones(HEADS, 16)}, 3, "channel has shape"),
    ):
        with pytest.raises(QtoolError, match=message):
            kv_append(x, **cache, tokens=tokens, lengths=None)


def token_of(row: int) -> int:
    """The token of row ``row`` of a tile of 16, as in csrc/attention/kv_codes.cuh."""
    return row % 8 // 2 + 4 * (row % 2) + 8 * (row // 8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [16, 80, 96, 128])
def test_fragments_hold_every_code_once_where_the_query_and_the_output_expect_it(
    bits: int, dim: int
) -> None:
    """The maps of csrc/attention/kv_codes.cuh, by lane r, c: products over slots are q.k, rows are
    channels in the output.
    """
    steps, token_bytes = dim // 16, dim * bits // 8
    stored = torch.randint(
        0, 256, (16, token_bytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    codes = unpack_nibbles(stored) if bits == 4 else stored  # [16 tokens, D]
    query = torch.arange(1, dim + 1)
    per_byte = 8 // bits
    for row in range(16):
        total = 0
        for step in range(steps):
            for c in range(4):
                first = c * (token_bytes // 4)
                if (
                    bits == 4
                ):  # bytes of the slots 2c, 2c + 1; their high nibbles are those of 2c + 8, 2c + 9
                    tail = steps % 2 and step == steps - 1
                    low = first + step // 2 * 4 + step % 2
                    channels = [
                        2 * b + odd for odd in (0, 1) for b in (low, low + (1 if tail else 2))
                    ]
                else:
                    channels = [first + 4 * step + i for i in range(4)]
                total += sum(int(codes[token_of(row), d]) * int(query[d]) for d in channels)
        assert total == int(codes[token_of(row)].long() @ query)
    places = set()
    for r in range(8):
        for step in range(steps):
            for odd in (0, 1):
                byte = r * (token_bytes // 8) + step * 2 // per_byte + (odd if bits == 8 else 0)
                assert byte * per_byte + (odd if bits == 4 else 0) == 2 * (r * steps + step) + odd
                places.add(2 * (r * steps + step) + odd)
    assert places == set(range(dim))
    slots = [
        token_of(2 * c + 8 * half + odd) for c in range(4) for half in (0, 1) for odd in (0, 1)
    ]
    assert slots == [4 * slot + c for c in range(4) for slot in range(4)]


def test_plans_fit_every_gpu_and_splits_cover_the_tokens() -> None:
    for bits, dim, rows in product((4, 8), range(16, 257, 16), (1, 8, 9, 64)):
        plan = Plan.of(bits, dim, rows)
        assert TOKENS % plan.tile == 0 and plan.shared_bytes <= 99 * 1024
        assert plan.row_blocks(rows) * 8 * plan.row_tiles >= rows
    plan = Plan.of(4, 128, 4)
    assert plan.splits(512, 4096, 132) == 1
    assert plan.splits(8, 1 << 20, 132) == MOST_SPLITS
    for tokens in (0, 1, 127, 128, 129, 5000):
        assert 1 <= plan.splits(8, tokens, 132) <= max(1, -(-tokens // (plan.tile * WARPS)))


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_is_the_reference_and_compiles_into_a_graph(name: str) -> None:
    call = arguments(name, queries=3, lengths=torch.tensor([50, 9], dtype=torch.int32))
    there = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in call.items()}
    torch.testing.assert_close(
        kv_attention(**there).cpu(), kv_attention(**call), rtol=2e-3, atol=2e-3
    )
    torch.library.opcheck(kv_attention, (), there)
    compiled = torch.compile(lambda: kv_attention(**there) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(), kv_attention(**there) * 2)
