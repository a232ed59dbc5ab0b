"""Measures attention over the packed KV cache beside torch's SDPA on a 16-bit one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qtool.bench.cuda_graphs import BANDWIDTH, copies, graph_us
from qtool.errors import QtoolError
from qtool.kernels.attention.kv_append import kv_append
from qtool.kernels.attention.kv_attention import kv_attention
from qtool.kernels.attention.packed_cache import MOST_CHANNELS, TOKENS, takes_head_dim
from qtool.units import whole_number

#: the default shapes; the project states its speed for the first one
SHAPES = (
    "64x4096x8x32x128",
    "16x4096x8x32x128",
    "1x4096x8x32x128",
    "1x32768x8x32x128",
    "64x1024x8x32x128",
    "32x4096x8x64x128",
    "32x2048x32x32x128",
    "16x4096x8x16x256",
    "32x4096x8x32x64",
)


@dataclass(frozen=True)
class Shape:
    """One decode step: ``batch`` sequences of ``tokens`` tokens, with one query token each."""

    batch: int
    tokens: int
    heads: int
    q_heads: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """The shape of a text ``BxTxHkvxHqxD``.

        Raises:
            QtoolError: the text is not five positive numbers that a cache can have.
        """
        numbers = [number for part in text.split("x") if (number := whole_number(part))]
        if len(numbers) != 5 or text.count("x") != 4:
            raise QtoolError(
                f"{text!r} is no shape: sequences x tokens x kv heads x query heads x head "
                "dimension"
            )
        shape = cls(*numbers)
        if shape.tokens % TOKENS or shape.q_heads % shape.heads or not takes_head_dim(shape.dim):
            raise QtoolError(
                f"{text!r}: tokens must be a multiple of {TOKENS}, query heads of kv heads, the "
                f"head dimension of 16, up to {MOST_CHANNELS}"
            )
        return shape

    def nbytes(self, bits: int) -> int:
        """Bytes of keys and values, including kv4's scales and zero points."""
        token = self.dim * bits // 8 + (4 if bits == 4 else 0)
        return 2 * self.batch * self.tokens * self.heads * token

    def query(self) -> Tensor:
        return torch.randn(self.batch, self.q_heads, 1, self.dim, device="cuda").bfloat16()


def packed(shape: Shape, bits: int) -> list[Tensor | None]:
    """Random codes, scales and zero points of keys, then of values."""
    parts: list[Tensor | None] = []
    for _ in range(2):
        size = (shape.batch, shape.heads, shape.tokens, shape.dim * bits // 8)
        codes = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
        if bits == 8:
            parts += [
                codes.view(torch.int8),
                torch.rand(shape.heads, shape.dim, device="cuda") * 0.02,
                None,
            ]
            continue
        scale, zero = torch.rand(2, *size[:3], 1, device="cuda")
        parts += [codes, (scale * 0.1 + 0.2).half(), (zero * 2 + 6.5).half()]
    return parts


def attention_us(shape: Shape, bits: int) -> float:
    """Microseconds of one call, over rotated caches."""
    caches = [packed(shape, bits) for _ in range(copies(shape.nbytes(bits)))]
    query, scaling = shape.query(), shape.dim**-0.5
    tail = (shape.tokens, None, None, scaling, 0.0, 0)
    attend: Callable[..., object] = kv_attention
    return graph_us([partial(attend, query, *cache, *tail) for cache in caches])


def sdpa_us(shape: Shape) -> float:
    """Microseconds of torch's SDPA with ``enable_gqa`` on a bfloat16 cache, over rotated caches."""
    size = (2, shape.batch, shape.heads, shape.tokens, shape.dim)
    caches = [
        torch.randn(size, dtype=torch.bfloat16, device="cuda")
        for _ in range(copies(shape.nbytes(16)))
    ]
    query = shape.query()
    attend = partial(scaled_dot_product_attention, query, enable_gqa=True)
    return graph_us([partial(attend, key=keys, value=values) for keys, values in caches])


def append_us(shape: Shape, bits: int) -> float:
    """Microseconds of appending one token's keys and values."""
    cache = packed(shape, bits)
    x = torch.randn(shape.batch, shape.heads, 1, shape.dim, device="cuda").bfloat16()

    def call() -> None:
        for codes, scale, zero in (cache[:3], cache[3:]):
            assert codes is not None
            per_token, per_channel = (scale, None) if bits == 4 else (None, scale)
            kv_append(x, codes, per_token, zero, per_channel, shape.tokens, None)

    return graph_us([call] * 8)


HEAD = (
    "B x T x Hkv x Hq x D",
    "kv",
    "us",
    "floor us",
    "x floor",
    "SDPA bf16 us",
    "times faster",
    "append us",
)


def kv_rows(shapes: Iterable[str]) -> list[list[str]]:
    """Times of kv4 and kv8 on ``shapes`` (``BxTxHkvxHqxD``) beside their floor and SDPA's.

    The columns are those of :data:`HEAD`.
    """
    rows = []
    for text, shape in [(text, Shape.parse(text)) for text in shapes]:
        sdpa = sdpa_us(shape)
        for bits in (4, 8):
            us, floor = attention_us(shape, bits), 1e6 * shape.nbytes(bits) / BANDWIDTH
            cells = [text, f"kv{bits}", f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}"]
            cells += [f"{sdpa:.1f}", f"{sdpa / us:.2f}", f"{append_us(shape, bits):.1f}"]
            rows.append(cells)
    return rows
