"""``quant_method`` fp8: weights in float8_e4m3fn, as in DeepSeek-V3, Qwen3-FP8 and others.

A linear has ``weight [N, K]`` with ``weight_scale_inv`` (DeepSeek, transformers), ``weight_scale``
(AutoFP8), ``scale`` (DeepSeek-V4) or ``qscale_weight`` (Mistral): one scale for a block of
``weight_block_size``, a row or a matrix, by which the codes are *multiplied*. Stacks of experts
have scales named after them: ``gate_up_proj`` and ``gate_up_proj_scale_inv``. Experts of
DeepSeek-V4 are E2M1, two in a byte (int8), with a scale for every 32 columns.

transformers takes the size of a block from the number of scales. This is wrong if a block at the
edge is smaller: 576 rows in blocks of 128 are 5 blocks, not 5 times 115.2. DeepSeek's own code and
this file take the size from ``weight_block_size``.
"""

from dataclasses import dataclass

import torch

from qtool.errors import QtoolError
from qtool.io.dequantize.block_scaled import Block, block_of, block_scaled
from qtool.io.dequantize.published import Config, Entries, Weight

#: endings of the names of scales, after the name of the weight and after that of its module
WEIGHT_SCALES = ("_scale_inv", "_scale")
MODULE_SCALES = (".scale", ".qscale_weight")
FP4_COLUMNS = 32


@dataclass(frozen=True)
class Fp8:
    """The format of codes of 8 bits, in blocks if ``block`` is given."""

    block: Block | None
    scales = ("_scale_inv", ".weight_scale", ".qscale_weight")
    unread = ("activation_scale", "input_scale", ".qscale_act", ".k_scale", ".v_scale")

    @property
    def about(self) -> str:
        return "FP8" + (f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else "")

    def weight(self, name: str, entries: Entries, dtype: torch.dtype) -> Weight | None:
        codes, module = entries[name], name.rpartition(".")[0]
        named = [name + ending for ending in WEIGHT_SCALES]
        named += [module + ending for ending in MODULE_SCALES]
        scales = next((scale for scale in named if scale in entries), None)
        if codes.dtype == torch.int8 and scales:
            blocks = [(1, FP4_COLUMNS)]
        elif codes.dtype == torch.float8_e4m3fn:
            blocks = [self.block] if self.block else []
        else:
            return None
        if scales is None:
            raise QtoolError(f"{name}: its codes have no scales ({', '.join(named)})")
        entry = block_scaled(name, codes, entries[scales], blocks, dtype)
        return Weight(name, entry, (name, scales))


def published(config: Config) -> Fp8:
    """The format of ``config``.

    Raises:
        QtoolError: ``weight_block_size`` is no pair of sizes.
    """
    block = config.get("weight_block_size")
    return Fp8(None if block is None else block_of(block, "fp8: weight_block_size"))
