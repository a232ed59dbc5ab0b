"""compressed-tensors' floating-point formats, which llm-compressor writes.

float-quantized: ``weight`` float8_e4m3fn with ``weight_scale``, one for a matrix, a row, a group of
columns or a block. nvfp4-pack-quantized: ``weight_packed`` uint8 ``[N, K / 2]`` (E2M1) with
``weight_scale`` float8_e4m3fn ``[N, K / 16]`` divided by ``weight_global_scale [1]``.
mxfp4-pack-quantized: the same with ``weight_scale`` uint8 ``[N, K / 32]`` (E8M0) and no divisor.
"""

from dataclasses import dataclass

import torch

from qtool.errors import QtoolError
from qtool.io.dequantize.block_scaled import Block, block_of, block_scaled
from qtool.io.dequantize.published import Config, Entries, Weight

FP8 = ("float-quantized", "naive-quantized")
#: dtypes of MXFP4's scales, which are powers of two
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


@dataclass(frozen=True)
class CompressedTensors:
    """The format of codes of 8 bits in one of ``blocks``, or of codes of 4 bits."""

    formats: tuple[str, ...]
    blocks: tuple[Block, ...]
    scales = (".weight_scale", ".weight_global_scale", ".weight_zero_point", ".weight_g_idx")
    unread = (
        *("input_scale", "input_global_scale", "output_scale"),
        *(".k_scale", ".v_scale", ".q_scale", ".k_global_scale", ".v_global_scale"),
    )

    @property
    def about(self) -> str:
        return f"compressed-tensors {' and '.join(self.formats)}"

    def weight(self, name: str, entries: Entries, dtype: torch.dtype) -> Weight | None:
        codes, (module, _, part) = entries[name], name.rpartition(".")
        packed = part == "weight_packed"
        if not packed and (part != "weight" or codes.dtype != torch.float8_e4m3fn):
            return None
        weight, scale, of_scale = (module + end for end in (".weight", *self.scales[:2]))
        if (scales := entries.get(scale)) is None:
            raise QtoolError(f"{name}: its codes have no {scale}")
        if not packed:
            entry = block_scaled(weight, codes, scales, self.blocks, dtype)
        elif scales.dtype in E8M0:
            entry = block_scaled(weight, codes, scales, [(1, 32)], dtype)
        elif of_scale in entries:
            divisor = entries[of_scale]
            entry = block_scaled(weight, codes, scales, [(1, 16)], dtype, divisor=divisor)
            return Weight(weight, entry, (name, scale, of_scale))
        else:
            raise QtoolError(f"{name}: its codes have no {of_scale}")
        return Weight(weight, entry, (name, scale))


def published(config: Config) -> CompressedTensors | None:
    """The format of ``config``; None if its codes are integers.

    Raises:
        QtoolError: the codes are floats in an unknown form.
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
    if sparse or transforms_online(config):
        what = "sparse weights" if sparse else "a transform_config (online rotations)"
        raise QtoolError(f"compressed-tensors with {what} is not known")
    if len(set(blocks)) > 1:
        raise QtoolError(f"compressed-tensors: blocks of {sorted(set(blocks))}; one is expected")
    return CompressedTensors(tuple(dict.fromkeys(formats)), tuple(dict.fromkeys(blocks)))


def transforms_online(config: Config) -> bool:
    """Whether a transform acts while the model runs; one at weights is in the stored weights."""
    groups = ((config.get("transform_config") or {}).get("config_groups") or {}).values()
    places = {place.get("location") for group in groups for place in group.get("apply") or ()}
    return not places <= {"weight_input", "weight_output"}


def _blocks(weights: Config) -> list[Block]:
    """The sizes of blocks if scales belong to blocks or to groups of columns; else none."""
    if weights.get("strategy") == "block":
        return [block_of(weights["block_structure"], "compressed-tensors: block_structure")]
    if weights.get("strategy") == "group":
        return [
            block_of([1, weights["group_size"]], "compressed-tensors: the block of a group_size")
        ]
    return []
