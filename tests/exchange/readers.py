"""Independent readers of the foreign formats: closed-form addresses of one element, written from
the formats' public descriptions. They share nothing with the code that writes, neither layouts nor
order.

Each returns ``(codes [N, K], ...)`` as int64 and float32; ``n`` and ``k`` run over a grid of all
elements.
"""

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
#: a column of eight (or an element of a Marlin fragment) -> its nibble
INTERLEAVE = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def grid(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Every (row, column) of a matrix."""
    return torch.arange(rows)[:, None].expand(rows, columns), torch.arange(columns).expand(
        rows, columns
    )


def nibble(words: Tensor, row: Tensor, column: Tensor, position: Tensor) -> Tensor:
    """Bits ``4 * position .. + 3`` of ``words[row, column]``."""
    return words.long()[row, column] >> 4 * position & 15


def per_input(scale: Tensor, k: int) -> Tensor:
    """``[N, G]`` repeated to ``[N, K]``."""
    return scale.repeat_interleave(k // scale.shape[1], 1)


def gptq(t: Tensors, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[N, K]``, scales ``[N, G]``, zeros ``[N, G]``; ``offset``: v1 stores one less than
    the zero.
    """
    words, groups = t["qweight"], t["scales"].shape[0]
    n, k = grid(words.shape[1], words.shape[0] * 8)
    codes = nibble(words, k // 8, n, k % 8)
    n, j = grid(words.shape[1], groups)
    return codes, t["scales"].t().float(), nibble(t["qzeros"], j, n // 8, n % 8) + offset & 15


def awq(t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, zeros."""
    n, k = grid(t["qweight"].shape[1] * 8, t["qweight"].shape[0])
    codes = nibble(t["qweight"], k, n // 8, INTERLEAVE[n % 8])
    n, j = grid(len(codes), t["scales"].shape[0])
    return codes, t["scales"].t().float(), nibble(t["qzeros"], j, n // 8, INTERLEAVE[n % 8])


def compressed_tensors(t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (signed value + 8), scales, zeros (8 without a tensor of them)."""
    rows, columns = t["weight_shape"].tolist()
    n, k = grid(rows, columns)
    codes = nibble(t["weight_packed"], n, k // 8, k % 8)
    n, j = grid(*t["weight_scale"].shape)
    zeros = (
        nibble(t["weight_zero_point"], n // 8, j, n % 8)
        if "weight_zero_point" in t
        else torch.full_like(n, 8)
    )
    return codes, t["weight_scale"].float(), zeros


def marlin(t: Tensors) -> tuple[Tensor, Tensor]:
    """Codes, scales ``[N, G]``."""
    words = t["B"]
    n, k = grid(words.shape[1] // 2, words.shape[0] * 16)
    kr, nc = k % 16, n % 16
    column = 128 * (n // 64) + 4 * (4 * (nc % 8) + kr % 8 // 2) + n // 16 % 4
    codes = nibble(words, k // 16, column, INTERLEAVE[4 * (nc // 8) + kr % 2 + 2 * (kr // 8)])
    groups = t["s"].shape[0]
    return codes, (marlin_groups(t["s"]) if groups > 1 else marlin_channel(t["s"])).t().float()


def marlin_groups(stored: Tensor) -> Tensor:
    """``[G, N]`` unpermuted: position i * 8 + j of a block of 64 holds column i + 8 j."""
    order = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    return _unpermuted(stored, order)


def marlin_channel(stored: Tensor) -> Tensor:
    """``[1, N]`` unpermuted, blocks of 32."""
    return _unpermuted(
        stored, torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    )


def _unpermuted(stored: Tensor, order: Tensor) -> Tensor:
    blocks = stored.reshape(len(stored), -1, len(order))
    plain = torch.empty_like(blocks)
    plain[:, :, order] = blocks
    return plain.reshape(stored.shape)


def marlin_24(t: Tensors) -> tuple[Tensor, Tensor]:
    """Dense codes (8 where nothing was kept), scales."""
    values, positions = _sparse_values(t["B_24"]), _sparse_positions(t["B_meta"])
    rows, quads = positions.shape
    codes = torch.full((rows, quads, 4), 8)
    codes.scatter_(2, (positions & 3)[..., None], values[:, 0::2, None])
    codes.scatter_(2, (positions >> 2)[..., None], values[:, 1::2, None])
    s = t["s"]
    if len(s) > 1:
        s = _unpermuted(
            s, torch.tensor([8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)])
        )
    return codes.flatten(1), s.t().float()


def sparse_permutation() -> Tensor:
    """The public packer's permutation of 1024 kept codes."""
    order = []
    for i in range(32):
        column = i // 4
        eight = [
            16 * row + 256 * (column // 2) + 8 * (column % 2) + 4 * block
            for block in (0, 1)
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1)
        ]
        order += [p + j for j in range(4) for p in eight]
    return torch.tensor(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def _sparse_values(words: Tensor) -> Tensor:
    """The kept codes ``[N, K / 2]``, by the packer's permutation run backwards."""
    tiles_of_k, n = words.shape[0], words.shape[1] // 2
    flat = (words.long()[..., None] >> 4 * torch.arange(8) & 15).reshape(-1, 1024)
    plain = torch.empty_like(flat)
    plain[:, sparse_permutation()] = flat
    return (
        plain.reshape(tiles_of_k, n // 16, 16, 16)
        .permute(0, 2, 1, 3)
        .reshape(tiles_of_k * 16, n)
        .t()
    )


def _sparse_positions(meta: Tensor) -> Tensor:
    """First kept position + 4 * second of every quad ``[N, K / 4]``, by the packer's scatter read
    backwards.
    """
    columns, n = meta.shape[0] * 2, meta.shape[1] // 2
    r, m = grid(n, columns)
    row = r // 64 * 64 + r % 2 * 2 + r % 8 // 4 + r % 32 % 4 // 2 * 32 + r % 64 // 8 * 4
    up, down = (row % 2 == 0) & (m % 2 == 1), (row % 2 == 1) & (m % 2 == 0)
    row, column = row + up.long() - down.long(), m - up.long() + down.long()
    words = meta.flatten().long()[column // 2 * 2 * n + 2 * row + column % 2]
    return (words[..., None] >> 4 * torch.arange(4) & 15).flatten(1)


def qqq(t: Tensors) -> Tensor:
    """The weight ``[N, K]`` that QQQ multiplies, int8 steps times the channel's scale, float64."""
    words, groups = t["B"], "s_group" in t
    n, k = grid(words.shape[1] // 2, words.shape[0] * 16)
    kr, nc = k % 16, n % 16
    column = 128 * (n // 64) + 4 * (4 * (nc % 8) + kr // 4) + n // 16 % 4
    position = INTERLEAVE if groups else torch.tensor([1, 3, 5, 7, 0, 2, 4, 6])
    codes = nibble(words, k // 16, column, position[4 * (nc // 8) + kr % 4])
    channel = marlin_channel(t["s_channel"]).double().t()
    if not groups:
        return 16 * torch.where(codes > 7, codes - 16, codes) * channel
    scale = marlin_groups(t["s_group"]).t().double()
    return ((codes - 8) * per_input(scale, codes.shape[1])).round().clamp(-128, 127) * channel


def qserve(t: Tensors) -> tuple[Tensor, Tensor]:
    """Codes, and the weight that QServe's kernel multiplies, float64."""
    rows, columns = t["qweight"].shape[0], 2 * t["qweight"].shape[1]
    n, k = grid(rows, columns)
    nl, kl = n % 32, k % 32
    byte = (n // 32 * (columns // 32) + k // 32) * 512 + (4 * (nl % 8) + kl // 4 % 4) * 16
    byte = byte + 8 * (kl // 16) + 4 * (nl // 8 % 2) + kl % 4
    codes = t["qweight"].view(torch.uint8).flatten().long()[byte] >> 4 * (nl // 16) & 15
    s1 = t["s1_scales"].double()[:, None]
    if "s1_szeros" in t:
        return codes, codes * s1 - t["s1_szeros"].double()[:, None]
    order = torch.tensor([8 * row + lane for lane in range(8) for row in range(4)])
    s2, zeros = (
        per_input(_unpermuted(t[x], order).t(), columns).long() for x in ("s2_scales", "s2_zeros")
    )
    wrapped = (codes * s2 + zeros + 128) % 256 - 128  # bytes
    return codes, wrapped * s1
