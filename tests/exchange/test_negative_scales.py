"""Scales below zero, as w4a16's `best` fits them to half of the groups, in every format that holds
w4a16.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.exchange.export import export
from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, stored


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq", "gptq-v2", "awq", "marlin", "qqq"])
def test_they_are_scales_like_others(
    name: str, native: Native, exported: Export, tmp_path: Path
) -> None:
    ours = shutil.copytree(native("w4a16", 128), tmp_path / "ours")
    (ours / "qtool.json").unlink()  # whose hashes are those of the positive scales
    for path in ours.glob("*.safetensors"):
        held = load_file(path)
        for scale in (tensor for key, tensor in held.items() if key.endswith(".scale")):
            scale.view(-1)[::2] *= -1
        save_file(held, path, {"format": "pt"})
    done = export(ours, name, tmp_path / "exported")
    before = exported(native("w4a16", 128), name)
    assert any((module.unpack()[1]["scale"] < 0).any() for module in linears(ours).values())
    assert done.errors.keys() == before.errors.keys()
    assert all(done.errors[linear] <= 1.1 * error for linear, error in before.errors.items())
    if name == "marlin":
        for linear, module in linears(ours).items():
            codes, params = module.unpack()
            found, scales = readers.marlin(stored(done.directory, linear))
            assert torch.equal(found, codes.long()) and torch.equal(scales, params["scale"].float())
