"""Which tokens a run is calibrated on, and what is recorded of them."""

import hashlib
import json
import re
import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import qtool
from qtool import recipes
from qtool.data.continuation import continued
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.models.auto import text_model
from qtool.pipeline import calibration_windows as calibration_text
from qtool.pipeline.calibration_windows import OutputJournal, Windows
from qtool.pipeline.job import Job
from qtool.pipeline.options import QuantizeOptions, RecipeOverrides
from qtool.pipeline.planning import memory as planning_memory
from qtool.pipeline.planning.memory import (
    CACHE_SHARE,
    DEVICE_SHARE,
    HOST_SHARE,
    ROUNDED_SCHEME,
    WEIGHTS_SHARE,
    ContinuationMemory,
    continuation_memory,
    rounded_bytes,
)
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.planning.plan_text import as_dict, as_text
from qtool.pipeline.quantize import Calibration, fingerprint, quantize
from qtool.report import commands as report_commands
from qtool.report.build import collect
from qtool.runtime.load import load, load_tokenizer
from tests.conftest import MakeModel
from tests.pipeline.test_quantize import files


def asked(
    recipe: str, given: Any = "demo", samples: int | None = 4, seqlen: int = 64, **overrides: Any
) -> Windows:
    source = Checkpoint(DEMO)
    job = Job.of(source.config, RecipeOverrides(**overrides).recipe("w4a16", recipe))
    return Windows(source, job, given, QuantizeOptions(samples=samples, seqlen=seqlen), "cpu")


def cut(recipe: str, *given: Any, **wishes: Any) -> Calibration:
    return asked(recipe, *given, **wishes).drawn


def test_best_continues_the_windows_that_paper_takes_as_they_are() -> None:
    given, written = cut("paper"), cut("best")
    own, theirs = torch.cat(list(written.tokens)), torch.cat(list(given.tokens))
    assert torch.equal(own[:, :8], theirs[:, :8]) and not torch.equal(own[:, 8:], theirs[:, 8:])
    assert written.facts["windows"] == "continued" and given.facts["windows"] == "given"
    assert (
        written.facts["tokens"] != given.facts["tokens"]
        and written.facts["sha256"] == given.facts["sha256"]
    )


