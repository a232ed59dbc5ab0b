import pytest
import torch

from qtool.calibration.batch import first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe, run
from qtool.calibration.transforms import smooth_attention
from qtool.calibration.transforms.key_transform import (
    KeyTransform,
    fit,
    key_factor,
    predicted_error,
)
from qtool.calibration.transforms.queries import Queries
from qtool.calibration.transforms.smooth_attention import (
    KeyObserver,
    Keys,
    SmoothAttention,
    least_score_error,
    observe_keys,
)
from qtool.models import family_of
from qtool.models.auto import auto_class
from qtool.models.cache_argument import CACHE
from tests.calibration.conftest import attended, make_model
from tests.models.tiny import tiny_config


def test_logits_stay(any_model, transformed, logits):
    smoothed = transformed(any_model, [SmoothAttention(alphas=(0.5, 1.0))])
    torch.testing.assert_close(logits(smoothed), logits(any_model), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("model_type", ["mistral", "qwen3", "falcon", "phi3"])
def test_rope_turns_what_the_class_turns(model_type, transformed, logits):
    """Of these only Phi-3's class reads a partial_rotary_factor."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = make_model(tiny_config(model_type, rope_parameters=rope, num_kv_heads=2))
    smoothed = transformed(model, [SmoothAttention(steps=5, starts=2)])
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("model_type", ["cohere", "cohere2", "ernie4_5", "glm", "glm4", "helium"])
@torch.no_grad()
def test_rope_may_turn_neighbours(model_type, transformed, logits):
    """GLM's turns half of the channels; its linears have biases."""
    model = make_model(tiny_config(model_type))
    attention = model.get_submodule(family_of(model.config).blocks)[0].self_attn
    dim = attention.head_dim
    for channel in (2, 3, dim - 1):
        attention.k_proj.weight[channel::dim] *= 20
    assert family_of(model.config).attention.neighbours
    smoothed = transformed(model, [SmoothAttention(steps=5, starts=2)])
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=2e-3, atol=5e-3)
    after = smoothed.get_submodule(family_of(model.config).blocks)[0].self_attn
    ratio = (after.k_proj.weight.norm(dim=1) / attention.k_proj.weight.norm(dim=1)).view(-1, dim)
    assert (ratio[:, 2:4] < 0.5).all()  # louder than others, as is their pair


@pytest.mark.parametrize(
    ("model_type", "turned"), [("gptj", 16), ("codegen", 16), ("laguna", 16), ("lfm3", 32)]
)
def test_rope_turns_as_many_channels_as_a_run_shows(model_type, turned, transformed, logits):
    """Whatever config.json calls their number, and if it has one for each kind of block."""
    model = make_model(tiny_config(model_type))
    family = family_of(model.config)
    found = {of.attention.turned for of in family.of_blocks(model.config) if of.attention}
    assert found == {turned} and "smooth-attention" not in family.refuses
    smoothed = transformed(model, [SmoothAttention(steps=5, starts=2)])
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_norms_over_all_heads_take_the_factors_of_each(kv_heads):
    """OLMo 2's: that of a single kv head is as long as one that all heads share would be."""
    torch.manual_seed(0)
    config = tiny_config("olmo2", num_key_value_heads=kv_heads)
    model, family = auto_class(config).from_config(config).eval(), family_of(config)
    for parameter in model.parameters():
        parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.1)
    batches = first_inputs(model, family, [torch.randint(3, 320, (2, 12))])
    block = Block(0, model.get_submodule(family.blocks)[0], family, config, {})
    block.weight("self_attn.k_norm")[5] *= 20
    before = run(block, batches[0])
    SmoothAttention(steps=5, starts=1).apply(block, batches)
    assert block.notes["smooth-attention"]["choice"] != "none"
    torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-4, atol=1e-4)


#: the last two of six blocks read the keys of the two before them
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "per_layer_config": {str(number): {"head_dim": 64} for number in (1, 3, 5)},
}


@pytest.mark.parametrize(
    ("model_type", "smoothed_blocks", "sizes"),
    [
        ("qwen3_5_text", [1], {}),
        ("qwen3_next", [1], {}),
        ("afmoe", [0, 1], {}),
        ("gemma4_text", [0, 1, 3], {"num_kv_shared_layers": 0}),
        ("gemma4_text", [0, 1], SHARED),
        ("gemma3n_text", [0, 1, 2, 3], {"num_kv_shared_layers": 0}),
    ],
)
@torch.no_grad()
def test_norms_of_attention_of_another_form_take_a_factor(
    model_type, smoothed_blocks, sizes, transformed, logits
):
    """Its queries and keys have a norm each, whatever else it does. Keys that a block of Gemma 4
    hands on are left alone.
    """
    torch.manual_seed(0)
    config = tiny_config(model_type, **sizes)
    model, family = auto_class(config).from_config(config).eval(), family_of(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.uniform_(0.5, 1.5)
            if "k_norm" in name:
                parameter[5] *= 20
    smoothed = transformed(model, [SmoothAttention(steps=5, starts=2)])
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=1e-3, atol=2e-3)
    blocks = zip(*(m.get_submodule(family.blocks) for m in (model, smoothed)), strict=True)
    changed = [
        number
        for number, (before, after) in enumerate(blocks)
        if hasattr(before, "self_attn")
        and hasattr(before.self_attn, "k_norm")
        and not torch.equal(before.self_attn.k_norm.weight, after.self_attn.k_norm.weight)
    ]
    assert changed == smoothed_blocks


