"""The script that quantizes random models with random options."""

import sys

import pytest

from qtool.pipeline.verify import Verified
from tests.combinations import drawn, main


def run(monkeypatch: pytest.MonkeyPatch, first: int, stop: int) -> int:
    monkeypatch.setattr(sys, "argv", ["combinations.py", str(first), str(stop)])
    return main()


def test_a_few_combinations_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that runs, one that the plan refuses, and one of which transformers makes no model."""
    assert run(monkeypatch, 3, 5) == 0
    said = capsys.readouterr().out
    assert "right, " in said and "refused: layer rule" in said

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("sizes\nthat do not fit")

    monkeypatch.setattr("tests.combinations.save_tiny", refuse)
    assert run(monkeypatch, 3, 4) == 0
    assert "no model: that do not fit" in capsys.readouterr().out


def test_a_combination_that_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qtool.verify", lambda _: [Verified("model.q_proj", "it is broken")])
    assert run(monkeypatch, 3, 4) == 1
    assert "WRONG: model.q_proj: it is broken" in capsys.readouterr().out


def test_a_number_gives_one_combination() -> None:
    one, two = drawn(7), drawn(7)
    assert one[:4] == two[:4] and one.windows.equal(two.windows)
    assert len({drawn(number).kind for number in range(40)}) > 10
