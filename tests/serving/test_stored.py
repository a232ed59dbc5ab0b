"""What a damaged checkpoint is told before anything is loaded."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.pipeline.job import native_format
from qtool.serving.stored import PackedLinears, require_stored
from tests.serving.conftest import Native

QKV = "model.layers.0.self_attn.q_proj"


def changed(directory: Path, out: Path, drop: str = "", **added: torch.Tensor) -> Checkpoint:
    """``directory`` without the tensor ``drop`` and with ``added`` ones, in one file."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    tensors.pop(drop, None)
    out.mkdir()
    shutil.copy(directory / "config.json", out)
    save_file(
        tensors | {name.replace("__", "."): tensor for name, tensor in added.items()},
        out / "model.safetensors",
    )
    return Checkpoint(out)


def linears(checkpoint: Checkpoint) -> PackedLinears:
    return PackedLinears(checkpoint.config, native_format(checkpoint.config))


def test_a_whole_checkpoint_passes(native: Native) -> None:
    checkpoint = Checkpoint(native(variant="mixtral"))
    require_stored(checkpoint, linears(checkpoint))
    assert f"{QKV}" in set(linears(checkpoint).names())


def test_only_linears_of_the_family_are_packed(native: Native) -> None:
    found = linears(Checkpoint(native(variant="mixtral")))
    assert found.of("model.layers.0.block_sparse_moe.experts.3.w2") is not None
    for name in ("model.layers.0.block_sparse_moe.gate", "model.layers.9.self_attn.q_proj", "lm_head",
                 "vision_tower.layers.0.self_attn.q_proj"):  # fmt: skip
        assert found.of(name) is None


def test_missing_left_over_and_wrong_tensors(native: Native, tmp_path: Path) -> None:
    whole = native()
    missing = changed(whole, tmp_path / "missing", drop=f"{QKV}.s2")
    with pytest.raises(QtoolError, match=f"tensor {QKV}.s2 is missing"):
        require_stored(missing, linears(missing))
    left_over = changed(
        whole, tmp_path / "over", **{f"{QKV}.zero".replace(".", "__"): torch.zeros(4)}
    )
    with pytest.raises(
        QtoolError, match=f"{QKV}.zero: stored, but the format of this linear has no such tensor"
    ):
        require_stored(left_over, linears(left_over))
    wrong = changed(whole, tmp_path / "wrong", **{f"{QKV}.s1".replace(".", "__"): torch.zeros(7)})
    with pytest.raises(
        QtoolError, match=rf"{QKV}.s1: torch.float32 \[7\] found, torch.bfloat16 \[512\] declared"
    ):
        require_stored(wrong, linears(wrong))
