"""Linears that are looked at together get what each gets alone, and take no more operations."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig

from qtool.calibration import stacking
from qtool.calibration.block import Block
from qtool.calibration.rounding import rtn
from qtool.calibration.rounding.gptq.clip_search import fit_groups, group_error
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.rounding.rtn import RoundToNearest, round_together
from qtool.calibration.stacking import by_kind, clips_of, padded
from qtool.calibration.statistics import Inputs
from qtool.calibration.transforms import clip, smooth
from qtool.calibration.transforms.clip import Clip
from qtool.calibration.transforms.smooth import Smooth
from qtool.schemes import SCHEMES, get
from tests.calibration.conftest import CONFIGS, MOE, SMALL, WIDE, make_model

MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe")
ALL, NONE = 1 << 40, 1
METHODS = {
    "smooth": lambda: Smooth(steps=2),
    "clip": lambda: Clip(steps=2),
    "alpha": lambda: Smooth(alpha=0.5),
}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch):
    """Lets as many linears come together as take no more than some bytes."""

    def limit(nbytes: int) -> None:
        monkeypatch.setattr(stacking, "TOGETHER", (nbytes, nbytes))
        monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", (nbytes, nbytes))

    return limit


def state(block: Block) -> dict[str, object]:
    """All that methods changed or noted."""
    return {
        **block.parameters(),
        **{f"{name}.clip": clips[0] for name, clips in block.clips.items()},
        **{f"{name}.group_clip": clips[1] for name, clips in block.clips.items()},
    }


def assert_close(found: object, expected: object) -> None:
    """Notes are equal but for the last digit of a sum."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    else:
        assert found == (
            pytest.approx(expected, rel=1e-12) if isinstance(expected, float) else expected
        )


def equal(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*MIXTURES, "llama-gqa-biases"])
def test_together_linears_get_what_each_gets_alone(name, method, blocks, limited, monkeypatch):
    """To the bit on a CPU; by a GPU's products of all of them, to rounding."""
    original = blocks(make_model(CONFIGS[name]))[0]
    found = []
    for nbytes, products in ((NONE, None), (ALL, None), (ALL, torch.matmul)):
        limited(nbytes)
        block, batches = copy.deepcopy(original)
        with monkeypatch.context() as patched:
            for module in (smooth, clip) if products else ():
                patched.setattr(module, "products", products)
            METHODS[method]().apply(block, batches)
        found.append((state(block), block.notes))
    (alone, notes), (own, own_notes), (batched, _) = found
    assert all(equal(own[key], value) for key, value in alone.items())
    assert_close(own_notes, notes)
    same = [
        torch.allclose(torch.as_tensor(batched[key]), torch.as_tensor(value), rtol=1e-4)
        for key, value in alone.items()
    ]
    assert sum(same) > 0.9 * len(same)  # of near equals another one may be chosen


