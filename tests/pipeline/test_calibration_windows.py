"""Which tokens a run is calibrated on, and what is recorded of them."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool import recipes
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.io.source import DEMO, Checkpoint
from qtool.pipeline import calibration_windows as calibration_text
from qtool.pipeline import commands
from qtool.pipeline.calibration_windows import calibration
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import CACHE_SHARE, writing
from qtool.pipeline.quantize import Calibration
from qtool.report import commands as report_commands
from qtool.report.build import collect
from qtool.runtime.load import load


def cut(recipe: str, **wishes: Any) -> Calibration:
    source = Checkpoint(DEMO)
    job = Job.of(source.config, commands.Wishes(recipe=recipe, **wishes).of("w4a16"))
    return calibration(
        source, job, "demo", data_dir=None, samples=4, seqlen=64, seed=0, device="cpu"
    )


def test_best_continues_the_windows_that_paper_takes_as_they_are() -> None:
    given, written = cut("paper"), cut("best")
    own, theirs = torch.cat(list(written.tokens)), torch.cat(list(given.tokens))
    assert torch.equal(own[:, :8], theirs[:, :8]) and not torch.equal(own[:, 8:], theirs[:, 8:])
    assert written.facts["windows"] == "continued" and given.facts["windows"] == "given"
    assert (
        written.facts["tokens"] != given.facts["tokens"]
        and written.facts["sha256"] == given.facts["sha256"]
    )
    assert cut("best").facts == written.facts  # so an interrupted run can be resumed


@pytest.mark.parametrize(("recipe", "windows"), [("best", "given"), ("paper", "continued")])
def test_the_command_line_has_the_last_word(recipe: str, windows: str) -> None:
    other = {"given": "paper", "continued": "best"}[windows]
    assert cut(recipe, windows=windows).facts["tokens"] == cut(other).facts["tokens"]


def test_a_model_that_does_not_fit_whole_keeps_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(calibration_text, "available_host_bytes", lambda: 30_000_000)
    kept = cut("best")
    assert kept.facts["windows"] == "given" and kept.facts["tokens"] == cut("paper").facts["tokens"]
    assert "stay the text's own: to continue them takes the whole model" in capsys.readouterr().err


def test_the_model_that_wrote_is_gone_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []

    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        seen.append(weakref.ref(model))
        return model

    monkeypatch.setattr(calibration_text, "load", loaded)
    cut("best")
    assert [model() for model in seen] == [None]


def test_how_many_at_once_is_a_matter_of_the_device() -> None:
    job = Job.of(Checkpoint(DEMO).config, recipes.load("w4a16", "best"))
    cpu = torch.device("cpu")
    for memory in (1e9, 5e9, 24e9):
        all_of_them = writing(job, 1 << 40, 512, cpu, memory)
        assert (
            all_of_them.at_once.bit_count() == 1
            and all_of_them.cache <= CACHE_SHARE * memory < 2 * all_of_them.cache
        )
        assert writing(job, 3, 512, cpu, memory).at_once == 3
    assert writing(job, 8, 10**9, cpu, 24e9).at_once == 1
    assert [writing(job, 8, n, cpu, 24e9).given for n in (2, 8, 15, 16, 2048)] == [1, 1, 1, 2, 256]


def test_of_several_ranks_the_first_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its tokens and load no model."""
    first = torch.cat(list(cut("best").tokens))
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(
        ranks, "first", lambda value: first if value is None else pytest.fail("written twice")
    )
    assert torch.equal(torch.cat(list(cut("best").tokens)), first)


def test_what_was_done_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    commands.quantize(
        "demo",
        "w4a16",
        out,
        recipe="best",
        calib="demo",
        data_dir=None,
        samples=2,
        seqlen=16,
        seed=0,
        device="cpu",
        resume=False,
        progress=None,
    )
    facts = json.loads((out / "qtool.json").read_text())["calibration"]
    assert facts["windows"] == "continued" and facts["samples"] == 2
    assert "--windows continued --out" in report_commands.commands(collect(out, None, "cpu"))[0]


def test_windows_of_a_recipe_are_given_or_continued() -> None:
    data = {"layers": [{"match": ".*", "scheme": "w8a8"}], "windows": "continued"}
    assert recipes.recipe.parse(data, "mine").windows == "continued"
    with pytest.raises(QtoolError, match="mine: windows is given or continued, found 'long'"):
        recipes.recipe.parse(data | {"windows": "long"}, "mine")
