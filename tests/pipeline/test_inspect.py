"""What inspect counts: a linear's bytes are those its format stores, and no byte is counted twice
or lost.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.pipeline.inspect import inspect, total
from qtool.pipeline.job import Job
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.quantize import quantize
from qtool.pipeline.verify import verify
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


def test_a_checkpoint_whose_config_has_a_size_that_is_none(
    make_model: MakeModel, tmp_path: Path
) -> None:
    out = quantize(Checkpoint(make_model()), recipes.load("w4a8-lqq"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    for wrong in (None, 0, "4"):
        (out / "config.json").write_text(json.dumps(config | {"num_attention_heads": wrong}))
        for look in (inspect, verify):
            with pytest.raises(QtoolError, match=f"num_attention_heads is {wrong!r}; a positive"):
                list(look(out))


def test_headers_are_listed_without_torchs_compiler() -> None:
    """Importing it takes a third of the command's time."""
    code = "import sys, qtool.pipeline.inspect; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
