import copy
from dataclasses import replace

import pytest
import torch

from qtool.calibration.batch import first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe, propagate, run
from qtool.calibration.method import check_order
from qtool.calibration.options import check_options
from qtool.calibration.rounding.rounded import Rounded, arranged
from qtool.calibration.transforms import gather_outliers
from qtool.calibration.transforms.block_precision import (
    BlockCosts,
    allocate,
    block_shares,
    rounded_inputs,
)
from qtool.calibration.transforms.clip import Clip
from qtool.calibration.transforms.gather_outliers import GatherOutliers
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.online_hadamard import OnlineHadamard
from qtool.calibration.transforms.reorder import Reorder
from qtool.calibration.transforms.smooth import Smooth
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.auto import auto_class
from qtool.models.experts import separate_experts
from qtool.schemes import get
from qtool.schemes.fmpq_blocks import by_magnitude, w4a4_share
from tests.conftest import needs_class
from tests.models.tiny import tiny_config

ALL = ("norm", "heads", "product")


def salience(block, batches, name):
    seen = []
    observe(block, batches, {name: seen.append})
    return torch.cat(seen).abs().amax(0)


@pytest.mark.parametrize("groups", (("heads", "product"), ALL))
def test_logits_stay(any_model, transformed, logits, groups):
    reordered = transformed(any_model, [Reorder(groups=groups)])
    torch.testing.assert_close(logits(reordered), logits(any_model), rtol=1e-4, atol=1e-4)


def test_logits_stay_where_outliers_are_gathered(any_wide_model, transformed, logits):
    gathered = transformed(any_wide_model, [GatherOutliers(w4a4_share=0.5)], get("w4ax-fmpq"))
    torch.testing.assert_close(logits(gathered), logits(any_wide_model), rtol=1e-4, atol=1e-4)


def test_salience_descends(llama, blocks):
    for block, batches in blocks(llama):
        Reorder(groups=ALL).apply(block, batches)
        for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
            assert salience(block, batches, name).diff().le(0).all()
        by_head = salience(block, batches, "self_attn.o_proj").view(
            block.heads.kv, -1, block.heads.dim
        )
        assert by_head.amax(1).diff().le(0).all()


def test_only_what_cannot_fold_is_stored(llama, blocks):
    family = family_of({"model_type": "llama"})
    assert Reorder().permutes(family) == ()
    for options in ({"groups": ALL}, {"groups": ("norm",)}, {}):
        block, batches = blocks(copy.deepcopy(llama))[0]
        Reorder(**options).apply(block, batches)
        assert tuple(block.permutations) == Reorder(**options).permutes(family)
    block, batches = blocks(llama)[0]
    Reorder(groups=ALL).apply(block, batches)
    assert torch.equal(block.permutations["mlp.gate_proj"], block.permutations["mlp.up_proj"])


def test_a_rounded_linear_gathers(llama, blocks):
    block, batches = blocks(llama, get("w8a8"))[0]
    before = run(block, batches[0])
    Reorder(groups=ALL).apply(block, batches)
    for name, scheme in block.schemes.items():
        params = block.fit(name)
        block.install({name: Rounded(scheme.quantize(block.weight(name), params), params)})
    error = (run(block, batches[0]) - before).square().mean() / before.square().mean()
    assert error < 1e-2


def test_two_orders_compose(llama, blocks):
    block, batches = blocks(llama)[0]
    before = run(block, batches[0])
    order, again = torch.randperm(96), torch.randperm(96)
    block.permute("mlp.up_proj", order)
    block.permute("mlp.up_proj", again)
    assert torch.equal(block.permutations["mlp.up_proj"], order[again])
    torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [Reorder(groups=("norm",)), GatherOutliers()])
def test_fusing_norms_after_ordering_their_readers_is_refused(order):
    """It would multiply the gathered columns by the weights of other channels."""
    with pytest.raises(QtoolError, match=f"norm-fusion must come before {order.name}"):
        check_order([order, NormFusion()])


def test_smoothing_after_reordering_is_refused():
    with pytest.raises(QtoolError, match="smooth must come before reorder"):
        check_order([Reorder(), Smooth()])
    with pytest.raises(QtoolError, match="unknown group 'down'"):
        Reorder(groups=("down",))


@pytest.fixture
def wide(llama):
    """A llama of whole 128-channel blocks."""
    config = copy.deepcopy(llama.config)
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 384, 64
    torch.manual_seed(0)
    return type(llama)(config).eval()


@torch.no_grad()
def scatter_outliers(model):
    """One outlier channel in each block of 128 behind the norms and in down's input."""
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[[3, 200]] *= 60
        layer.mlp.up_proj.weight[[10, 150, 300]] *= 60


def test_outliers_share_one_block(wide, blocks, transformed, logits):
    scatter_outliers(wide)
    scheme = get("w4ax-fmpq")
    torch.testing.assert_close(
        logits(transformed(wide, [GatherOutliers()], scheme)), logits(wide), rtol=1e-4, atol=1e-4
    )
    block, batches = blocks(wide, scheme)[0]
    GatherOutliers().apply(block, batches)
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
        assert block.schemes[name].eight_bit.sum() == 1
        assert salience(block, batches, name)[:128].amax() == salience(block, batches, name).amax()
    assert set(block.permutations) == set(
        GatherOutliers().permutes(family_of({"model_type": "llama"}))
    )


