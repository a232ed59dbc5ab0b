"""Windows that the model continues: sampled from its own distribution, token by token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel

from qtool.data import continuation
from qtool.data.continuation import continued, sampled
from qtool.errors import QtoolError
from qtool.models.auto import text_model
from qtool.runtime.decode import graph_decoding
from qtool.runtime.load import load
from tests.conftest import VARIANTS, MakeModel
from tests.models.tiny import save_tiny
from tests.runtime.test_decode import HYBRID, model_of, recorded  # noqa: F401  (a fixture)


def texts(windows: int = 4, length: int = 5) -> Tensor:
    return torch.randint(0, 320, (windows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", VARIANTS)
def test_tokens_are_drawn_from_what_the_model_says_of_all_before(
    family: str, make_model: MakeModel
) -> None:
    """Drawn again without a cache, from the logits of the whole beginning: also where a window
    slides.
    """
    model = load(make_model(family), dtype=torch.float32)
    assert torch.equal(continued(model, texts(), 40, seed=7), drawn_again(model, 40))


@pytest.mark.parametrize("model_type", ["bert-generation", "cpmant", "xlstm"])
def test_tokens_of_a_model_without_a_cache_of_these_tokens(model_type: str, tmp_path: Path) -> None:
    """One gives none, one has tokens of its own in it too, and one keeps states, not keys."""
    model = load(save_tiny(model_type, tmp_path / "source"), dtype=torch.float32)
    for name, parameter in model.named_parameters():  # else any context draws the same
        parameter.data *= 0 if name.endswith("bias") else 8 if parameter.dim() > 1 else 1
    assert torch.equal(continued(model, texts(), 12, seed=7), drawn_again(model, 12))


def test_parts_are_written_one_after_another(make_model: MakeModel) -> None:
    model = load(make_model("llama"), dtype=torch.float32)
    whole = continued(model, texts(), 40, seed=0)
    parts = continued(model, texts(), 40, seed=0, batch_size=3)
    assert whole.shape == parts.shape == (4, 40)
    assert torch.equal(continued(model, texts()[:3], 40, seed=0), parts[:3])
    assert torch.equal(parts[:, :5], texts())
    assert torch.equal(whole, continued(model, texts(), 40, seed=0))
    assert not torch.equal(whole, continued(model, texts(), 40, seed=1))


@torch.no_grad()
def drawn_again(model: PreTrainedModel, length: int) -> Tensor:
    random, wanted = torch.Generator().manual_seed(7), texts()
    while wanted.shape[1] < length:
        p = model(wanted, use_cache=False).logits[:, -1].softmax(-1)
        wanted = torch.cat([wanted, sampled(p, random)], 1)
    return wanted


def test_tokens_are_as_frequent_as_probable_and_none_is_drawn_that_has_no_probability() -> None:
    rows = torch.tensor([0, 0.25, 0, 0.75, 0]).expand(10_000, -1)
    counts = sampled(rows, torch.Generator().manual_seed(0)).flatten().bincount(minlength=5)
    assert counts.sum() == counts[1] + counts[3] == 10_000
    assert abs(counts[1] / 10_000 - 0.25) < 0.02  # five standard deviations


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_least_and_the_largest_random_number_draw_tokens_with_a_probability(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.tensor([[number]], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *size, **how: drawn)
    row = torch.tensor([[0, 0.25, 0, 0.7, 0]])  # of a sum that rounding may leave below 1
    assert sampled(row, torch.Generator()).item() == token


class Killed(Exception):
    pass


class Entries(list[dict[str, Tensor]]):
    """A journal in memory: due at every third token, it stops the run after ``most`` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.asked = most, 0

    def read(self) -> list[dict[str, Tensor]]:
        return list(self)

    def due(self) -> bool:
        self.asked += 1
        return self.asked % 3 == 0

    def append(self, entry: Mapping[str, Tensor]) -> None:  # type: ignore[override]
        super().append(dict(entry))
        if len(self) == self.most:
            raise Killed


