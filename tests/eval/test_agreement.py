"""`eval` and lm-eval's own API agree on every item of a quantized checkpoint."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from qtool import recipes
from qtool.eval import zero_shot
from qtool.eval.evaluate import evaluate
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.load import load, load_tokenizer

ITEMS, BATCH = 6, 8
Scores = list[tuple[float, bool]]


def scored(run: Any) -> Scores:
    """What every call of lm-eval's scoring returns while ``run`` runs: (log-likelihood, greedy)."""
    found: Scores = []
    original = HFLM._loglikelihood_tokens

    def spy(self: HFLM, *args: Any, **kwargs: Any) -> Scores:
        found.extend(result := original(self, *args, **kwargs))
        return result

    with mock.patch.object(HFLM, "_loglikelihood_tokens", spy):
        run()
    return found


@pytest.mark.parametrize("scheme", ["w4a4-g128", "w4a8-lqq"])
def test_every_item_has_the_same_log_likelihood(scheme: str, tmp_path: Path) -> None:
    """Both run what a user's server runs, so nothing differs, with 4-bit activations either."""
    native = quantize(Checkpoint(DEMO), recipes.load(scheme, "fast"), tmp_path / "native")
    tokenizer = load_tokenizer(native)
    options: dict[str, Any] = {"limit": ITEMS, "batch_size": BATCH}

    def theirs() -> None:
        tasks, _ = zero_shot.load("demo_choice", tokenizer)
        model = HFLM(
            pretrained=str(native),
            dtype="auto",
            softmax_dtype="float32",
            device="cpu",
            batch_size=BATCH,
        )
        evaluator.simple_evaluate(
            model=model,
            tasks=tasks,
            limit=ITEMS,
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )

    own = scored(lambda: evaluate(["demo_choice"], load(native), tokenizer, **options))
    assert len(own) == 4 * ITEMS and own == scored(theirs)
