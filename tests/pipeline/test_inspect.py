"""What inspect counts: a linear's bytes are those its format stores, and no byte is counted twice
or lost.
"""

from pathlib import Path

from qtool import recipes
from qtool.io.source import Checkpoint
from qtool.pipeline.inspect import inspect, total
from qtool.pipeline.job import Job
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.quantize import quantize
from tests.conftest import MakeModel


def test_a_bias_is_not_among_the_bytes_of_a_packed_linear(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source, recipe = Checkpoint(make_model("llama-biases")), recipes.load("w4a8-lqq")
    out = quantize(source, recipe, tmp_path / "out")
    rows = {row.name: row for row in inspect(out)}
    planned = {x.name: x.nbytes for x in plan(Job.of(source.config, recipe)).linears}
    assert {n: rows[f"model.layers.{b}.{n}"].nbytes for n in planned for b in (0, 1)} == planned
    assert rows["model.layers.0.mlp.up_proj.bias"].nbytes == 4 * 384
    assert total("all", rows.values()).nbytes == sum(
        entry.nbytes for entry in Checkpoint(out).entries.values()
    )
