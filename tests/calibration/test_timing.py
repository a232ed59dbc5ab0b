"""Stages add up to the whole; what is inside another is taken from it; without a recording nothing
happens.
"""

import time

import pytest
import torch

from qtool.calibration.timing import OTHER, Stages, recording, stage

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):  # type: ignore[no-untyped-def]
    """Time stands still but for ``clock(seconds)``."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_stage_inside_another_takes_its_time_from_it(clock) -> None:  # type: ignore[no-untyped-def]
    with recording(Stages(CPU)) as stages:
        clock(1)
        with stage("search"):
            clock(2)
            with stage("forward"):
                clock(4)
            clock(8)
            with pytest.raises(ValueError), stage("forward"):
                clock(16)
                raise ValueError
        clock(32)
    stages.settle()
    assert dict(stages.seconds) == {OTHER: 33, "search": 10, "forward": 20}
    clock(64)
    stages.settle()
    assert stages.seconds[OTHER] == 97


def test_threads_are_counted_beside(clock) -> None:  # type: ignore[no-untyped-def]
    stages = Stages(CPU)
    for seconds in (1, 2):
        with stages.thread("write"):
            clock(seconds)
    stages.settle()
    assert dict(stages.behind) == {"write": 3} and stages.seconds[OTHER] == 3


def test_nothing_is_recorded_outside_a_recording(clock) -> None:  # type: ignore[no-untyped-def]
    with recording(Stages(CPU)) as outer:
        with recording(Stages(CPU)) as inner, stage("forward"):
            clock(1)
        with stage("pack"):
            clock(2)
    with stage("forward"):
        clock(4)
    for stages in (outer, inner):
        stages.settle()
    assert (
        "forward" not in outer.seconds
        and outer.seconds["pack"] == 2
        and inner.seconds["forward"] == 1
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_devices_own_time_is_measured() -> None:
    stages, a = Stages(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    with recording(stages), stage("forward"):
        for _ in range(20):
            a = a @ a / 64
    stages.settle()
    assert stages.seconds["forward"] > 20 * 2 * 4096**3 / 1e15
