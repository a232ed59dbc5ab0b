"""Time decode attention over pages beside the dense cache's, on this GPU, and the append.

    python benchmarks/kernels/bench_kv_paged.py [--shapes 64x4096x8x32x128]

A shape is B x T x Hkv x Hq x D; pages lie in random order.
"""

import argparse
import sys
from functools import partial

import torch
from torch import Tensor

from qtool.bench.cuda_graphs import BANDWIDTH, copies, graph_us
from qtool.bench.kv import SHAPES, Shape, append_us, attention_us
from qtool.kernels.attention.kv_append_paged import kv_append_paged
from qtool.kernels.attention.kv_attention_paged import kv_attention_paged
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import PagedCache, head_bytes

Cache = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def pages_of(shape: Shape, bits: int) -> Cache:
    """Random pages and table, and kv8's scales."""
    each = shape.tokens // TOKENS
    count = shape.batch * each
    size = (count, shape.heads, head_bytes(bits, shape.dim))
    pages = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    table = torch.randperm(count, device="cuda").view(shape.batch, each).int()
    if bits == 8:
        scales = torch.rand(2, shape.heads, shape.dim, device="cuda") * 0.02
        return pages, table, scales[0], scales[1]
    for part in PagedCache("bench", pages, shape.dim, None, None).parts():
        part["scale"].uniform_(0.2, 0.3)
        part["zero"].uniform_(6.5, 8.5)
    return pages, table, None, None


def paged_us(shape: Shape, bits: int, capacity: int) -> float:
    """Microseconds of one call over rotated caches, planned for ``capacity`` tokens."""
    caches = [pages_of(shape, bits) for _ in range(copies(shape.nbytes(bits)))]
    query = shape.query()[:, :, 0].contiguous()
    lengths = torch.full((shape.batch,), shape.tokens, dtype=torch.int32, device="cuda")
    calls = []
    for pages, table, *scales in caches:
        wide = torch.nn.functional.pad(table, (0, (capacity - shape.tokens) // TOKENS))
        cache = (pages, wide, lengths, *scales, None, torch.empty_like(query))
        calls.append(partial(kv_attention_paged, query, *cache, capacity, shape.dim**-0.5, 0.0, 0))
    return graph_us(calls)


def paged_append_us(shape: Shape, bits: int) -> float:
    """Microseconds of appending a token's keys and values, with kv4's offsets."""
    pages, table, *scales = pages_of(shape, bits)
    size = (shape.batch, shape.heads, shape.dim)
    key, value = torch.randn(2, *size, device="cuda").bfloat16()
    slots = table[:, -1].long() * TOKENS
    calibrated = [torch.rand(size[1:], device="cuda") for _ in range(2)]
    stored = [None, None] if bits == 8 else calibrated
    return graph_us([partial(kv_append_paged, key, value, pages, slots, *scales, *stored)] * 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kv_paged.py: a CUDA device is needed")
    print("shape, cache: dense, paged, paged for 32768 tokens, floor; append dense, paged (us)")
    for text in arguments.shapes.split(","):
        shape = Shape.parse(text)
        for bits in (4, 8):
            dense, paged = attention_us(shape, bits), paged_us(shape, bits, shape.tokens)
            roomy = paged_us(shape, bits, max(shape.tokens, 32768))
            floor = 1e6 * shape.nbytes(bits) / BANDWIDTH
            times = (dense, paged, roomy, floor, append_us(shape, bits))
            each = " ".join(f"{us:7.1f}" for us in (*times, paged_append_us(shape, bits)))
            print(f"{text} kv{bits}: {each}", flush=True)


if __name__ == "__main__":
    main()
