"""GPTQ: better than round to nearest for every scheme, and the same whatever the order things are
stored in.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.calibration.batch import first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import inputs_of, run
from qtool.calibration.reference import Reference
from qtool.calibration.rounding.gptq import clip_search, factor, gptq, memory
from qtool.calibration.rounding.gptq.clip_search import fit_groups
from qtool.calibration.rounding.gptq.factor import Factor
from qtool.calibration.rounding.gptq.gptq import Problem, prepare
from qtool.calibration.rounding.gptq.gptq import solve as solve_problems
from qtool.calibration.rounding.gptq.hessian import Hessian, relative_error
from qtool.calibration.rounding.gptq.residual_stream import size_of_tokens
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.scales import float_scale
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.schemes import SCHEMES, Scheme, get
from qtool.schemes.arithmetic.grid import Grid
from tests.calibration.conftest import CONFIGS, make_model, random_block, solve
from tests.models.tiny import tiny_config

DENSE = [name for name, scheme in SCHEMES.items() if scheme.sparsity is None]
PLAIN = Gptq(clip_steps=1, residual=0, rounds=0)


def problem(n: int = 24, k: int = 128, tokens: int = 512, seed: int = 0) -> tuple[Tensor, Hessian]:
    """A weight ``[n, k]`` and the Hessian of correlated inputs of uneven size."""
    gen = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=gen) * torch.rand(k, generator=gen)
    hessian = Hessian(k, torch.device("cpu"))
    hessian.add(torch.randn(tokens, k, generator=gen) @ mixing)
    return torch.randn(n, k, generator=gen) * 0.05, hessian.complete()


def scale_of(params: dict[str, Tensor]) -> Tensor:
    return params[float_scale(params)]


def loss(
    weight: Tensor, hessian: Hessian, scheme: Scheme, codes: Tensor, params: dict[str, Tensor]
) -> float:
    scheme.check(codes, params)
    return float(
        relative_error(
            hessian.power(weight - scheme.dequantize(codes, params)), hessian.power(weight)
        )
    )


@pytest.mark.parametrize("name", DENSE)
def test_uncorrelated_inputs_give_round_to_nearest(name: str) -> None:
    scheme, (weight, hessian) = get(name), problem()
    hessian.h.copy_(torch.eye(128))
    codes, params, _ = solve(PLAIN, scheme, weight, hessian)
    fitted = scheme.fit(weight)
    assert all(torch.equal(params[key], fitted[key]) for key in fitted)
    assert torch.equal(
        codes, scheme.grid(params).nearest(scheme.groups(weight)).flatten(1).to(codes.dtype)
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_each_part_of_the_method_lowers_the_error(name: str) -> None:
    scheme, (weight, hessian) = get(name), problem()
    params = scheme.fit(weight)
    nearest = loss(weight, hessian, scheme, scheme.quantize(weight, params), params)
    plain = loss(weight, hessian, scheme, *solve(PLAIN, scheme, weight, hessian)[:2])
    full = loss(weight, hessian, scheme, *solve(Gptq(residual=0), scheme, weight, hessian)[:2])
    assert full < plain < nearest


def test_channels_in_another_order_get_the_same_codes() -> None:
    scheme, (weight, hessian) = get("w4a8-qoq"), problem()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(5))
    codes, params, _ = solve(PLAIN, scheme, weight, hessian)
    hessian.h = hessian.h[order][:, order]
    shuffled, shuffled_params, _ = solve(PLAIN, scheme, weight[:, order], hessian)
    assert torch.equal(shuffled, codes[:, order])
    assert all(torch.equal(shuffled_params[key], params[key]) for key in params)


@pytest.mark.parametrize("name", ["w4a8-lqq", "w4a16-24", "w4a8-qoq"])
def test_stacked_rows_are_rounded_as_if_alone(name: str) -> None:
    scheme, (weight, hessian) = get(name), problem()
    codes, params, _ = solve(Gptq(), scheme, weight, hessian)
    for rows in (slice(0, 8), slice(8, 24)):
        own_codes, own_params, _ = solve(Gptq(), scheme, weight[rows], hessian)
        # matrix products of other shapes may add in another order and tip a weight midway between
        # codes
        assert (own_codes != codes[rows]).float().mean() < 0.01
        for key in params:
            torch.testing.assert_close(own_params[key], params[key][rows], rtol=1e-2, atol=0)


def test_damping_is_raised_until_cholesky_succeeds() -> None:
    scheme = get("w4a16")
    weight, hessian = problem(tokens=3)
    codes, params, damping = solve(Gptq(damping=1e-12), scheme, weight, hessian)
    assert 1e-12 < damping <= 1e-2
    scheme.check(codes, params)
    factor = Factor(hessian.h.clone(), 0.01)
    assert factor.damping == 0.01


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_what_no_damping_makes_positive_definite_is_refused(sign: float) -> None:
    hessian = sign * torch.eye(128)
    hessian[0, 1] = hessian[1, 0] = 2
    with pytest.raises(QtoolError, match="not positive semi-definite"):
        gptq.gptq(torch.randn(8, 128), get("w4a16"), hessian=hessian)


def test_a_hessian_may_be_of_any_dtype() -> None:
    weight, x = torch.randn(8, 128), torch.randint(-3, 4, (64, 128)).double()
    hessian, scheme = 2 * x.T @ x + torch.eye(128), get("w4a16")  # integers, also in float16
    codes, _ = gptq.gptq(weight, scheme, hessian=hessian.float())
    for dtype in (torch.float16, torch.float64):
        same, _ = gptq.gptq(weight, scheme, hessian=hessian.to(dtype))
        assert torch.equal(same, codes)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_no_numbers_are_refused(value: float, scheme: str) -> None:
    inputs = torch.randn(16, 128)
    inputs[3, 4] = value
    with pytest.raises(QtoolError, match="gptq: the inputs hold NaN or Inf"):
        gptq.gptq(torch.randn(8, 128), get(scheme), inputs=inputs)


@pytest.mark.parametrize(
    ("weight", "given"),
    [
        ((8, 128), {"inputs": (16, 64)}),
        ((8, 128), {"inputs": (2, 8, 128)}),
        ((8, 128), {"hessian": (64, 64)}),
        ((8, 128), {"hessian": (8, 128)}),
        ((128,), {"inputs": (16, 128)}),
    ],
)
def test_tensors_of_other_shapes_are_named(
    weight: tuple[int, ...], given: dict[str, tuple[int, ...]]
) -> None:
    (name,) = given
    with pytest.raises(QtoolError, match=rf"weight \[.*\] and {name} \[.*\] are given"):
        gptq.gptq(torch.ones(weight), get("w4a16"), **{name: torch.ones(given[name])})


def test_damping_is_a_share_of_the_mean_diagonal_however_often_it_was_raised() -> None:
    exact = torch.eye(128).double()
    exact[0, 0] = -0.01  # too much for a damping of 0.001 and of 0.01
    factor = Factor(exact.clone(), 0.001)
    assert factor.damping == pytest.approx(0.1)
    torch.testing.assert_close(
        factor.h - exact, torch.eye(128).double() * 0.1 * exact.diagonal().mean()
    )


def test_channels_and_linears_that_saw_nothing_are_rounded_to_nearest() -> None:
    scheme, (weight, hessian) = get("w4a16"), problem()
    hessian.h[:, 7] = hessian.h[7] = 0
    codes, params, _ = solve(PLAIN, scheme, weight, hessian)
    assert torch.equal(codes[:, 7], scheme.quantize(weight, params)[:, 7])
    unseen = Hessian(128, torch.device("cpu"), drift=True).complete()
    codes, params, _ = solve(Gptq(), scheme, weight, unseen)
    grid = scheme.grid(params)
    assert torch.equal(codes, grid.nearest(scheme.groups(weight)).flatten(1).to(codes.dtype))


@pytest.mark.parametrize("name", ["w4a8-lqq", "w4a8-qoq", "w4a16", "w4a16-24", "w4ax-fmpq"])
def test_problems_together_get_what_each_gets_alone(name: str) -> None:
    """Also one whose Hessian needs more damping, and with a target that makes up for the input."""
    scheme, problems = get(name), []
    for seed, tokens in enumerate((1024, 3, 600)):
        weight, hessian = problem(tokens=tokens, seed=seed)
        problems.append(
            Problem(
                scheme,
                weight,
                hessian,
                0.9,
                torch.ones(len(weight), 128 // (scheme.group_size or 128)),
            )
        )
    method = Gptq(damping=1e-12)
    found = gptq.solve(problems, method)
    assert found[1].damping > found[0].damping
    for own, together in zip(problems, found, strict=True):
        (alone,) = gptq.solve([own], method)
        assert torch.equal(alone.codes, together.codes) and alone.damping == together.damping
        assert all(torch.equal(alone.params[key], together.params[key]) for key in alone.params)
        assert torch.equal(alone.lost, together.lost) and torch.equal(alone.power, together.power)


def test_the_target_makes_up_for_the_error_of_the_input() -> None:
    scheme, gen = get("w4a16"), torch.Generator().manual_seed(0)
    weight, _ = problem()
    exact = torch.randn(1024, 128, generator=gen) @ torch.randn(128, 128, generator=gen)
    seen = exact * 0.9 + torch.randn(1024, 128, generator=gen)
    hessian = Hessian(128, seen.device, drift=True)
    for part in range(0, 1024, 300):
        hessian.add(seen[part : part + 300], exact[part : part + 300])
    hessian.complete()
    errors = []
    for residual in (0.0, 0.5, 1.0):
        codes, params, _ = solve(Gptq(residual=residual), scheme, weight, hessian)
        errors.append((seen @ scheme.dequantize(codes, params).T - exact @ weight.T).norm())
    assert errors[2] < errors[1] < errors[0]


def test_the_target_makes_up_for_what_the_residual_stream_lacks() -> None:
    """All of it where the inputs can make it; else as least squares do."""
    (weight, _), gen = problem(), torch.Generator().manual_seed(0)
    x = torch.randn(1024, 128, generator=gen)
    change = 0.1 * torch.randn(24, 128, generator=gen)

    def target(lacking: Tensor) -> Tensor:
        hessian = Hessian(128, x.device, hidden=24)
        hessian.add(x, lacking=lacking)
        hessian.complete()
        of = Problem(get("w4a16"), weight, hessian, lacking=hessian.s)
        return prepare(of, Gptq(damping=1e-6)).target

    torch.testing.assert_close(target(x @ change.T), weight + change, rtol=1e-3, atol=1e-3)
    lacking = torch.randn(1024, 24, generator=gen)
    left = lacking - x @ (target(lacking) - weight).T
    assert left.norm() < lacking.norm()
    torch.testing.assert_close(left.T @ x / 1024, torch.zeros(24, 128), rtol=0, atol=1e-3)


def moments(
    blocks: list[tuple[Block, list]], linear: str, **options: float
) -> tuple[Hessian, list[Tensor]]:
    """The moments of a linear of block 0 where the float model's path differs, and by how much."""
    block, batches = blocks[0]
    gen, floats = torch.Generator().manual_seed(2), {}
    for batch in batches:
        floats[id(batch)] = copy.deepcopy(batch)
        floats[id(batch)].hidden += torch.randn(batch.hidden.shape, generator=gen)
    differences = [floats[id(batch)].hidden - batch.hidden for batch in batches]
    reference = Reference.of(block, floats)
    return Gptq(**options).moments(block, reference, batches, linear), differences


