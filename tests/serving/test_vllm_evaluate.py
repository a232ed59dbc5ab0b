"""Through vLLM an evaluation asks what it asks in this process; the answers are made here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from qtool.eval.evaluate import evaluate
from qtool.io.model_directory import DEMO
from qtool.runtime.load import load, load_tokenizer
from qtool.serving.evaluate import VllmModel
from qtool.serving.replay import profiled
from qtool.serving.vllm.engine import FIXED_CACHE
from tests.serving.models import configured


class FakeLLM:
    """What is used of ``vllm.LLM``, by transformers on a CPU."""

    def __init__(self) -> None:
        self.model = load(DEMO, dtype=torch.float32)
        config = SimpleNamespace(
            max_model_len=513,
            model=str(DEMO),
            tokenizer=str(DEMO),
            tokenizer_revision=None,
            code_revision=None,
            hf_config=self.model.config,
            trust_remote_code=False,
        )
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(model_config=config, engine_core=core)

    @torch.no_grad()
    def generate(self, prompts: list[Any], sampling_params: Any, **options: Any) -> list[Any]:
        return [self.answer(dict(prompt)["prompt_token_ids"]) for prompt in prompts]

    def answer(self, ids: list[int]) -> Any:
        """The log-probability of each token, and of the best one."""
        logits = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found: list[Any] = [None]
        for row, token in zip(logits, ids[1:], strict=True):
            pair = {token: float(row[token]), int(row.argmax()): float(row.max())}
            found.append({key: SimpleNamespace(logprob=value) for key, value in pair.items()})
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=found)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that engines are made with."""
    options: list[dict[str, Any]] = []

    def engine(directory: Any, *, in_process: bool, **given: Any) -> FakeLLM:
        assert not in_process
        options.append(given)
        return FakeLLM()

    monkeypatch.setattr("qtool.serving.evaluate.engine", engine)
    return options


def test_windows_and_choices_are_scored_alike(asked: list[dict[str, Any]]) -> None:
    tokenizer, how = load_tokenizer(DEMO), {"limit": 3, "seqlen": 64}
    tasks = ["demo", "demo_choice"]
    here = evaluate(tasks, load(DEMO, dtype=torch.float32), tokenizer, **how)
    model = VllmModel(DEMO, tokens=None, dtype="float32", tensor_parallel=1)
    there = evaluate(tasks, model, tokenizer, **how)
    model.close()
    mine, theirs = (found["demo"].details["window_nll"] for found in (here, there))
    assert theirs == pytest.approx(mine, abs=1e-5)
    assert there["demo_choice"].metrics == here["demo_choice"].metrics
    assert there["demo"].engine == model.version() != ""


def test_vllm_takes_the_options(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    for tokens in (512, None):
        VllmModel(DEMO, tokens=tokens, dtype=None, tensor_parallel=1)
        config = configured(DEMO, **asked[-1])
        assert config.model_config.max_model_len == 513  # a whole context, and a token after it
    config = configured(DEMO, kv_cache_memory_bytes=1 << 30, **FIXED_CACHE, **profiled(tmp_path))
    assert config.profiler_config.torch_profiler_dir == str(tmp_path)
