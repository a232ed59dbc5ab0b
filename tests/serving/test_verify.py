"""What counts as the same answer: nothing beyond a runtime's own rounding."""

from types import SimpleNamespace

import pytest
import torch

from qtool.errors import QtoolError
from qtool.serving import verify
from qtool.serving.verify import Answer, continuations, perplexity, verify_in_vllm
from tests.serving.conftest import Native

TOKENS, GAPS = [[5, 6, 7], [8, 9, 10]], [[1.0, 0.1, 1.0], [1.0, 1.0, 1.0]]
OURS = Answer(torch.full((2, 4), -2.0), TOKENS, GAPS, torch.full((2, 4), 0.06))


def test_continuations_part_only_within_the_noise() -> None:
    assert not continuations(TOKENS, OURS).problem
    unsure = continuations([[5, 4, 4], [8, 9, 10]], OURS)  # what follows a parting does not count
    assert not unsure.problem
    assert unsure.ran == "1 of 2 continuations equal; noise 0.0600"
    sure = continuations([[5, 6, 7], [8, 4, 10]], OURS)
    assert sure.problem == "diverge by more than twice the noise: prompt 1 at token 1, by 1.000"


def test_perplexities_differ_by_no_more_than_the_noise() -> None:
    assert not perplexity(OURS.scores + 9e-4, OURS).problem
    signs = torch.tensor([0.5, -0.5]).repeat(2, 2)  # four standard errors are 0.76
    assert not perplexity(OURS.scores + 0.7, Answer(OURS.scores, TOKENS, GAPS, signs)).problem
    assert perplexity(OURS.scores + 0.8, Answer(OURS.scores, TOKENS, GAPS, signs)).problem
    below = Answer(OURS.scores, TOKENS, GAPS, -signs.abs())
    assert continuations(TOKENS, below).ran.endswith("noise 0.5000")
    assert perplexity(OURS.scores + 2e-3, OURS).problem == "log-probabilities are 0.0020 apart"


def test_a_model_without_packed_linears_is_refused_on_any_number_of_gpus(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    for name in ("require_vllm", "our_answer"):
        monkeypatch.setattr(verify, name, lambda *_: None)
    for ranks in (1, 2):
        llm = SimpleNamespace(apply_model=lambda run, ranks=ranks: [run(model)] * ranks)
        monkeypatch.setattr(verify, "engine", lambda *_, llm=llm, **options: llm)
        with pytest.raises(QtoolError, match="no layer from packed linears"):
            list(verify_in_vllm(native(), tensor_parallel=ranks))
