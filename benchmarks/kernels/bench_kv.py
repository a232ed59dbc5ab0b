"""Time decode attention over a packed cache beside torch's SDPA on a 16-bit one, on this GPU.

python benchmarks/kernels/bench_kv.py [--shapes 64x4096x8x32x128,1x32768x8x32x128]   (B x T x Hkv x Hq x D)
"""

import argparse

import torch

from qtool.kernels.bench import BANDWIDTH, graph_us
from qtool.kernels.kv_append import kv_append
from qtool.kernels.kv_attention import Plan, kv_attention

SHAPES = (
    "64x4096x8x32x128,16x4096x8x32x128,1x4096x8x32x128,1x32768x8x32x128,64x1024x8x32x128,32x4096x8x64x128,"
    "32x2048x32x32x128,16x4096x8x16x256,32x4096x8x32x64"
)


def packed(bits: int, batch: int, tokens: int, heads: int, dim: int) -> list[torch.Tensor | None]:
    """Random codes, scales and zero points of keys, then of values."""
    parts: list[torch.Tensor | None] = []
    for _ in range(2):
        size = (batch, heads, tokens, dim * bits // 8)
        codes = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
        if bits == 8:
            parts += [codes.view(torch.int8), torch.rand(heads, dim, device="cuda") * 0.02, None]
        else:
            parameter = (batch, heads, tokens, 1)
            parts += [
                codes,
                (torch.rand(parameter, device="cuda") * 0.1 + 0.2).half(),
                (torch.rand(parameter, device="cuda") * 2 + 6.5).half(),
            ]
    return parts


def attention_us(bits: int, batch: int, tokens: int, heads: int, q_heads: int, dim: int) -> float:
    """Of one call, over as many caches as exceed the L2 cache four times (at least two)."""
    nbytes = 2 * batch * tokens * heads * dim * bits / 8
    caches = [packed(bits, batch, tokens, heads, dim) for _ in range(max(2, min(32, int(240e6 / nbytes) + 1)))]
    query = torch.randn(batch, q_heads, 1, dim, device="cuda").bfloat16()
    calls = [
        lambda c=c: kv_attention(query, *c, tokens, None, None, dim**-0.5, 0.0, 0)  # type: ignore[misc]
        for c in caches
    ]
    return graph_us(calls)


def sdpa_us(batch: int, tokens: int, heads: int, q_heads: int, dim: int) -> float:
    """torch's SDPA with ``enable_gqa`` on a bfloat16 cache."""
    nbytes = 4 * batch * tokens * heads * dim
    query = torch.randn(batch, q_heads, 1, dim, device="cuda").bfloat16()
    caches = [
        torch.randn(2, batch, heads, tokens, dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(max(2, min(32, int(240e6 / nbytes) + 1)))
    ]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return graph_us([lambda c=c: sdpa(query, c[0], c[1], enable_gqa=True) for c in caches])  # type: ignore[misc]


def append_us(bits: int, batch: int, tokens: int, heads: int, dim: int) -> float:
    """Of appending one token's keys and values."""
    cache = packed(bits, batch, tokens, heads, dim)
    x = torch.randn(batch, heads, 1, dim, device="cuda").bfloat16()

    def call() -> None:
        for codes, scale, zero in (cache[:3], cache[3:]):
            assert codes is not None
            per_token, per_channel = (scale, None) if bits == 4 else (None, scale)
            kv_append(x, codes, per_token, zero, per_channel, tokens, None)

    return graph_us([call] * 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=SHAPES)
    args = parser.parse_args()
    print("| B x T x Hkv x Hq x D | kv | us | floor us | x floor | SDPA bf16 us | times faster | splits | append us |")
    print(f"|{'---|' * 9}")
    for text in args.shapes.split(","):
        batch, tokens, heads, q_heads, dim = map(int, text.split("x"))
        sdpa = sdpa_us(batch, tokens, heads, q_heads, dim)
        for bits in (4, 8):
            us = attention_us(bits, batch, tokens, heads, q_heads, dim)
            row = dim * bits / 8 + (4 if bits == 4 else 0)  # bytes of a token and head, parameters included
            floor = 1e6 * 2 * batch * tokens * heads * row / BANDWIDTH
            plan = Plan.of(bits, dim, q_heads // heads)
            processors = torch.cuda.get_device_properties(0).multi_processor_count
            splits = plan.splits(batch * heads * plan.row_blocks(q_heads // heads), tokens, processors)
            append = append_us(bits, batch, tokens, heads, dim)
            cells = [f"kv{bits}", f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}", f"{sdpa:.1f}"]
            print(f"| {text} | {' | '.join(cells)} | {sdpa / us:.2f} | {splits} | {append:.1f} |", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
