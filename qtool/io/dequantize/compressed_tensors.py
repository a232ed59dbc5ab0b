"""compressed-tensors' floating-point formats, which llm-compressor writes.

float-quantized: ``weight`` float8_e4m3fn with ``weight_scale``, one a matrix, a row, a group of
columns or a block. nvfp4-pack-quantized: ``weight_packed`` uint8 ``[N, K / 2]`` (E2M1) with
``weight_scale`` float8_e4m3fn ``[N, K / 16]`` divided by ``weight_global_scale [1]``.
mxfp4-pack-quantized: the same with ``weight_scale`` uint8 ``[N, K / 32]`` (E8M0) and no divisor.
"""

from dataclasses import dataclass

import torch

from qtool.errors import QtoolError
from qtool.io.dequantize.block_scaled import Block, block_scaled
from qtool.io.dequantize.published import Config, Entries, Weight

FP8 = ("float-quantized", "naive-quantized")
FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


@dataclass(frozen=True)
class CompressedTensors:
    """Codes of 8 bits, in one of ``blocks``, or of 4."""

    formats: tuple[str, ...]
    blocks: tuple[Block, ...]
    scales = ("weight_scale", "weight_global_scale", "weight_zero_point", "weight_g_idx")
    unread = (
        *("input_scale", "input_global_scale", "output_scale"),
        *(".k_scale", ".v_scale", ".q_scale", ".k_global_scale", ".v_global_scale"),
    )

    @property
    def about(self) -> str:
        return f"compressed-tensors {' and '.join(self.formats)}"

    def weight(self, name: str, entries: Entries, dtype: torch.dtype) -> Weight | None:
        codes, (module, _, part) = entries[name], name.rpartition(".")
        if codes.dtype == torch.float8_e4m3fn and part == "weight":
            blocks, divisor = self.blocks, None
        elif part == "weight_packed":
            nvfp4 = f"{module}.weight_global_scale" in entries
            blocks = ((1, 16 if nvfp4 else 32),)
            divisor = f"{module}.weight_global_scale" if nvfp4 else None
        else:
            return None
        weight, scales = f"{module}.weight", f"{module}.weight_scale"
        if scales not in entries:
            raise QtoolError(f"{name}: its codes have no {scales}")
        of = entries[divisor] if divisor else None
        entry = block_scaled(weight, codes, entries[scales], blocks, dtype, divisor=of)
        return Weight(weight, entry, (name, scales, *([divisor] if divisor else [])))


def published(config: Config) -> CompressedTensors | None:
    """The format of ``config``; None where its codes are integers.

    Raises:
        QtoolError: floats in a form that is not known here.
    """
    groups = config.get("config_groups") or {}
    weights = {name: group.get("weights") or {} for name, group in groups.items()}
    if not groups or not all(found.get("type") == "float" for found in weights.values()):
        return None
    formats, blocks = [], []
    for name, group in groups.items():
        found = group.get("format") or config.get("format")
        if found not in (*FP8, *FP4):
            raise QtoolError(f"compressed-tensors {name}: format {found!r} of floats is not known")
        if not weights[name].get("symmetric", True):
            raise QtoolError(f"compressed-tensors {name}: floats with zero points are not known")
        formats.append(found)
        if found in FP8:
            blocks += _blocks(weights[name])
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
    if sparse or config.get("transform_config"):
        what = "sparse weights" if sparse else "a transform_config (rotations)"
        raise QtoolError(f"compressed-tensors with {what} is not known")
    if len(set(blocks)) > 1:
        raise QtoolError(f"compressed-tensors: blocks of {sorted(set(blocks))}; one is expected")
    return CompressedTensors(tuple(dict.fromkeys(formats)), tuple(dict.fromkeys(blocks)))


def _blocks(weights: Config) -> list[Block]:
    """The size of a block where scales are of blocks or of groups of columns."""
    if weights.get("strategy") == "block":
        rows, columns = weights["block_structure"]
        return [(int(rows), int(columns))]
    return [(1, int(weights["group_size"]))] if weights.get("strategy") == "group" else []