@pytest.mark.parametrize("batch_size", [4, 3])
def test_a_killed_continuation_goes_on_to_the_same_windows(
    batch_size: int, make_model: MakeModel
) -> None:
    model = load(make_model("llama"), dtype=torch.float32)
    wanted = continued(model, texts(), 40, seed=0, batch_size=batch_size)
    journal, kills = Entries(2), 0
    while True:
        try:
            found = continued(model, texts(), 40, seed=0, batch_size=batch_size, journal=journal)
            break
        except Killed:
            kills += 1
            journal.most += 2
    assert kills >= 4
    assert torch.equal(found, wanted)
    drawn = sum(entry["tokens"].numel() for entry in journal)
    assert drawn == 4 * (40 - texts().shape[1])  # each token once
    assert sum("keys.0" not in entry for entry in journal) == -(-4 // batch_size)  # whole windows


def test_a_layer_that_text_passes_over_has_nothing_to_keep(tmp_path: Path) -> None:
    """That of Llama 3.2 Vision's cross-attention."""
    model = text_model(load(save_tiny("mllama", tmp_path / "model"), dtype=torch.float32))
    wanted, journal = continued(model, texts(), 40, seed=0), Entries(2)
    with pytest.raises(Killed):
        continued(model, texts(), 40, seed=0, journal=journal)
    assert all("keys.0" in entry and "keys.1" not in entry for entry in journal)
    journal.most = 100
    assert torch.equal(continued(model, texts(), 40, seed=0, journal=journal), wanted)


def test_whole_windows_are_kept_of_a_model_whose_state_is_not(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make_model("llama"), dtype=torch.float32)
    monkeypatch.setattr(continuation._Batch, "can_be_kept", False)
    wanted = continued(model, texts(), 40, seed=0, batch_size=1)
    journal = Entries(2)
    with pytest.raises(Killed):
        continued(model, texts(), 40, seed=0, batch_size=1, journal=journal)
    assert [[*entry] for entry in journal] == [["tokens", "random"]] * 2
    journal.most = 100
    assert torch.equal(continued(model, texts(), 40, seed=0, batch_size=1, journal=journal), wanted)
    assert len(journal) == 4


@pytest.mark.parametrize(("config", "more"), [(LlamaConfig, {}), (Gemma3TextConfig, HYBRID)])
def test_windows_are_drawn_by_graphs(
    config: type,
    more: dict[str, object],
    recorded: list[str],  # noqa: F811
) -> None:
    """Each is a likeliest one by all before, to the precision of bf16; a killed run goes on."""
    model = model_of(config, **more)
    model.lm_head.weight.data *= 1000  # nothing else is ever drawn
    given = texts() % 128
    assert graph_decoding(model)
    wanted = continued(model, given, 40, seed=0, batch_size=3)
    assert recorded == (["run", "record"] + ["replay"] * 33) * 2
    assert not model.decode_graphs.steps  # nor the caches that they are of
    with torch.no_grad():
        logits = model(input_ids=wanted, use_cache=False).logits[:, 4:-1].float()
    most, chosen = logits.amax(-1), logits.gather(-1, wanted[:, 5:, None])[..., 0]
    assert (chosen > 0.95 * most).all()
    journal = Entries(2)
    with pytest.raises(Killed):
        continued(model, given, 40, seed=0, batch_size=3, journal=journal)
    journal.most = 100
    assert torch.equal(continued(model, given, 40, seed=0, batch_size=3, journal=journal), wanted)
    drawn = sum(entry["tokens"].numel() for entry in journal)
    assert drawn == 4 * (40 - given.shape[1])


def test_a_model_may_prepare_arguments_that_are_given_too(recorded: list[str]) -> None:  # noqa: F811
    model: Any = model_of(LlamaConfig)
    assert graph_decoding(model)
    wanted = continued(model, texts() % 128, 40, seed=0)
    prepare = model.prepare_inputs_for_generation
    more = {"use_cache": False, "logits_to_keep": None}
    model.prepare_inputs_for_generation = lambda *given, **how: prepare(*given, **how) | more
    assert torch.equal(continued(model, texts() % 128, 40, seed=0), wanted)


def test_no_text_from_nan(make_model: MakeModel) -> None:
    model = load(make_model("llama"), dtype=torch.float32)
    model.model.norm.weight.data.fill_(1e38)
    model.lm_head.weight.data *= 1e6
    with pytest.raises(QtoolError, match=r"NaN or Inf in the model's logits, .* finite in torch.f"):
        continued(model, texts(), 40, seed=0)
    model.lm_head.weight.data[0] = float("nan")
    with pytest.raises(QtoolError, match=r"lm_head.weight: holds \d+ NaN or Inf values; .*damaged"):
        continued(model, texts(), 40, seed=0)
