import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

from qtool.calibration.transforms.key_transform import KeyTransform
from qtool.calibration.transforms.queries import LEAST, Queries, apply_rope, observe_queries
from tests.calibration.conftest import attended


def test_queries_are_looked_at_as_they_meet_the_keys(any_model, blocks):
    """Their mean outer product, against what attention itself is given."""
    block, batches = blocks(any_model)[0]
    queries, _ = attended(block, batches)
    heads = block.heads
    every = (
        torch.cat(queries).transpose(0, 1).reshape(heads.kv, -1, heads.dim)
    )  # [Hkv, heads of it B S, D]
    found = observe_queries(block, batches)
    moment = every.mT @ every / (every.shape[1] / (heads.query // heads.kv))
    power = moment.diagonal(dim1=1, dim2=2)
    scale = power.sum() / found.power.sum()  # OPT scales all its queries alike
    torch.testing.assert_close(found.moment * scale, moment, rtol=1e-3, atol=1e-3)
    importance = found.importance()
    torch.testing.assert_close(
        importance, power / power.mean(1, keepdim=True), rtol=1e-3, atol=LEAST
    )


def test_an_angle_may_stand_once_for_its_pair():
    """GPT-OSS hands its blocks half as many angles as others."""
    queries, angles = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 4)
    given = angles.cos(), angles.sin()
    expected, _ = apply_rotary_pos_emb(queries, queries, *given, unsqueeze_dim=2)
    for twice in (1, 2):
        tensors = tuple(part.repeat(1, 1, twice) for part in given)
        turned = apply_rope(queries, {"position_embeddings": tensors}, 8)
        torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("rotary", (0, 8, 16))
def test_importance_under_a_transform_is_that_of_the_transformed_queries(rotary):
    torch.manual_seed(0)
    half = rotary // 2
    transform = KeyTransform(torch.rand(2, 16) + 0.5, torch.randn(2, half))
    transform.factor[:, half:rotary] = transform.factor[:, :half]
    queries = torch.randn(2, 500, 16) @ torch.randn(2, 16, 16)

    def moments(x):
        return Queries(x.mT @ x / x.shape[1])

    expected = moments(transform.queries(queries)).importance()
    torch.testing.assert_close(
        moments(queries).importance(transform), expected, rtol=1e-4, atol=1e-5
    )


def test_the_error_of_scores_is_that_of_keys_met_by_queries():
    torch.manual_seed(0)
    queries, lost = torch.randn(2, 40, 16) @ torch.randn(2, 16, 16), torch.randn(2, 30, 16)
    expected = (queries @ lost.mT).square().mean((1, 2))
    torch.testing.assert_close(Queries(queries.mT @ queries / 40).score_error(lost), expected)


def test_silent_heads_and_channels_count_something():
    found = Queries(torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 8]]).diag_embed()).importance()
    assert found.tolist() == [[1, 1, 1, 1], [pytest.approx(LEAST)] * 3 + [4]]
