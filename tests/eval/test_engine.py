"""An engine is asked the windows and requests that a model in this process is asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from qtool.errors import QtoolError
from qtool.eval import saved
from qtool.eval.checkpoints import evaluate_checkpoints
from qtool.eval.engine import Engine, require_engine
from qtool.eval.evaluate import evaluate
from qtool.eval.language_model import language_model

from .conftest import CONTEXT, VOCABULARY, make_model

TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times! " * 4
ROW = '{"query": "a", "choices": ["b", "cd"], "gold": 0}\n'


class Fake(Engine):
    """The tiny model behind an engine's interface, one window after another."""

    vocabulary, context_length, batch_size = VOCABULARY, CONTEXT, 3

    def __init__(self, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.closed = make_model(), tokenizer, False

    @classmethod
    def version(cls) -> str:
        return "fake 1.0"

    @torch.no_grad()
    def nll(self, windows: Tensor) -> list[float]:
        logits = [self.model(window[None]).logits[0, :-1].double() for window in windows]
        pairs = zip(logits, windows[:, 1:], strict=True)
        return [float(cross_entropy(found, wanted, reduction="sum")) for found, wanted in pairs]

    def lm_eval_model(self) -> Any:
        return language_model(self.model, self.tokenizer, 1)

    def close(self) -> None:
        self.closed = True


def test_perplexity_and_choices_are_those_of_a_model_in_this_process(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.jsonl").write_text(ROW)
    (tmp_path / "c4.txt").write_text(TEXT)
    options: dict[str, Any] = {"data_dir": tmp_path, "seqlen": 20}
    here = evaluate(["c4", "mine"], model, tokenizer, **options)
    there = evaluate(["c4", "mine"], Fake(tokenizer), tokenizer, **options)
    assert [result.engine for result in here.tasks] == ["", ""]
    assert [result.engine for result in there.tasks] == ["fake 1.0", "fake 1.0"]
    assert there["c4"].details["window_nll"] == pytest.approx(here["c4"].details["window_nll"])
    assert there["mine"].metrics == here["mine"].metrics
    whole = evaluate(["c4"], Fake(tokenizer), tokenizer, data_dir=tmp_path)
    assert whole["c4"].details["seqlen"] == CONTEXT


def test_an_engine_has_room_for_what_it_is_asked_and_is_closed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Fake, dict[str, Any]]] = []

    class Loaded(Fake):
        def __init__(self, directory: Path, **options: Any) -> None:
            assert all(fake.closed for fake, _ in opened)  # one at a time has the GPUs
            super().__init__(tokenizer)
            opened.append((self, options))

    (tmp_path / "text.txt").write_text("once upon a time " * 99)
    text = str(tmp_path / "text.txt")
    monkeypatch.setattr("qtool.eval.checkpoints.load_tokenizer", lambda _: tokenizer)
    found, baseline = evaluate_checkpoints(
        [text], "demo", "demo", engine=Loaded, tensor_parallel=2, seqlen=16
    )
    assert found == baseline and found.tasks[0].engine == "fake 1.0"
    assert [options for _, options in opened] == 2 * [
        {"tokens": 16, "dtype": None, "tensor_parallel": 2}
    ]
    assert saved.environment("cpu", engine=Loaded)["engine"] == "fake 1.0"
    assert saved.environment("cpu", engine=Loaded)["device"] == "cuda"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.jsonl").write_text(ROW)
    evaluate_checkpoints([text, "mine"], "demo", engine=Loaded, data_dir=tmp_path)
    assert opened[-1][1]["tokens"] is None  # questions have any length
    assert opened[-1][0].closed


def test_what_an_engine_does_not_do_is_refused() -> None:
    require_engine(None, 1, kv="kv4", deterministic=True)
    with pytest.raises(QtoolError, match="--tensor-parallel 2 is for --engine vllm"):
        require_engine(None, 2)
    for option in ("kv", "as_export", "deterministic"):
        with pytest.raises(QtoolError, match=f"goes without --{option.replace('_', '-')}"):
            require_engine(Fake, 1, **{option: "x"})