def test_next_to_no_input_makes_up_for_nothing_by_weights_beyond_float16() -> None:
    """Output channels that would take such weights keep their own."""
    (weight, _), gen = problem(), torch.Generator().manual_seed(0)
    x = 1e-6 * torch.randn(1024, 128, generator=gen)
    lacking = torch.randn(1024, 24, generator=gen)
    lacking[:, ::2] *= 1e-6
    hessian = Hessian(128, x.device, hidden=24)
    hessian.add(x, lacking=lacking)
    hessian.complete()
    of = Problem(get("w4a16", 128, torch.float16), weight, hessian, lacking=hessian.s)
    target = prepare(of, Gptq()).target
    assert torch.equal(target[1::2], weight[1::2])
    assert not torch.equal(target[::2], weight[::2])
    (found,) = solve_problems([of], Gptq())
    assert of.scheme.dequantize(found.codes, found.params).half().isfinite().all()


def test_what_the_stream_lacks_is_seen_where_it_is_added_to(llama, blocks) -> None:
    own = blocks(llama)
    (block, batches), name = own[0], "self_attn.o_proj"
    found, differences = moments(own, name, residual=0.25, stream=0.5)
    expected = torch.zeros_like(found.s)
    for batch, difference in zip(batches, differences, strict=True):
        (x,) = inputs_of(block, batch, name)
        x = block.schemes[name].fake_activation(x, block.fit(name))
        drifted = copy.deepcopy(batch)
        drifted.hidden += difference
        (exact,) = inputs_of(block, drifted, name)
        by_input = (exact - x) @ block.weight(name).T
        expected += 2 * (0.5 * difference.flatten(0, 1) + 0.25 * by_input).T @ x
    torch.testing.assert_close(found.s, expected, rtol=1e-4, atol=1e-2)
    assert found.d is None
    behind_attention, _ = moments(own, "mlp.down_proj")
    assert behind_attention.s is not None and behind_attention.s.any()
    assert moments(own, "self_attn.q_proj")[0].s is None
    assert moments(own, name, stream=0)[0].s is None


