"""Decoding by recorded steps: which forwards are steps, and that a step is the model's own forward.

No GPU here: a recorded step is run again instead of replayed, and attention over ranges is SDPA
under the mask that the ranges stand for.
"""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.cache_utils import DynamicCache, StaticCache

from qtool.models.cache_argument import CACHE
from qtool.runtime import decode, range_attention, range_attention_triton
from qtool.runtime.decode import Step, graph_decoding
from qtool.runtime.fused_norms import fuse_norms
from qtool.runtime.merge import merge_linears
from qtool.runtime.range_attention import (
    are_ranges,
    attention_over_ranges,
    last_of,
    mask_of,
    ranges_of,
)
from tests.models.tiny import tiny_config
from tests.runtime.test_merge import llama, with_kernels  # noqa: F401  (a fixture)

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


def sdpa(query: Tensor, key: Tensor, value: Tensor, ranges: Any, scaling: float | None) -> Tensor:
    mask = mask_of(ranges, key.shape[2])
    out = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happened to each step: ``run``, ``record`` or ``replay``."""
    events: list[str] = []
    run, record, replay = Step.run, Step.record, Step.replay

    def noted_record(step: Step, forward: Any, cache: Any) -> None:
        lengths = [layer.cumulative_length.clone() for layer in cache.layers]
        record(step, forward, cache)
        for layer, length in zip(cache.layers, lengths, strict=True):  # a GPU computes nothing yet
            layer.cumulative_length.copy_(length)
        events[-1:] = ["record"]  # of the steps in it
        over = weakref.ref(cache)
        step.graph = SimpleNamespace(replay=lambda: again(step, forward, over()))  # type: ignore[assignment]

    def again(step: Step, forward: Any, cache: Any) -> None:
        step.logits = run(step, forward, cache).logits

    def noted_run(step: Step, *arguments: Any) -> Any:
        events.append("run")
        return run(step, *arguments)

    def noted_replay(step: Step, *arguments: Any) -> Any:
        events.append("replay")
        return replay(step, *arguments)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(decode, "recording", lambda graph, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(decode, "_recording_stream", lambda device: None)
    monkeypatch.setattr(Step, "record", noted_record)
    monkeypatch.setattr(Step, "run", noted_run)
    monkeypatch.setattr(Step, "replay", noted_replay)
    monkeypatch.setattr(range_attention, "attention_over_ranges", sdpa)
    monkeypatch.setattr(decode, "_has_graphs", lambda device: True)
    yield events


def model_of(config: type, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = config(**SIZES | more)
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


SLIDING = {"sliding_window": 6, "num_hidden_layers": 2}
HYBRID = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "more", "is_recorded"),
    [
        (Gemma3TextConfig, HYBRID, True),
        (Cohere2Config, HYBRID, True),
        (Olmo3Config, HYBRID, True),
        (Qwen3Config, HYBRID | {"use_sliding_window": True}, True),
        (MistralConfig, SLIDING | {"sliding_window": 64}, True),
        (MistralConfig, SLIDING, False),  # how long its cache is cannot be known
        (Phi3Config, SLIDING | {"sliding_window": 64}, True),
        (GraniteConfig, {"attention_multiplier": 0.2}, True),
        (Olmo2Config, {}, True),
        (SmolLM3Config, {"num_hidden_layers": 4}, True),
        (Glm4Config, {}, True),
    ],
    ids=str,
)
def test_sliding_windows_and_derived_families(
    config: Any,
    more: dict[str, Any],
    is_recorded: bool,
    recorded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and continuations that are longer than the window, beside the dynamic cache's."""
    monkeypatch.setattr(decode, "HALF", (torch.float32,))
    model = model_of(config, **{"pad_token_id": 0} | more).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    expected = greedy(model, tokens=12)
    assert graph_decoding(model)
    assert torch.equal(greedy(model, tokens=12), expected)
    assert recorded == (["run", "record"] + ["replay"] * 10 if is_recorded else [])
    hidden = greedy(model, tokens=12, output_hidden_states=True, return_dict_in_generate=True)
    assert torch.equal(hidden.sequences, expected)  # launch by launch