@pytest.mark.parametrize(
    "model_type",
    [
        "afmoe",
        pytest.param("beam", marks=needs_class("beam")),
        "recurrent_gemma",
        "granite",
        "gpt_neox",
    ],
)
@torch.no_grad()
def test_an_order_folds_only_where_each_channel_is_alone(model_type):
    """AFMoE's and Beam's attention is multiplied by a gate, RecurrentGemma's product by a state."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model, family = auto_class(config).from_config(config).eval(), family_of(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.6 / parameter.shape[-1] ** 0.5)
    separate_experts(model)
    batches = first_inputs(model, family, [torch.arange(48).view(2, 24) * 7 % 61])
    for index, module in enumerate(model.get_submodule(family.blocks)):
        own = family.at(config, index)
        schemes = dict.fromkeys(own.linears(), get("w4ax-fmpq"))
        block = Block(index, module, own, config, schemes)
        before = run(block, batches[0])
        for transform in (Reorder(), GatherOutliers(ratio=1.5)):
            transform.apply(block, batches)
            block.update_module()
            torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-3, atol=1e-3)
        assert set(block.permutations) <= set(GatherOutliers().permutes(own))
        propagate(block, batches)


@torch.no_grad()
def test_what_stays_in_16_bits_keeps_its_order(wide, blocks):
    """No order is stored for it; the others are clipped for their input in the new one."""
    scatter_outliers(wide)
    kept, clips = "self_attn.q_proj", []
    for quantized in (True, False):
        block, batches = blocks(wide, get("w4ax-fmpq"))[0]
        weight, before = block.weight(kept).clone(), run(block, batches[0])
        if not quantized:
            del block.schemes[kept]
        GatherOutliers().apply(block, batches)
        assert torch.equal(block.weight(kept), weight) is not quantized
        assert (kept in block.permutations) is quantized
        torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-4, atol=1e-4)
        Clip(sequences=0).apply(block, batches)
        clips.append(block.clips["self_attn.k_proj"])
    for together, alone in zip(*clips, strict=True):
        assert torch.equal(together, alone)


def test_the_first_tokens_are_looked_at(wide, blocks, monkeypatch):
    """Whole batches, until they hold enough of them."""
    monkeypatch.setattr(gather_outliers, "MOST_TOKENS", 1)
    scheme = get("w4ax-fmpq")
    one, batches = blocks(copy.deepcopy(wide), scheme)[0]
    other, _ = blocks(wide, scheme)[0]
    assert len(batches) > 1
    GatherOutliers(ratio=1.5).apply(one, batches)
    GatherOutliers(ratio=1.5).apply(other, batches[:1])
    assert one.notes == other.notes and one.permutations
    assert all(torch.equal(one.permutations[n], o) for n, o in other.permutations.items())


def test_no_eight_bit_block_allowed(wide, blocks):
    scatter_outliers(wide)
    block, batches = blocks(wide, get("w4ax-fmpq"))[0]
    GatherOutliers(max_8bit_blocks=0).apply(block, batches)
    assert all(scheme.eight_bit.sum() == 0 for scheme in block.schemes.values())


def test_smoothing_sees_8_bits_where_all_blocks_get_them(wide, blocks):
    """A group of which some blocks keep 4 bits is smoothed for 4."""
    transform, groups = GatherOutliers(w4a4_share=0.5), family_of({"model_type": "llama"}).groups
    whole, part = (next(n for n, g in enumerate(groups) if f".{x}_" in g.linears[0]) for x in "oq")
    block, batches = blocks(wide, get("w4ax-fmpq"))[0]
    counts = torch.zeros(len(groups), dtype=torch.int64)
    counts[whole], counts[part] = 2, 1  # of two blocks each
    transform.load({"0": counts})
    transform.announce(block)
    x = torch.randn(8, 256)
    for number, bits in ((whole, 127), (part, 7)):
        name = groups[number].linears[0]
        codes, _ = block.schemes[name].quantize_activation(x, block.fit(name))
        assert (codes.abs().unflatten(-1, (2, 128)).amax(-1) == bits).all()
    transform.apply(block, batches)
    assert block.schemes[groups[part].linears[0]].eight_bit.tolist() == [1, 0]
    assert block.schemes[groups[whole].linears[0]].eight_bit.tolist() == [1, 1]


def gather(transform, block, batches):
    """``transform`` of a model of this block alone."""
    if transform.learns:
        seen = [replace(batch) for batch in batches]
        transform.load(transform.learn([block], seen))
    transform.apply(block, batches)


def test_a_share_of_w4a4_work_is_kept_and_spent_well(wide, blocks):
    scatter_outliers(wide)

    def outcome(ratio=1e9, **options):  # no channel is an outlier by rule: error decides alone
        block, batches = blocks(copy.deepcopy(wide), get("w4ax-fmpq"))[0]
        exact = run(block, batches[0])
        gather(GatherOutliers(ratio=ratio, **options), block, batches)
        work = [
            (block.schemes[name].eight_bit, block.weight(name).shape[0]) for name in block.schemes
        ]
        with rounded_inputs(block, list(block.schemes)):
            return w4a4_share(work), float((run(block, batches[0]) - exact).square().sum())

    some, error = outcome(w4a4_share=0.6)
    none, least = outcome(w4a4_share=0.0)
    every, most = outcome(w4a4_share=1.0)
    assert (none, every) == (0, 1) and 0.6 <= some < 0.8
    assert least < error < 0.7 * most
    # outliers, whatever the share
    assert outcome(ratio=10)[0] == outcome(ratio=10, w4a4_share=1.0)[0] < 1
    assert outcome(ratio=10, w4a4_share=0.3)[0] < 0.4
    for limit in ({"max_8bit_blocks": 0}, {"min_w4a4_share": 1.0}):
        assert outcome(ratio=10, w4a4_share=0.0, **limit)[0] == 1
    assert 0 < outcome(w4a4_share=0.0, max_8bit_blocks=1)[0] < 1
    with pytest.raises(QtoolError, match=r"w4a4_share is 84; expected .* at most 1"):
        check_options(GatherOutliers, {"w4a4_share": 84})


def test_schemes_without_a_block_map_are_left_alone(wide, blocks):
    block, batches = blocks(wide, get("w4a4", 128))[0]
    GatherOutliers().apply(block, batches)
    assert not block.permutations


@pytest.mark.parametrize(
    "name", ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
)
def test_blocks_go_where_the_decoder_block_feels_them(name, wide, blocks, monkeypatch):
    """Not where a linear's own output is worst, nor where they are cheap."""
    block, batches = blocks(wide, get("w4ax-fmpq"))[0]
    felt = set(block.family.group_of(name).linears)
    monkeypatch.setattr(
        gather_outliers,
        "output_errors",
        lambda _, __, groups: [float(name in g) for g, _ in groups],
    )
    work = {linear: block.weight(linear).numel() for linear in block.schemes}
    share = 1 - sum(work[linear] for linear in felt) / sum(work.values())
    gather(GatherOutliers(ratio=1e9, w4a4_share=share), block, batches)
    assert {linear for linear, scheme in block.schemes.items() if scheme.eight_bit.any()} == felt