def test_a_massive_token_counts_as_a_large_one_where_the_stream_is_written_to(
    llama, blocks
) -> None:
    """A thousand times the median's size counts as the median; all others count as they are."""
    (block, batches), name = blocks(llama)[0], "self_attn.o_proj"
    batches = batches[:1]
    batches[0].hidden[0, 3] *= 1e5
    x, norm = inputs_of(block, batches[0], name, "input_layernorm")
    written = x @ block.weight(name).T
    size = (norm + written).norm(dim=1)
    share = torch.ones_like(size)
    share[3] = size.sort().values[len(size) // 2] / size[3]
    assert share[3] < 0.01
    read = block.schemes[name].fake_activation(x, block.fit(name))
    for largest, counted in ((16, read * share[:, None]), (0, read)):
        found = Gptq(residual=0, largest_token=largest).moments(block, None, batches, name).h
        torch.testing.assert_close(found, 2 * counted.T @ counted, rtol=1e-3, atol=1e-4)
    (x,) = inputs_of(block, batches[0], "self_attn.q_proj")
    read = block.schemes["self_attn.q_proj"].fake_activation(x, block.fit("self_attn.q_proj"))
    found = Gptq(residual=0).moments(block, None, batches, "self_attn.q_proj").h
    torch.testing.assert_close(found, 2 * read.T @ read)


def test_a_group_that_was_never_active_is_clipped_as_any_other() -> None:
    scheme, weight = get("w4a8-qoq-g128"), torch.randn(24, 256)
    dead, ratios = torch.ones(256), [1.4, 1.2, 1.0, 0.8]
    dead[:128] = 0
    found, alive = (fit_groups(scheme, weight, h, ratios) for h in (dead, torch.ones(256)))
    assert all(torch.equal(tensor, alive[name]) for name, tensor in found.items())


def test_what_is_written_makes_a_token_massive() -> None:
    """Also where the stream was as others are before, as in the block that makes it so."""
    stream, x, columns = torch.ones(5, 8), torch.zeros(5, 16), torch.ones(16)
    assert (size_of_tokens(stream, x, columns) == 8**0.5).all()
    x[2, 7] = 1000
    sizes = size_of_tokens(stream, x, columns / 2)
    assert sizes.tolist() == pytest.approx([8**0.5] * 2 + [500] + [8**0.5] * 2, rel=1e-4)


@pytest.mark.parametrize("kept", [0, memory.MOST_INPUT_BYTES], ids=["looked at again", "kept"])
def test_the_float_path_moves_on_in_its_last_look(llama, blocks, kept, monkeypatch) -> None:
    """What the last linear is compared with comes of the run that makes the next block's inputs.

    Where all inputs are kept the first look is the last, and the codes are the same.
    """

    def rounded(
        before_change: Callable[[], None] | None, kept: int = kept
    ) -> tuple[dict[str, Rounded], Reference]:
        monkeypatch.setattr(memory, "MOST_INPUT_BYTES", kept)
        block, batches = blocks(copy.deepcopy(llama))[0]
        floats = {id(batch): copy.deepcopy(batch) for batch in batches}
        for batch in floats.values():
            batch.hidden += 0.1
            batch.stored = lambda name, tensor, own=batch.hidden: own.copy_(tensor)  # as on disk
        block.reference = Reference.of(block, floats, before_change)
        return Gptq().round(block, batches), block.reference

    settled: list[int] = []
    stays, reference = rounded(None)
    expected = [run(reference.block, batch) for batch in reference.batches.values()]
    found, moving = rounded(lambda: settled.append(1))
    assert settled == [1] and not reference.moved
    assert moving.moved.keys() == moving.batches.keys()
    for path in (reference, moving):  # the first has it all to do, the second nothing
        path.propagate()
        moved = [batch.hidden for batch in path.batches.values()]
        assert all(map(torch.equal, moved, expected))
    again, _ = rounded(None, 0)
    for name, own in stays.items():
        assert torch.equal(found[name].codes, own.codes)
        assert torch.equal(again[name].codes, own.codes)


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("falcon-rw", True, True),  # one branch after the other
        ("falcon", True, False),  # both read the same norm
        ("falcon-new", True, False),  # each a norm of its own of the same stream
        ("gemma2", None, None),  # what is written is normalized first
        ("qwen2-moe", True, True),  # routed experts, before the shared one, make up for nothing
    ],
)
def test_of_parallel_branches_one_makes_up_for_the_stream(
    model: str, first: bool | None, second: bool | None, blocks
) -> None:
    own = blocks(make_model(CONFIGS[model]))
    groups = own[0][0].family.groups
    writers = [g.linears[0] for g in groups if g.writes_residual and not g.routed]
    sums = [moments(own, name, residual=0)[0].s for name in writers]
    assert [s if s is None else bool(s.any()) for s in sums] == [first, second]


