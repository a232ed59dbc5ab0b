"""Errors of a run are of one kind: of outputs where GPTQ noted any, else of weights."""

import pytest

from qtool.pipeline.summary import noted_errors, shard_facts

OUTPUTS = {"gptq": {"down": {"error": 0.1}, "up": {"groups": 3}}}
WEIGHTS = {"rtn": {"experts.0.up": {"weight_error": 0.7}}}


@pytest.mark.parametrize(
    ("blocks", "what", "errors"),
    [
        ([WEIGHTS, OUTPUTS | WEIGHTS], "output", {(1, "down"): 0.1}),
        ([OUTPUTS, WEIGHTS], "output", {(0, "down"): 0.1}),
        ([WEIGHTS], "weight", {(0, "experts.0.up"): 0.7}),
        ([{"mine": WEIGHTS["rtn"]}], "weight", {(0, "experts.0.up"): 0.7}),
        ([{"clip": OUTPUTS["gptq"], "distill": {"loss": [1.0]}, "halved": 1}], "", {}),
        ([{}], "", {}),
    ],
)
def test_weights_and_outputs_are_not_mixed(blocks, what, errors) -> None:  # type: ignore[no-untyped-def]
    assert noted_errors(blocks) == (what, errors)


def test_a_blocks_largest_error_is_that_of_an_output() -> None:
    assert shard_facts(OUTPUTS | WEIGHTS).endswith(", largest error 0.1000")
    assert shard_facts({}).endswith("B")