@pytest.mark.parametrize("first", ["text", "messages"])
def test_every_window_begins_with_one_bos(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer adds it to a document, and the template of a chat writes it."""
    tokenizer = load_tokenizer(DEMO)
    bos = tokenizer.bos_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = f"{bos}{{{{ messages[0].content }}}}"
    monkeypatch.setattr(calibration_text, "load_tokenizer", lambda _: tokenizer)
    said = "a few words of a text " * 4
    rows = {"text": {"text": said}, "messages": {"messages": [{"role": "user", "content": said}]}}
    found = torch.cat(list(cut("paper", [rows[first]], samples=99, seqlen=8).tokens))
    ids = [tokenizer.eos_token_id, *tokenizer(said, add_special_tokens=False)["input_ids"]]
    expected = torch.tensor(ids[: found.numel()]).view(-1, 8)
    expected[:, 0] = tokenizer.eos_token_id
    assert len(found) > 1 and torch.equal(found, expected)


@pytest.mark.parametrize(("recipe", "windows"), [("best", "given"), ("paper", "continued")])
def test_the_command_line_has_the_last_word(recipe: str, windows: str) -> None:
    other = {"given": "paper", "continued": "best"}[windows]
    assert cut(recipe, windows=windows).facts["tokens"] == cut(other).facts["tokens"]


SMOOTHED = {
    "scheme": "test",
    "layers": [{"match": ".*", "scheme": "w8a8"}],
    "transforms": [{"smooth": {"steps": 1}}],
    "rounding": "rtn",
    "windows": "continued",
}


def run(model: Path, out: Path, **options: Any) -> Path:
    """A run that calibrates on continued token ids: a model without a tokenizer."""
    source, recipe = Checkpoint(model), recipes.parse(SMOOTHED, "test")
    drawn_by = QuantizeOptions(samples=2, seqlen=16)
    windows = Windows(source, Job.of(source.config, recipe), torch.arange(200), drawn_by, "cpu")
    return quantize(source, recipe, out, calibration=windows, **options)


def stopped(model: Path, out: Path) -> Path:
    """A run that stops after its first shard; returns where its windows are."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, out, progress=stop)
    return out.with_name("out.partial") / ".run" / "windows.safetensors"


def test_free_memory_decides_nothing(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model does not fit whole, its windows cannot be had: never other ones instead."""
    monkeypatch.setattr(calibration_text, "host_memory", lambda: (64e9, 100_000))
    with pytest.raises(QtoolError, match=r"takes the whole model, .* kB .*--windows given"):
        run(make_model(), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    assert cut("best", windows="given").facts["tokens"] == cut("paper").facts["tokens"]


def test_memory_that_a_run_leaves_to_others_may_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that fill a run's share of the memory fit while others have a part of theirs."""
    many = torch.zeros(1 << 14, 128, dtype=torch.long)
    monkeypatch.setattr(calibration_text, "host_memory", lambda: (1e9, 0.6e9))
    monkeypatch.setattr(calibration_text, "gpu_memory", lambda device: (1e9, 0.95e9))
    for device, share in (("cpu", HOST_SHARE), ("cuda", DEVICE_SHARE)):
        text = asked("best")
        text.device = torch.device(device)
        assert 0.59 * share * 1e9 < text._continuation(many).bytes <= share * 1e9


def test_the_plan_says_that_the_model_does_not_fit() -> None:
    job = asked("best").job
    assert "pass --windows given" in as_text(plan(job, device_memory=1e6))
    assert "pass --windows given" not in as_text(plan(job))


def test_the_memory_that_does_not_hold_the_model_is_named() -> None:
    """The weights of a model on a GPU pass through the host."""
    job = asked("best").job
    room: dict[str, Any] = {"device_memory": 1e9, "host_memory": 1e5}
    for device, what in (("cuda", "MB"), ("cpu", "with its cache")):
        said = as_text(plan(job, **room, device=device))
        assert re.search(
            rf"to continue them takes the whole model, .* {what}, where 50 kB of host memory",
            said,
        )
    room = {"device_memory": 1e5, "host_memory": 1e9}
    tight = plan(job, **room)
    assert re.search(r"with its cache, where 90 kB of cuda memory", as_text(tight))
    assert as_dict(tight)["windows_shortage"] == tight.shortage != ""


def test_the_plan_says_that_the_model_is_rounded() -> None:
    job = asked("best").job
    edge = continuation_memory(job, 2, 64, torch.device("cuda"), 1e9).weights / WEIGHTS_SHARE
    for memory, rounded in [(1.01 * edge, False), (0.99 * edge, True)]:
        found = plan(job, 2, 64, device_memory=memory)
        assert ("by the model, rounded to w4a16 (--windows" in as_text(found)) == rounded
        assert as_dict(found)["continued_by"] == (ROUNDED_SCHEME if rounded else None)
        assert found.continuation


def test_windows_are_drawn_once(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run reads them, and loads no model to continue them."""
    model = make_model()
    whole = files(run(model, tmp_path / "whole"))
    stopped(model, tmp_path / "out")
    monkeypatch.setattr(Windows, "_draw", lambda self: pytest.fail("drawn again"))
    assert files(run(model, tmp_path / "out", resume=True)) == whole
    facts = json.loads(whole["qtool.json"])["calibration"]
    assert facts["tokens"] and facts["windows"] == "continued" and facts["samples"] == 2


@pytest.mark.parametrize(("change", "following"), [("none", 6), ("cut", 5), ("gone", 3)])
def test_windows_that_are_half_drawn_are_drawn_on(
    change: str,
    following: int,
    make_model: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed meanwhile, a run goes on from the last whole entry of its journal."""
    model = make_model()
    whole = files(run(model, tmp_path / "whole"))
    monkeypatch.setattr(OutputJournal, "due", lambda self: True)
    drawn, append = [], OutputJournal.append

    def killed(self: OutputJournal, entry: Any) -> None:
        append(self, entry)
        drawn.append(self.entries)
        if len(drawn) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputJournal, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out")
    directory = tmp_path / "out.partial" / ".run"
    entries = sorted(directory.glob("continued-*.safetensors"))
    if change == "cut":
        entries[-1].write_bytes(entries[-1].read_bytes()[:-8])
    elif change == "gone":
        entries[2].unlink()
    assert files(run(model, tmp_path / "out", resume=True)) == whole
    assert drawn == [*range(1, 6), *range(following, 15)]


def test_windows_of_a_large_cache_are_stored_whole_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing them half drawn would take as long as drawing them again."""
    need = continuation_memory(asked("best").job, 2, 64, torch.device("cpu"), 1e9)
    for most, due in ((need.cache, True), (need.cache - 1, False)):
        monkeypatch.setattr(calibration_text, "JOURNAL_BYTES", most)
        nowhere: Any = None
        journal = OutputJournal(nowhere, need, "cpu", torch.zeros(1, 1))
        journal.next = 0
        assert journal.due() == due


def test_half_drawn_windows_of_another_text_are_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus is known by its name, and the text of that name may be another one now."""
    local = tmp_path / "wikitext2" / "train.txt"
    local.parent.mkdir()
    how: dict[str, Any] = {"calibration": "wikitext2", "data_dir": tmp_path, "windows": "continued"}
    make = partial(qtool.quantize, "demo", "w8a8", recipe="paper", samples=2, seqlen=32, **how)
    append = OutputJournal.append

    def killed(self: OutputJournal, entry: Any) -> None:
        append(self, entry)
        raise KeyboardInterrupt

    local.write_text("the old man and the sea " * 40)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(OutputJournal, "due", lambda self: True)
        patched.setattr(OutputJournal, "append", killed)
        make(out=tmp_path / "out")
    local.write_text("the young woman and the hill " * 40)
    make(out=tmp_path / "whole")
    make(out=tmp_path / "out", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    recorded = json.loads((tmp_path / "out" / "qtool.json").read_text())["calibration"]
    assert recorded["data_dir"] == str(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_windows_are_drawn_again(
    damage: str, make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model()
    whole = files(run(model, tmp_path / "whole"))
    stored = stopped(model, tmp_path / "out")
    stored.unlink() if damage == "gone" else stored.write_bytes(stored.read_bytes()[:-8])
    assert files(run(model, tmp_path / "out", resume=True)) == whole


def test_other_calibration_data_does_not_resume(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    stopped(model, tmp_path / "out")
    SMOOTHED["windows"] = "given"
    try:
        with pytest.raises(QtoolError, match=r"another calibration data \(windows: \"continued\""):
            run(model, tmp_path / "out", resume=True)
    finally:
        SMOOTHED["windows"] = "continued"


def test_content_is_compared_and_not_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is resumed from another directory, with other paths of the same model and texts."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    shutil.copytree(DEMO, here / "model")
    (here / "text.txt").write_text("the old man and the sea " * 40)
    shutil.copyfile(here / "text.txt", there / "same.txt")
    shutil.copyfile(here / "text.txt", there / "rows.raw")
    (there / "other.txt").write_text("the young woman and the hill " * 40)
    out, few = tmp_path / "out", {"recipe": "paper", "seqlen": 16}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    mix = {"demo": 2, "text.txt": 2}
    monkeypatch.chdir(here)
    with pytest.raises(KeyboardInterrupt):
        qtool.quantize("model", "w8a8", calibration=mix, out=out, progress=stop, **few)
    monkeypatch.chdir(there)
    for parts, difference in [
        ({"demo": 2, "other.txt": 2}, r"parts\[1\].content: "),
        ({"demo": 2, "rows.raw": 2}, r"parts\[1\].content: "),
        ({"demo": 2, "same.txt": 3}, r"parts\[1\].samples: 2, now 3"),
        ({"same.txt": 2, "demo": 2}, r"parts\[0\].content: \"demo\", now "),
        ({"demo": 2}, r"parts\[1\]: .*, now null"),
    ]:
        with pytest.raises(QtoolError, match=rf"another calibration data \({difference}"):
            qtool.quantize("../here/model", "w8a8", calibration=parts, out=out, resume=True, **few)
    same = {"demo": 2, "same.txt": 2}
    qtool.quantize("../here/model", "w8a8", calibration=same, out=out, resume=True, **few)
    whole = tmp_path / "whole"
    monkeypatch.chdir(here)
    qtool.quantize("model", "w8a8", calibration=mix, out=whole, **few)
    assert files(out) == files(whole)


def test_what_is_clipped_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.arange(300).reshape(3, 100)
    assert [b.shape for b in cut("paper", ids, samples=9, seqlen=4096).tokens] == [(3, 100)]
    assert [record.message for record in caplog.records] == [
        "calibration windows have 100 tokens, not 4096: the model's context or the given token "
        "ids are shorter",
        "token ids holds 3 of the 9 requested windows of 100 tokens",
    ]
    assert asked("paper", seqlen=4096).seqlen == 512  # the demo's context


@pytest.mark.parametrize(
    ("recipe", "kv", "seqlen", "said"),
    [
        ("paper", None, 63, 1),
        ("paper", None, 64, 0),  # the Hessian of the widest inputs can have full rank
        ("fast", "kv8", 63, 0),
    ],
)
def test_fewer_tokens_than_input_channels_are_said_once(
    recipe: str,
    kv: str | None,
    seqlen: int,
    said: int,
    make_model: MakeModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = make_model(intermediate_size=384)
    ids = torch.arange(6 * seqlen).reshape(6, seqlen) % 320
    qtool.quantize(source, "w4a16", recipe=recipe, kv=kv, calibration=ids, out=tmp_path / "out")
    found = [line for line in caplog.messages if "tokens are fewer than" in line]
    assert len(found) == said
    for line in found:
        assert line.startswith("378 calibration tokens are fewer than the 384 input channels of ")


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
        many = continuation_memory(job, 1 << 40, 128, cpu, memory)
        room = CACHE_SHARE * HOST_SHARE * memory
        beside = many.bytes - many.weights
        assert beside <= room < beside * (1 + 1 / many.batch_size)
        assert many.working > 16 * 4096 * many.batch_size  # logits, shares and their float64 sums
        assert continuation_memory(job, 3, 128, cpu, memory).batch_size == 3
        again = continuation_memory(job, 2 * many.batch_size + 1, 128, cpu, memory)
        assert again.batch_size == -(-(2 * many.batch_size + 1) // 3)  # parts are of like size
    assert continuation_memory(job, 8, 10**9, cpu, 1e6).batch_size == 1


def test_a_model_that_a_gpu_cannot_hold_is_rounded() -> None:
    """One that it can is not, however little is left beside it; nor is any on a CPU."""
    job = Job.of(Checkpoint(DEMO).config, recipes.load("w4a16", "best"))
    where = torch.device("cuda")
    exact = continuation_memory(job, 2, 64, where, 1e9)
    edge = exact.weights / WEIGHTS_SHARE
    assert not exact.rounded
    for memory, rounded in [(1.01 * edge, False), (0.99 * edge, True)]:
        found = continuation_memory(job, 128, 512, where, memory)
        assert found.rounded == rounded and found.bytes <= DEVICE_SHARE * memory
        assert (found.weights < exact.weights) == rounded
    assert not continuation_memory(job, 2, 64, torch.device("cpu"), 1e6).rounded


def test_its_bytes_are_those_of_the_rounded_checkpoint(
    make_model: MakeModel, tmp_path: Path
) -> None:
    for variant in ("llama", "llama-tied", "mixtral"):
        source = Checkpoint(make_model(variant))
        quantize(source, recipes.load(ROUNDED_SCHEME), tmp_path / f"{variant}-rounded")
        stored = Checkpoint(tmp_path / f"{variant}-rounded").entries.values()
        job = Job.of(source.config, recipes.load("w4a16", "best"))
        assert rounded_bytes(job) == sum(entry.nbytes for entry in stored)


def test_a_shape_that_cannot_be_rounded_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.of(Checkpoint(DEMO).config, recipes.load("w4a16", "best"))
    monkeypatch.setattr(planning_memory, "rounded_bytes", lambda job: None)
    assert not continuation_memory(job, 2, 64, torch.device("cuda"), 1e6).rounded


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is rounded to continue windows."""

    def need(*args: Any) -> ContinuationMemory:
        return replace(continuation_memory(*args), rounded=True)

    monkeypatch.setattr(calibration_text, "continuation_memory", need)


@pytest.mark.usefixtures("rounds")
def test_the_rounded_model_continues_as_its_checkpoint_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few: dict[str, Any] = {"calibration": "demo", "samples": 2, "seqlen": 32}
    out, fast = tmp_path / "out", tmp_path / "fast"
    qtool.quantize("demo", "w8a8", out=out, recipe="paper", windows="continued", **few)
    assert "the rest by the model, rounded to w4a16 (" in caplog.text
    facts = json.loads((out / "qtool.json").read_text())["calibration"]
    assert facts["continued_by"] == ROUNDED_SCHEME
    assert f"continued_by {ROUNDED_SCHEME}" in (out / "README.md").read_text()
    quantize(Checkpoint(DEMO), recipes.load(ROUNDED_SCHEME), fast)
    given = torch.cat(list(cut("paper", windows="given", samples=2, seqlen=32).tokens))
    written = continued(text_model(load(fast, device="cpu")), given[:, :4], 32, seed=0)
    assert facts["tokens"] == fingerprint([written])


@pytest.mark.usefixtures("rounds")
def test_a_rounded_model_that_does_not_fit_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_text, "host_memory", lambda: (64e9, 100_000))
    with pytest.raises(QtoolError, match=r"whole model, rounded to w4a16, .* with its cache"):
        cut("best")


def test_memory_that_ends_meanwhile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\n\nMore")

    monkeypatch.setattr(calibration_text, "continued", full)
    with pytest.raises(
        QtoolError, match=r"ran out of memory \(CUDA .* GiB.\) while .* --windows given"
    ):
        cut("best")


def test_what_an_end_of_memory_advises_can_be_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The windows drawn so far are in the run's directory, and it counts as refused."""

    def full(*args: Any, journal: OutputJournal, **options: Any) -> torch.Tensor:
        journal.append({"tokens": torch.zeros(1, 1, dtype=torch.int64)})
        raise torch.OutOfMemoryError("CUDA out of memory")

    how: Any = {"recipe": "best", "samples": 2, "seqlen": 32, "out": tmp_path / "out"}
    with monkeypatch.context() as patched, pytest.raises(QtoolError, match="--windows given"):
        patched.setattr(calibration_text, "continued", full)
        qtool.quantize("demo", "w4a16", **how)
    assert qtool.quantize("demo", "w4a16", windows="given", **how).directory == tmp_path / "out"


def test_long_windows_are_continued_in_pieces() -> None:
    job = Job.of(Checkpoint(DEMO).config, recipes.load("w4a16", "best"))
    for seqlen, pieces, length, given in [
        *[(2, 8, 2, 1), (8, 8, 8, 1), (15, 8, 15, 1), (16, 8, 16, 2)],
        *[(255, 8, 255, 31), (256, 16, 128, 16), (511, 8, 511, 63)],
        *[(512, 32, 128, 16), (1000, 32, 250, 31), (1023, 24, 341, 42)],
        *[(1024, 32, 256, 32), (1031, 8, 1031, 128), (1600, 40, 320, 40)],
        *[(2048, 64, 256, 32), (4096, 128, 256, 32)],
    ]:
        found = continuation_memory(job, 8, seqlen, torch.device("cpu"), 24e9)
        assert (found.pieces, found.length, found.given) == (pieces, length, given)


def test_pieces_stand_where_their_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is what the model makes of its beginning alone, as a window of its length is."""
    monkeypatch.setattr(planning_memory, "PIECE_TOKENS", (32, 32))
    given = torch.cat(list(cut("paper", windows="given", samples=3, seqlen=96).tokens))
    written = torch.cat(list(cut("paper", windows="continued", samples=3, seqlen=96).tokens))
    model = text_model(load(Checkpoint(DEMO), device="cpu", dtype=torch.float32))
    pieces = continued(model, given.reshape(9, 32)[:, :4], 32, seed=0)
    assert written.shape == given.shape and torch.equal(written.reshape(9, 32), pieces)
    assert torch.equal(written.reshape(9, 32)[:, :4], given.reshape(9, 32)[:, :4])


def test_of_several_ranks_the_first_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its windows and load no model."""
    first = cut("paper")
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(ranks, "broadcast", lambda value: first)
    monkeypatch.setattr(Windows, "_draw", lambda self: pytest.fail("drawn twice"))
    assert cut("paper") is first


def test_what_was_done_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    few: dict[str, Any] = {"calibration": "demo", "samples": 2, "seqlen": 16}
    qtool.quantize("demo", "w8a8", out=out, recipe="paper", windows="continued", **few)
    facts = json.loads((out / "qtool.json").read_text())["calibration"]
    assert facts["windows"] == "continued" and facts["samples"] == 2
    assert "--windows continued --out" in report_commands.commands(collect(out, None, "cpu"))[0]


def test_windows_of_a_recipe_are_given_or_continued() -> None:
    data = {"layers": [{"match": ".*", "scheme": "w8a8"}], "windows": "continued"}
    assert recipes.parse(data, "mine").windows == "continued"
    with pytest.raises(QtoolError, match="mine: windows is given or continued, found 'long'"):
        recipes.parse(data | {"windows": "long"}, "mine")


class _Stop(Exception):
    pass


def test_what_cannot_run_is_refused_before_windows_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output directory that is there, another recipe, and a run that is complete already."""
    few: dict[str, Any] = {"recipe": "paper", "samples": 2, "seqlen": 32, "out": tmp_path / "out"}

    def stop(*_: object) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        qtool.quantize("demo", "w8a8", progress=stop, **few)
    qtool.quantize("demo", "w8a8", **few | {"out": tmp_path / "done"})

    def drawn(_: object) -> None:
        raise AssertionError("windows were drawn")

    monkeypatch.setattr(Windows, "_draw", drawn)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "letter.txt").write_text("dear")
    with pytest.raises(QtoolError, match="exists already"):
        qtool.quantize("demo", "w8a8", **few | {"out": tmp_path / "there"})
    with pytest.raises(QtoolError, match=r"another recipe"):
        qtool.quantize("demo", "w8a8", resume=True, **few | {"recipe": "best"})
    done = qtool.quantize("demo", "w8a8", resume=True, **few | {"out": tmp_path / "done"})
    assert done.directory == tmp_path / "done"


def test_a_mix_holds_the_windows_of_each_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part's windows are those that it would have alone, and the record names it."""
    (tmp_path / "a,b.txt").write_text("the old man and the sea " * 20)
    short = str(tmp_path / "a,b.txt")
    mixed = cut("paper", {"demo": 5, short: 9}, samples=None, seqlen=32)
    alone = [cut("paper", "demo", samples=5, seqlen=32), cut("paper", short, samples=9, seqlen=32)]
    rows = [torch.cat(list(c.tokens)).tolist() for c in (mixed, *alone)]
    assert sorted(rows[0]) == sorted(rows[1] + rows[2])
    found = len(rows[2])
    assert found < 9
    assert f"{short} holds {found} of the 9 requested windows of 32 tokens" in caplog.text
    facts = mixed.facts
    assert facts["samples"] == 5 + found and "sha256" not in facts
    escaped = short.replace(",", "\\,")
    assert facts["text"] == f"demo:5,{escaped}:{found}"
    assert facts["parts"] == [
        {name: part.facts[name] for name in ("text", "samples", "sha256")} for part in alone
    ]
    again = cut("paper", facts["text"], samples=facts["samples"], seqlen=32)
    assert again.facts == facts


def test_a_part_that_is_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("three words only")
    with pytest.raises(QtoolError, match=r"few.txt has \d tokens, fewer than one window of 64"):
        cut("paper", f"demo:2,{tmp_path / 'few.txt'}:2", samples=None)


def test_chats_are_a_part_like_any_other(tmp_path: Path) -> None:
    """The template renders them; the result, its card and its report name every part."""
    model = shutil.copytree(DEMO, tmp_path / "model")
    chats = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "who is it? " * 30}, {"role": "assistant", "content": "I"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    mix = f"demo:3,{chats}:2"
    few: dict[str, Any] = {"recipe": "paper", "calibration": mix, "seqlen": 16}
    with pytest.raises(QtoolError, match="no chat template"):
        qtool.quantize(model, "w8a8", out=tmp_path / "out", **few)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    qtool.quantize(model, "w8a8", out=tmp_path / "out", **few)
    facts = json.loads((tmp_path / "out" / "qtool.json").read_text())["calibration"]
    rendered = "<user>" + turns[0]["content"] + "<assistant>I"
    assert facts["parts"][1]["sha256"] == hashlib.sha256(rendered.encode()).hexdigest()
    card = (tmp_path / "out" / "README.md").read_text()
    page = qtool.write_report(tmp_path / "out", out=tmp_path / "report.html")
    shown = Path(page).read_text()
    for part in facts["parts"]:
        assert f"{part['samples']} windows of {part['text']}, sha256 {part['sha256']}" in card
        assert part["sha256"] in shown
    command = report_commands.commands(collect(tmp_path / "out", None, "cpu"))[0]
    assert f"--calib {mix} --samples 5" in command


def test_the_plan_counts_the_windows_of_a_mix() -> None:
    """And plans the recipe that a run on calibration data takes."""
    plans = [
        qtool.plan("demo", "w4a16", recipe="paper", samples=96),
        qtool.plan("demo", "w4a16", calibration="c4:64,nowhere.jsonl:32"),
        qtool.plan("demo", "w4a16", calibration="c4,pile", samples=96),
    ]
    assert plans[0] == plans[1] == plans[2] != qtool.plan("demo", "w4a16", recipe="paper")