@torch.no_grad()
def test_blocks_that_multiply_what_they_add_are_rounded_as_those_that_need_not() -> None:
    """By 1/4, with four times the weights before it: every sum is the same, to the last bit."""

    def rounded(multiplier: float) -> dict[str, Rounded]:
        torch.manual_seed(0)
        config = tiny_config("granite", residual_multiplier=multiplier)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        family = family_of(config.to_dict())
        module, own = model.get_submodule(family.blocks)[0], family.at(config, 0)
        for group in own.groups:
            for name in group.linears if group.writes_residual else ():
                module.get_submodule(name).weight.data /= multiplier
        batches = first_inputs(model, family, [torch.randint(61, (2, 48))])
        floats = {id(batch): copy.deepcopy(batch) for batch in batches}
        for batch in floats.values():
            batch.hidden += torch.randn(batch.hidden.shape)
        block = Block(0, module, own, config, dict.fromkeys(own.linears(), get("w4a16")))
        block.reference = Reference.of(block, floats)
        return Gptq().round(block, batches)

    one, quarter = rounded(1.0), rounded(0.25)
    assert one.keys() == quarter.keys()
    for name, found in quarter.items():
        assert torch.equal(found.codes, one[name].codes), name


@pytest.fixture
def block() -> tuple[Block, list]:
    lengths = (32, 17, 48, 25, 40, 64)
    return random_block(get("w4a16"), lengths, hidden_size=128, num_attention_heads=4)


