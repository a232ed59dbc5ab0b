"""The rotation that is learned: its gradient, its maxima, of what, and what it keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool import recipes
from qtool.calibration.recorded import Recorded
from qtool.calibration.transforms import learned_rotation, rotate
from qtool.calibration.transforms.hadamard import rotation
from qtool.calibration.transforms.learned_rotation import (
    BATCH,
    POWER,
    Dense,
    GroupedRows,
    gradient,
    gradient_of_step,
    learn,
    rows_of_step,
    to_gradient,
)
from qtool.io.safetensors import read, read_header
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.planning.work import block_shape
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load
from tests.conftest import MakeModel

H, GROUP = 64, 32
LAYERS = [{"match": ".*", "scheme": "w8a8", "group_size": "channel", "layout": "row-major-8"}]


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def grouped(x: Tensor, ranges: bool = False) -> GroupedRows:
    return GroupedRows(x, GROUP, ranges)


def start() -> Tensor:
    return rotation(H)(torch.eye(H, dtype=torch.float64))[None]


def maxima(x: Tensor, q: Tensor) -> float:
    """The mean square of the groups' largest values."""
    parts = x.unflatten(-1, (len(q), -1, q.shape[-1]))
    turned = (parts @ q.to(x.dtype)).flatten(1).unflatten(-1, (-1, GROUP))
    return float(turned.abs().amax(-1).square().mean())


def test_the_gradient_is_that_of_the_norm() -> None:
    x, q = rows(20).double(), start().requires_grad_()
    turned = (x @ q[0]).unflatten(-1, (-1, GROUP))
    turned.abs().pow(POWER).mean(-1).pow(2 / POWER).mean().backward()
    assert q.grad is not None
    torch.testing.assert_close(gradient(x, q.detach(), GROUP), q.grad)


def test_the_gradient_of_ranges_is_that_of_half_of_both_norms() -> None:
    x, q = rows(20).double(), start().requires_grad_()
    turned = (x @ q[0]).unflatten(-1, (-1, GROUP))
    norms = [part.pow(POWER).mean(-1).pow(1 / POWER) for part in (turned.relu(), (-turned).relu())]
    ((norms[0] + norms[1]) / 2).square().mean().backward()
    assert q.grad is not None
    torch.testing.assert_close(gradient(x, q.detach(), GROUP, True), q.grad)


@pytest.mark.parametrize("ranges", [False, True])
def test_small_shares_of_a_maximum_make_no_subnormal_numbers(ranges: bool) -> None:
    """A CPU would multiply these many times as slowly."""
    x = rows(8).view(8, 2, GROUP) * 10.0 ** -torch.arange(GROUP).div(4)
    found = to_gradient(x, ranges)
    assert found.any() and not ((found != 0) & (found.abs() < torch.finfo().tiny)).any()


