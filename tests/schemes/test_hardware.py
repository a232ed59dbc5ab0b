"""The GPU table and the two choices the papers make from it."""

import pytest

from qtool.errors import QtoolError
from qtool.schemes.hardware import GPUS, choose_qoq, choose_w4a4, gpu


@pytest.mark.parametrize(
    "name, rho, choice",
    [("a100", 64, "mix"), ("rtx3090", 16, "g128"), ("a40", 16, "g128"), ("l40s", 8, "g128")],
)
def test_ratios_and_choices_of_apex4_table_1(name: str, rho: float, choice: str) -> None:
    chosen, reason = choose_w4a4(gpu(name))
    assert chosen == choice and f" = {rho} on {name}" in reason


@pytest.mark.parametrize(
    "name, choice", [("a100", "w4a8-qoq"), ("l40s", "w4a8-qoq-g128"), ("h200", "w4a8-qoq")]
)
def test_choices_of_qserve(name: str, choice: str) -> None:
    assert choose_qoq(gpu(name))[0] == choice


def test_int4_tensor_cores_end_with_ada() -> None:
    with_int4 = {name for name, g in GPUS.items() if g.int4}
    assert with_int4 == {"a100", "rtx3090", "a40", "a10", "l40s", "rtx4090"}
    for name, g in GPUS.items():
        _, reason = choose_w4a4(g)
        assert ("no INT4 tensor cores: W4A8" in reason) != (name in with_int4)
    assert all(g.source for g in GPUS.values())


def test_unknown_gpu_suggests() -> None:
    with pytest.raises(QtoolError, match="did you mean h100"):
        gpu("h10")