def test_a_block_is_rounded_better_than_to_nearest_and_the_same_twice(
    block: tuple[Block, list],
) -> None:
    from qtool.calibration.rounding.rtn import RoundToNearest

    original, batches = block
    targets = [run(original, batch) for batch in batches]

    def distance(rounding) -> tuple[float, Block, dict]:
        own = copy.deepcopy(original)
        rounded = rounding.round(own, batches)
        for name in rounded:
            own.schemes[name].check(rounded[name].codes, rounded[name].params)
            if rounding.name == "rtn":
                own.install({name: rounded[name]})
        off = sum(
            float((run(own, b) - t).square().sum()) for b, t in zip(batches, targets, strict=True)
        )
        return off, own, rounded

    nearest, _, _ = distance(RoundToNearest())
    best, rounded_block, rounded = distance(Gptq())
    again, _, repeated = distance(Gptq())
    assert best < 0.8 * nearest
    assert best == again
    assert all(torch.equal(rounded[name].codes, repeated[name].codes) for name in rounded)
    notes = rounded_block.notes["gptq"]
    assert list(notes) == list(original.family.linears())
    assert all(0 < note["error"] < 0.2 and note["tokens"] == 2 * 226 for note in notes.values())


def test_linears_of_different_schemes_share_an_input(block: tuple[Block, list]) -> None:
    own, batches = block
    own.schemes["self_attn.v_proj"] = get("w4a4", 32)
    own.schemes.pop("mlp.up_proj")
    rounded = Gptq().round(own, batches)
    assert set(rounded) == set(own.schemes)
    assert scale_of(rounded["self_attn.v_proj"].params).shape == (64, 4)
    for name, result in rounded.items():
        own.schemes[name].check(result.codes, result.params)


