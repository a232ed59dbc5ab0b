"""One perplexity on every device: where, and that nothing of it stays behind."""

import pytest
import torch
from torch import Tensor

from qtool.eval.deterministic import deterministic
from qtool.eval.perplexity import perplexity
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.kernels.order import in_order
from qtool.runtime.huggingface import quantized_linears, replace_linears
from tests.runtime.test_deterministic import Device

from .conftest import make_model

TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times! " * 4


def packed(scheme: str) -> torch.nn.Module:
    """The tiny model with its weights in groups of 32 (per channel: the attention's are 32 wide)."""
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
    with torch.no_grad(), deterministic(model), Device(seed):
        return model(tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]


@pytest.mark.parametrize("scheme", GROUPS)
def test_hidden_states_are_equal_where_activations_are_quantized(scheme: str) -> None:
    model = packed(scheme)
    assert torch.equal(hidden(model, 1), hidden(model, 2)) == (scheme != "w4a16")


def test_groups_are_added_in_order_in_the_decoder_and_nothing_stays_behind() -> None:
    model, seen = packed("w4a4"), []
    decoder = model.get_decoder()
    decoder.embed_tokens.register_forward_pre_hook(lambda *_: seen.append(in_order()))
    before = dict(vars(decoder))
    for broken in (False, True):
        try:
            with torch.no_grad(), deterministic(model):
                model(torch.full((1, 4), 200 if broken else 3))  # of 98 tokens
        except IndexError:
            assert broken
    assert seen == [True, True] and not in_order() and vars(decoder) == before
    with torch.no_grad():
        model(torch.full((1, 4), 3))
    assert seen[-1] is False


def test_a_perplexity_is_evaluated_so(tokenizer) -> None:
    model = packed("w4a4")
    found = [
        perplexity(TEXT, model, tokenizer, seqlen=20, batch_size=size).window_nll for size in (1, 8)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