def test_nothing_is_smoothed_without_batches(llama, blocks):
    block, _ = blocks(llama)[0]
    before = block.weight("self_attn.k_proj").clone()
    SmoothAttention().apply(block, [])
    assert torch.equal(block.weight("self_attn.k_proj"), before)
    assert "smooth-attention" not in block.notes


@torch.no_grad()
def key_outliers(layer):
    """Two RoPE pairs of one kv head loud in the keys, quiet in the queries: the same attention."""
    attention = layer.self_attn
    dim = attention.head_dim
    channels = torch.tensor([2, 2 + dim // 2, 5, 5 + dim // 2])
    for linear, heads, factor in ((attention.k_proj, 1, 20), (attention.q_proj, 2, 1 / 20)):
        for head in range(heads):
            linear.weight[channels + dim * head] *= factor
            if linear.bias is not None:
                linear.bias[channels + dim * head] *= factor


@pytest.mark.parametrize(("alphas", "steps"), (((0.5,), 0), ((0.25, 0.5, 0.75, 1.0), 0), ((), 100)))
def test_key_outliers_vanish_and_four_bit_keys_recover(llama, blocks, alphas, steps):
    key_outliers(llama.model.layers[0])
    block, batches = blocks(llama)[0]
    before = run(block, batches[0])
    SmoothAttention(alphas=alphas, steps=steps).apply(block, batches)
    torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-3, atol=1e-3)
    note = block.notes["smooth-attention"]
    assert note["choice"] in ("alpha 0.5", "alpha 0.75", "alpha 1.0", "fitted")
    assert note["error"] < 0.5 * note["error_unsmoothed"]


def test_keys_are_seen_after_rope(llama, blocks):
    block, batches = blocks(llama)[0]
    observer, seen = KeyObserver(), []
    run(block, batches[0], **{CACHE: observer})
    observe(block, batches[:1], {"self_attn.k_proj": seen.append})
    raw = torch.nn.functional.linear(
        seen[0], block.weight("self_attn.k_proj"), block.bias("self_attn.k_proj")
    )
    dim = block.heads.dim
    raw = raw.view(2, 16, block.heads.kv, dim)
    assert observer.amax.shape == (block.heads.kv, dim)
    assert not torch.allclose(observer.amax, raw.abs().amax((0, 1)))
    # position 0 is not turned, and a turn keeps the length of a pair
    pairs = raw[..., : dim // 2].square() + raw[..., dim // 2 :].square()
    longest = pairs.amax((0, 1)).sqrt()
    assert (observer.amax[:, : dim // 2] <= longest * 1.001).all()


def test_pairs_share_a_factor_and_heads_do_not():
    amax = torch.rand(3, 16) + 0.1
    factor = key_factor(amax, 0.5, rotary=16, shared=False)
    assert torch.equal(factor[:, :8], factor[:, 8:])
    assert not torch.equal(factor[0], factor[1])
    torch.testing.assert_close(factor.log().mean(1), torch.zeros(3), atol=1e-5, rtol=0)
    ratio = torch.maximum(amax[:, :8], amax[:, 8:]).sqrt() / factor[:, :8]
    torch.testing.assert_close(ratio, ratio[:, :1].expand(3, 8))


def test_partial_rotary_and_shared_norms():
    amax = torch.rand(2, 16) + 0.1
    factor = key_factor(amax, 0.5, rotary=8, shared=True)
    assert torch.equal(factor[0], factor[1]) and torch.equal(factor[:, :4], factor[:, 4:8])
    assert len(factor[0, 8:].unique()) == 8
    assert key_factor(amax, 0.0, 16, False).eq(1).all()
    assert key_factor(torch.zeros(1, 4), 0.5, 4, False).eq(1).all()


@pytest.mark.parametrize("rotary", (0, 8, 16))
def test_scores_do_not_notice_a_key_transform(rotary):
    transform = KeyTransform(torch.rand(2, 16) + 0.5, torch.randn(2, rotary // 2))
    pairs = slice(0, rotary // 2), slice(rotary // 2, rotary)
    transform.factor[:, pairs[1]] = transform.factor[:, pairs[0]]
    keys = torch.randn(2, 5, 16)
    queries = torch.randn(2, 5, 16)
    angles = torch.randn(5, rotary // 2)

    def positioned(x):
        """RoPE: position t turns pair i by its own angle."""
        a, b = x[..., pairs[0]], x[..., pairs[1]]
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine, x[..., rotary:]], -1)

    scores = positioned(queries) @ positioned(keys).mT
    torch.testing.assert_close(
        positioned(transform.queries(queries)) @ positioned(transform.keys(keys)).mT, scores
    )
    torch.testing.assert_close(transform.original(transform.keys(keys)), keys)
    torch.testing.assert_close(positioned(transform.keys(keys)), transform.keys(positioned(keys)))


def test_the_fit_lowers_the_predicted_error_and_a_shared_one_is_shared():
    torch.manual_seed(0)
    keys, power = torch.randn(3, 200, 16) * torch.rand(16), torch.rand(3, 16) + 0.1
    keys[..., 8:] *= 0.1  # the first of each pair is the louder
    still = torch.zeros(3, 8)
    start = key_factor(keys.abs().amax(1), 0.5, rotary=16, shared=False)
    before = predicted_error(KeyTransform(start, still), keys, power)
    fitted = fit(keys, power, start, still[None], shared=False, turns=True, steps=100)
    unturned = fit(keys, power, start, still[None], shared=False, turns=False, steps=100)
    assert unturned.phase.eq(0).all() and fitted.phase.ne(0).any()
    assert (predicted_error(unturned, keys, power) < before).all()
    assert (predicted_error(fitted, keys, power) < predicted_error(unturned, keys, power)).all()
    shared = fit(keys, power, start, still[None], shared=True, turns=False, steps=100)
    assert torch.equal(shared.factor[:, 0], shared.factor[:, 2])
    several = fit(
        keys, power, start, torch.stack([still, still + 1]), shared=False, turns=True, steps=100
    )
    torch.testing.assert_close(several.factor[0], fitted.factor[0])  # starts do not see each other
    assert not torch.allclose(several.phase[1], fitted.phase[0], atol=0.1)


def test_each_head_takes_the_transform_that_serves_its_scores():
    torch.manual_seed(0)
    keys, queries = torch.randn(2, 300, 16), torch.randn(2, 300, 16)
    keys[0, :, [3, 11]] *= 30  # loud in one head's keys, in the other's queries
    queries[1, :, [3, 11]] *= 30
    keys -= keys.mean(1, keepdim=True)
    quiet = torch.ones(2, 16)
    quiet[:, [3, 11]] = 30
    made = KeyTransform(torch.stack([quiet, torch.ones(2, 16)]), torch.zeros(2, 2, 8))
    chosen = least_score_error(made, keys, Queries(queries.mT @ queries / 300))
    assert torch.equal(chosen.factor, torch.stack([quiet[0], torch.ones(16)]))


def test_the_start_is_chosen_by_keys_that_the_fit_has_not_seen(llama, blocks, monkeypatch):
    block, _ = blocks(llama)[0]
    heads, dim = block.heads.kv, block.heads.dim
    # in the first half of the sample, in the second
    loud = [[pair, pair + dim // 2] for pair in (2, 5)]
    sample, factor = torch.randn(heads, 400, dim), torch.ones(2, heads, dim)
    for half, channels in enumerate(loud):
        sample[:, 200 * half : 200 * (half + 1), channels] *= 30
        factor[half, :, channels] = 30
    seen = []

    def fitted(keys, *_, **__):
        seen.append(keys)
        return KeyTransform(factor, torch.zeros(2, heads, dim // 2))

    monkeypatch.setattr(smooth_attention, "fit", fitted)
    keys = Keys(sample.abs().amax(1), torch.zeros(heads, dim), sample)
    found = SmoothAttention().candidates(
        block, keys, Queries(torch.eye(dim).expand(heads, dim, dim))
    )["fitted"]
    assert torch.equal(seen[0], sample[:, :200]) and torch.equal(found.factor, factor[1])


def test_keys_are_looked_at_as_they_meet_queries(any_model, blocks):
    """The mean of the keys, against attention's own."""
    block, batches = blocks(any_model)[0]
    _, keys = attended(block, batches)
    heads, dim = block.heads, block.heads.dim
    # repeated for the query heads, or not
    mean = torch.cat(keys).mean((0, 2)).view(heads.kv, -1, dim)[:, 0]
    observed = observe_keys(block, batches, tokens=20)
    torch.testing.assert_close(observed.mean, mean, rtol=1e-3, atol=1e-5)
    assert observed.sample.shape[1] == 20


def test_keys_are_sampled_at_other_places_in_each_batch(llama, blocks):
    block, (batch, _) = blocks(llama)[0]
    sample = observe_keys(block, [batch] * 3, tokens=12).sample  # [Hkv, T, D]
    first, *others = sample.split(4, dim=1)
    assert len(others) == 2
    for other in others:
        assert not torch.equal(other.sort(1).values, first.sort(1).values)
    assert observe_keys(block, [batch] * 3, tokens=1).sample.shape[1] == 3
    assert observe_keys(block, [batch] * 3).sample.shape[1] == 0


@pytest.mark.parametrize("alphas", ((), (0.5,)))
def test_it_repeats(llama, transformed, alphas):
    def weight():
        return (
            transformed(llama, [SmoothAttention(alphas=alphas)])
            .model.layers[1]
            .self_attn.k_proj.weight
        )

    assert torch.equal(weight(), weight())
