"""marlin and marlin-24 files, read back by closed forms."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, stored


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [128, "channel"])
@pytest.mark.parametrize(("scheme", "name"), [("w4a16", "marlin"), ("w4a16-24", "marlin-24")])
def test_codes_and_scales_are_ours(
    scheme: str, name: str, size: int | str, dtype: torch.dtype, native: Native, exported: Export
) -> None:
    ours = native(scheme, size, dtype=dtype)
    done = exported(ours, name)
    assert set(done.errors.values()) == {0.0}  # bf16 scales of ordinary size fit fp16
    read = readers.marlin if name == "marlin" else readers.marlin_24
    for linear, module in linears(ours).items():
        codes, params = module.unpack()
        tensors = stored(done.directory, linear)
        found, scales = read(tensors)
        assert torch.equal(found, codes.long())
        assert torch.equal(scales, params["scale"].float())
        assert tensors["s"].dtype == torch.float16


def test_the_whole_model_is_fp16(native: Native, exported: Export) -> None:
    from qtool.io.source import Checkpoint

    done = exported(native("w4a16", 128, dtype=torch.bfloat16), "marlin")
    checkpoint = Checkpoint(done.directory)
    floats = {entry.dtype for entry in checkpoint.entries.values() if entry.dtype.is_floating_point}
    assert floats == {torch.float16}
    assert checkpoint.config["dtype"] == "float16"
    assert "bfloat16 here, float16 there" in done.notes[0]


def test_a_note_says_where_no_dtype_is_named(
    native: Native, exported: Export, tmp_path: Path
) -> None:
    ours = Path(shutil.copytree(native("w4a16", 128, dtype=torch.bfloat16), tmp_path / "ours"))
    config = json.loads((ours / "config.json").read_text())
    del config["dtype"]
    (ours / "config.json").write_text(json.dumps(config))
    assert "a dtype that config.json does not name here" in exported(ours, "marlin").notes[0]


@pytest.mark.parametrize(("scheme", "name"), [("w4a16", "marlin"), ("w4a16-24", "marlin-24")])
def test_config(scheme: str, name: str, native: Native, exported: Export) -> None:
    directory = exported(native(scheme, "channel"), name).directory
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    expected = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True,
                "checkpoint_format": name.replace("-", "_")}  # fmt: skip
    assert expected.items() <= config.items()
