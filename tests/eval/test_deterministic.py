"""The two arithmetics: as served by default, and the one that is the same on every device."""

import json

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qtool.eval.deterministic import arithmetic, deterministic_decoder
from qtool.eval.evaluate import evaluate, load_tasks
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.kernels.order import adds_in_order
from qtool.runtime.huggingface import quantized_linears, replace_linears
from tests.runtime.test_deterministic import Device

from .conftest import make_model

TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times! " * 4


def packed(scheme: str) -> torch.nn.Module:
    """The tiny model with its weights in groups of 32, or one a channel (attention is 32 wide)."""
    model = make_model()
    weights = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    layout = {"w4a4": "apex4", "w4a16": "row-major", "w8a8": "row-major-8"}[scheme]
    replace_linears(
        model, CheckpointFormat("x", (Rule(".*", LinearFormat(scheme, GROUPS[scheme], layout)),))
    )
    for name, linear in quantized_linears(model).items():
        kind = linear.format.scheme_object
        params = kind.fit(weights[name].detach())
        for key, tensor in linear.format.pack(
            kind.quantize(weights[name].detach(), params), params
        ).items():
            linear.get_buffer(key).copy_(tensor)
    return model


GROUPS = {"w4a4": 32, "w4a16": 32, "w8a8": None}


def hidden(model: torch.nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(2, 98, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), deterministic_decoder(model), Device(seed):
        return model(tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]


@pytest.mark.parametrize("scheme", [None, *GROUPS])
def test_hidden_states_are_equal_on_all_devices(scheme: str | None) -> None:
    model = packed(scheme) if scheme else make_model()
    assert torch.equal(hidden(model, 1), hidden(model, 2))


def test_hidden_states_of_a_mixture_are_equal_on_all_devices() -> None:
    """transformers multiplies its experts by a grouped matmul, which torch has not in float64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        vocab_size=98, num_experts=4, num_experts_per_tok=2, num_attention_heads=4, **sizes
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    assert torch.equal(hidden(model, 1), hidden(model, 2))


def test_groups_are_added_in_order_in_the_decoder_and_nothing_stays_behind() -> None:
    model, seen = packed("w4a4"), []
    decoder = model.get_decoder()
    decoder.embed_tokens.register_forward_pre_hook(lambda *_: seen.append(adds_in_order()))
    before = dict(vars(decoder))
    for broken in (False, True):
        try:
            with torch.no_grad(), deterministic_decoder(model):
                model(torch.full((1, 4), 200 if broken else 3))  # of 98 tokens
        except IndexError:
            assert broken
    assert seen == [True, True] and not adds_in_order() and vars(decoder) == before
    with torch.no_grad():
        model(torch.full((1, 4), 3))
    assert seen[-1] is False


@torch.no_grad()
def test_by_default_a_model_runs_as_it_is_served() -> None:
    """No operation of the forward is replaced: the logits are a plain call's, to the bit."""
    model, ids = packed("w4a4"), torch.arange(2, 34)[None]
    plain = model(ids).logits
    with arithmetic(model, deterministic=False):
        assert torch.equal(model(ids).logits, plain)
    with arithmetic(model, deterministic=True):
        assert not torch.equal(model(ids).logits, plain)


def test_both_kinds_of_task_take_the_mode_and_record_it(tokenizer, tmp_path) -> None:
    (tmp_path / "c4.txt").write_text(TEXT)
    (tmp_path / "tasks").mkdir()
    row = {"query": "fox", "choices": [" jumps", " lazy"], "gold": 0}
    (tmp_path / "tasks" / "mine.jsonl").write_text(json.dumps(row) + "\n")
    model, seen = packed("w4a4"), []
    model.get_decoder().embed_tokens.register_forward_pre_hook(
        lambda *_: seen.append(adds_in_order())
    )
    options = {"data_dir": tmp_path, "seqlen": 20}
    for mode in (False, True):
        for task in ("c4", "mine"):
            seen.clear()
            [result] = evaluate([task], model, tokenizer, deterministic=mode, **options).tasks
            assert set(seen) == {mode} and result.deterministic is mode
            [asked] = load_tasks([task], tokenizer, deterministic=mode, **options)
            assert asked.facts["deterministic"] is mode  # no answer of the other mode is reused
