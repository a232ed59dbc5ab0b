"""A published checkpoint reads, to the bit, as what the library that defines its format makes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.io.check_source import check_source
from qtool.io.dequantize import block_scaled
from qtool.io.safetensors import read, read_header
from qtool.io.source import Checkpoint
from qtool.io.source_names import _made
from qtool.models import family_of
from qtool.models.architecture import Architecture
from qtool.models.parts import RowsOf
from tests.io.published import CASES, codes, scales
from tests.models.tiny import save_tiny


@pytest.fixture(scope="module", params=CASES)
def checkpoints(request, tmp_path_factory) -> tuple[Checkpoint, Checkpoint]:  # type: ignore[no-untyped-def]
    """The published checkpoint and its plain twin."""
    published, plain = CASES[request.param].make(tmp_path_factory.mktemp("published"))
    return Checkpoint(published), Checkpoint(plain)


def test_it_reads_as_the_plain_model(checkpoints: tuple[Checkpoint, Checkpoint]) -> None:
    published, plain = checkpoints
    assert published.config == plain.config
    assert published.entries.keys() == plain.entries.keys()
    for name in plain.entries:
        found, expected = published.read(name), plain.read(name)
        assert published.entry(name).shape == plain.entry(name).shape == found.shape
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name


def test_rows_are_those_of_the_whole(
    checkpoints: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    published, plain = checkpoints
    monkeypatch.setattr(block_scaled, "PIECE", 1000)  # some rows at a time
    for name, entry in published.entries.items():
        if entry.computed and len(entry.shape) == 2:
            whole, rows = plain.read(name), slice(3, entry.shape[0] - 5)
            assert torch.equal(read(entry, rows), whole[rows]), name
            assert torch.equal(entry.computed.read(slice(1, 40, 3)), whole[1:40:3]), name
            turned = entry.computed.read(slice(1, 40, 3), transposed=True)
            assert torch.equal(turned, whole.T[1:40:3]), name


def test_each_matrix_of_a_stack_has_its_own_global_scale(tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (3, 8, 16), dtype=torch.uint8)
    scales = torch.rand(3, 8, 2).to(torch.float8_e4m3fn)
    divisors = torch.tensor([1.0, 2.0, 4.0])
    save_file({"packed": packed, "scales": scales, "divisors": divisors}, tmp_path / "file")
    stored = read_header(tmp_path / "file")
    entry = block_scaled.block_scaled(
        "w",
        stored["packed"],
        stored["scales"],
        [(1, 16)],
        torch.float32,
        divisor=stored["divisors"],
    )
    plain = block_scaled.block_scaled(
        "w", stored["packed"], stored["scales"], [(1, 16)], torch.float32
    )
    assert torch.equal(read(entry), read(plain) / divisors[:, None, None])


def test_rows_of_a_stack_make_a_stack(tmp_path: Path) -> None:
    """The lower rows of each matrix of a dequantized stack form a stack of their own."""
    stored, scale = codes((3, 8, 16)), scales(3, 8, 1)
    save_file({"codes": stored, "scales": scale}, tmp_path / "file")
    file = read_header(tmp_path / "file")
    whole = block_scaled.block_scaled("w", file["codes"], file["scales"], [], torch.float32)
    rows = tuple(row for row in range(24) if row % 8 >= 4)
    family = SimpleNamespace(
        rows_on_disk={"down": (RowsOf("w", 12, rows, 3, False),)}, sizes={"experts": lambda _: 3}
    )
    model: Any = SimpleNamespace(family=family, source_shapes=dict, namespace=None)
    down, expected = _made({"w": whole}, model)["down"], (stored.float() * scale)[:, 4:]
    assert torch.equal(read(down), expected)
    assert torch.equal(read(down.matrix(1), slice(1, 3)), expected[1, 1:3])


def test_a_square_weight_of_conv1d_is_turned(tmp_path: Path) -> None:
    directory, name = save_tiny("gpt2", tmp_path / "gpt2"), "transformer.h.0.attn.c_proj.weight"
    stored, scale = codes((128, 128)), scales(128, 1)
    file = directory / "model.safetensors"
    save_file(load_file(file) | {name: stored, f"{name}_scale": scale}, file)
    config = json.loads((directory / "config.json").read_text())
    config |= {"dtype": "float32", "quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(config))
    source = Checkpoint(directory)
    for _ in range(2):  # adopted once
        check_source(source, Architecture(source.config, family_of(source.config)))
        assert torch.equal(source.read(name), (stored.float() * scale).T)