def test_inputs_of_several_lengths_are_judged_each_by_its_own():
    weights, scheme = torch.randn(3, 40, 64), get("w4a8-lqq", 32)
    samples = [torch.randn(count, 64) * torch.rand(64) * 3 for count in (5, 17, 1)]
    seen = [Inputs(sample.abs().amax(0), sample) for sample in samples]
    w_amax = weights.abs().amax(1)
    factors, values = smooth.best_factors(
        lambda: [(scheme, weights, False)],
        padded(samples),
        [len(sample) for sample in samples],
        torch.stack([own.amax for own in seen]),
        w_amax,
        smooth.exponent_grid(3),
    )
    grid = smooth.exponent_grid(3)
    for e, sample in enumerate(samples):
        factor, value = smooth.smooth_factors([weights[e]], sample, [scheme], grid=grid)
        torch.testing.assert_close(factors[e], factor)
        torch.testing.assert_close(values[e], value, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_clips_of_several_linears_are_those_of_each(scheme):
    chosen, ratios = get(scheme), [1.0, 0.9, 0.7]
    weights, x = torch.randn(3, 64, 256), torch.randn(3, 20, 256)
    for e, ((row, group), errors) in enumerate(clip.search(chosen, weights, x, ratios)):
        ((own_row, own_group), own) = clip.search(chosen, weights[e : e + 1], x[e : e + 1], ratios)[
            0
        ]
        assert torch.equal(row, own_row) and torch.equal(group, own_group)
        assert torch.equal(errors, own)


@pytest.mark.parametrize("chunk", [NONE, 300, 64 * 256, 2 * 64 * 256, ALL])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounded_together_they_are_what_each_is(scheme, chunk, limited):
    chosen, weights = get(scheme), torch.randn(3, 64, 256)
    groups = chosen.groups(weights[0]).shape[1]
    clips, group_clips = 0.5 + torch.rand(3, 64) / 2, 0.5 + torch.rand(3, 64, groups) / 2
    alone = [
        round_together(chosen, *own)[0]
        for own in zip(weights[:, None], clips, group_clips, strict=True)
    ]
    limited(chunk)
    found = round_together(chosen, weights, clips.flatten(), group_clips.flatten(0, 1))
    for own, expected in zip(found, alone, strict=True):
        assert torch.equal(own.codes, expected.codes)
        assert own.weight_error == pytest.approx(expected.weight_error, rel=1e-12)
        assert own.params.keys() == expected.params.keys()
        assert all(torch.equal(own.params[key], t) for key, t in expected.params.items())


@pytest.mark.parametrize("method", [RoundToNearest(), Gptq(), Gptq(residual=0, rounds=0)])
@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w4a4", "w4ax-fmpq"])
def test_a_block_is_rounded_to_the_same_bits(scheme, method, blocks, limited):
    config = copy.deepcopy(CONFIGS["qwen2-moe"])
    for name, size in WIDE.items():
        setattr(config, name, size)
    original, found = blocks(make_model(config), get(scheme))[0], []
    if scheme == "w4ax-fmpq":  # a map for each linear
        for number, name in enumerate(original[0].schemes):
            blocks_of = original[0].weight(name).shape[1] // 128
            eight_bit = (torch.arange(blocks_of) + number) % 2
            original[0].schemes[name] = original[0].schemes[name].with_blocks(eight_bit)
    name = "mlp.experts.1.up_proj"
    original[0].clips[name] = (0.8, 0.9)  # one of those that come together
    for nbytes in (NONE, ALL):
        limited(nbytes)
        block, batches = copy.deepcopy(original)
        rounded = method.round(block, batches)
        block.install(rounded)
        found.append((rounded, state(block), block.notes))
    (alone, weights, notes), (own, own_weights, own_notes) = found
    assert list(own) == list(alone)
    assert_close(own_notes, notes)
    for key, expected in alone.items():
        assert torch.equal(own[key].codes, expected.codes)
        assert all(torch.equal(own[key].params[part], t) for part, t in expected.params.items())
    assert all(equal(own_weights[key], value) for key, value in weights.items())


def test_what_is_alike_has_one_scheme_and_shape(blocks):
    (block, _), *_ = blocks(make_model(CONFIGS["qwen3-moe"]))
    names = list(block.schemes)
    # k and v; q and o are as large as experts
    assert sorted(len(same) for same in by_kind(block, names)) == [2, 14]
    first, second = "mlp.experts.0.up_proj", "mlp.experts.1.up_proj"
    block.schemes[first] = get("w4a8-lqq", 64)
    del block.schemes[second]
    kinds = by_kind(block, names)
    assert [first] in kinds and [second] in kinds
    block.schemes = dict.fromkeys(names, get("w4ax-fmpq"))  # a map for each
    assert all(len(same) == 1 for same in by_kind(block, names))


def test_clips_are_in_the_order_of_the_linears(blocks):
    (block, _), *_ = blocks(make_model(CONFIGS["qwen3-moe"]))
    names = [f"mlp.experts.{e}.up_proj" for e in (2, 0)]
    assert clips_of(block, names) == (1.0, 1.0)
    block.clips[names[1]] = (torch.full((96,), 0.5), torch.full((96, 3), 0.25))
    row, group = clips_of(block, names)
    assert row.tolist() == [1.0] * 96 + [0.5] * 96
    assert group.shape == (192, 3) and group.sum(1).tolist() == [3.0] * 96 + [0.75] * 96


def test_importance_is_that_of_each_weight():
    weights, importance, scheme = torch.randn(3, 6, 256), torch.rand(3, 256), get("w4a16", 128)
    ratios = [1.0, 0.8, 0.6]
    found = fit_groups(scheme, weights.flatten(0, 1), importance, ratios)
    for e, params in enumerate(scheme.split_params(found, 3)):
        own = fit_groups(scheme, weights[e], importance[e], ratios)
        assert all(torch.equal(params[name], t) for name, t in own.items())
    grid = scheme.grid(found)
    errors = group_error(scheme.groups(weights.flatten(0, 1)), importance.view(3, 2, 128), grid)
    lost = scheme.fake_weight(weights.flatten(0, 1), found) - weights.flatten(0, 1)
    expected = (lost.view(3, 6, 2, 128).square() * importance.view(3, 1, 2, 128)).sum(-1)
    torch.testing.assert_close(errors, expected.flatten(0, 1))


def test_a_search_takes_hardly_more_operations_for_more_experts(blocks, limited, monkeypatch):
    """Some of each expert are left: its inputs are gathered, its factor is folded."""

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += not func.is_view
            return func(*args, **(kwargs or {}))

    limited(ALL)
    for module in (smooth, clip):
        monkeypatch.setattr(module, "products", torch.matmul)
    found = []
    for count in (4, 12):
        model = make_model(Qwen3MoeConfig(**SMALL | MOE | {"num_experts": count}))
        block, batches = blocks(model)[0]
        with Counted() as counted:
            for method in (Smooth(), Clip(sequences=0), RoundToNearest()):
                method.round(block, []) if method.name == "rtn" else method.apply(block, batches)
        found.append(counted.count)
    few, many = found
    assert (many - few) / 8 < 0.01 * few


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["smooth", "clip"])
def test_on_a_gpu_they_get_what_each_gets_alone_to_rounding(method, blocks, limited):
    block, batches = blocks(make_model(CONFIGS["qwen2-moe"]))[0]
    block.module.cuda()
    for batch in batches:
        batch.hidden = batch.hidden.cuda()
    found = []
    for nbytes in (NONE, ALL):
        limited(nbytes)
        own, its_batches = copy.deepcopy((block, batches))
        METHODS[method]().apply(own, its_batches)
        found.append(own.notes[method])
    alone, all_at_once = found
    assert alone.keys() == all_at_once.keys()
    for name, note in alone.items():
        assert all_at_once[name]["error"] == pytest.approx(note["error"], rel=1e-2)
