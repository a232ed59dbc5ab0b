"""Decoding by recorded steps: which forwards are steps, and that a step is the model's own forward.

No GPU here: a recorded step is run again instead of replayed, and attention over ranges is SDPA
under the mask that the ranges stand for.
"""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from qtool.runtime import decode
from qtool.runtime.decode import Step, graph_decoding, is_of_ranges, one_kernel_norms, ranges_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def mask_of(ranges: decode.Ranges, capacity: int) -> Tensor:
    """Bool ``[B, 1, 1, C]``: the inverse of ``ranges_of``."""
    starts, used = ranges
    first = starts[:-1] - torch.arange(len(used)) * capacity
    at = torch.arange(capacity)
    return ((at >= first[:, None]) & (at < (first + used)[:, None]))[:, None, None]


def sdpa(query: Tensor, key: Tensor, value: Tensor, ranges: Any, scaling: float | None) -> Tensor:
    mask = mask_of(ranges, key.shape[2])
    out = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happened to each step: ``run``, ``record`` or ``replay``."""
    events: list[str] = []
    run, replay = Step.run, Step.replay

    def record(step: Step, forward: Any, cache: Any) -> None:
        def again() -> None:
            step.out = run(step, forward, cache)

        events.append("record")
        step.graph = SimpleNamespace(replay=again)  # type: ignore[assignment]

    def noted_run(step: Step, *arguments: Any) -> Any:
        events.append("run")
        return run(step, *arguments)

    def noted_replay(step: Step, *arguments: Any) -> Any:
        events.append("replay")
        return replay(step, *arguments)

    monkeypatch.setattr(Step, "record", record)
    monkeypatch.setattr(Step, "run", noted_run)
    monkeypatch.setattr(Step, "replay", noted_replay)
    monkeypatch.setattr(decode, "attention_over_ranges", sdpa)
    monkeypatch.setattr(decode, "_has_graphs", lambda device: True)
    yield events


def model_of(config: type, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = config(**SIZES, **more)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()


PROMPTS = torch.randint(2, 128, (2, 7), generator=torch.Generator().manual_seed(1))
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])


def greedy(model: Any, mask: Tensor = PADDED, tokens: int = 8, **how: Any) -> Tensor:
    how |= {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return model.generate(PROMPTS, attention_mask=mask, pad_token_id=0, **how)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])
def test_recorded_steps_write_the_models_tokens(config: type, recorded: list[str]) -> None:
    """With padding, over two calls of generate, each over a cache of its own."""
    model = model_of(config)
    expected = greedy(model)
    assert graph_decoding(model)
    assert torch.equal(greedy(model), expected)
    assert recorded == ["run", "record"] + ["replay"] * 6
    assert torch.equal(greedy(model), expected)
    assert torch.equal(greedy(model, cache_implementation="dynamic"), expected)
    assert recorded == (["run", "record"] + ["replay"] * 6) * 2


def test_what_a_graph_cannot_hold_is_the_models_own_forward(recorded: list[str]) -> None:
    model = model_of(LlamaConfig)
    ids = torch.tensor([[5]])
    expected = model(ids).logits
    graph_decoding(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1] * 7])
    greedy(model, holes, tokens=2)
    greedy(model, tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert recorded == []


def test_a_copy_of_the_model_is_on_its_own(recorded: list[str]) -> None:
    model = model_of(LlamaConfig)
    graph_decoding(model)
    greedy(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert (greedy(other)[:, 7:] == 0).all() and not (greedy(model)[:, 7:] == 0).all()


def test_architectures_that_do_more_than_attend_to_a_range_are_left_alone() -> None:
    windowed = model_of(Qwen3Config, layer_types=["sliding_attention", "full_attention"])
    assert not graph_decoding(windowed) and "forward" not in vars(windowed)
    assert windowed.generation_config.cache_implementation is None
    wide = model_of(LlamaConfig).float()
    assert not graph_decoding(wide)


def test_masks_and_ranges() -> None:
    at = torch.arange(6)
    mask = torch.stack([(at >= 2) & (at < 5), at < 6, at < 1])[:, None, None]
    starts, used = ranges_of(mask)
    assert starts.tolist() == [2, 6, 12, 18] and used.tolist() == [3, 6, 1]
    assert torch.equal(mask_of((starts, used), 6), mask) and is_of_ranges(mask)
    assert not is_of_ranges(mask.clone().index_fill_(3, torch.tensor([3]), False))
    assert not is_of_ranges(torch.zeros(1, 1, 1, 6, dtype=torch.bool))


def test_norms_round_once_but_not_where_operators_are_intercepted() -> None:
    from qtool.runtime.deterministic import deterministic_arithmetic

    model = model_of(LlamaConfig)
    norm: Any = model.get_submodule("model.norm")
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 64).bfloat16()
    with deterministic_arithmetic():
        expected = norm(x)
    one_kernel_norms(model)
    exact = torch.nn.functional.rms_norm(
        x.double(), (64,), norm.weight.double(), norm.variance_epsilon
    )
    assert (norm(x) - exact).abs().max() <= (exact.abs() * 2**-8).max()
    with deterministic_arithmetic():
        assert torch.equal(norm(x), expected)
