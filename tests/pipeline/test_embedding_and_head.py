"""Embedding and head in pieces: the same rows, however many go at a time."""

import torch

from qtool import recipes
from qtool.io import finite
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


def test_the_head_takes_the_gain_of_the_norm_that_is_made_plain(make_model: MakeModel) -> None:
    source = Checkpoint(make_model())
    layers = [{"match": ".*", "scheme": None}]
    fused = recipes.parse({"layers": layers, "transforms": ["norm-fusion"]}, "fused")
    stored = dict(edges.head(source, Job.of(source.config, fused), CPU))
    gain, head = source.read("model.norm.weight"), source.read("lm_head.weight")
    assert torch.equal(stored["model.norm.weight"], torch.ones_like(gain))
    torch.testing.assert_close(stored["lm_head.weight"], head * gain)
