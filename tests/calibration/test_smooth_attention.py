import pytest
import torch

from qtool.calibration.smooth_attention import KeyObserver, SmoothAttention, key_factor


def test_logits_stay(any_kv_model, transformed, logits):
    smoothed = transformed(any_kv_model, [SmoothAttention(alphas=(0.5, 1.0))])
    torch.testing.assert_close(logits(smoothed), logits(any_kv_model), rtol=1e-3, atol=2e-3)


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


@pytest.mark.parametrize("alphas", ((0.5,), (0.25, 0.5, 0.75, 1.0)))
def test_key_outliers_vanish_and_four_bit_keys_recover(llama, blocks, alphas):
    key_outliers(llama.model.layers[0])
    block, batches = blocks(llama)[0]
    before = block.run(batches[0])
    SmoothAttention(alphas=alphas).apply(block, batches)
    torch.testing.assert_close(block.run(batches[0]), before, rtol=1e-3, atol=1e-3)
    note = block.notes["smooth-attention"]
    assert note["alpha"] >= 0.5 and note["error"] < 0.5 * note["error_unsmoothed"]


def test_keys_are_seen_after_rope(llama, blocks):
    block, batches = blocks(llama)[0]
    observer, seen = KeyObserver(), []
    block.run(batches[0], past_key_values=observer)
    block.observe(batches[:1], {"self_attn.k_proj": seen.append})
    raw = torch.nn.functional.linear(seen[0], block.weight("self_attn.k_proj"), block.bias("self_attn.k_proj"))
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


@pytest.mark.parametrize("alphas", ((), (0.5,)))
def test_it_repeats(llama, transformed, alphas):
    def weight():
        return transformed(llama, [SmoothAttention(alphas=alphas)]).model.layers[1].self_attn.k_proj.weight

    assert torch.equal(weight(), weight())
