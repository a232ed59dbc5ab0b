"""A recorded function does on a GPU what the function itself does."""

import copy
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from qtool.calibration.recorded import Recorded
from qtool.calibration.rounding.distill import distill
from qtool.calibration.rounding.distill.distill import Distill
from qtool.schemes import get
from tests.calibration.conftest import CONFIGS, make_model, random_block

pytestmark = pytest.mark.cuda


def test_calls_are_replayed_with_their_own_arguments() -> None:
    calls, total = [], torch.zeros(3, device="cuda")

    def add(x: Tensor, more: dict[str, Any]) -> None:
        calls.append(more["times"])
        total.add_(x * more["times"] + more["also"])

    recorded, want = Recorded(add), torch.zeros(3, device="cuda")
    none = torch.zeros(1, device="cuda")
    recorded(none, {"times": 1, "also": none})  # of another shape than the others
    for i in range(6):
        x, also = torch.full((3,), float(i), device="cuda"), torch.ones(3, device="cuda") * i * i
        recorded(x, {"times": 2, "also": also})
        want += 2 * x + also
    assert torch.equal(total, want)
    assert calls == [1, 2, 2]  # once run, once recorded
    recorded(x, {"times": 5, "also": also})
    recorded(x[:1], {"times": 2, "also": also[:1]})
    assert calls == [1, 2, 2, 5, 2]


def test_what_a_graph_cannot_hold_runs_as_it_is() -> None:
    seen, total = [], torch.zeros(1, device="cuda")

    def add(x: Tensor) -> None:
        seen.append(float(x))  # it waits for the GPU
        total.add_(x)

    recorded = Recorded(add)
    with mock.patch.object(torch.cuda, "graph", side_effect=AssertionError):  # it is not tried
        for i in range(4):
            recorded(torch.full((1,), float(i), device="cuda"))
    assert recorded.refused and seen == [0, 1, 2, 3] and float(total) == 6
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_function_that_never_waits_is_not_listened_to() -> None:
    total = torch.zeros(1, device="cuda")
    recorded = Recorded(total.add_, may_wait=False)
    with mock.patch.object(torch.cuda, "set_sync_debug_mode", side_effect=AssertionError):
        for _ in range(4):
            recorded(torch.ones(1, device="cuda"))
    assert recorded.graph is not None and float(total) == 4


def test_a_wait_of_another_thread_is_not_the_functions_own() -> None:
    total = torch.zeros(1, device="cuda")

    def add(x: Tensor) -> None:
        other = threading.Thread(target=lambda: float(total))
        other.start()
        other.join()
        total.add_(x)

    recorded = Recorded(add)
    recorded(torch.ones(1, device="cuda"))
    assert not recorded.refused and float(total) == 1


def test_routed_experts_wait_and_are_not_recorded(blocks: Any) -> None:
    block, batches = blocks(make_model(CONFIGS["mixtral"]), get("w4a16", 32))[0]
    block.module.cuda()
    with mock.patch.object(torch.cuda, "graph", side_effect=AssertionError):
        Distill(samples=4, batch=2, epochs=3).round(block, batches)
    assert len(block.notes["distill"]["loss"]) == 4


@pytest.mark.parametrize("name", ["w4a16-24", "w4a8-lqq", "w4a4"])
@pytest.mark.parametrize(
    "options",
    [{"weight_lr": 0.05}, {"weight_lr": 0.05, "decay": False, "loss": "cosine"}, {"weight_lr": 0}],
)
def test_recorded_iterations_learn_the_same(name: str, options: dict[str, Any]) -> None:
    block, batches = random_block(get(name), (32,) * 6, hidden_size=128, num_attention_heads=2)
    block.module.cuda()
    curves, graphs = [], []
    for kind in (Recorded, lambda function: function):
        own, inputs = copy.deepcopy((block, batches))
        with mock.patch.object(
            distill, "Recorded", lambda f, kind=kind: graphs.append(kind(f)) or graphs[-1]
        ):
            Distill(samples=12, batch=2, epochs=3, **options).round(own, inputs)
        curves.append(own.notes["distill"]["loss"])
    assert graphs[0].graph is not None and not graphs[0].refused
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