@pytest.mark.usefixtures("with_kernels")
def test_recorded_steps_of_a_packed_model(recorded: list[str]) -> None:
    """Merged linears that take their norms along: the reference rounds as transformers' norm."""
    model = llama("w4a8-lqq", "dual-mma")
    prompts = PROMPTS % 64
    how = {"attention_mask": PADDED, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(prompts, max_new_tokens=5, **how)
    merge_linears(model)
    assert graph_decoding(model)
    assert torch.equal(model.generate(prompts, max_new_tokens=5, **how), expected)
    assert recorded.count("replay") == expected.shape[1] - 7 - 2


@pytest.mark.parametrize(
    "how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {"use_cache": False}, {"cache": 1}]
)
def test_other_ways_to_generate(how: dict[str, Any], recorded: list[str]) -> None:
    """Beams reorder the cache; assisted generation and a given cache want no static one."""
    model = model_of(LlamaConfig)

    def written() -> Tensor:
        given = {CACHE: DynamicCache(config=model.config)} if "cache" in how else how
        settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
        rows = slice(1, 2) if "prompt_lookup_num_tokens" in how else slice(2)
        mask = PADDED[rows]
        return model.generate(PROMPTS[rows], attention_mask=mask, **settings, **given)

    expected = written()
    graph_decoding(model)
    assert torch.equal(written(), expected)
    assert model.generation_config.cache_implementation is None


def test_a_configuration_may_want_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of(LlamaConfig), []
    monkeypatch.setattr(
        type(model), "generate", lambda self, inputs, config=None, **kwargs: given.append(kwargs)
    )
    graph_decoding(model)
    for wanted in (True, False):
        model.generate(PROMPTS, GenerationConfig(use_cache=wanted))
    assert given == [{"cache_implementation": "static"}, {}]


def test_generate_takes_the_positional_arguments_of_transformers(recorded: list[str]) -> None:
    model = model_of(LlamaConfig)
    config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0)
    given = PROMPTS, config, [lambda ids, scores: -scores]
    expected = model.generate(*given, attention_mask=PADDED)
    graph_decoding(model)
    assert torch.equal(model.generate(*given, attention_mask=PADDED), expected)
    assert "replay" in recorded


def test_a_step_may_leave_its_positions_to_the_model(recorded: list[str]) -> None:
    model: Any = model_of(LlamaConfig)
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = wraps(prepare)(
        lambda *given, **how: prepare(*given, **how) | {"position_ids": None}
    )
    expected = greedy(model)
    assert graph_decoding(model)
    assert torch.equal(greedy(model), expected) and "replay" in recorded


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


