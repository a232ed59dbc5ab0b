"""Injects faults into a copy of the tree, one at a time, and counts those that the tests catch.

A fault is a slip that a colleague might make: a swapped digit of a layout, a check that is gone, a
scale that is off by one step. Each one names the narrowest tests that should notice it. A fault
that they miss asks for a better test, not for another fault::

    python tests/faults.py                  # all of them, some fifteen minutes on one core
    python tests/faults.py qtool/schemes    # those in these files or folders
    python tests/faults.py --sample 3       # some, the same for the same --seed
    python tests/faults.py --write          # and store the counts in tests/faults.json

The exit code is 0 where all are caught, 1 where one is missed, 2 where one cannot be judged: its
old text is not in its file exactly once, or its tests cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "faults.json"
#: what tests read, beside the package
FOLDERS = ("qtool", "tests", "benchmarks", "docs", "examples")
FILES = ("README.md", "pyproject.toml", "Makefile")
#: seconds after which tests that a fault keeps from ending are stopped
LONGEST = 300


class Fault(NamedTuple):
    """``old`` becomes ``new`` in ``file``; ``tests`` are pytest's arguments, apart by spaces."""

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"


FAULTS = [
    Fault(*fault)
    for fault in (
        # schemes: what the numbers mean
        (
            "qtool/schemes/base.py",
            "2.0**-24 if dtype",
            "torch.finfo(dtype).tiny if dtype",
            "tests/schemes/test_protocol.py",
        ),
        (
            "qtool/schemes/base.py",
            "require((low >= grid.low) & (high <= grid.high)",
            "require((low >= grid.low - 1) & (high <= grid.high)",
            "tests/schemes/test_protocol.py",
        ),
        (
            "qtool/schemes/qoq.py",
            "torch.where(width > 0, width, 1.0)",
            "width",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/schemes/qoq.py",
            "torch.round(-low / scale.float())",
            "torch.floor(-low / scale.float())",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/schemes/qoq.py",
            "- token_sum * params",
            "+ token_sum * params",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/schemes/qoq_group.py",
            "torch.div(128, s2",
            "torch.div(127, s2",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/schemes/qoq_group.py",
            "((high - low) / 15).clamp(1, 16)",
            "((high - low) / 15).clamp(1, 15)",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/schemes/lqq.py",
            "torch.div(127 - low, s2",
            "torch.div(128 - low, s2",
            "tests/schemes/test_lqq.py tests/schemes/test_protocol.py",
        ),
        (
            "qtool/schemes/lqq.py",
            "(bounds[1] - low) / 15",
            "(bounds[1] - low) / 16",
            "tests/schemes/test_lqq.py",
        ),
        (
            "qtool/schemes/lqq.py",
            "require((offset - 128).abs() <= PROTECTIVE_MAX",
            "require((offset - 128).abs() <= PROTECTIVE_MAX + 1",
            "tests/schemes/test_lqq.py",
        ),
        (
            "qtool/schemes/two_level.py",
            "PROTECTIVE_MAX = 119",
            "PROTECTIVE_MAX = 127",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/schemes/arithmetic/symmetric.py",
            "torch.where(amax < 0, -scale, scale)",
            "scale",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/schemes/w4a16.py",
            "low, high = 7.5, 8",
            "low, high = 7.0, 8",
            "tests/schemes/arithmetic/test_symmetric.py",
        ),
        (
            "qtool/schemes/w8a8.py",
            "= 127, -127, 127",
            "= 127, -128, 127",
            "tests/schemes/arithmetic/test_symmetric.py tests/schemes/test_protocol.py",
        ),
        (
            "qtool/schemes/w4a16_24.py",
            "= a >= b, a >= c,",
            "= a > b, a >= c,",
            "tests/schemes/arithmetic/test_symmetric.py",
        ),
        (
            "qtool/schemes/arithmetic/activation.py",
            "amax / top, 1.0).clamp_min(torch.finfo(torch.float32).tiny)",
            "amax / top, 1.0)",
            "tests/schemes/arithmetic/test_activation.py",
        ),
        (
            "qtool/schemes/arithmetic/products.py",
            "step = min(group_size, MAIN_LOOP_CHANNELS)",
            "step = group_size",
            "tests/schemes/arithmetic/test_products.py",
        ),
        (
            "qtool/schemes/arithmetic/products.py",
            "EXACT_PRODUCTS = 1024",
            "EXACT_PRODUCTS = 65536",
            "tests/schemes/arithmetic/test_products.py",
        ),
        (
            "qtool/schemes/fmpq.py",
            "bool(), 127, 7)",
            "bool(), 7, 127)",
            "tests/schemes/test_fmpq.py",
        ),
        (
            "qtool/schemes/fmpq_blocks.py",
            "torch.argsort(amax, descending=True, stable=True)",
            "torch.argsort(amax, stable=True)",
            "tests/schemes/test_fmpq.py",
        ),
        (
            "qtool/schemes/fmpq_blocks.py",
            "(1 - min_w4a4_share) + 1e-9",
            "(1 - min_w4a4_share)",
            "tests/schemes/test_fmpq.py",
        ),
        (
            "qtool/schemes/hardware.py",
            "if target.rho <= GROUP_RATIO:",
            "if target.rho < GROUP_RATIO:",
            "tests/schemes/test_hardware.py",
        ),
        # the KV cache
        (
            "qtool/schemes/kv.py",
            "torch.where(amax > 0, amax.float() / 127, 1.0)",
            "amax.float() / 127",
            "tests/schemes/test_kv.py",
        ),
        (
            "qtool/schemes/kv.py",
            "return codes[..., 0::2] | (codes[..., 1::2] << 4)",
            "return codes[..., 1::2] | (codes[..., 0::2] << 4)",
            "tests/schemes/test_kv.py",
        ),
        ("qtool/schemes/kv.py", "RANGE = 0.95", "RANGE = 1.0", "tests/schemes/test_kv.py"),
        (
            "qtool/schemes/kv.py",
            "halving_sum(w * left_again.square()) < halving_sum(w * left.square())",
            "halving_sum(left_again.square()) < halving_sum(left.square())",
            "tests/schemes/test_kv.py",
        ),
        (
            "qtool/schemes/kv.py",
            "return x.float() - self._offset(x)",
            "return x.float()",
            "tests/schemes/test_kv.py",
        ),
        (
            "qtool/runtime/packed_kv.py",
            "kept = min(self._grouped, tokens // self.quantizer.tokens * self.quantizer.tokens)",
            "kept = min(self._grouped, tokens)",
            "tests/runtime/test_packed_kv.py",
        ),
        (
            "qtool/runtime/packed_kv.py",
            "return KV4(stored(OFFSET), stored(IMPORTANCE)), KV4()",
            "return KV4(), KV4()",
            "tests/runtime/test_kv_cache.py",
        ),
        (
            "qtool/pipeline/job.py",
            "if job.recipe.kv and not any(",
            "if False and not any(",
            "tests/test_plugins.py -k without_a_kv_cache",
        ),
        (
            "qtool/runtime/kv_cache.py",
            "values.store(value_states[:, ::repeats])",
            "values.store(value_states[:, : value_states.shape[1] // repeats])",
            "tests/runtime/test_kv_cache.py -k heads",
        ),
        (
            "qtool/calibration/kv/cache.py",
            "seen.mean.cpu()",
            "seen.amax.cpu()",
            "tests/calibration/test_kv.py",
        ),
        (
            "qtool/calibration/kv/cache.py",
            "(block.with_cache(simulated) if own is None else {})",
            "block.with_cache(simulated)",
            "tests/calibration/test_kv.py",
        ),
        (
            "qtool/models/derived/cached.py",
            "if len(calls) > 1:",
            "if len(calls) > 2:",
            "tests/models/test_derive.py -k quantized_cache",
        ),
        (
            "qtool/models/derived/cached.py",
            "not in LAYERS",
            "is None",
            "tests/models/test_derive.py -k quantized_cache",
        ),
        (
            "qtool/runtime/kv_cache.py",
            "list(given) or DynamicCache(config=config).layers",
            "[DynamicLayer() for _ in given or DynamicCache(config=config).layers]",
            "tests/runtime/test_kv_cache.py -k hybrid",
        ),
        # layouts: where the numbers lie
        (
            "qtool/layouts/w4ax_interleaved.py",
            'group_order="g, nt row"',
            'group_order="g, row nt"',
            "tests/layouts/test_checkpoint_orders.py tests/layouts/test_identities.py",
        ),
        (
            "qtool/layouts/w4ax_interleaved.py",
            'order="nt row, kt q c j p"',
            'order="row nt, kt q c j p"',
            "tests/layouts/test_checkpoint_orders.py tests/layouts/test_identities.py",
        ),
        (
            "qtool/layouts/dual_mma.py",
            "w q c j h b",
            "w q c h j b",
            "tests/layouts/test_checkpoint_orders.py qtool/layouts/dual_mma.py",
        ),
        (
            "qtool/layouts/compute_aware.py",
            'group_order="g, nt l hi h"',
            'group_order="g, nt l h hi"',
            "tests/layouts/test_checkpoint_orders.py qtool/layouts/compute_aware.py",
        ),
        (
            "qtool/layouts/marlin.py",
            '"nt j1 cq j0 b cl"',
            '"nt j1 cq b j0 cl"',
            "tests/layouts/test_checkpoint_orders.py qtool/layouts/marlin.py",
        ),
        (
            "qtool/layouts/marlin_24.py",
            'group_order="g, nt co c1 j blk"',
            'group_order="g, nt co c1 blk j"',
            "tests/layouts/test_marlin_24.py tests/layouts/test_checkpoint_orders.py",
        ),
        (
            "qtool/layouts/qqq.py",
            "low=1,",
            "low=0,",
            "tests/layouts/test_checkpoint_orders.py qtool/layouts/qqq.py",
        ),
        (
            "qtool/layouts/apex4.py",
            'order="kt, nt c, q b"',
            'order="kt, nt c, b q"',
            "tests/layouts/test_checkpoint_orders.py qtool/layouts/apex4.py",
        ),
        (
            "qtool/layouts/digit_layout.py",
            "digit[self.nibble] ^ self.low if",
            "digit[self.nibble] if",
            "tests/layouts/test_identities.py",
        ),
        (
            "qtool/layouts/words.py",
            "((high & mask) << 4)",
            "(high << 4)",
            "tests/layouts/test_identities.py",
        ),
        (
            "qtool/kernels/activation/arrangement.py",
            "torch.argsort(16 * nibble + byte % 16)",
            "torch.argsort(byte % 16 * 2 + nibble)",
            "tests/kernels/test_registers.py qtool/kernels/activation/arrangement.py",
        ),
        # exchange: other loaders' files
        (
            "qtool/exchange/formats/affine.py",
            '"w4a16-24": W4A16_GROUP_SIZES',
            '"w4a16-24": (32, 128, None)',
            "tests/exchange/test_affine.py",
        ),
        (
            "qtool/exchange/formats/affine.py",
            '"w4a4": W4A16_GROUP_SIZES',
            '"w4a4": (64, 128, None)',
            "tests/exchange/test_affine.py",
        ),
        (
            "qtool/exchange/formats/affine.py",
            '"w4a8-qoq": (None,), "w4a8-qoq-g128": (32, 64, 128)}',
            '"w4a8-qoq": (None,), "w4a8-qoq-g128": (32, 128)}',
            "tests/exchange/test_affine.py",
        ),
        (
            "qtool/exchange/formats/affine.py",
            'torch.empty_like(codes).index_copy_(1, params["permutation"].long(), codes)',
            'codes[:, params["permutation"].long()]',
            "tests/exchange/test_export.py -k reordered",
        ),
        (
            "qtool/exchange/export_format.py",
            "leaves_16_bit = False",
            "leaves_16_bit = True",
            "tests/exchange/test_export.py -k 16_bit",
        ),
        (
            "qtool/exchange/formats/qserve.py",
            'zeros = -(params["zero"]',
            'zeros = (params["zero"]',
            "tests/exchange/test_qserve.py",
        ),
        (
            "qtool/exchange/export_format.py",
            "uniform: ClassVar[bool] = True",
            "uniform: ClassVar[bool] = False",
            "tests/exchange/test_export.py -k group_size",
        ),
        (
            "qtool/exchange/export_format.py",
            "lost := int((cast == 0).sum())",
            "lost := int((cast != cast).sum())",
            "tests/exchange/test_export.py -k fp16",
        ),
        (
            "qtool/exchange/formats/gptq.py",
            "* 0x11111111",
            "* 0x01111111",
            "tests/exchange/test_import_exact.py -k borrow",
        ),
        (
            "qtool/exchange/import_.py",
            'linears = {"gate_proj": names.gate, "up_proj": names.up,',
            'linears = {"gate_proj": names.up, "up_proj": names.gate,',
            "tests/exchange/test_import.py",
        ),
        (
            "qtool/io/dequantize/compressed_tensors.py",
            '{"weight_input", "weight_output"}',
            '{"weight_input"}',
            "tests/exchange/test_import.py",
        ),
        (
            "qtool/exchange/formats/gptq.py",
            '{"gptq": 1, "gptq_v2": 0}',
            '{"gptq": 0, "gptq_v2": 0}',
            "tests/exchange/test_gptq.py",
        ),
        (
            "qtool/exchange/formats/awq.py",
            'order="k, w j0 j2"',
            'order="k, w j2 j0"',
            "tests/exchange/test_awq.py",
        ),
        (
            "qtool/exchange/formats/compressed_tensors.py",
            '"symmetric": stored.form is not asymmetric_4',
            '"symmetric": True',
            "tests/exchange/test_compressed_tensors.py",
        ),
        (
            "qtool/exchange/formats/compressed_tensors.py",
            "to_fp8 = 127 / E4M3_MAX",
            "to_fp8 = 1 / E4M3_MAX",
            "tests/exchange/test_export.py -k kv_scales",
        ),
        (
            "qtool/exchange/formats/auto_round.py",
            'int(config.get("act_bits") or 16) < 16',
            'int(config.get("act_bits") or 16) < 8',
            "tests/exchange/test_import.py -k configs",
        ),
        (
            "qtool/exchange/import_format.py",
            "(index.bincount(minlength=groups) != k // groups).any()",
            "(index.bincount(minlength=groups) == 0).any()",
            "tests/exchange/test_import_exact.py",
        ),
        (
            "qtool/exchange/import_.py",
            "codes = codes[:, grid.order]",
            "codes = codes[:, grid.order.argsort()]",
            "tests/exchange/test_import_exact.py",
        ),
        (
            "qtool/exchange/convert.py",
            "require_file_intact(path, recorded.get(path.name))",
            "require_file_intact(path, None)",
            "tests/exchange/test_exportable.py -k flipped",
        ),
        (
            "qtool/exchange/as_export.py",
            "keepdim=True) / 127.5",
            "keepdim=True) / 127",
            "tests/exchange/test_as_export.py -k every_scheme",
        ),
        (
            "qtool/exchange/import_format.py",
            "stored.nbytes != n * groups // 2",
            "stored.nbytes > n * groups // 2",
            "tests/exchange/test_import.py -k damaged_tensors",
        ),
        (
            "qtool/exchange/as_export.py",
            "rounds_cache = CACHE == OLDER",
            "rounds_cache = True",
            "tests/exchange/test_as_export.py -k cache",
        ),
        # calibration: rounding
        (
            "qtool/calibration/rounding/gptq/hessian.py",
            "total.add_(2 * (a.T.float() @ b.float()))",
            "total.copy_(2 * (a.T.float() @ b.float()))",
            "tests/calibration/rounding/test_hessian.py",
        ),
        (
            "qtool/calibration/rounding/gptq/factor.py",
            "diagonal += self.damping * mean - added",
            "diagonal += self.damping * mean",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/gptq/gptq.py",
            "missing = options.residual * product",
            "missing = -options.residual * product",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/gptq/factor.py",
            "found[half:, :half] = -product(",
            "found[half:, :half] = product(",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/scales.py",
            "alpha=-1)",
            "alpha=1)",
            "tests/calibration/rounding/test_scales.py",
        ),
        (
            "qtool/calibration/transforms/gather_outliers.py",
            "self._count(block, number) == blocks",
            "self._count(block, number)",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/calibration/transforms/block_precision.py",
            "arranged(inputs[0], order, rotated)",
            "arranged(inputs[0], order, False)",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/calibration/transforms/block_precision.py",
            "arranged(t, order, rotated)",
            "arranged(t, order, False)",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "stacked_weights(block, some), some[0] in block.to_rotate)",
            "stacked_weights(block, some), False)",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/transforms/online_hadamard.py",
            "block.to_rotate |= {",
            "_ = {",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/kernels/activation/quantize_activation_groups.py",
            "y = rotate(y) if self.rotated else y",
            "pass",
            "tests/kernels/test_quantize_activation_groups.py",
        ),
        (
            "qtool/runtime/dispatch.py",
            "own.layout, own.rotated)",
            "own.layout, False)",
            "tests/runtime/test_dispatch.py",
        ),
        (
            "qtool/pipeline/streaming/built_blocks.py",
            "if t.needs_data), len(transforms))",
            "if t), len(transforms))",
            "tests/pipeline/test_quantize.py -k unrotated_router",
        ),
        (
            "qtool/pipeline/streaming/built_blocks.py",
            "transform.announce(block)",
            "pass",
            "tests/pipeline/test_quantize.py",
        ),
        (
            "qtool/pipeline/streaming/shards.py",
            "self._few(earlier, tokens, snapshots, job.transforms)",
            "self._few(earlier, tokens, snapshots)",
            "tests/pipeline/test_quantize.py",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "slice((step + number) % n, None, n)",
            "slice(0, None, n + 1)",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/data/continuation.py",
            "[:, :, self.cached : self.drawn - 1]",
            "[:, :, self.cached :]",
            "tests/data/test_continuation.py",
        ),
        (
            "qtool/calibration/rounding/gptq/rounding.py",
            "if not any(map(streams[-1].equal, streams[:-1])):",
            "if True:",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/kernels/recording.py",
            "        torch.cuda.stream(stream),\n",
            "",
            "tests/kernels/test_recording.py",
        ),
        (
            "qtool/pipeline/trial_rounding.py",
            "            raise AllSeen\n",
            "            return\n",
            "tests/pipeline/test_sensitivity.py -k gptq_looks",
        ),
        (
            "qtool/calibration/rounding/distill/distill.py",
            "elif half:",
            "elif not half:",
            "tests/calibration/rounding/test_distill.py -k beyond_float16",
        ),
        (
            "qtool/calibration/rounding/distill/distill.py",
            "None if b is None else run(block, b, **block.full_kv) for b in teacher_batches",
            "None if b is None else run(block, b, **block.full_kv) for b in self.batches",
            "tests/calibration/rounding/test_distill.py",
        ),
        (
            "qtool/calibration/rounding/distill/distill.py",
            "whole.part(slice(first, min(first + size, wanted)))",
            "whole.part(slice(first, wanted))",
            "tests/calibration/rounding/test_distill.py",
        ),
        (
            "qtool/calibration/rounding/distill/distill.py",
            "tensors[HIDDEN].clone()",
            "tensors[HIDDEN]",
            "tests/calibration/rounding/test_distill.py",
        ),
        (
            "qtool/calibration/rounding/distill/distill.py",
            "(self.loss(given) * scale).backward()",
            "self.loss(given).backward()",
            "tests/calibration/rounding/test_distill.py",
        ),
        (
            "qtool/calibration/batch.py",
            "double == 2 * single",
            "axis == 0 and single == 1",
            "tests/calibration/test_block.py",
        ),
        (
            "qtool/calibration/statistics.py",
            "if routed and tokens:",
            "if False:",
            "tests/calibration/test_statistics.py",
        ),
        (
            "qtool/calibration/batch.py",
            "self.hidden[(slice(None),) * self.axis + (sequences,)]",
            "self.hidden[sequences]",
            "tests/pipeline/test_passed.py",
        ),
        (
            "qtool/calibration/rounding/gptq/sparsegpt.py",
            "free[:, j + 1 :].addr_(moved, inner[k + j, k + j + 1 : k + m])",
            "free[:, j + 1 :].add_(0)",
            "tests/calibration/rounding/test_columns.py",
        ),
        (
            "qtool/calibration/rounding/gptq/columns.py",
            "m[k + 1 :] * (e - before)",
            "m[k + 1 :] * e",
            "tests/calibration/rounding/test_columns.py",
        ),
        (
            "qtool/calibration/rounding/gptq/gptq.py",
            "sum(1).argsort(descending=True, stable=True)",
            "sum(1).argsort(stable=True)",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/gptq/clip_search.py",
            "mul_(importance[:, None])",
            "mul_(importance[:1, None])",
            "tests/calibration/test_stacking.py -k importance",
        ),
        (
            "qtool/calibration/rounding/gptq/clip_search.py",
            "group_clip=group_clip * ratio)",
            "group_clip=ratio)",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/scales.py",
            "stored_scale(better.abs(), scale.dtype).copysign(scale)",
            "stored_scale(better.abs(), scale.dtype)",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/rtn.py",
            "(a / b) ** 0.5",
            "a / b",
            "tests/calibration/rounding/test_rtn.py",
        ),
        (
            "qtool/calibration/rounding/rtn.py",
            "slice(first * n + start,",
            "slice(start,",
            "tests/calibration/test_stacking.py -k rounded_together",
        ),
        (
            "qtool/calibration/stacking.py",
            "block.weight(name).shape, own and name)",
            "block.weight(name).shape)",
            "tests/calibration/test_stacking.py -k alike",
        ),
        (
            "qtool/calibration/stacking.py",
            "for c, n in zip(clips, rows, strict=True)",
            "for c, n in zip(clips[::-1], rows, strict=True)",
            "tests/calibration/test_stacking.py -k clips",
        ),
        (
            "qtool/calibration/rounding/distill/learned_linear.py",
            "return self.steps * self.step",
            "return self.steps * self.step.mean()",
            "tests/calibration/rounding/test_distill.py",
        ),
        (
            "qtool/calibration/rounding/distill/learned_linear.py",
            "inside if keep is None else inside & keep",
            "inside",
            "tests/calibration/rounding/test_distill.py",
        ),
        (
            "qtool/calibration/rounding/rounded.py",
            "x = x.index_select(-1, permutation)",
            "x = x.index_select(-1, permutation.argsort())",
            "tests/calibration/rounding/test_distill.py",
        ),
        # calibration: transforms
        (
            "qtool/calibration/transforms/reorder.py",
            "recipe_group(g) in self.groups and g.ordered",
            "recipe_group(g) in self.groups",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/models/derived/arithmetic.py",
            "kind in (Kind.SCALED, Kind.ORDERED)",
            "kind == Kind.ORDERED",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/calibration/transforms/reorder.py",
            "            if name in block.schemes:\n                block.permute(name, order)",
            "            block.permute(name, order)",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/calibration/kv/cache.py",
            'errors["weighted"] < errors["even"]',
            "True",
            "tests/calibration/test_kv.py",
        ),
        (
            "qtool/calibration/transforms/queries.py",
            "attention is None or attention.neighbours",
            "attention is None",
            "tests/calibration/test_kv.py",
        ),
        (
            "qtool/calibration/transforms/smooth_attention.py",
            "by_head[:, :, order]",
            "by_head",
            "tests/calibration/transforms/test_smooth_attention.py",
        ),
        (
            "qtool/runtime/kv_attention.py",
            "self.to_attend and not self.otherwise",
            "self.to_attend",
            "tests/runtime/test_kv_attention.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "outputs += target.shape[0] * target.shape[2] // len(x)",
            "outputs += target.shape[0]",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "errors / (outputs * torch.tensor(tokens).to(x.device, non_blocking=True))",
            "errors / (outputs * x.shape[1])",
            "tests/calibration/test_stacking.py -k lengths",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "alive = (x_amax > 0) & (w_amax > 0)",
            "alive = x_amax > 0",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "torch.where(apart, median(amax), amax)",
            "amax",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "_of_least(balanced, errors)",
            "_of_least(balanced, -errors)",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/cli_errors.py",
            "return plugins.raised_in(error) or error",
            "return error",
            "tests/test_plugins.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "seen, target = x * share, target.mul_(share)",
            "pass",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/statistics.py",
            "    chosen[: min(tokens, 1)] = True\n",
            "",
            "tests/calibration/test_statistics.py",
        ),
        (
            "qtool/calibration/transforms/folding.py",
            "by_head.amax(1, keepdim=True)",
            "by_head[:, :1]",
            "tests/calibration/transforms",
        ),
        (
            "qtool/calibration/transforms/norm_fusion.py",
            "gain = stored.double() + offset",
            "gain = stored.double()",
            "tests/calibration/transforms/test_norm_fusion.py",
        ),
        (
            "qtool/calibration/transforms/rotate.py",
            "bias.copy_(_by_parts(bias.double(), q))",
            "bias.copy_(bias)",
            "tests/calibration/transforms/test_rotate.py",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "            half = half - means + means.mT\n",
            "            half = half - means - means.mT\n",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/pruned_rotation.py",
            "found.addcmul_(turned_inverse, of_cost, value=2)",
            "pass",
            "tests/calibration/transforms/test_pruned_rotation.py",
        ),
        (
            "qtool/calibration/rounding/gptq/residual_stream.py",
            "parts = (stream, x * columns.to(x.dtype))",
            "parts = (stream, stream * 0)",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/rounding/gptq/rows.py",
            "target += product(",
            "target -= product(",
            "tests/calibration/rounding/test_rows.py",
        ),
        (
            "qtool/calibration/rounding/gptq/output_hessian.py",
            "total.add(torch.cat(gradients))",
            "total.add(torch.cat(gradients[:1]))",
            "tests/calibration/rounding/test_rows.py",
        ),
        (
            "qtool/calibration/rounding/gptq/output_hessian.py",
            "max(1, TOKENS // seqlen)",
            "SEQUENCES",
            "tests/calibration/rounding/test_rows.py",
        ),
        (
            "qtool/calibration/rounding/gptq/rounding.py",
            "for name in names)) <= MOST_ROWS",
            "for name in names)) > 0",
            "tests/calibration/rounding/test_rows.py",
        ),
        (
            "qtool/pipeline/streaming/shards.py",
            "self.output.drop(_gradients(shard - 2))",
            "pass",
            "tests/pipeline/test_stream_gradients.py",
        ),
        (
            "qtool/calibration/rounding/gptq/rounding.py",
            "outputs.get(output_modules(block, names))",
            "outputs.get(tuple(names))",
            "tests/calibration/rounding/test_rows.py -k sum",
        ),
        (
            "qtool/calibration/rounding/gptq/rounding.py",
            "shapes, id(stack.outputs)",
            "shapes",
            "tests/calibration/rounding/test_rows.py -k another_g",
        ),
        (
            "qtool/calibration/rounding/gptq/rows.py",
            "product(feedback, error[order[:start]])",
            "product(feedback, errors[0][order[:start]])",
            "tests/calibration/rounding/test_rows.py -k one_g",
        ),
        (
            "qtool/calibration/rounding/gptq/cost.py",
            "not groups[0].routed or groups[0].writes_residual",
            "not groups[0].routed",
            "tests/pipeline/test_plan.py -k experts_share",
        ),
        (
            "qtool/calibration/rounding/gptq/output_hessian.py",
            "(drawn @ block.sensitivity)",
            "drawn",
            "tests/calibration/rounding/test_rows.py",
        ),
        (
            "qtool/pipeline/calibration_windows.py",
            "min((DEVICE_SHARE if on_gpu else HOST_SHARE) * whole, free)",
            "(DEVICE_SHARE if on_gpu else HOST_SHARE) * free",
            "tests/pipeline/test_calibration_windows.py",
        ),
        (
            "qtool/pipeline/streaming/stream_gradients.py",
            "moments += scaled.T @ (share[:, None] * scaled)",
            "moments += scaled.T @ scaled",
            "tests/pipeline/test_stream_gradients.py",
        ),
        (
            "qtool/pipeline/streaming/stream_gradients.py",
            "across = drawn - (drawn * unit).sum(-1, keepdim=True) * unit",
            "across = drawn",
            "tests/pipeline/test_stream_gradients.py",
        ),
        (
            "qtool/pipeline/streaming/stream_gradients.py",
            "gradients[number] = _limited(_backwards(block, sequence, gradient))",
            "pass",
            "tests/pipeline/test_stream_gradients.py",
        ),
        (
            "qtool/calibration/transforms/rotate.py",
            "group = scheme.group_size or hidden",
            "group = hidden",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/rotate.py",
            "size = scheme.activation.group_size or hidden",
            "size = hidden",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "alpha=len(rows) / count",
            "alpha=1 / len(together)",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/pruned_rotation.py",
            "weight * to_median(torch.linalg.vector_norm(weight, dim=1))[:, None]",
            "weight",
            "tests/calibration/transforms/test_pruned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/balance.py",
            "x**one / w ** (1 - one)",
            "x**one / w",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "starts = torch.ones_like(x_amax)[None]",
            "starts = torch.full_like(x_amax, 2.0)[None]",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/transforms/smooth.py",
            "for some in quantized\n    ]",
            "for some in stacks\n    ]",
            "tests/calibration/transforms/test_smooth.py",
        ),
        (
            "qtool/calibration/rounding/gptq/clip_search.py",
            "importance.sum(-1, keepdim=True) > 0, importance, 1.0",
            "importance.sum(-1, keepdim=True) > 0, importance, 0.0",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/outliers.py",
            "most - count + count // 2",
            "most // 2 + 0 * count",
            "tests/calibration/test_outliers.py",
        ),
        (
            "qtool/calibration/outliers.py",
            "middle / sizes",
            "largest * middle / sizes",
            "tests/calibration/test_outliers.py",
        ),
        (
            "qtool/calibration/rounding/gptq/gptq.py",
            "range(-above, self.clip_steps)",
            "range(self.clip_steps)",
            "tests/schemes/test_qoq.py",
        ),
        (
            "qtool/calibration/transforms/pruned_rotation.py",
            "largest=False",
            "largest=True",
            "tests/calibration/transforms/test_pruned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/pruning_order.py",
            "order[j, one] = torch.where(better, theirs, mine)",
            "order[j, one] = torch.where(better, mine, theirs)",
            "tests/calibration/transforms/test_pruning_order.py",
        ),
        (
            "qtool/calibration/transforms/pruning_order.py",
            "found[0] + found[1] < least[one] + least[other]",
            "found[0] + found[1] > least[one] + least[other]",
            "tests/calibration/transforms/test_pruning_order.py",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            ".pow(power / POWER - 1)",
            ".pow(power / POWER)",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "above.add_(below)",
            "above.sub_(below)",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/models/torch_defaults.py",
            "with _TURN:",
            "with nullcontext():",
            "tests/models/test_torch_defaults.py",
        ),
        (
            "qtool/plugins.py",
            "if entry in _called:",
            "if False:",
            "tests/test_plugins.py",
        ),
        (
            "qtool/runtime/packed_kv.py",
            "not in stored",
            "in stored",
            "tests/pipeline/test_verify.py",
        ),
        (
            "qtool/format/linear.py",
            "rows = lcm(SLAB_ROWS, linear_format.layout_object.tile[0])",
            "rows = SLAB_ROWS",
            "tests/test_plugins.py",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "(axes, group)], AXES",
            "(axes, group)], 0.0",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/transforms/value_heads.py",
            "(len(self.matrix), -1))  #",
            "(-1, len(self.matrix))).transpose(-2, -3)  #",
            "tests/calibration/transforms/test_rotate.py",
        ),
        (
            "qtool/calibration/transforms/rotate.py",
            "            propagate(block, batches)\n",
            "",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/calibration/forwards.py",
            "**(arguments | given | extra)",
            "**(arguments | extra)",
            "tests/pipeline/test_passed.py",
        ),
        (
            "qtool/calibration/reference.py",
            "if key not in self.moved:",
            "if True:",
            "tests/calibration/rounding/test_gptq.py",
        ),
        (
            "qtool/calibration/batch.py",
            "return {HIDDEN: self.hidden, **self.passed}",
            "return {HIDDEN: self.hidden}",
            "tests/pipeline/test_passed.py",
        ),
        (
            "qtool/pipeline/quantize.py",
            'source.require_unchanged(output.identity["source model"])',
            "pass",
            "tests/pipeline/test_faults.py -k meanwhile",
        ),
        (
            "qtool/distributed/serialization.py",
            "return _aligned(places[-1].stop)",
            "return places[-1].stop",
            "tests/distributed/test_serialization.py",
        ),
        (
            "qtool/pipeline/streaming/built_blocks.py",
            "rows = table_rows(self.source, job, name, wanted)",
            "rows = torch.zeros(len(wanted), self.source.entry(f'{name}.weight').shape[1])",
            "tests/pipeline/test_passed.py",
        ),
        (
            "qtool/pipeline/streaming/shards.py",
            "transforms=job.transforms[:number],",
            "",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/pipeline/streaming/shards.py",
            "if kept := output.kept(name):",
            "if None and (kept := output.kept(name)):",
            "tests/pipeline/test_quantize.py",
        ),
        (
            "qtool/calibration/transforms/hadamard.py",
            "* (2 / square)",
            "* (1 / square)",
            "tests/calibration/transforms/test_hadamard.py",
        ),
        (
            "qtool/calibration/transforms/reorder.py",
            "rows = by_head + heads.dim * torch.arange(heads.kv",
            "rows = by_head + heads.kv * torch.arange(heads.kv",
            "tests/calibration/transforms/test_reorder.py",
        ),
        (
            "qtool/calibration/transforms/key_transform.py",
            "torch.maximum(amax[:, : rotary // 2], amax[:, rotary // 2 : rotary])",
            "amax[:, : rotary // 2]",
            "tests/calibration/transforms/test_smooth_attention.py",
        ),
        (
            "qtool/calibration/transforms/value_basis.py",
            ", self.steps, [of_values])",
            ", self.steps)",
            "tests/calibration/transforms/test_value_basis.py",
        ),
        (
            "qtool/calibration/transforms/clip.py",
            "torch.where((error < best)[:, None], chosen, group_clip)",
            "chosen",
            "tests/calibration/transforms/test_clip.py",
        ),
        (
            "qtool/calibration/statistics.py",
            "self.amax = maximum((self.amax, amax))",
            "self.amax = amax",
            "tests/calibration/test_statistics.py",
        ),
        (
            "qtool/calibration/statistics.py",
            "tokens >= min(LEAST_TOKENS, total)",
            "tokens > 0",
            "tests/calibration/test_statistics.py",
        ),
        # data
        (
            "qtool/data/windows.py",
            "[order[:samples].sort().values]",
            "[:samples]",
            "tests/data/test_calibration_input.py",
        ),
        (
            "qtool/data/mix.py",
            "+ (i < whole % count)",
            "",
            "tests/data/test_mix.py",
        ),
        (
            "qtool/data/mix.py",
            "[torch.cat(places).argsort(stable=True)]",
            "",
            "tests/data/test_mix.py",
        ),
        (
            "qtool/data/continuation.py",
            "nan_to_num(0, 0, 0).softmax(-1)",
            "nan_to_num(0, 0, 0).mul(2).softmax(-1)",
            "tests/data/test_continuation.py",
        ),
        (
            "qtool/data/corpora.py",
            '" " if split == TEST else BLANK_LINE',
            '" " if split == TRAIN else BLANK_LINE',
            "tests/data/test_corpora.py",
        ),
        # the pipeline, and what a killed run leaves
        (
            "qtool/pipeline/quantize.py",
            '"device": device.type,',
            '"device": "",',
            "tests/pipeline/test_quantize.py -k resume",
        ),
        (
            "qtool/data/mix.py",
            "return self.data.sha256 or self.data.name",
            "return self.data.name",
            "tests/pipeline/test_calibration_windows.py -k content",
        ),
        (
            "qtool/data/text_files.py",
            "digest.update(_ending(path).encode())",
            "",
            "tests/pipeline/test_calibration_windows.py -k content",
        ),
        (
            "qtool/pipeline/quantize.py",
            '"source model": source.fingerprint(),',
            '"source model": "",',
            "tests/pipeline/test_quantize.py -k resume",
        ),
        (
            "qtool/pipeline/streaming/built_blocks.py",
            "with quantized_kv(block, job.format.kv, parts):",
            "with quantized_kv(block, None, parts):",
            "tests/pipeline/test_reference.py",
        ),
        (
            "qtool/format/linear.py",
            "return self.layout_object.by_rows and not self.scheme_object.shared_params",
            "return True",
            "tests/layouts/test_together.py",
        ),
        (
            "qtool/pipeline/streaming/snapshots.py",
            "mine = number <= block and owner",
            "mine = owner",
            "tests/pipeline/test_snapshots.py",
        ),
        (
            "qtool/pipeline/streaming/snapshots.py",
            "number != snapshot.block)",
            "number > snapshot.block)",
            "tests/pipeline/test_snapshots.py",
        ),
        (
            "qtool/pipeline/streaming/embedding_and_head.py",
            "zip(job.transforms, norms, strict=False)",
            "zip(job.transforms, norms[1:], strict=False)",
            "tests/pipeline/test_embedding_and_head.py",
        ),
        (
            "qtool/pipeline/recipe_fit/layer_rules.py",
            "if number in hold:",
            "if any(map(rule.search, names)):",
            "tests/recipes/test_recipe.py",
        ),
        (
            "qtool/pipeline/recipe_fit/part_names.py",
            "if group.fold in (Fold.PRODUCT, Fold.ACTIVATION):",
            "if group.fold is Fold.PRODUCT:",
            "tests/pipeline/test_family_recipe.py",
        ),
        (
            "qtool/pipeline/planning/memory.py",
            'learning, "learning_bytes", tokens',
            'learning, "held_bytes", tokens',
            "tests/pipeline/test_plan.py",
        ),
        (
            "qtool/pipeline/planning/work.py",
            "if job.needs_data and kv_tensors(",
            "if not job.needs_data and kv_tensors(",
            "tests/pipeline/test_plan.py",
        ),
        (
            "qtool/pipeline/recipe_fit/family_recipe.py",
            "HEAD_SHARE = 0.05",
            "HEAD_SHARE = 0.5",
            "tests/pipeline/test_family_recipe.py",
        ),
        (
            "qtool/pipeline/job.py",
            "(4 * k if self.format.is_permuted(name) else 0)",
            "0",
            "tests/pipeline/test_plan.py",
        ),
        (
            "qtool/pipeline/verify.py",
            "if not names and checkpoint_format.kv is None:",
            "if not names and checkpoint_format.kv:",
            "tests/test_bad_input.py -k packed_linears",
        ),
        (
            "qtool/pipeline/verify.py",
            "if error <= tolerance else",
            "if tolerance else",
            "tests/pipeline/test_verify.py",
        ),
        (
            "qtool/pipeline/streaming/built_blocks.py",
            "or activations.room < sum(",
            "or activations.room > sum(",
            "tests/pipeline/test_faults.py -k no_room_for_both",
        ),
        (
            "qtool/pipeline/planning/plan.py",
            "beside = memory.gradient_bytes(job, few)",
            "beside = 0",
            "tests/pipeline/test_plan.py -k gradients_need",
        ),
        (
            "qtool/pipeline/quantize.py",
            "if stays_float32(model, name, cast)",
            'if stays_float32(model, "", cast)',
            "tests/models/test_tiny.py -k keeps_in_float32",
        ),
        (
            "qtool/models/derived/block_family.py",
            '"" if name == "experts" else name',
            'name if name == "experts" else name',
            "tests/models/test_tiny.py -k gemma4_text",
        ),
        (
            "qtool/models/derived/stream.py",
            "if block.prefix[:-1] in block.model.trace.changing:",
            "if not block.prefix:",
            "tests/models/test_own.py",
        ),
        (
            "qtool/models/derived/whole.py",
            "centred or any(",
            "any(",
            "tests/models/test_own.py",
        ),
        (
            "qtool/models/derived/folds.py",
            "r.value_id != call.value_id for r",
            "r.value_id < 0 for r",
            "tests/models/test_own.py",
        ),
        (
            "qtool/io/adapter.py",
            "{file: sha256_of(self.directory / file) for",
            "{file: file for",
            "tests/io/test_adapter.py -k meanwhile",
        ),
        (
            "qtool/progress.py",
            "now - self.first[1] < AT_ONCE",
            "now < self.first[1]",
            "tests/test_cli.py -k end_at_once",
        ),
        (
            "qtool/calibration/reference.py",
            "x.clone() if self.watched or changes",
            "x.clone() if self.watched",
            "tests/pipeline/test_reference.py -k overwrite",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "        return matrix\n",
            "        return self.matrix\n",
            "tests/calibration/transforms/test_learned_rotation.py -k threads",
        ),
        (
            "qtool/schemes/arithmetic/launch_triton.py",
            "torch.cuda.device(first.device)",
            'torch.cuda.device("cuda:0")',
            "tests/schemes/arithmetic/test_launch_triton.py",
        ),
        (
            "qtool/pipeline/calibration_windows.py",
            "name != self._next_name() or kept is None",
            "kept is None",
            "tests/pipeline/test_calibration_windows.py -k drawn_on",
        ),
        (
            "qtool/distributed/watch.py",
            "is_alone() or ",
            "",
            "tests/test_cli.py -k first_of_several",
        ),
        # input and output
        (
            "qtool/io/integrity.py",
            "elif digest != expected:",
            "elif not digest:",
            "tests/io/test_integrity.py",
        ),
        (
            "qtool/io/read_ahead.py",
            "moved[2].wait()",
            "pass",
            "tests/io/test_read_ahead.py",
        ),
        (
            "qtool/io/output.py",
            "found.pop(OWN_HASH, None) != content_hash(found)",
            "not found.pop(OWN_HASH, None)",
            "tests/pipeline/test_faults.py -k flipped_bit",
        ),
        (
            "qtool/io/output.py",
            "contextlib.suppress(FileNotFoundError):  # the same run",
            "contextlib.nullcontext():  # the same run",
            "tests/pipeline/test_quantize.py -k may_remove",
        ),
        (
            "qtool/exchange/gguf/write.py",
            "if left.name != LOCK:",
            "if left.name == FILE:",
            "tests/exchange/test_gguf.py -k as_new",
        ),
        (
            "qtool/io/output.py",
            "if partial.is_symlink() or partial.is_mount() or others:",
            "if partial.is_mount() or others:",
            "tests/pipeline/test_faults.py",
        ),
        (
            "qtool/io/integrity.py",
            "objects += blocks if isinstance(blocks, list) else [blocks]",
            "objects += blocks if isinstance(blocks, list) else []",
            "tests/io/test_integrity.py",
        ),
        (
            "qtool/calibration/rounding/gptq/hessian.py",
            "torch.where(whole > 0, lost.sum() / whole, 0.0)",
            "(lost.sum() / whole)",
            "tests/pipeline/test_faults.py",
        ),
        (
            "qtool/io/output.py",
            'return record if record["sha256"] == sha256_of(path) else None',
            "return record",
            "tests/pipeline/test_snapshots.py -k damaged",
        ),
        (
            "qtool/io/output.py",
            'if record["job"] != content_hash(self.identity):',
            'if not record["job"]:',
            "tests/pipeline/test_faults.py tests/io",
        ),
        (
            "qtool/io/safetensors.py",
            "if start != end:",
            "if start < end:",
            "tests/io/test_safetensors.py",
        ),
        (
            "qtool/io/safetensors.py",
            "if end != size:",
            "if end > size:",
            "tests/io/test_safetensors.py",
        ),
        (
            "qtool/io/source.py",
            "if Path(shard).name != shard or not",
            "if not",
            "tests/io/test_damaged_files.py -k names_no_file",
        ),
        (
            "qtool/io/safetensors.py",
            "start=self.start + number * one.nbytes",
            "start=self.start",
            "tests/io/test_source_names.py",
        ),
        (
            "qtool/io/safetensors.py",
            "within.order[row] for row in order",
            "row for row in order",
            "tests/io/test_safetensors.py",
        ),
        (
            "qtool/models/derived/folds.py",
            'source=names["up_proj"], fold=fold',
            'source=names.get("gate_proj", names["up_proj"]), fold=fold',
            "tests/models/test_tiny.py -k as_they_were[granite]",
        ),
        (
            "qtool/io/source_names.py",
            "gate, up = slice(0, None, 2), slice(1, None, 2)",
            "up, gate = slice(0, None, 2), slice(1, None, 2)",
            "tests/models/test_tiny.py -k end_to_end[gpt_oss]",
        ),
        (
            "qtool/io/source_names.py",
            "for number in range(stack.shape[0])]",
            "for number in reversed(range(stack.shape[0]))]",
            "tests/models/test_tiny.py -k end_to_end[llama4_text]",
        ),
        (
            "qtool/io/source_names.py",
            "or any(stack in own for stack in stacks)",
            "or False",
            "tests/io/test_source_names.py -k wrapper",
        ),
        (
            "qtool/models/family.py",
            "{**self.disk_names, **names, **others}",
            "{**self.disk_names, **names}",
            "tests/io/test_source_names.py -k towers",
        ),
        (
            "qtool/exchange/export.py",
            "whole.T.contiguous() if part.transposed else whole",
            "whole",
            "tests/models/test_tiny.py -k published",
        ),
        (
            "qtool/models/derived/forward.py",
            "key=lambda name: (steps(name), -sizes[name])",
            "key=lambda name: -sizes[name]",
            "tests/models/test_derive.py -k nearest",
        ),
        (
            "qtool/exchange/gguf/architectures.py",
            "return tensor.float() + offset",
            "return tensor.float()",
            "tests/exchange/test_gguf.py -k llama_cpp_knows",
        ),
        (
            "qtool/exchange/gguf/write.py",
            "sorted(stored.owners.items())",
            "sorted(stored.owners.items(), key=lambda pair: str(-pair[0]))",
            "tests/exchange/test_gguf.py -k llama_cpp_knows",
        ),
        (
            "qtool/exchange/gguf/tokenizer.py",
            "scores = {piece: -spans[turn[0]][0]",
            "scores = {piece: spans[turn[0]][0]",
            "tests/exchange/test_gguf_tokenizer.py",
        ),
        (
            "qtool/io/safetensors.py",
            "slice(order.start, order.stop, order.step)",
            "slice(order.start, order.stop)",
            "tests/io/test_source_names.py tests/pipeline/test_published_sources.py",
        ),
        (
            "qtool/io/source.py",
            "digest.update(repr(self.adapter.hashes).encode())",
            "pass",
            "tests/io/test_adapter.py",
        ),
        (
            "qtool/io/dequantize/block_scaled.py",
            "// bn]",
            "// bk]",
            "tests/io/test_dequantize.py",
        ),
        (
            "qtool/io/dequantize/block_scaled.py",
            "        if divisor:",
            "        if False:",
            "tests/io/test_dequantize.py",
        ),
        (
            "qtool/io/dequantize/block_scaled.py",
            "values[:, edge:].mul_(scale[:, -1:])",
            "pass",
            "tests/io/test_dequantize.py",
        ),
        (
            "qtool/io/dequantize/__init__.py",
            "elif name.endswith(found.scales):",
            "elif False:",
            "tests/pipeline/test_published_sources.py",
        ),
        (
            "qtool/io/adapter.py",
            "math.sqrt(rank) if self",
            "rank if self",
            "tests/io/test_adapter.py",
        ),
        (
            "qtool/io/adapter.py",
            "if isinstance(weight.computed, Merged):",
            "if False:",
            "tests/io/test_adapter.py",
        ),
        (
            "qtool/io/run_record.py",
            'if before.get("job") == self.job else []',
            "if before else []",
            "tests/io/test_run_record.py",
        ),
        # evaluation
        (
            "qtool/eval/perplexity.py",
            "targets = batch[:, 1:]",
            "targets = batch[:, :-1]",
            "tests/eval/test_perplexity.py",
        ),
        (
            "qtool/eval/perplexity.py",
            "scored = windows.shape[1] - 1",
            "scored = windows.shape[1]",
            "tests/eval/test_perplexity.py",
        ),
        (
            "qtool/runtime/load.py",
            'placed = {"": where}  # else',
            "pass  # else",
            "tests/runtime/test_load.py -k stacked",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "self.q.copy_(start)",
            "self.q.copy_(self.one)",
            "tests/calibration/transforms/test_learned_rotation.py -k start",
        ),
        (
            "qtool/pipeline/streaming/method_checks.py",
            "sorted(before ^ found.keys())",
            "sorted(before - found.keys())",
            "tests/test_plugins.py -k method_returns",
        ),
        (
            "qtool/models/derived/module_kinds.py",
            " or form_of(module) is not None",
            "",
            "tests/models/test_own.py",
        ),
        (
            "qtool/exchange/export.py",
            'permuted = f"{owner}.permutation" in self.source',
            "permuted = False",
            "tests/test_plugins.py -k gathered",
        ),
        (
            "qtool/layouts/protocol.py",
            "for name in packed if layout.by_rows else ():",
            "for name in ():",
            "tests/test_plugins.py -k by_rows",
        ),
        (
            "qtool/schemes/protocol.py",
            'require(same, "clip_bounds, in units of the float scale, stays if that is doubled")',
            "pass",
            "tests/test_plugins.py -k bounds",
        ),
        (
            "qtool/schemes/protocol.py",
            "if torch.equal(doubled, 2 * values) else None",
            "",
            "tests/test_plugins.py -k float_zero_point",
        ),
        (
            "qtool/schemes/protocol.py",
            'require(near, "with_clip_bounds is the inverse of clip_bounds")',
            "pass",
            "tests/test_plugins.py -k bounds",
        ),
        (
            "qtool/pipeline/recipe_fit/layer_rules.py",
            'if not any(name.endswith(f".{role}") for name in names):',
            "if False:",
            "tests/recipes/test_recipe.py",
        ),
        (
            "qtool/eval/compare.py",
            "changes = batch_means(changes)",
            "pass",
            "tests/eval/test_evaluate.py",
        ),
        (
            "qtool/eval/results.py",
            "r = 1 / freedom if freedom else 0.0",
            "r = 0.0",
            "tests/eval/test_evaluate.py",
        ),
        (
            "qtool/eval/compare.py",
            "math.hypot(new.stderr, old.stderr)",
            "new.stderr + old.stderr",
            "tests/eval/test_evaluate.py",
        ),
        (
            "qtool/eval/compare.py",
            "if not same or len(mine) != len(other):",
            "if len(mine) != len(other):",
            "tests/eval/test_evaluate.py",
        ),
        (
            "qtool/eval/items.py",
            "[ratio + count * (t - ratio * w) / whole",
            "[ratio + (t - ratio * w) / whole",
            "tests/eval/test_items.py",
        ),
        (
            "qtool/eval/kv_error.py",
            "(error / square).sqrt()",
            "(error / square)",
            "tests/eval/test_measured.py",
        ),
        (
            "qtool/eval/local_tasks.py",
            '" " + row["continuation"]',
            'row["continuation"]',
            "tests/eval/test_zero_shot.py -k lambada",
        ),
        (
            "qtool/eval/saved.py",
            "if s.facts == facts)",
            "if facts)",
            "tests/eval/test_saved.py",
        ),
        (
            "qtool/eval/saved.py",
            "        require_intact(directory)\n",
            "        pass\n",
            "tests/eval/test_saved.py",
        ),
        # the runtime, and what engines load
        (
            "qtool/runtime/linear.py",
            "x = x[..., self.permutation.long()]",
            "x = x[..., self.permutation.long().argsort()]",
            "tests/runtime/test_linear.py",
        ),
        (
            "qtool/runtime/huggingface.py",
            "            require_intact(directory)\n",
            "            pass\n",
            "tests/runtime/test_load.py",
        ),
        (
            "qtool/runtime/merge.py",
            "if any(part.format != first.format or part.in_features != k for part in parts):",
            "if any(part.in_features != k for part in parts):",
            "tests/runtime/test_merge.py",
        ),
        (
            "qtool/runtime/experts.py",
            'up, down = ("gate", "up"), ("down",)',
            'up, down = ("up", "gate"), ("down",)',
            "tests/runtime/test_experts.py",
        ),
        (
            "qtool/runtime/experts.py",
            'or buffers["qweight"] is not codes',
            "",
            "tests/runtime/test_experts.py",
        ),
        (
            "qtool/runtime/range_attention.py",
            "used.clamp_max(window)",
            "used.clamp_max(window + 1)",
            "tests/runtime/test_decode.py",
        ),
        (
            "qtool/runtime/decode.py",
            "known = None in windows or max(lengths) < (window or 0)",
            "known = True",
            "tests/runtime/test_decode.py",
        ),
        (
            "qtool/kernels/op.py",
            "            key += value.stride(), value.dtype, value.get_device()",
            "            key += value.dtype, value.get_device()",
            "tests/kernels/test_op.py",
        ),
        (
            "qtool/kernels/op.py",
            "key += address % ALIGNMENT, shape[1:], shape[:1] == tokens",
            "key += address % ALIGNMENT, shape[1:], True",
            "tests/kernels/test_op.py",
        ),
        (
            "qtool/kernels/op.py",
            "                key += address, shape\n",
            "                key += (address,)\n",
            "tests/kernels/test_op.py",
        ),
        (
            "qtool/kernels/hopper/gemm.py",
            "tiles if tile.split > 2 else min(tiles, kernel.resident // tile.split)",
            "tiles",
            "tests/kernels/test_prepared.py",
        ),
        (
            "qtool/kernels/experts/route.py",
            "place[order] = torch.where(rows < offsets[-1], rows, -1)",
            "place[order] = rows",
            "tests/kernels/test_experts.py",
        ),
        (
            "qtool/kernels/mma/w4a16.py",
            "MOST_BY_MMA = 16",
            "MOST_BY_MMA = 15",
            "tests/kernels/test_w4a16.py",
        ),
        (
            "qtool/kernels/experts/rows.py",
            "(self.place >= 0).nonzero(as_tuple=True)",
            "self.place.nonzero(as_tuple=True)",
            "tests/kernels/test_experts.py",
        ),
        (
            "qtool/kernels/experts/w4a16.py",
            "torch.cat(stack.unbind(), 1)",
            "torch.cat(stack.unbind()[::-1], 1)",
            "tests/kernels/test_experts.py",
        ),
        (
            "qtool/runtime/experts.py",
            "if hidden.dtype not in self.dtypes:",
            "if not self.dtypes:",
            "tests/runtime/test_experts.py",
        ),
        (
            "qtool/runtime/deterministic.py",
            "dim**-0.5 if scale is None else scale",
            "dim**-0.5",
            "tests/runtime/test_deterministic.py",
        ),
        (
            "qtool/format/checkpoint.py",
            '(found := config.get("format_version")) not in FORMAT_VERSIONS',
            'not (found := config.get("format_version"))',
            "tests/test_bad_input.py -k foreign",
        ),
        (
            "qtool/serving/partition.py",
            "by_group = shared or (param.dim() == 2 and param.shape[1] > 1)",
            "by_group = param.dim() == 2",
            "tests/serving/test_partition.py",
        ),
        (
            "qtool/serving/preflight.py",
            "if len({own.kv_cache for own in linears.families}) > 1:",
            "if False:",
            "tests/serving/test_preflight.py -k caches",
        ),
        (
            "qtool/serving/preflight.py",
            "sum(outputs), k, capability, dtype)",
            "sum(outputs), k, capability)",
            "tests/serving/test_preflight.py -k imported",
        ),
        (
            "qtool/serving/stored.py",
            "in packed and full not in expected:",
            "in expected and full not in packed:",
            "tests/serving/test_stored.py",
        ),
        (
            "qtool/models/families/gemma.py",
            "norm_offset=1.0",
            "norm_offset=0.0",
            "tests/calibration/transforms/test_norm_fusion.py",
        ),
        (
            "qtool/runtime/experts.py",
            'getattr(stacked, "act_fn", None)',
            "stacked.act_fn",
            "tests/runtime/test_experts.py -k gate_of_their_own",
        ),
        (
            "qtool/models/family.py",
            "max(heads.kv, ranks) % min(heads.kv, ranks)",
            "heads.kv % ranks",
            "tests/serving/test_preflight.py -k kv_heads",
        ),
        (
            "qtool/serving/layer.py",
            "1 < len(self.names) != len(self.outputs)",
            "1 < len(self.names) == len(self.outputs)",
            "tests/serving/test_layer.py",
        ),
        (
            "qtool/serving/verify.py",
            "ours.noise.abs().max()",
            "ours.noise.max()",
            "tests/serving/test_verify.py",
        ),
        # recipes
        (
            "qtool/recipes/recipe.py",
            "if schemes and scheme not in schemes:",
            "if schemes and scheme is None:",
            "tests/recipes/test_recipe.py",
        ),
        (
            "qtool/recipes/schema.py",
            "replace(rule, **changes) if rule.scheme and of",
            "replace(rule, **changes) if of",
            "tests/recipes/test_recipe.py",
        ),
        (
            "qtool/recipes/schema.py",
            '["value-basis"] if self.variant == "best"',
            '["value-basis"] if self.variant == "fast"',
            "tests/recipes/test_recipe.py",
        ),
        # the rotation at run time
        (
            "qtool/calibration/rounding/rounded.py",
            "return rotate_fast(x) if rotated else x",
            "return x",
            "tests/calibration/transforms/test_online_hadamard.py -k rounded",
        ),
        (
            "qtool/format/checkpoint.py",
            "names = name, _any_expert(name)",
            "names = (name,)",
            "tests/runtime/test_linear.py -k rotated",
        ),
        (
            "qtool/format/checkpoint.py",
            "set(linears) - set(names)",
            "set()",
            "tests/runtime/test_linear.py -k rotated",
        ),
        (
            "qtool/kernels/experts/gather.py",
            "if self.rotated else y",
            "if not self.rotated else y",
            "tests/kernels/test_experts.py -k a_row",
        ),
        (
            "qtool/kernels/experts/rows.py",
            "self.fusion, 0.0, self.rotated)",
            "self.fusion, 0.0)",
            "tests/kernels/test_experts.py -k a_row",
        ),
        (
            "qtool/models/experts.py",
            "observer(as_read(linears, x, counts), counts)",
            "observer(x, counts)",
            "tests/calibration/transforms/test_online_hadamard.py -k experts",
        ),
        (
            "qtool/models/grouped.py",
            "rotate_fast(x) if rotated else x",
            "x",
            "tests/models/test_grouped.py -k rotate",
        ),
        (
            "qtool/models/grouped.py",
            "torch.where(rows[:, None], rotate_fast(x), x)",
            "rotate_fast(x)",
            "tests/models/test_grouped.py -k rotate",
        ),
        (
            "qtool/runtime/dispatch.py",
            "call.expert_offsets, call.fusion, call.format.rotated",
            "call.expert_offsets, call.fusion, False",
            "tests/runtime/test_experts.py -k rotated",
        ),
        (
            "qtool/runtime/packed_linears.py",
            "        if first.rotated:\n",
            "        if second.rotated:\n",
            "tests/serving/test_preflight.py -k rotated",
        ),
        (
            "qtool/calibration/transforms/online_hadamard.py",
            "and group.gate is None",
            "and False",
            "tests/calibration/transforms/test_online_hadamard.py -k relu",
        ),
        (
            "qtool/calibration/transforms/online_hadamard.py",
            "[1] % SPAN",
            "[1] % 32",
            "tests/calibration/transforms/test_online_hadamard.py -k 64",
        ),
        (
            "qtool/exchange/exportable.py",
            "if found and found.rotated)",
            "if found is None)",
            "tests/exchange/test_exportable.py -k rotated",
        ),
        (
            "qtool/format/checkpoint.py",
            "return ROTATED if self.rotated else PLAIN",
            "return PLAIN",
            "tests/runtime/test_linear.py -k version",
        ),
        (
            "qtool/pipeline/streaming/packing.py",
            "        if linear_format.rotated:\n",
            "        if not linear_format:\n",
            "tests/pipeline/test_reference.py -k ones_before",
        ),
        (
            "qtool/pipeline/streaming/method_checks.py",
            "sorted(rotates - block.rotated)",
            "sorted(rotates - {*formats})",
            "tests/test_plugins.py -k rotate",
        ),
        (
            "qtool/recipes/schema.py",
            'if step.name != "online-hadamard"',
            "if step.options",
            "tests/recipes/test_recipe.py -k export",
        ),
        (
            "qtool/runtime/dispatch.py",
            "x = rotate(x).to(x.dtype)",
            "x = x.to(x.dtype)",
            "tests/runtime/test_dispatch.py -k rotate",
        ),
        (
            "qtool/runtime/dispatch.py",
            "call.epsilon, call.format.rotated)",
            "call.epsilon, False)",
            "tests/runtime/test_dispatch.py -k rotate",
        ),
        (
            "qtool/runtime/linear.py",
            "            weight = rotate(weight)",
            "            pass",
            "tests/runtime/test_linear.py -k rotated",
        ),
        (
            "qtool/schemes/arithmetic/online_hadamard.py",
            "(low + high, low - high)",
            "(low - high, low + high)",
            "tests/schemes/arithmetic/test_online_hadamard.py",
        ),
        # runs, their windows and their plans
        (
            "qtool/data/continuation.py",
            "if batch.is_whole or (batch.can_be_kept and journal.due())",
            "if batch.can_be_kept and journal.due()",
            "tests/data/test_continuation.py",
        ),
        (
            "qtool/data/continuation.py",
            "return self.drawn == self.length",
            "return self.drawn >= self.length - 1",
            "tests/data/test_continuation.py",
        ),
        (
            "qtool/pipeline/calibration_windows.py",
            "return self.takes_halves and ",
            "return ",
            "tests/pipeline/test_calibration_windows.py -k large",
        ),
        (
            "qtool/pipeline/calibration_windows.py",
            "fingerprint([prompts])",
            '""',
            "tests/pipeline/test_calibration_windows.py -k another_text",
        ),
        (
            "qtool/pipeline/recipe_fit/part_names.py",
            'rf"\\.\\d+\\.({',
            'rf"({',
            "tests/pipeline/test_tile_fit.py tests/pipeline/test_family_recipe.py",
        ),
        (
            "qtool/pipeline/planning/plan_model.py",
            "            require_devices(device, gpus)\n",
            "",
            "tests/exchange/test_import.py -k devices",
        ),
        (
            "qtool/pipeline/planning/plan_model.py",
            "        require_made(config_directory(model), job)\n",
            "        pass\n",
            "tests/test_bad_input.py -k cannot_make",
        ),
        (
            "qtool/report/commands.py",
            '        and record.get("min_expert_tokens") in (None, known.min_expert_tokens)\n',
            "",
            "tests/report/test_report.py -k needs_no_file",
        ),
        (
            "qtool/io/run_record.py",
            "- {0, self.attempt.threads}",
            "- {0}",
            "tests/pipeline/test_quantize.py -k threads",
        ),
        (
            "qtool/models/family_checks.py",
            "        if together != rows:",
            "        if together < rows:",
            "tests/models/test_families.py -k fused",
        ),
        (
            "qtool/models/family_checks.py",
            "    if len(norms) == 1 and",
            "    if len(norms) == 3 and",
            "tests/models/test_families.py",
        ),
        (
            "qtool/progress.py",
            "time.monotonic() - seconds\n",
            "time.monotonic()\n",
            "tests/test_cli.py -k count",
        ),
        (
            "qtool/pipeline/streaming/built_blocks.py",
            "            notes.setdefault(job.rounding.name, errors)\n",
            "            pass\n",
            "tests/test_plugins.py -k weight_errors",
        ),
        (
            "qtool/format/linear.py",
            "if k % (inputs := scheme.activation.group_size or 1):",
            "if (inputs := scheme.activation.group_size or 1) > k:",
            "tests/test_plugins.py -k inputs_that",
        ),
        (
            "qtool/exchange/formats/compressed_tensors.py",
            'return f"transformers loads {what} {told}" if what else ""',
            'return ""',
            "tests/exchange/test_as_export.py -k test_every_scheme",
        ),
        (
            "qtool/calibration/transforms/learned_rotation.py",
            "top ** (power - 1) / size",
            "top ** (power - 1)",
            "tests/calibration/transforms/test_learned_rotation.py",
        ),
        (
            "qtool/format/checkpoint.py",
            "self.to_dict() | made_with",
            "self.to_dict()",
            "tests/test_plugins.py -k made_with",
        ),
    )
]


