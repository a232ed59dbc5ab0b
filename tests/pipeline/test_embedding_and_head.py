"""Embedding and head in pieces: the same rows, however many go at a time."""

import weakref
from pathlib import Path

import numpy
import pytest
import torch

from qtool import recipes
from qtool.calibration.transforms.hadamard import rotation
from qtool.io import finite
from qtool.io.safetensors import write
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.streaming import embedding_and_head as edges
from tests.conftest import MakeModel

EMBEDDING, CPU = "model.embed_tokens", torch.device("cpu")


def test_rows_of_a_table_that_comes_in_pieces(make_model: MakeModel, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    source = Checkpoint(make_model())
    job, table = Job.of(source.config, recipes.load("w8a8")), source.read(f"{EMBEDDING}.weight")
    for rows in (1, 7, 64, 1000):
        monkeypatch.setattr(finite, "PIECE_BYTES", rows * table.shape[1] * 4)
        for wanted in (
            torch.arange(len(table)),
            torch.tensor([0, 6, 7, 63, 64, 65, 319]),
            torch.tensor([200]),
        ):
            assert torch.equal(edges.table_rows(source, job, EMBEDDING, wanted), table[wanted])
        pieces = [piece for _, piece in edges.tables(source, job, CPU)]
        assert len(pieces) == -(-len(table) // rows) and torch.equal(torch.cat(pieces), table)


def test_a_piece_is_free_before_the_next_one_is_read(  # type: ignore[no-untyped-def]
    make_model: MakeModel, monkeypatch, tmp_path: Path
) -> None:
    source = Checkpoint(make_model())
    read, pieces = source.read, list[weakref.ref[numpy.ndarray]]()

    def counted(name: str, rows: slice | None = None, *, pinned: bool = False) -> torch.Tensor:
        if rows is None:
            return read(name)  # the final norm
        assert not any(piece() is not None for piece in pieces)
        array = read(name, rows).numpy().copy()  # lives as long as a tensor of its memory
        pieces.append(weakref.ref(array))
        return torch.from_numpy(array)

    rows, columns = source.entry(f"{EMBEDDING}.weight").shape
    monkeypatch.setattr(finite, "PIECE_BYTES", rows * columns)  # a quarter of the rows
    for transforms in [], ["norm-fusion", "rotate"]:
        layers = [{"match": ".*", "scheme": None}]
        recipe = recipes.parse({"layers": layers, "transforms": transforms}, "some")
        job = Job.of(source.config, recipe)
        for tensors in edges.tables, edges.head:
            names = dict(tensors(source, job, CPU))
            specs = {name: torch.empty(source.entry(name).shape) for name in names}
            with monkeypatch.context() as patched:
                patched.setattr(source, "read", counted)
                write(tmp_path / "model.safetensors", specs, tensors(source, job, CPU))
            assert len(pieces) == 4
            pieces.clear()


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_what_transforms_make_of_a_narrow_source_is_rounded_once(
    cast: torch.dtype, make_model: MakeModel
) -> None:
    """To the dtype of the result: a wider one keeps what bfloat16 has no room for."""
    source = Checkpoint(make_model(dtype=torch.bfloat16))
    layers = [{"match": ".*", "scheme": None}]
    rotated = {"layers": layers, "transforms": ["norm-fusion", "rotate"]}
    job = Job.of(source.config, recipes.parse(rotated, "rotated"), dtype=cast)
    stored = dict([*edges.tables(source, job, CPU), *edges.head(source, job, CPU)])
    rotate = rotation(source.entry("lm_head.weight").shape[1], seed=0, keeps_ones=False)
    embedding, head, gain = (
        source.read(f"{name}.weight").double() for name in (EMBEDDING, "lm_head", "model.norm")
    )
    for name, exact in {EMBEDDING: embedding, "lm_head": head * gain}.items():
        found, once = stored[f"{name}.weight"], rotate(exact).to(cast)
        assert found.dtype == cast
        off = (found.double() - once.double()).abs() > 1e-6 * once.abs().max()
        assert off.float().mean() < 0.001  # float32 in between hardly ever rounds otherwise


def test_the_head_takes_the_gain_of_the_norm_that_is_made_plain(make_model: MakeModel) -> None:
    source = Checkpoint(make_model())
    layers = [{"match": ".*", "scheme": None}]
    fused = recipes.parse({"layers": layers, "transforms": ["norm-fusion"]}, "fused")
    stored = dict(edges.head(source, Job.of(source.config, fused), CPU))
    gain, head = source.read("model.norm.weight"), source.read("lm_head.weight")
    assert torch.equal(stored["model.norm.weight"], torch.ones_like(gain))
    torch.testing.assert_close(stored["lm_head.weight"], head * gain)