def test_inputs_are_judged_in_the_order_in_which_they_are_gathered(wide, blocks, monkeypatch):
    scatter_outliers(wide)
    block, batches = blocks(wide, get("w4ax-fmpq"))[0]
    given = {}
    monkeypatch.setattr(gather_outliers, "allocate", lambda costs, share: given.update(costs) or {})
    GatherOutliers(w4a4_share=0.5, tokens=10**6).learn([block], list(map(replace, batches)))
    for (_, number), costs in given.items():
        names, seen = block.family.groups[number].linears, []
        observe(block, batches, {names[0]: seen.append})
        x = torch.cat(seen).float()
        order = by_magnitude(x.abs().amax(0))
        shares = block_shares(block, names, x, order)
        torch.testing.assert_close(costs.cost / costs.cost.sum(), shares)
    assert len(given) == 4


@torch.no_grad()
def test_inputs_are_judged_as_rotated_as_they_will_be(wide, blocks):
    scatter_outliers(wide)
    block, batches = blocks(wide, get("w4ax-fmpq"))[0]
    down = "mlp.down_proj"
    order = torch.randperm(block.weight(down).shape[1])
    x = torch.randn(32, len(order)).exp()
    rotated = copy.deepcopy(block)
    rotated.permute(down, order)
    rotated.rotate_inputs(down)
    rotation = OnlineHadamard()
    rotation.prepare(block.family, wide.config)
    rotation.announce(block)
    assert block.to_rotate == {down}
    with rounded_inputs(block, [down], order), rounded_inputs(rotated, [down]):
        torch.testing.assert_close(run(block, batches[0]), run(rotated, batches[0]))
    as_they_are = block_shares(rotated, [down], arranged(x, order, True), torch.arange(len(order)))
    torch.testing.assert_close(block_shares(block, [down], x, order), as_they_are)


def test_the_share_is_of_the_whole_model():
    """Blocks of 8 bits go where they save most for their work, in whichever decoder block."""
    first = BlockCosts(torch.tensor([4.0, 3.0, 2.0]), work=1, least=0, most=3)
    second = BlockCosts(torch.tensor([9.0, 1.0, 1.0]), work=3, least=0, most=3)
    assert allocate({0: first, 1: second}, w4a4_share=0.75) == {0: 3, 1: 0}
    assert allocate({0: first, 1: second}, w4a4_share=0.5) == {0: 3, 1: 1}
    capped = replace(first, least=1, most=2)
    assert allocate({0: capped, 1: second}, w4a4_share=1.0) == {0: 1, 1: 0}
    assert allocate({0: capped, 1: second}, w4a4_share=0.5) == {0: 2, 1: 1}
