import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qtool.calibration.forwards import run
from qtool.calibration.method import check_order
from qtool.calibration.statistics import subset
from qtool.calibration.transforms import clip
from qtool.calibration.transforms.clip import Clip, block_error, search, two_levels
from qtool.calibration.transforms.rotate import Rotate
from qtool.errors import QtoolError
from qtool.schemes import get

SCHEMES = (
    ("w4a8-lqq", 32),
    ("w4a8-qoq-g128", 128),
    ("w4a8-qoq", None),
    ("w4a16", 128),
    ("w4a4", 32),
    ("w4a4", None),
)
RATIOS = [1 - 0.05 * i for i in range(9)]


@pytest.fixture
def heavy_tails():
    """A weight with a few large entries and a correlated input."""
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(3.0).sample((24, 256))
    return weight, torch.randn(300, 256) @ (torch.eye(256) + 0.1 * torch.randn(256, 256))


def output_error(scheme, weight, x, clip=1.0, group_clip=1.0):
    params = scheme.fit(weight, clip=clip, group_clip=group_clip)
    rounded = scheme.dequantize(scheme.quantize(weight, params), params)
    return (x @ (rounded - weight).T).square().sum(0)


@pytest.mark.parametrize("name, group_size", SCHEMES)
def test_every_row_gains_or_stays(heavy_tails, name, group_size):
    weight, x = heavy_tails
    scheme = get(name, group_size)
    ((clips, (least, unclipped)),) = search(scheme, weight[None], x[None], RATIOS)
    before, after = output_error(scheme, weight, x), output_error(scheme, weight, x, *clips)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.9 * before.sum()
    assert float(least) == pytest.approx(float(after.sum()), rel=1e-4)
    assert float(unclipped) == pytest.approx(float(before.sum()), rel=1e-4)


def test_ratios_are_searched_a_row_apart(heavy_tails):
    weight, x = heavy_tails
    scheme = get("w4a8-qoq", None)
    (((clip, _), _),) = search(scheme, weight[None], x[None], RATIOS)
    best = torch.stack([output_error(scheme, weight, x, ratio) for ratio in RATIOS]).argmin(0)
    assert torch.equal(clip, torch.tensor(RATIOS)[best])


def test_a_grid_of_one_changes_nothing(heavy_tails):
    weight, x = heavy_tails
    (((clip, group_clip), _),) = search(get("w4a8-lqq", 32), weight[None], x[None], [1.0])
    assert clip.eq(1).all() and group_clip.eq(1).all()


def test_levels_of_the_schemes():
    assert two_levels(get("w4a8-lqq", 32), 4)
    assert two_levels(get("w4a8-qoq-g128", 128), 4)
    assert not two_levels(get("w4a16", 128), 4)
    assert not two_levels(get("w4a4", 32), 4)


def test_logits_stay(any_model, transformed, logits):
    clipped = transformed(any_model, [Clip(steps=1, tokens=32, sequences=2)])
    assert torch.equal(logits(clipped), logits(any_model))


def test_a_block_gets_clips_and_keeps_its_output(llama, blocks):
    for block, batches in blocks(llama):
        before = run(block, batches[0])
        Clip(steps=3).apply(block, batches)
        assert torch.equal(run(block, batches[0]), before)
        assert set(block.clips) == set(block.schemes)
        for note in block.notes["clip"].values():
            assert note["error"] <= note["error_unclipped"]
        for name in block.schemes:
            block.fit(name)


def test_q_and_k_go_by_the_block(llama, blocks):
    block, batches = blocks(llama, get("w4a4", None))[0]
    Clip(steps=3).apply(block, batches)
    by_block = block.notes["clip"]["self_attn.q_proj"]
    assert by_block == block.notes["clip"]["self_attn.k_proj"] and "ratio" in by_block
    few = subset(batches, Clip().sequences)
    chosen = {name: block.clips[name] for name in ("self_attn.q_proj", "self_attn.k_proj")}
    error = block_error(block, few, [run(block, batch) for batch in few], chosen)
    torch.testing.assert_close(float(error), by_block["error"])
    assert by_block["error"] < by_block["error_unclipped"]
    block, batches = blocks(llama, get("w4a4", None))[0]
    Clip(steps=3, sequences=0).apply(block, batches)
    assert "ratio" not in block.notes["clip"]["self_attn.q_proj"]


def test_the_ratio_that_serves_the_block_best_is_taken(llama, blocks, monkeypatch):
    block, batches = blocks(llama, get("w4a4", None))[0]
    wanted, names = Clip(steps=3).ratios[2], ("self_attn.q_proj", "self_attn.k_proj")

    def error(block, batches, exact, clips):
        return torch.tensor(
            sum(float((ratio - torch.as_tensor(wanted)).abs().sum()) for ratio, _ in clips.values())
        )

    monkeypatch.setattr(clip, "block_error", error)
    Clip(steps=3).apply(block, batches)
    assert all(block.clips[name] == (wanted, 1.0) for name in names)
    assert [block.notes["clip"][name]["ratio"] for name in names] == [wanted, wanted]


def test_clipping_before_rotating_is_refused():
    with pytest.raises(QtoolError, match="rotate must come before clip"):
        check_order([Clip(), Rotate()])


def test_a_channel_that_is_one_group_needs_no_moments_of_its_inputs() -> None:
    """Which are K x K: the products of a search are the outputs alone."""
    x, weight, ratios = torch.randn(32, 512), torch.randn(8, 512), [1.0, 0.9, 0.8]
    with FlopCounterMode(display=False) as counter:
        search(get("w4a8-qoq"), weight[None], x[None], ratios)
    assert counter.get_total_flops() == len(ratios) * 2 * x.numel() * len(weight)