def misplaced(fault: Fault, root: Path = ROOT) -> str:
    """Why ``fault`` cannot be injected; empty if it can."""
    count = (root / fault.file).read_text().count(fault.old)
    if count != 1:
        return f"{fault}: the old text is there {count} times"
    missing = [name for name in _paths(fault) if not (root / name).exists()]
    return f"{fault}: {missing[0]} does not exist" if missing else ""


def _paths(fault: Fault) -> list[str]:
    """The test files and folders of ``fault``."""
    return [part for part in fault.tests.split() if "/" in part]


def copy_of_the_tree(directory: Path) -> None:
    """Lay out a tree in ``directory`` whose package can be changed."""
    left_out = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, directory / name, ignore=left_out)
    for name in FILES:
        shutil.copyfile(ROOT / name, directory / name)
    for weights in (ROOT / "qtool").rglob("*.safetensors"):  # of the demo
        (directory / weights.relative_to(ROOT)).symlink_to(weights)


def run(fault: Fault, tree: Path) -> str:
    """Run the tests of ``fault`` in ``tree``, where it is injected: caught, missed, or an error."""
    sys.stdout.flush()
    if not (child := os.fork()):
        _run_tests(fault.tests.split(), tree)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "caught" if os.WTERMSIG(status) == signal.SIGALRM else "error"
    return {0: "missed", 1: "caught"}.get(os.WEXITSTATUS(status), "error")