def test_what_cannot_be_recorded_is_run(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(LlamaConfig)
    expected = greedy(model)
    graph_decoding(model)

    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\n\nand more")

    monkeypatch.setattr(Step, "record", refuse)
    with pytest.warns(UserWarning, match=r"without CUDA graphs: operation not permitted .*ing$"):
        assert torch.equal(greedy(model), expected)
    assert torch.equal(greedy(model), expected)
    assert recorded == ["run"]


def test_a_step_is_recorded_on_the_models_device(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not on the current one would run while it is recorded, and never again."""
    model = model_of(LlamaConfig)
    graph_decoding(model)
    current: list[torch.device] = []
    streams: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.remove(device)

    def recording(_: Any, stream: torch.device) -> Any:
        streams.append(stream)
        assert current == [model.device]
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(decode, "recording", recording)
    monkeypatch.setattr(decode, "_recording_stream", lambda device: device)
    greedy(model)
    assert streams == [model.device] and recorded[1] == "record"


def test_a_copy_of_the_model_is_on_its_own(recorded: list[str]) -> None:
    model = model_of(LlamaConfig)
    graph_decoding(model)
    greedy(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert (greedy(other)[:, 7:] == 0).all() and not (greedy(model)[:, 7:] == 0).all()


def test_architectures_that_do_more_than_attend_to_a_range_are_left_alone() -> None:
    capped = model_of(Gemma2Config)
    assert not graph_decoding(capped) and "forward" not in vars(capped)
    assert "generate" not in vars(capped)
    wide = model_of(LlamaConfig).float()
    assert not graph_decoding(wide)
    other_heads = AutoModelForCausalLM.from_config(tiny_config("gemma4_text")).bfloat16()
    assert not graph_decoding(other_heads)  # each layer has its own


def test_masks_and_ranges() -> None:
    at = torch.arange(6)
    mask = torch.stack([(at >= 2) & (at < 5), at < 6, at < 1])[:, None, None]
    numbers, starts, used = ranges_of(mask)
    assert numbers.tolist() == [0, 1, 2, 3]
    assert starts.tolist() == [2, 6, 12, 18] and used.tolist() == [3, 6, 1]
    assert torch.equal(mask_of((numbers, starts, used), 6), mask) and are_ranges(mask).all()
    holes = mask.clone().index_fill_(3, torch.tensor([3]), False)
    assert are_ranges(holes).tolist() == [False, False, True]
    assert not are_ranges(torch.zeros(1, 1, 1, 6, dtype=torch.bool))
    ranges = numbers, starts, used
    assert last_of(ranges, None) is ranges
    last = mask_of(last_of(ranges, 2), 6)[:, 0, 0]
    assert last.tolist() == [[at in seen for at in range(6)] for seen in ((3, 4), (4, 5), (0,))]


def test_a_hole_in_the_mask_of_a_recorded_step_is_not_overlooked(recorded: list[str]) -> None:
    model = model_of(LlamaConfig)
    graph_decoding(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(PROMPTS, **{CACHE: cache})
        for number in range(3):
            mask = (torch.arange(16) < 8 + number).expand(2, 1, 1, 16).clone()
            mask[1, 0, 0, 3] = number < 2
            ids = {"input_ids": PROMPTS[:, :1], "attention_mask": mask}
            logits = model(**ids, **{CACHE: cache}).logits
            assert logits.isnan().all(-1).flatten().tolist() == [False, number == 2]


def test_the_mask_of_a_step_is_transformers_own(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(LlamaConfig)
    graph_decoding(model)
    masks: Any = model.create_masks_for_generate
    seen = []

    def both(**kwargs: Any) -> Any:
        found = masks(**kwargs)
        if kwargs["inputs_embeds"].shape[1] == 1:
            seen.append(torch.equal(found, masks.args[0](**kwargs)))
        return found

    monkeypatch.setattr(model, "create_masks_for_generate", both)
    greedy(model)
    assert seen == [True] * 7


def test_norms_round_once_but_not_where_operators_are_intercepted() -> None:
    from qtool.runtime.deterministic import deterministic_arithmetic

    model = model_of(LlamaConfig)
    norm: Any = model.get_submodule("model.norm")
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 64).bfloat16()
    with deterministic_arithmetic():
        expected = norm(x)
    fuse_norms(model)
    exact = torch.nn.functional.rms_norm(
        x.double(), (64,), norm.weight.double(), norm.variance_epsilon
    )
    assert (norm(x) - exact).abs().max() <= (exact.abs() * 2**-8).max()
    with deterministic_arithmetic():
        assert torch.equal(norm(x), expected)


@pytest.mark.usefixtures("with_kernels")
def test_a_step_of_a_packed_model_compiles_as_one_graph() -> None:
    """For those who want torch.compile: no operator of ours breaks the graph."""
    model = llama("w4a8-lqq", "dual-mma", layers=1)
    fuse_norms(model)
    merge_linears(model)
    assert graph_decoding(model)
    forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    mask = (torch.arange(12) < 8).expand(2, 1, 1, 12)
    logits = []
    with torch.no_grad():
        for step in (model.forward, forward):
            cache = StaticCache(config=model.config, max_cache_len=12)
            model(PROMPTS % 64, **{CACHE: cache})
            given = {"attention_mask": mask, "position_ids": torch.full((2, 1), 7)}
            out = step(input_ids=PROMPTS[:, :1] % 64, **{CACHE: cache}, **given)
            logits.append(out.logits)
    assert torch.equal(*logits)


@pytest.mark.cuda
@pytest.mark.parametrize(("heads", "queries"), [(4, 4), (4, 20), (1, 16), (8, 8)])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_attention_of_many_sequences_is_sdpas(heads: int, queries: int, dim: int) -> None:
    """Each over a range of its own, from one token to all."""
    batch, capacity = 512 // heads, 200
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16)

    query = normal(batch, queries, 1, dim)
    key, value = (normal(batch, capacity, heads, dim).transpose(1, 2) for _ in range(2))
    numbers = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    first, used = numbers[:-1] % capacity, numbers.new_ones(batch)
    used = torch.where(numbers[:-1] % 3 == 0, capacity - first, used).int()
    starts = numbers * capacity
    starts[:-1] += first
    ranges = numbers, starts, used
    assert range_attention_triton.runs_on(query.squeeze(2), key.transpose(1, 2).flatten(0, 1))
    found = attention_over_ranges(query, key, value, ranges, None)
    expected = sdpa(query.float(), key.float(), value.float(), ranges, None)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02)
