import pytest
import torch

from qtool.calibration.key_transform import KeyTransform
from qtool.calibration.queries import LEAST, Queries, observe_queries, rotary_dim


def test_queries_are_looked_at_as_they_meet_the_keys(any_model, blocks):
    """Power of each channel and products of the pairs, against what attention itself is given."""
    block, batches = blocks(any_model)[0]
    queries = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def seen(q, *rest, **options):
        queries.append(q)
        return attention(q, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
        for batch in batches:
            block.run(batch)
    if not queries:
        pytest.skip("this family's attention is not torch's own")
    heads, half = block.heads, rotary_dim(block) // 2
    every = torch.cat(queries)  # [B, Hq, S, D]
    found = observe_queries(block, batches)
    power = every.square().mean((0, 2)).view(heads.kv, -1, heads.dim).sum(1)
    scale = power.sum() / found.power.sum()  # OPT scales all its queries alike
    torch.testing.assert_close(found.power * scale, power, rtol=1e-3, atol=1e-5)
    products = (every[..., :half] * every[..., half : 2 * half]).mean((0, 2))
    cross = products.view(heads.kv, heads.query // heads.kv, half).sum(1)
    torch.testing.assert_close(found.cross * scale, cross, rtol=1e-3, atol=1e-3)
    importance = found.importance()
    torch.testing.assert_close(importance, power / power.mean(1, keepdim=True), rtol=1e-3, atol=LEAST)


@pytest.mark.parametrize("rotary", (0, 8, 16))
def test_importance_under_a_transform_is_that_of_the_transformed_queries(rotary):
    torch.manual_seed(0)
    half = rotary // 2
    transform = KeyTransform(torch.rand(2, 16) + 0.5, torch.randn(2, half))
    transform.factor[:, half:rotary] = transform.factor[:, :half]
    queries = torch.randn(2, 500, 16) @ torch.randn(2, 16, 16)

    def moments(x):
        return Queries(x.square().mean(1), (x[..., :half] * x[..., half:rotary]).mean(1))

    expected = moments(transform.queries(queries)).importance()
    torch.testing.assert_close(moments(queries).importance(transform), expected, rtol=1e-4, atol=1e-5)


def test_silent_heads_and_channels_count_something():
    found = Queries(torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 8]]), torch.zeros(2, 2)).importance()
    assert found.tolist() == [[1, 1, 1, 1], [pytest.approx(LEAST)] * 3 + [4]]