def test_the_gradient_of_several_matrices_is_that_of_each() -> None:
    """Of four parts of the columns, two for each matrix, in groups across them."""
    x, q = rows(20).double(), torch.randn(2, H // 4, H // 4).double().requires_grad_()
    turned = torch.cat([part @ q[i // 2] for i, part in enumerate(x.split(H // 4, 1))], 1)
    turned.view(20, -1, GROUP).abs().pow(POWER).mean(-1).pow(2 / POWER).mean().backward()
    assert q.grad is not None
    torch.testing.assert_close(gradient(x, q.detach(), GROUP), q.grad)


def test_it_begins_at_the_start_which_stays_as_it_is() -> None:
    begin = start().float()
    x, copy = [grouped(rows(20))], begin.clone()
    torch.testing.assert_close(learn(x, begin, 0), begin.double(), rtol=0, atol=1e-6)
    moved = learn(x, begin, 2)
    assert torch.equal(begin, copy) and not torch.allclose(moved.float(), begin, atol=1e-3)


def test_threads_may_use_a_matrix_on_several_devices_at_once() -> None:
    """The thread that writes turns a final norm's bias on the CPU, while blocks turn on a GPU."""

    class Shared(Dense):
        def __setattr__(self, name: str, value: Tensor) -> None:
            super().__setattr__(name, value)
            if value.is_meta:  # at once another thread moves it back
                super().__setattr__(name, torch.eye(4))

    matrix = Shared(torch.eye(4))
    assert matrix.on(torch.device("meta")).is_meta


@pytest.mark.cuda
@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("group", [24, 64, 128, 4096, 5000])
def test_the_fused_gradient_is_torchs(group: int, ranges: bool) -> None:
    x = torch.randn(7, 5, group, generator=torch.Generator().manual_seed(group))
    x[1], x[2, 0] = 0, x[2, 0].abs()  # a row of zeros, a group of one sign
    expected = to_gradient(x.clone(), ranges)
    found = to_gradient(x.cuda(), ranges)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-6)
    half = to_gradient(x.half().cuda(), ranges)
    torch.testing.assert_close(half.cpu().float(), expected, rtol=2e-2, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("keeps_ones", [False, True])
@pytest.mark.parametrize("matrices, order", [(1, 128), (8, 128), (32, 64), (2, 256), (1, 512)])
def test_steps_of_a_graph_are_the_steps(
    matrices: int, order: int, keeps_ones: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Recorded]()

    def recorded(function: Callable[..., None], **options: Any) -> Recorded:
        made.append(Recorded(function, **options))
        return made[-1]

    monkeypatch.setattr(learned_rotation, "Recorded", recorded)
    learned_rotation._recorded.cache_clear()
    x = torch.randn(order, matrices * order, device="cuda")
    begin = rotation(order, keeps_ones=True)(torch.eye(order, dtype=torch.float64))
    how = [grouped(x.half())], begin.expand(matrices, -1, -1).cuda(), 4
    found = learn(*how, keeps_ones=keeps_ones)
    again = learn(*how, keeps_ones=keeps_ones)  # of the next block: all its steps are replayed
    assert made.pop().graph is not None and not made
    torch.testing.assert_close(again, found, rtol=0, atol=1e-3)
    monkeypatch.setattr(learned_rotation, "RECORDED", 0)
    expected = learn(*how, keeps_ones=keeps_ones)
    assert not made
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (begin.cuda() - found[0]).norm() > 100 * (found - expected).norm()


@pytest.mark.cuda
@pytest.mark.parametrize("ranges", [False, True])
def test_products_on_a_gpu_have_16_bits_and_no_overflow(ranges: bool) -> None:
    """All of a row's square in one channel, in wide groups, makes the largest gradient."""
    n = 1024
    peaks = torch.eye(n).repeat(8, 1) * n**0.5
    q = rotation(n)(torch.eye(n, dtype=torch.float64))[None].float()
    for x, turn in ((peaks, torch.eye(n)[None]), (torch.randn(4 * n, n), q)):
        wanted = gradient(x, turn, n, ranges)
        found = gradient(x.cuda(), turn.cuda(), n, ranges).cpu()
        assert (found - wanted).norm() < 3e-3 * wanted.norm()


def test_it_is_orthogonal_and_lowers_the_maxima() -> None:
    x = torch.cat([rows(600), torch.zeros(2, H)])  # a row of zeros has no direction
    q = learn([grouped(x)], start(), 60)
    torch.testing.assert_close(q[0] @ q[0].T, torch.eye(H, dtype=torch.float64))
    assert maxima(x, q) < 0.75 * maxima(x, start())
    assert torch.equal(q, learn([grouped(x)], start(), 60))


def test_groups_with_zero_points_lower_their_ranges() -> None:
    """Below what they come to where the largest values count."""

    def ranges(q: Tensor) -> float:
        turned = (x @ q[0].float()).unflatten(-1, (-1, GROUP))
        return float((turned.amax(-1) - turned.amin(-1)).square().mean())

    x = rows(600)
    learned = [ranges(learn([grouped(x, some)], start(), 60)) for some in (True, False)]
    assert learned[0] < 0.97 * learned[1] < 0.9 * ranges(start())


def test_channels_of_the_residual_stream_stay_spread() -> None:
    axes = torch.eye(H) * H**0.5
    assert maxima(axes, start()) == pytest.approx(1)
    assert maxima(axes, learn([grouped(rows(600))], start(), 60)) < 3 < maxima(rows(600), start())


def test_inputs_stand_in_for_the_axes() -> None:
    inputs = rows(600, 1) * torch.linspace(0, 2, H)
    q = learn([grouped(rows(600))], start(), 60, [grouped(inputs)])
    assert maxima(inputs, q) < 0.75 * maxima(inputs, start())
    assert maxima(rows(600), q) < 0.85 * maxima(rows(600), start())
    assert maxima(torch.eye(H) * H**0.5, q) > 3


def test_every_row_has_its_turn() -> None:
    """Also where there are more of them than a step looks at, and many parts."""
    parts = [range(1000 * n, 1000 * n + count) for n, count in enumerate((7, 90, 1))]

    def of_step(step: int) -> list[int]:
        shares = rows_of_step([len(part) for part in parts], 1, step)
        return [row for part, own in zip(parts, shares, strict=True) for row in part[own]]

    turns = [of_step(step) for step in range(7)]
    assert sorted(row for turn in turns for row in turn) == [row for part in parts for row in part]
    assert max(map(len, turns)) <= BATCH + len(parts)
    assert turns[0] == of_step(7)


def test_every_weight_has_its_own_groups() -> None:
    """Each counts by its rows; those in the same groups as if they were one weight."""
    parts = [rows(count, count).double() for count in (20, 40, 10)]
    own = [grouped(parts[0]), GroupedRows(parts[1], H, True), grouped(parts[2])]
    found = gradient_of_step(own, start(), 0)
    of_groups = gradient(torch.cat([parts[0], parts[2]]), start(), GROUP)
    wanted = (30 * of_groups + 40 * gradient(parts[1], start(), H, True)) / 70
    torch.testing.assert_close(found, wanted)


def test_rows_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradient(rows(100).double(), start(), GROUP)
    monkeypatch.setattr(learned_rotation, "STEP_NUMBERS", 7 * H)
    torch.testing.assert_close(gradient(rows(100).double(), start(), GROUP), whole)


@pytest.mark.parametrize(
    ("scheme", "coarse", "count"),
    [("w4a4", True, 1), ("w4a4", True, 2), ("w4a8-qoq-g128", False, 1), ("w8a8", True, 1)],
)
def test_it_is_learned_of_what_the_float_model_makes_of_the_text(
    scheme: str,
    coarse: bool,
    count: int,
    make_model: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what every norm before a quantized linear hands it, if in no more bits than its weight.

    Of as many tokens of one batch as of several.
    """
    source, ids = make_model("llama"), torch.arange(48).view(2, 24)
    size = "channel" if scheme == "w8a8" else 64
    layers = [{"match": ".*", "scheme": scheme, "group_size": size}]
    turn = {"rotate": {"learn_steps": 1}}
    given = {"scheme": "test", "layers": layers, "transforms": ["norm-fusion", turn]}
    recipe, found = recipes.parse(given | {"rounding": "gptq"}, "test"), []

    def spy(*arguments: Any) -> Tensor:
        found.append(arguments)
        return learn(*arguments)

    monkeypatch.setattr(rotate, "learn", spy)
    monkeypatch.setattr(rotate, "TOKENS", 12)
    batches = ids.split(2 // count)
    quantize(Checkpoint(source), recipe, tmp_path / "out", calibration=Calibration(batches))
    [(weights, _, steps, inputs, _)] = found
    hidden = Checkpoint(source).config["hidden_size"]
    groups = {hidden if size == "channel" else size}
    assert {part.group for part in (*weights, *inputs)} == groups
    assert {part.ranges for part in weights} == {scheme == "w4a8-qoq-g128"}
    wanted = norm_outputs(source, ids)
    assert steps == 1 and len(inputs) == coarse * len(wanted) * count
    # block by block, in each batch by batch, the block's two norms
    expected = wanted[:, ::4].unflatten(0, (-1, 2)).unflatten(2, (count, -1)).transpose(1, 2)
    for found_there, there in zip(inputs, expected.flatten(0, 2), strict=False):
        torch.testing.assert_close(found_there.values, there.half(), rtol=2e-3, atol=2e-3)


def test_it_is_learned_for_the_groups_that_each_weight_is_rounded_in(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of v apart; what both read is among the inputs once in each of the sizes."""
    layers = [
        {"match": "v_proj", "scheme": "w4a4", "group_size": 32},
        {"match": ".*", "scheme": "w4a4", "group_size": "channel"},
    ]
    turn = {"rotate": {"learn_steps": 1, "heads": False}}
    given = {"scheme": "test", "layers": layers, "transforms": ["norm-fusion", turn]}
    source, found = make_model("llama"), list[tuple[Any, ...]]()

    def spy(*arguments: Any) -> Tensor:
        found.append(arguments)
        return learn(*arguments)

    monkeypatch.setattr(rotate, "learn", spy)
    recipe, ids = recipes.parse(given | {"rounding": "gptq"}, "test"), torch.arange(48).view(2, 24)
    quantize(Checkpoint(source), recipe, tmp_path / "out", calibration=Calibration([ids]))
    [(weights, _, _, inputs, _)] = found
    config = Checkpoint(source).config
    hidden, blocks = config["hidden_size"], config["num_hidden_layers"]
    assert [part.group for part in weights] == [hidden, hidden, 32, hidden, hidden] * blocks
    of_blocks = [sorted(part.group for part in inputs[i : i + 3]) for i in range(0, 3 * blocks, 3)]
    assert len(inputs) == 3 * blocks and of_blocks == [[32, hidden, hidden]] * blocks


def norm_outputs(source: Path, ids: Tensor) -> Tensor:
    """What n norms of all blocks make of ``ids [B, S]``, but for their weights: ``[n, B S, H]``."""
    model, seen = load(source, dtype=torch.float32), []
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(ids)
    states = torch.stack(seen).flatten(1, 2).detach()
    return states / states.square().mean(-1, keepdim=True).sqrt()


def quantized(source: Path, out: Path, steps: int) -> Path:
    """A model rounded to nearest in 8 bits after the rotation."""
    turn = {"rotate": {"learn_steps": steps}}
    given = {"scheme": "test", "layers": LAYERS, "transforms": ["norm-fusion", turn]}
    return quantize(Checkpoint(source), recipes.parse(given | {"rounding": "rtn"}, "test"), out)


def embedding(directory: Path) -> Tensor:
    for file in sorted(directory.glob("*.safetensors")):
        found = read_header(file)
        if "model.embed_tokens.weight" in found:
            return read(found["model.embed_tokens.weight"])
    raise AssertionError


def test_a_model_with_a_learned_rotation_computes_the_same(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model("llama")
    fixed, learned = (quantized(source, tmp_path / str(n), n) for n in (0, 10))
    assert not torch.equal(embedding(fixed), embedding(learned))
    ids = torch.arange(40)[None]
    exact, found = load(source)(ids).logits, load(learned)(ids).logits
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_large_models_learn_from_some_rows(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every n-th of each weight, so that all together have about as many bytes as they may."""
    source, found = make_model("llama"), list[Any]()

    def spy(weights: list[GroupedRows], *others: Any) -> Tensor:
        found.append([part.values for part in weights])
        return learn(weights, *others)

    monkeypatch.setattr(rotate, "learn", spy)
    quantized(source, tmp_path / "all", 1)
    size = 2 * sum(rows.numel() for rows in found[0])
    monkeypatch.setattr(rotate, "MOST_ROW_BYTES", -(-size // 3))
    quantized(source, tmp_path / "some", 1)
    whole, some = found
    assert abs(2 * sum(rows.numel() for rows in some) - size / 3) < 0.05 * size
    for few, rows in zip(some, whole, strict=True):
        assert any(torch.equal(few, rows[first::3]) for first in range(3))


def test_value_heads_alone_learn_block_by_block() -> None:
    assert not rotate.Rotate(learn_steps=5, residual=False).learns


def test_layer_norms_keep_their_ones() -> None:
    ones, x = torch.ones(H, dtype=torch.float64), rows(600)
    fixed = rotation(H, keeps_ones=True)(torch.eye(H, dtype=torch.float64))[None]
    q = learn([grouped(x)], fixed, 60, keeps_ones=True)
    torch.testing.assert_close(ones @ q[0], ones, rtol=0, atol=1e-5)
    torch.testing.assert_close(q[0] @ q[0].T, torch.eye(H, dtype=torch.float64))
    assert maxima(x, q) < 0.8 * maxima(x, fixed)


def test_rows_of_a_layer_norm_are_centred() -> None:
    x = rows(5) + 3
    wanted = torch.nn.functional.layer_norm(x, (H,), eps=0)
    torch.testing.assert_close(
        learned_rotation.unit_rows(x, True).float(), wanted, atol=2e-3, rtol=2e-3
    )


def test_a_plan_counts_it(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the readers and outputs of the norms in 16 bits."""
    config = Checkpoint(make_model("llama")).config

    def counted(steps: int) -> tuple[float, int]:
        given = {"scheme": "test", "layers": LAYERS, "rounding": "rtn"}
        turn = {"rotate": {"learn_steps": steps, "heads": False}}
        recipe = recipes.parse(given | {"transforms": ["norm-fusion", turn]}, "test")
        job = Job.of(config, recipe)
        shape = block_shape(job, 0, 1, 16)
        held = job.transforms[1].learning_bytes(shape) - shape.exact_bytes
        return job.transforms[1].work(shape).search_flops, held

    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    rows = heads * config["head_dim"] + 2 * config["intermediate_size"] + 2 * rotate.TOKENS
    flops, held = counted(10)
    assert held == 2 * rows * config["hidden_size"] * config["num_hidden_layers"]
    assert flops > 0 and counted(20)[0] == 2 * flops and counted(0)[0] == 0
    monkeypatch.setattr(rotate, "MOST_ROW_BYTES", 1000)
    flops_of_some, held_of_some = counted(10)
    assert flops_of_some == flops and held_of_some < held
