"""Phases add up to the whole; what is inside another is taken from it; without a recording nothing
happens.
"""

import time

import pytest
import torch

from qtool.calibration.timing import OTHER, PhaseTimer, phase, recording

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):  # type: ignore[no-untyped-def]
    """Time stands still but for ``clock(seconds)``."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_stage_inside_another_takes_its_time_from_it(clock) -> None:  # type: ignore[no-untyped-def]
    with recording(PhaseTimer(CPU)) as phases:
        clock(1)
        with phase("search"):
            clock(2)
            with phase("forward"):
                clock(4)
            clock(8)
            with pytest.raises(ValueError), phase("forward"):
                clock(16)
                raise ValueError
        clock(32)
    phases.settle()
    assert dict(phases.seconds) == {OTHER: 33, "search": 10, "forward": 20}
    clock(64)
    phases.settle()
    assert phases.seconds[OTHER] == 97


def test_threads_are_counted_beside(clock) -> None:  # type: ignore[no-untyped-def]
    phases = PhaseTimer(CPU)
    for seconds in (1, 2):
        with phases.thread("write"):
            clock(seconds)
    phases.settle()
    assert dict(phases.beside) == {"write": 3} and phases.seconds[OTHER] == 3


def test_nothing_is_recorded_outside_a_recording(clock) -> None:  # type: ignore[no-untyped-def]
    with recording(PhaseTimer(CPU)) as outer:
        with recording(PhaseTimer(CPU)) as inner, phase("forward"):
            clock(1)
        with phase("pack"):
            clock(2)
    with phase("forward"):
        clock(4)
    for phases in (outer, inner):
        phases.settle()
    assert (
        "forward" not in outer.seconds
        and outer.seconds["pack"] == 2
        and inner.seconds["forward"] == 1
    )


@pytest.mark.cuda
def test_the_devices_own_time_is_measured() -> None:
    phases, a = PhaseTimer(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    with recording(phases), phase("forward"):
        for _ in range(20):
            a = a @ a / 64
    phases.settle()
    assert phases.seconds["forward"] > 20 * 2 * 4096**3 / 1e15
