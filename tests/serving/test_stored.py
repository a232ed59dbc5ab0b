"""What a damaged checkpoint is told before anything is loaded."""

from pathlib import Path

import pytest
import torch

from qtool.errors import QtoolError
from qtool.format import native_format
from qtool.io.source import Checkpoint
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.stored import require_stored
from tests.serving.conftest import Native, rewritten

Q = "model.layers.0.self_attn.q_proj"


def linears(checkpoint: Checkpoint) -> PackedLinears:
    return PackedLinears(checkpoint.config, native_format(checkpoint.config))


def test_a_whole_checkpoint_passes(native: Native) -> None:
    checkpoint = Checkpoint(native(variant="mixtral"))
    require_stored(checkpoint, linears(checkpoint))
    assert Q in linears(checkpoint).formats()


def test_only_linears_of_the_family_are_packed(native: Native) -> None:
    found = linears(Checkpoint(native(variant="mixtral")))
    assert found.of("model.layers.0.block_sparse_moe.experts.3.w2") is not None
    for name in (
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.9.self_attn.q_proj",
        "lm_head",
        "vision_tower.layers.0.self_attn.q_proj",
    ):
        assert found.of(name) is None


def test_missing_left_over_and_wrong_tensors(native: Native, tmp_path: Path) -> None:
    whole = native()
    missing = Checkpoint(rewritten(whole, tmp_path / "missing", {}, drop=f"{Q}.s2"))
    with pytest.raises(QtoolError, match=f"tensor {Q}.s2 is missing"):
        require_stored(missing, linears(missing))
    left_over = Checkpoint(rewritten(whole, tmp_path / "over", {f"{Q}.zero": torch.zeros(4)}))
    with pytest.raises(QtoolError, match=f"{Q}.zero: stored, but the format of this linear has no"):
        require_stored(left_over, linears(left_over))
    wrong = Checkpoint(rewritten(whole, tmp_path / "wrong", {f"{Q}.s1": torch.zeros(7)}))
    found = rf"{Q}.s1: torch.float32 \[7\] found, torch.bfloat16 \[512\] declared"
    with pytest.raises(QtoolError, match=found):
        require_stored(wrong, linears(wrong))


def test_a_permutation_is_of_its_dtype_and_length(native: Native, tmp_path: Path) -> None:
    whole, name = native("w4ax-fmpq", "w4ax-interleaved"), f"{Q}.permutation"
    for number, order in enumerate((torch.arange(512), torch.arange(7, dtype=torch.int32))):
        stored = rewritten(
            whole, tmp_path / str(number), {name: order}, permuted=["self_attn.q_proj"]
        )
        found = rf"{order.dtype} \[{len(order)}\] found, torch.int32 \[512\] declared"
        with pytest.raises(QtoolError, match=f"{name}: {found}"):
            require_stored(Checkpoint(stored), linears(Checkpoint(stored)))