def test_clips_of_a_recipe_are_the_start_of_the_search(block: tuple[Block, list]) -> None:
    own, batches = block
    own.clips["self_attn.q_proj"] = (torch.full((128,), 0.5), torch.ones(128, 1))
    before = own.schemes["self_attn.q_proj"].range(own.weight("self_attn.q_proj"))
    rounded = Gptq(residual=0, rounds=0, clip_steps=1).round(own, batches)
    expected = own.schemes["self_attn.q_proj"].fit_range(*before, clip=0.5)
    torch.testing.assert_close(scale_of(rounded["self_attn.q_proj"].params), scale_of(expected))
    unclipped = own.schemes["self_attn.k_proj"]
    assert scale_of(rounded["self_attn.k_proj"].params).shape == (64, 1)
    unclipped.check(rounded["self_attn.k_proj"].codes, rounded["self_attn.k_proj"].params)


def test_a_sparse_weight_whose_input_is_off_is_pruned_and_rounded_as_its_target() -> None:
    scheme, method, (weight, hessian) = get("w4a16-24"), Gptq(residual=1), problem()
    hessian.d = 0.03 * torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) @ hessian.h
    target = prepare(Problem(scheme, weight, hessian), method).target
    assert (target - weight).norm() > 0.1 * weight.norm()
    found = solve(method, scheme, weight, hessian)
    hessian.d = None
    expected = solve(method, scheme, target, hessian)
    assert torch.equal(found[0], expected[0]) and torch.equal(
        found[1]["scale"], expected[1]["scale"]
    )


