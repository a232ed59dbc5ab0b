"""A published checkpoint reads, to the bit, as what the library that defines its format makes."""

import pytest
import torch

from qtool.io.dequantize import block_scaled
from qtool.io.safetensors import read
from qtool.io.source import Checkpoint
from tests.io.published import CASES


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
