"""``quant_method`` mxfp4: experts in E2M1 with a power of two every 32 input channels (GPT-OSS).

``NAME_blocks`` uint8 ``[E, N, K / 32, 16]`` and ``NAME_scales`` uint8 ``[E, N, K / 32]`` are the
stack ``NAME [E, K, N]``, which transformers holds transposed. Other tensors are not quantized.
"""

from dataclasses import dataclass, replace

import torch

from qtool.errors import QtoolError
from qtool.io.dequantize.block_scaled import block_scaled
from qtool.io.dequantize.published import Config, Entries, Weight

BLOCKS, SCALES = "_blocks", "_scales"
COLUMNS = 32


@dataclass(frozen=True)
class Mxfp4:
    """The format of codes of 4 bits in blocks of 32."""

    about = f"MXFP4 in blocks of {COLUMNS}"
    scales = (SCALES,)
    unread = ()

    def weight(self, name: str, entries: Entries, dtype: torch.dtype) -> Weight | None:
        weight, codes = name.removesuffix(BLOCKS), entries[name]
        if weight == name:
            return None
        scales = entries.get(weight + SCALES)
        if codes.dtype != torch.uint8 or len(codes.shape) != 4 or codes.shape[3] != COLUMNS // 2:
            raise QtoolError(
                f"{name}: {codes.dtype} {list(codes.shape)} found; uint8 [experts, rows, columns / "
                f"{COLUMNS}, {COLUMNS // 2}] is expected"
            )
        if scales is None or scales.dtype != torch.uint8:
            raise QtoolError(f"{name}: there is no {weight + SCALES} of dtype uint8")
        stack, n, groups, half = codes.shape
        codes = replace(codes, shape=(stack, n, groups * half))
        entry = block_scaled(weight, codes, scales, [(1, COLUMNS)], dtype, transposed=True)
        return Weight(weight, entry, (name, weight + SCALES))


def published(config: Config) -> Mxfp4:
    """The format of ``config``, which only names the modules that are not quantized."""
    return Mxfp4()