@pytest.mark.parametrize("name", ["w4a16", "w4a16-24"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_scales_below_zero_are_tried_where_they_are_legal(name: str, rounds: int) -> None:
    """A weight and its mirror image get the same codes, as good ones."""
    scheme, (weight, hessian) = get(name, scale_dtype=torch.float16), problem(k=256)
    method = Gptq(residual=0, rounds=rounds, negative_scales=True)
    (codes, params, _), (same, mirrored, _) = (
        solve(method, scheme, w, hessian) for w in (weight, -weight)
    )
    assert torch.equal(codes, same) and torch.equal(params["scale"], -mirrored["scale"])
    assert params["scale"].dtype == torch.float16
    below = params["scale"] < 0
    assert below.any() and not below.all()
    above = solve(Gptq(residual=0, rounds=rounds), scheme, weight, hessian)
    assert (above[1]["scale"] > 0).all()
    assert loss(weight, hessian, scheme, codes, params) < loss(weight, hessian, scheme, *above[:2])


def test_scales_stay_above_zero_where_they_have_to() -> None:
    scheme, (weight, hessian) = get("w4a4"), problem()
    found, plain = (
        solve(Gptq(negative_scales=both), scheme, weight, hessian) for both in (True, False)
    )
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1]["scale"], plain[1]["scale"])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("by_tensor", [False, True])
def test_candidates_tried_together_are_those_tried_one_by_one(
    scheme: str, by_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, weight, importance = get(scheme), torch.randn(6, 256), torch.rand(256)
    groups = chosen.groups(weight).shape[1]
    clips = (
        {"clip": 0.5 + torch.rand(6), "group_clip": 0.5 + torch.rand(6, groups)}
        if by_tensor
        else {}
    )
    options = (chosen, weight, importance, [1.0, 0.9, 0.9, 0.7, 0.5, 0.3, 0.2])
    expected = fit_groups(*options, **clips)

    def of_all(own: Tensor, importance: Tensor, grid: Grid) -> Tensor:
        return clip_search.group_error(
            own.repeat(len(grid.step) // len(own), 1, 1), importance, grid
        )

    monkeypatch.setattr(clip_search, "triton_runs_on", lambda _: True)
    monkeypatch.setattr(clip_search.group_error_triton, "group_error", of_all)
    for at_once in (1, 3 * 6 * groups, 1 << 24):
        monkeypatch.setattr(clip_search, "AT_ONCE", at_once)
        found = fit_groups(*options, **clips)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["w4a16", "w4a16-24"])
def test_columns_are_visited_by_falling_importance_and_those_pruned_together_stay_so(
    name: str,
) -> None:
    scheme = get(name, 128)
    importance = torch.rand(256, generator=torch.Generator().manual_seed(0))
    size = scheme.sparsity[1] if scheme.sparsity else 1
    order = gptq.visiting_order(importance, scheme, act_order=True)
    together = order.view(-1, size)
    assert torch.equal(order.sort().values, torch.arange(256))
    assert (together == together[:, :1] + torch.arange(size)).all()
    assert (importance[together].sum(1).diff() <= 0).all()


def test_the_search_goes_on_from_the_clips_it_is_given() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    scheme, clip = get("w4a16", 128), torch.rand(8, 2) * 0.5 + 0.5
    found = fit_groups(scheme, weight, torch.ones(256), [1.0], group_clip=clip)
    assert torch.equal(found["scale"], scheme.fit(weight, group_clip=clip)["scale"])


@pytest.mark.parametrize("block", [1, 7, 16, 40])
def test_a_large_hessian_is_factored_by_blocks(block, monkeypatch):
    monkeypatch.setattr(factor, "BLOCK", block)
    x = torch.randn(60, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = Factor(x.T @ x, 0.01)
    monkeypatch.setattr(factor, "WHOLE", 39)
    monkeypatch.setattr(factor, "CORNER", block)
    parts = Factor(x.T @ x, 0.01)
    for name in ("h", "feedback", "cost"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    rows = torch.randn(3, 40, dtype=torch.float64)
    torch.testing.assert_close(parts.solve(rows) @ parts.h, rows)
    torch.testing.assert_close(parts.feedback.tril(), torch.zeros_like(parts.feedback))
    flat = torch.ones(40, 40)
    flat[5, 6] = flat[6, 5] = 3  # not positive definite
    assert factor.cholesky(flat) is None
    assert Factor(flat, 0.01).damping > 1