def _run_tests(arguments: Sequence[str], tree: Path) -> None:
    """pytest in this process, which ends with its exit code."""
    import pytest

    code = 3
    try:
        signal.alarm(LONGEST)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tree)]
        code = int(pytest.main([*options, *arguments]))
    finally:
        os._exit(code)


def inject(faults: Sequence[Fault]) -> dict[Fault, str]:
    """The verdict on each of ``faults``: caught, missed or error; prints a line for each."""
    # a file that changes twice a second would be taken from the cache of what it was before
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import hypothesis
    import torch
    import transformers.models.llama.modeling_llama

    assert hypothesis and transformers and "qtool" not in sys.modules
    torch.set_num_threads(1)
    verdicts = {}
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_of_the_tree(tree)
        for number, fault in enumerate(faults, 1):
            path, began = tree / fault.file, time.monotonic()
            text = path.read_text()
            if not (problem := misplaced(fault, tree)):
                path.write_text(text.replace(fault.old, fault.new))
                verdicts[fault] = run(fault, tree)
                path.write_text(text)
            else:
                verdicts[fault] = "error"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{number}/{len(faults)} {verdicts[fault]} ({took}) {problem or fault}")
            if verdicts[fault] == "error" and not problem:
                print((tree / "log").read_text()[-2000:])
    return verdicts


def counts(verdicts: dict[Fault, str]) -> dict[str, dict[str, int]]:
    """Faults and those caught, by file."""
    found: dict[str, dict[str, int]] = {}
    for fault, verdict in verdicts.items():
        entry = found.setdefault(fault.file, {"faults": 0, "caught": 0})
        entry["faults"] += 1
        entry["caught"] += verdict == "caught"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="only faults in these files or folders")
    parser.add_argument("--sample", type=int, help="only so many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"store the counts in {STORED.name}")
    options = parser.parse_args(arguments)
    paths = tuple(path.rstrip("/") for path in options.paths)
    faults = [f for f in FAULTS if not paths or f.file.startswith(paths)]
    if options.sample is not None:
        faults = random.Random(options.seed).sample(faults, options.sample)
    verdicts = inject(faults)
    tally = {word: list(verdicts.values()).count(word) for word in ("caught", "missed", "error")}
    print(", ".join(f"{count} {word}" for word, count in tally.items()))
    if options.write:
        stored = json.loads(STORED.read_text()) if STORED.exists() and (paths) else {}
        stored |= counts(verdicts)
        STORED.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
    return 2 if tally["error"] else 1 if tally["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
