"""Plans: bytes as they are written, operations as torch counts them, places with room; the largest
models too.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import qtool
from qtool import recipes
from qtool.bench import bench_quantize
from qtool.bench import quantize as bench
from qtool.bench.ceilings import Ceilings
from qtool.bench.random_checkpoint import SHAPES, config_of, make
from qtool.calibration import stacking
from qtool.calibration.batch import first_inputs
from qtool.calibration.block import Block
from qtool.calibration.cost import Work
from qtool.calibration.forwards import by_place, inputs_of, observe, run
from qtool.calibration.method import LEARNING_SEQUENCES
from qtool.calibration.rounding.distill.distill import Distill
from qtool.calibration.rounding.gptq import gptq, memory
from qtool.calibration.rounding.gptq.memory import MOST_HESSIAN_BYTES, hessians_at_once
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.stacking import by_role
from qtool.calibration.transforms import clip, smooth
from qtool.calibration.transforms.rotate import Rotate
from qtool.calibration.transforms.smooth_attention import SmoothAttention
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.io.finite import PIECE_BYTES
from qtool.io.run_record import record_path
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.experts import separate_experts
from qtool.models.skeleton import skeleton
from qtool.pipeline.job import Job
from qtool.pipeline.planning.estimate import CPU, H200
from qtool.pipeline.planning.memory import (
    DEVICE_SHARE,
    gradient_bytes,
    learning_bytes,
    source_job,
    working_bytes,
)
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.planning.plan_text import as_dict, as_text
from qtool.pipeline.planning.work import block_shape, block_work, work_of
from qtool.recipes import Step
from qtool.schemes import get
from qtool.units import bytes_text, times
from tests.conftest import VARIANTS, MakeModel
from tests.models.tiny import save_tiny

PAPER_GPTQ = Path(__file__).parents[2] / "benchmarks/quantize/paper-gptq.yaml"
GPTQ = recipes.parse(
    {
        "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64}],
        "rounding": {"gptq": {"residual": 0}},
    },
    "test",
)
#: with no inputs of all blocks for gradients
ALIKE = replace(GPTQ, rounding=Step("gptq", {"residual": 0, "output_hessian": False}))
LQQ = {"layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64}]}
DISTILLED = {
    "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64}],
    "rounding": "distill",
}
LARGE = {name: SHAPES[name] for name in ("llama-3.1-405b", "qwen3-235b-a22b", "deepseek-v3")} | {
    "mixtral-8x22b": SHAPES["llama-3-8b"]
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w4ax-fmpq"])
def test_the_bytes_of_a_block_are_those_of_its_tensors(
    variant: str, scheme: str, make_model: MakeModel
) -> None:
    config = json.loads((make_model(variant) / "config.json").read_text())
    job = Job.of(config, recipes.load(scheme))
    for block in range(job.blocks):
        tensors = job.block_tensors(block).values()
        assert job.block_bytes(block) == sum(t.numel() * t.dtype.itemsize for t in tensors)


def counted(run: Callable[[], object]) -> int:
    """Operations of ``run``, those of attention left out."""
    with FlopCounterMode(display=False) as counter:
        run()
    return sum(
        n for name, n in counter.get_flop_counts().get("Global", {}).items() if "mm" in str(name)
    )


def test_forwards_and_looks_cost_what_torch_counts(make_model: MakeModel) -> None:
    source = make_model("llama")
    model, family = skeleton(AutoConfig.from_pretrained(source)), family_of({"model_type": "llama"})
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    batches = first_inputs(model, family, list(torch.zeros(3, 24, dtype=torch.long).split(1)))
    block = Block(0, model.get_submodule(family.blocks)[0], family, model.config, {})  # type: ignore[index]
    job = Job.of(json.loads((source / "config.json").read_text()), GPTQ)
    shape = block_shape(job, 0, 3, 24)

    assert (
        counted(lambda: [run(block, batch) for batch in batches])
        == shape.forward_flops() - shape.attention_flops()
    )
    last = family.groups[-1].linears[0]
    assert (
        counted(lambda: observe(block, batches, {last: lambda x: None}))
        == shape.partial_forward_flops() - shape.attention_flops()
    )
    before = sum(
        counted(lambda g=g: [inputs_of(block, b, g.linears[0]) for b in batches])
        for g in family.groups
    )
    gptq = Gptq(residual=0, output_hessian=False).work(shape)
    # the look at o runs all of the attention for both looks after it, and the first runs o again
    inside = shape.linear_flops(n for n in shape.linears if n.startswith("self_attn."))
    again = 2 * shape.linear_flops(["self_attn.o_proj"])
    assert before - 2 * inside + again == gptq.forward_flops - shape.attention_flops()
    assert gptq.hessian_flops == 2 * 72 * sum(
        shape.linears[g.linears[0]][1] ** 2 for g in family.groups
    )
    writers = [shape.linears[name] for name in ("self_attn.o_proj", "mlp.down_proj")]
    both = 2 * gptq.hessian_flops + 2 * 72 * sum(2 * n * k - k * k for n, k in writers)
    assert Gptq(output_hessian=False).work(shape).hessian_flops == both
    assert Gptq(stream=0, output_hessian=False).work(shape).hessian_flops == 2 * gptq.hessian_flops
    outputs = Gptq(residual=0).work(shape).hessian_flops - gptq.hessian_flops
    stacked = (sum(shape.linears[name][0] for name in g.linears) for g in family.groups)
    whole = 2 * 72 * sum(rows**2 for rows in stacked)
    assert whole / 2 < outputs <= whole  # the upper triangles, by panels
    learned = Rotate(learn_steps=1)  # of the first sequences alone
    assert (
        counted(lambda: learned.learn([block], batches))
        == learned.work(shape).forward_flops - shape.attention_flops()
    )
    few, many = (block_shape(job, 0, n, 24) for n in (LEARNING_SEQUENCES, LEARNING_SEQUENCES + 1))
    assert learned.work(many).forward_flops == few.forward_flops()


def test_the_clipping_search_tries_what_is_planned(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QoQ begins above 1, w4a16 takes scales below 0 too, and LiquidQuant does neither."""
    looked_at, fit = [], gptq.fit_groups

    def counted_fit(scheme: Any, weight: torch.Tensor, importance: Any, ratios: Any, **clips: Any):
        looked_at.append(len(ratios) * weight.numel())
        return fit(scheme, weight, importance, ratios, **clips)

    monkeypatch.setattr(gptq, "fit_groups", counted_fit)
    schemes = {"o_proj": "w4a8-qoq-g128", "mlp": "w4a16", ".*": "w4a8-lqq"}
    layers = [{"match": m, "scheme": scheme, "group_size": 64} for m, scheme in schemes.items()]
    recipe = {"layers": layers, "rounding": {"gptq": {"clip_steps": 5, "negative_scales": True}}}
    source, found = make_model(), recipes.parse(recipe, "test")
    windows = torch.arange(48).view(2, 24)
    qtool.quantize(source, recipe=found, calibration=windows, out=tmp_path / "out")
    job = Job.of(Checkpoint(source).config, found)
    blocks = [block_shape(job, block, 2, 24) for block in range(job.blocks)]
    planned = sum(job.rounding.work(block).rounding_weights - 4 * block.weights for block in blocks)
    assert planned == sum(looked_at)


def test_smoothing_tries_the_weights_of_its_groups(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, looked_at = make_model("llama"), []
    found = replace(GPTQ, transforms=(Step("smooth", {"groups": ["heads", "product"]}),))
    job = Job.of(Checkpoint(source).config, found)
    error = smooth.output_error

    def counted_error(x: Any, scheme: Any, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        looked_at.append(weight.numel())
        return error(x, scheme, weight, *others)

    monkeypatch.setattr(smooth, "output_error", counted_error)
    qtool.quantize(source, recipe=found, calibration=torch.arange(48).view(2, 24))
    blocks = [block_shape(job, block, 2, 24) for block in range(job.blocks)]
    assert sum(job.transforms[0].work(block).search_weights for block in blocks) == sum(looked_at)


def test_what_a_rotation_learns_from_is_gone_when_activations_are_kept() -> None:
    """Rows of all layers count in what learning holds, not beside the activations."""
    cuda, held = torch.device("cuda"), {}
    for layers in (6, 12):
        job = Job.of(config_of("llama-2-7b", layers), recipes.load("w4a8-lqq", "best"))
        planned = plan(job, samples=128, seqlen=2048, device_memory=80e9)
        working, learning = (
            working_bytes(job, 128 * 2048, 2048, cuda),
            learning_bytes(job, 2048, cuda),
        )
        held[layers] = working, learning
        assert planned.device_bytes >= max(working + planned.activation_bytes, learning)
    assert held[6][0] == held[12][0] and held[6][1] < held[12][1]
    fast = Job.of(config_of("llama-2-7b"), recipes.load("w4a8-lqq", "paper"))
    assert learning_bytes(fast, 2048, cuda) == 0


@pytest.mark.parametrize("samples", [4, 64])
def test_keys_are_observed_as_often_as_planned(samples: int, make_model: MakeModel) -> None:
    source = make_model("llama")
    transform, plain = SmoothAttention(sequences=16), Job.of(Checkpoint(source).config, GPTQ)
    model = AutoModelForCausalLM.from_pretrained(source)
    family, runs = plain.family, [0]
    batches = first_inputs(
        model, family, list((torch.arange(samples * 8) % 320).view(samples, 8).split(1))
    )
    block = Block(0, model.model.layers[0], family, model.config, {})
    down = block.get("mlp.down_proj")
    down.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    transform.apply(block, batches)
    shape = block_shape(plain, 0, samples, 8)
    # queries are observed in front of down
    few = min(samples, 16) / samples
    whole = transform.work(shape).forward_flops - few * shape.partial_forward_flops()
    assert round(whole / shape.forward_flops() * samples) == runs[0]
    cached = Job.of(Checkpoint(source).config, replace(GPTQ, kv="kv8"))
    more = block_work(cached, 0, samples, 8).forward_flops
    assert more == block_work(plain, 0, samples, 8).forward_flops + shape.forward_flops()


def test_a_search_by_the_blocks_output_costs_nothing_without_attention() -> None:
    shape = block_shape(Job.of(config_of("llama-tiny", 1), GPTQ), 0, 16, 256)
    without = replace(shape, family=replace(shape.family, attention=None))
    by_block, by_layer = (clip.Clip(sequences=sequences) for sequences in (8, 0))
    assert by_block.work(without) == by_layer.work(without)
    more = by_block.work(shape).forward_flops - by_layer.work(shape).forward_flops
    assert more == pytest.approx(13 * shape.forward_flops() / 2)  # of half the sequences


def test_the_inputs_of_all_experts_cost_one_forward(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the quantized path alone. It ends where they are reached, though 2 and 3 get no token."""
    source = make_model("qwen2_moe")
    model = AutoModelForCausalLM.from_pretrained(source)
    job = Job.of(Checkpoint(source).config, ALIKE)
    separate_experts(model)
    family, shape = job.block_family(0), block_shape(job, 0, 4, 24)
    batches = first_inputs(model, family, list(torch.arange(96).view(4, 24).split(2)))
    block = Block(0, model.model.layers[0], family, model.config, {})
    block.weight("mlp.gate").zero_()
    firsts = [[group.linears[0] for group in same] for same in by_role(family.groups)]

    def ignored(*inputs: object) -> None:
        pass

    assert [len(names) for names in firsts] == [1, 1, 4, 4, 1, 1]
    runs = [
        counted(lambda n=n: observe(block, batches, dict.fromkeys(by_place(block, n), ignored)))
        for n in firsts
    ]  # type: ignore[misc]
    routers = 2 * 2 * shape.tokens * 4 * 128
    # the look at o runs all of the attention for those after it, and the first runs o again
    inside = shape.linear_flops(n for n in shape.linears if n.startswith("self_attn."))
    again = 2 * shape.linear_flops(["self_attn.o_proj"])
    plain = Gptq(residual=0).work(shape).forward_flops - shape.attention_flops()
    assert plain + routers == sum(runs) - 4 * inside + again
    # the float block's run to the block's output gives all of its inputs where they are kept
    assert Gptq().work(shape).forward_flops == Gptq(residual=0).work(shape).forward_flops
    monkeypatch.setattr(memory, "MOST_INPUT_BYTES", 0)
    beside = Gptq().work(shape).forward_flops - shape.attention_flops()
    alone = [n for n, names in zip(runs, firsts, strict=True) if len(names) == 1]
    # the last goes on to the block's output, and also takes the outputs kept by the look at o
    assert beside - plain == sum(alone[:-1]) + shape.linear_flops(["self_attn.o_proj"]) - 2 * inside


def test_experts_share_the_output_side_of_the_hessian(make_model: MakeModel) -> None:
    """One G for the sum of their outputs, beside those of the dense linears."""
    job = Job.of(Checkpoint(make_model("qwen2_moe")).config, GPTQ)
    shape = block_shape(job, 0, 4, 24)
    dense = [group.linears for group in shape.family.groups if not group.routed]
    rows = [128, *(sum(shape.linears[name][0] for name in linears) for linears in dense)]
    beside = Gptq().work(shape).hessian_flops - Gptq(output_hessian=False).work(shape).hessian_flops
    whole = 2 * 96 * sum(n**2 for n in rows)
    assert whole / 2 < beside <= whole  # the upper triangles, by panels
    held = Gptq().held_bytes(shape) - Gptq(output_hessian=False).held_bytes(shape)
    assert held == 4 * sum(n**2 for n in rows)


def test_rules_that_name_blocks() -> None:
    rules = [
        {"match": r"layers\.0\.", "scheme": None},
        {"match": ".*", "scheme": "w4a16", "group_size": 128},
    ]
    job = Job.of(config_of("llama-tiny", 4), recipes.parse({"layers": rules}, "mixed"))
    assert job.representatives == [0, 1, 1, 1] and {x.scheme for x in plan(job).linears} == {
        "w4a16"
    }
    assert plan(job).shard_bytes[1:-1] == [job.block_bytes(block) for block in range(4)]
    rules[0] = {
        "match": r"layers\.3\..*down",
        "scheme": "w4a4",
        "group_size": 128,
        "layout": "marlin-24",
    }
    with pytest.raises(QtoolError, match="marlin-24"):
        Job.of(config_of("llama-tiny", 4), recipes.parse({"layers": rules}, "mixed"))


@pytest.mark.parametrize("quantized", [r".*\.down_proj", r".*self_attn\..*"])
def test_rules_that_quantize_part_of_a_block(quantized: str) -> None:
    rules = [{"match": quantized, "scheme": "w4a16", "group_size": 128}]
    recipe = recipes.parse({"layers": rules, "rounding": "gptq"}, "part")
    assert plan(Job.of(config_of("llama-tiny", 1), recipe)).device_bytes > 0


def test_distill_takes_what_its_start_takes() -> None:
    """Of many tokens, the outputs of the attention that gptq keeps take more than what learns."""
    shape = block_shape(Job.of(config_of("llama-tiny", 1), GPTQ), 0, 4096, 256, 2)
    start, method = Gptq(), Distill(start="gptq")
    assert start.spare_bytes(shape) > 0 and Distill().spare_bytes(shape) == 0
    assert method.held_bytes(shape) + method.spare_bytes(shape) >= (
        start.held_bytes(shape) + start.spare_bytes(shape)
    )


def test_work_adds_up() -> None:
    assert Work(read_bytes=2) + Work(read_bytes=3, forward_flops=1) * 2 == Work(
        read_bytes=8, forward_flops=2
    )
    job = Job.of(config_of("llama-tiny", 3), GPTQ)
    one, three = work_of(Job.of(config_of("llama-tiny", 1), GPTQ), 2, 64), work_of(job, 2, 64)
    block = block_work(job, 0, 2, 64)
    assert three.hessian_flops == 3 * block.hessian_flops == 3 * one.hessian_flops
    assert three.forward_flops - one.forward_flops == 2 * block.forward_flops


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_models_are_planned(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE[name]))
    planned = qtool.plan(str(tmp_path), "w4a8-lqq", recipe="best")
    assert planned.place and planned.device == H200.name
    assert planned.seconds > 60 and planned.device_bytes > 1e9 and planned.host_bytes > 1e9
    assert planned.disk_bytes >= planned.output_bytes > 0.25 * planned.source_bytes
    assert "calibration activations" in as_text(planned) and "(first run 8 s more)" in as_text(
        planned
    )


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_a_plan_of_latent_attention_has_the_shapes_of_transformers(kind: str) -> None:
    small = LARGE["deepseek-v3"] | {
        "model_type": kind,
        "hidden_size": 128,
        "intermediate_size": 192,
        "vocab_size": 64,
    }
    small |= {
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    small |= {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    small |= {"q_lora_rank": 64 if kind == "deepseek_v3" else None, "kv_lora_rank": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    shapes = Job.of(small, GPTQ).source_shapes()
    # stacked by transformers
    theirs = {name: t for name, t in model.state_dict().items() if ".experts." not in name}
    assert {name: shape for name, shape in shapes.items() if ".experts." not in name} == {
        name: tuple(t.shape) for name, t in theirs.items()
    }
    assert sum(map(prod, shapes.values())) == sum(t.numel() for t in model.state_dict().values())


def test_a_plan_of_deepseek_v3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE["deepseek-v3"]))
    planned = qtool.plan(str(tmp_path), "w4a8-lqq", recipe="fast")
    assert "mlp.experts.*.up_proj (256)" in as_text(planned)
    # billions of parameters, as its authors count them
    assert round(planned.source_bytes / 2e9) == 671


def test_deepseek_v3_fits_one_h200_by_every_recipe() -> None:
    """A block's 256 experts are 11.3 billion weights.

    They are held in 16 bits, in float32 and once more for the float model; of their Hessians, 52.6
    GB for the gates, as many as are solved in turn.
    """
    cuda = torch.device("cuda")
    experts = 256 * 3 * 7168 * 2048
    for name, copies in (("paper", 6), ("best", 8)):
        job = Job.of(LARGE["deepseek-v3"], recipes.load("w4a8-lqq", name))
        held = working_bytes(job, 0, 2048, cuda)
        assert copies * experts < held < 140e9
    all_at_once = held - MOST_HESSIAN_BYTES + 256 * 4 * 7168**2
    assert all_at_once > 140e9 and hessians_at_once(7168) < 256 == min(256, hessians_at_once(2048))


def test_experts_cost_what_their_tokens_cost() -> None:
    job = Job.of(LARGE["mixtral-8x22b"], GPTQ)
    block = block_shape(job, 0, 1, 2048)
    assert block.share("block_sparse_moe.experts.3.w1") == 0.25
    dense = sum(n * k for name, (n, k) in block.linears.items() if "experts" not in name)
    experts = sum(n * k for name, (n, k) in block.linears.items() if "experts" in name)
    assert block.forward_flops() == 2 * 2048 * (dense + experts / 4) + block.attention_flops()


def test_what_learning_keeps_is_planned() -> None:
    """The targets of all tokens, and what a step keeps for its gradients: of experts, their tokens'
    share of it.
    """
    recipe, cuda = recipes.parse(DISTILLED, "distill"), torch.device("cuda")
    for name in ("mixtral-8x22b", "llama-3.1-405b"):
        job, hidden = Job.of(LARGE[name], recipe), LARGE[name]["hidden_size"]
        plain = Job.of(LARGE[name], recipes.parse(DISTILLED | {"rounding": "rtn"}, "rtn"))
        two, one = (working_bytes(job, tokens, 500, cuda) for tokens in (101_000, 100_000))
        assert (
            two - one
            == 1000 * hidden * 2
            > working_bytes(plain, 101_000, 500, cuda) - working_bytes(plain, 100_000, 500, cuda)
            == 0
        )
        seen = sum(
            block_shape(job, 0, 1, 1).share(n) * sum(shape) for n, shape in job.linears(0).items()
        )
        assert working_bytes(job, 101_000, 1000, cuda) > two  # an iteration's windows are longer
        kept = job.rounding.iteration * 500 * 2 * seen
        assert one - 100_000 * hidden * 2 - working_bytes(plain, 100_000, 500, cuda) > kept
        assert name == "llama-3.1-405b" or seen < 0.5 * sum(map(sum, job.linears(0).values()))
    shape = block_shape(job, 0, 256, 2048)
    work = job.rounding.work(shape)
    # 10 epochs: 7 of 8 sequences thrice, 1 of 8 once
    assert work.learning_flops == 27.5 * work.forward_flops
    assert work.learning_weights == 10 * 7 / 8 * 256 / job.rounding.iteration * shape.weights


def test_searches_are_planned_in_the_turns_that_run(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts several share a turn, as memory is meant to hold them."""
    source = make_model("qwen3_moe", num_experts=8)
    model, family = (
        skeleton(AutoConfig.from_pretrained(source)),
        family_of({"model_type": "qwen3_moe"}),
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)  # a router that starves no expert
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for buffer in model.buffers():
        buffer.zero_()
    ids = torch.arange(480).remainder(320).view(4, 120)
    batches, own = first_inputs(model, family, list(ids.split(2))), family.at(model.config, 0)
    recipe = recipes.parse(LQQ | {"transforms": ["smooth", "clip"]}, "test")
    job = Job.of(json.loads((source / "config.json").read_text()), recipe)
    shape, turns = block_shape(job, 0, 4, 120), []
    factors, search = smooth.best_factors, clip.search

    def counted_factors(stacks: Any, *rest: Any) -> Any:
        whole = list(stacks())
        turns.extend(len(weight) for _, weight, _ in whole)
        return factors(lambda: whole, *rest)

    def counted_clips(scheme: Any, weight: torch.Tensor, *rest: Any) -> Any:
        turns.append(len(weight))
        return search(scheme, weight, *rest)

    monkeypatch.setattr(smooth, "best_factors", counted_factors)
    monkeypatch.setattr(clip, "search", counted_clips)
    pairs = zip(job.transforms, (512, 1024), (37, 23), strict=True)
    for method, tokens, candidates in pairs:
        for most in (1, 3, 1000):
            nbytes = most * stacking.search_bytes(256, 128, tokens)
            monkeypatch.setattr(stacking, "TOGETHER", (nbytes, nbytes))
            module = model.get_submodule(family.blocks)[0]  # type: ignore[index]
            schemes = dict.fromkeys(own.linears(), get("w4a8-lqq", 64))
            turns.clear()
            method.apply(Block(0, module, own, model.config, schemes), batches)
            assert sum(turns) == len(schemes) and (len(turns) < len(schemes) or most == 1)
            assert method.work(shape).search_tries == candidates * len(turns)


def test_where_activations_go_is_planned() -> None:
    job = Job.of(config_of("llama-2-70b"), ALIKE)
    roomy, tight = plan(job, host_memory=64e9), plan(job, device_memory=33e9, host_memory=64e9)
    assert (roomy.place, tight.place) == ("device", "both")
    assert roomy.activation_bytes == tight.activation_bytes == 128 * 2048 * 8192 * 2
    on_host = tight.host_bytes - roomy.host_bytes
    assert roomy.device_bytes - tight.device_bytes == on_host
    assert 0 < on_host < roomy.activation_bytes and tight.device_bytes <= DEVICE_SHARE * 33e9
    full = plan(job, device_memory=16e9, host_memory=1e9)
    assert full.place == "disk" and full.disk_bytes == full.output_bytes + full.activation_bytes
    assert plan(job, samples=256, host_memory=64e9).activation_bytes == 2 * roomy.activation_bytes
    named = {p: plan(job, host_memory=64e9, place=p) for p in ("device", "host", "disk")}
    assert named["device"] == roomy
    host, disk = named["host"], named["disk"]
    assert (host.place, disk.place) == ("host", "disk") and host.device_bytes == disk.device_bytes
    assert host.host_bytes - disk.host_bytes == roomy.activation_bytes
    assert disk.disk_bytes - host.disk_bytes == roomy.activation_bytes
    over = plan(job, device_memory=16e9, host_memory=64e9, place="device")
    assert over.device_bytes > over.device_memory and "it does not fit" in as_text(over)
    assert qtool.plan("demo", "w8a8", recipe="paper", activations="disk").place == "disk"
    assert roomy.resume_bytes == 2 * roomy.activation_bytes and "to continue from" in as_text(roomy)


def test_windows_are_planned_up_to_the_context() -> None:
    job = Job.of(config_of("llama-tiny") | {"max_position_embeddings": 512}, GPTQ)
    assert plan(job, seqlen=4096).activation_bytes == plan(job, seqlen=512).activation_bytes
    assert plan(job, seqlen=256).activation_bytes < plan(job, seqlen=512).activation_bytes


def test_host_and_device_memory_do_not_grow_with_depth() -> None:
    few, many = (plan(Job.of(config_of("llama-2-70b", layers), ALIKE)) for layers in (4, 80))
    assert (few.host_bytes, few.device_bytes) == (many.host_bytes, many.device_bytes)


def test_the_inputs_that_gradients_need_are_planned_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of all blocks, for a few windows; the rest is the same with more blocks."""
    monkeypatch.setattr(Gptq, "spare_bytes", lambda *_: 0)  # it needs less without
    job, deeper = (Job.of(config_of("llama-2-70b", layers), GPTQ) for layers in (80, 160))
    inputs = 2 * LEARNING_SEQUENCES * 2048 * 8192  # of a block, in 16 bits
    roomy, deep = (plan(one, host_memory=64e9) for one in (job, deeper))
    assert deep.device_bytes - roomy.device_bytes == 80 * inputs
    few, cuda = LEARNING_SEQUENCES * 2048, torch.device("cuda")
    beside = working_bytes(source_job(job), 80 * few, 2048, cuda) + gradient_bytes(job, few)
    assert roomy.device_bytes == 80 * inputs + beside > 80 * inputs + 4 * 2 * few * 8192
    tight = plan(job, device_memory=33e9, host_memory=64e9)
    moved = roomy.device_bytes - tight.device_bytes
    assert 0 < moved == tight.host_bytes - roomy.host_bytes < 80 * inputs
    assert tight.device_bytes <= DEVICE_SHARE * 33e9


def test_a_random_checkpoint_is_quantized_and_timed(tmp_path: Path) -> None:
    options = {"samples": 2, "seqlen": 32, "device": "cpu", "activations": "auto", "progress": None}
    measured = bench_quantize(
        "llama-tiny", "w4a8-lqq", recipe="paper", layers=2, work=tmp_path, keep=False, **options
    )
    phases = measured.record["phases"]
    expected = {"windows", "read", "forward", "search", "rounding", "pack", "write"}
    assert expected | {"write, beside"} <= set(phases)
    assert set(measured.floors) == {
        "read",
        "forward",
        "Hessian",
        "search",
        "rounding",
        "pack",
        "write",
    }
    inner = sum(seconds for name, seconds in phases.items() if "beside" not in name)
    assert inner <= measured.record["seconds"]
    assert "of floor" in measured.table()
    assert "device" not in measured.table() and "16-bit 0," not in measured.table()  # of a CPU
    found = json.loads(json.dumps(measured.as_dict()))
    assert found["planned"]["peak_host_bytes"] == measured.planned.host_bytes
    out = tmp_path / "llama-tiny-2-w4a8-lqq"
    assert (tmp_path / "llama-tiny-2" / "config.json").exists() and not out.exists()
    assert not record_path(out).exists()
    bench_quantize(
        "llama-tiny", "w4a8-lqq", recipe="paper", layers=2, work=tmp_path, keep=True, **options
    )
    kept = json.loads((out / "qtool.json").read_text())["bench"]
    assert (
        kept["floors"].keys() == measured.floors.keys()
        and kept["record"]["phases"].keys() == phases.keys()
    )


def test_memory_of_a_gpu_is_not_that_of_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="--device-memory 8: --device cuda is expected"):
        bench_quantize("llama-tiny", "w8a8", layers=1, device_memory=8, work=tmp_path, samples=1,
                       seqlen=16, device="cpu")  # fmt: skip


def test_the_gpu_of_a_measured_run_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current_gpus: list[object]
) -> None:
    """Triton launches on that, whatever GPU the tensors are on."""

    def run(*_: Any, device: str, **options: Any) -> None:
        raise QtoolError(f"run on {device} beside {current_gpus}")

    monkeypatch.setattr("qtool.bench.quantize.run", run)
    with pytest.raises(QtoolError, match=r"run on cuda:1 beside \['cuda:1'\]"):
        bench_quantize("llama-tiny", "w8a8", layers=1, device="cuda:1", work=tmp_path)


def test_the_shapes_of_random_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"llama-9: no such .*; shapes .*: llama-tiny, llama-2"):
        bench_quantize("llama-9", "w8a8", work=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_the_time_of_continued_windows_is_part_of_a_run(tmp_path: Path) -> None:
    recipe = tmp_path / "continued.yaml"
    recipe.write_text(
        "scheme: w4a16\nwindows: continued\ntransforms: [smooth]\n"
        "layers: [{match: '.*', scheme: w4a16, group_size: 128}]\nrounding: rtn\n"
    )
    measured = bench_quantize(
        "llama-tiny", None, recipe=str(recipe), layers=1, work=tmp_path, keep=True, samples=2,
        seqlen=32, device="cpu",
    )  # fmt: skip
    phases, floors = measured.record["phases"], measured.floors
    assert floors["windows"] > 0 and phases["windows"] > 0
    inner = sum(seconds for name, seconds in phases.items() if "beside" not in name)
    assert inner <= measured.record["seconds"]
    kept = json.loads((tmp_path / "llama-tiny-1-w4a16" / "qtool.json").read_text())
    assert kept["calibration"]["windows"] == "continued"


def test_ceilings_are_of_the_directory_that_is_written(
    make_model: MakeModel, tmp_path: Path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    measure, probed, work = bench.measure, [], tmp_path / "work"

    def probe(source: Checkpoint, directory: Path, device: torch.device) -> Ceilings:
        probed.append(directory)
        return measure(source, directory, device)

    monkeypatch.setattr(bench, "measure", probe)
    bench_quantize(
        str(make_model(name="models/tiny")),
        "w8a8",
        recipe=None,
        layers=None,
        work=work,
        keep=False,
        samples=2,
        seqlen=32,
        device="cpu",
    )
    assert probed == [work]


def test_floors_are_of_windows_as_long_as_the_context(
    tmp_path: Path,
    make_model,  # type: ignore[no-untyped-def]
) -> None:
    source = make_model(max_position_embeddings=16)
    options = {"work": tmp_path, "samples": 2, "seqlen": 64, "device": "cpu"}
    measured = bench_quantize(str(source), "w4a16", recipe="paper", **options)
    flops = measured.floors["forward"] * measured.ceilings.sixteen_bit
    assert flops == pytest.approx(work_of(measured.planned.job, 2, 16).forward_flops)


def test_iterations_that_learn_pass_over_their_weights() -> None:
    """Beside their products: the numbers that an iteration reads and writes of each."""
    machine = Ceilings(read=1, write=1, memory=4, sixteen_bit=2, tf32=1, float32=1)
    work = Work(learning_flops=6, learning_weights=8)
    assert machine.floors(work, None)["rounding"] == 6 / 2 + 44 * 8 / 4
    for rates in (H200, CPU):
        second = Work(learning_weights=rates.learning_weights)
        assert rates.seconds(second) == pytest.approx(rates.start + 1)


def test_a_wrapper_is_timed_as_its_text_model(tmp_path: Path) -> None:
    source = save_tiny("mistral3", tmp_path / "mistral3")
    options = {"work": tmp_path, "samples": 2, "seqlen": 16, "device": "cpu"}
    measured = bench_quantize(str(source), "w4a16", recipe="best", **options)
    assert measured.floors["forward"] > 0


def test_a_checkpoint_that_is_no_measured_run_is_not_replaced(tmp_path: Path) -> None:
    source = make(config_of("llama-tiny", 1), tmp_path / "tiny")
    own = qtool.quantize(source, "w8a8", out=tmp_path / "tiny-w8a8").directory
    options: dict[str, Any] = {"work": tmp_path, "samples": 2, "seqlen": 16, "device": "cpu"}
    with pytest.raises(QtoolError, match="tiny-w8a8 is no measured run, and not replaced"):
        bench_quantize(str(source), "w8a8", **options)
    assert (own / "config.json").is_file()
    mine = own.rename(tmp_path / "tiny-w8a8.partial")
    with pytest.raises(QtoolError, match=r"tiny-w8a8\.partial is an unfinished run"):
        bench_quantize(str(source), "w8a8", **options)
    assert (mine / "config.json").is_file()
    mine.rename(tmp_path / "mine")
    for _ in range(2):
        bench_quantize(str(source), "w8a8", keep=True, **options)


def test_several_processes_measure_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_world", ranks.World(0, 2))
    with pytest.raises(QtoolError, match="measured in one process: start no others"):
        bench_quantize("llama-tiny", "w8a8", work=tmp_path / "work", samples=2, seqlen=16)
    assert not (tmp_path / "work").exists()


def test_a_killed_random_checkpoint_is_made_whole_and_a_whole_one_kept(tmp_path: Path) -> None:
    whole = make(config_of("llama-tiny", 1), tmp_path / "whole")
    killed = tmp_path / "llama-tiny-1"
    killed.mkdir()
    (killed / "model-00001.safetensors").write_bytes(b"cut")
    make(config_of("llama-tiny", 1), killed)
    for file in whole.iterdir():
        assert (killed / file.name).read_bytes() == file.read_bytes(), file.name
    written = {file: file.stat().st_mtime_ns for file in whole.iterdir()}
    make(config_of("llama-tiny", 1), whole)
    assert {file: file.stat().st_mtime_ns for file in whole.iterdir()} == written


def test_shapes_have_the_parameters_that_their_authors_count() -> None:
    counted = {"llama-2-13b": 13.0, "llama-3.1-405b": 405.9, "qwen3-235b-a22b": 235.1}
    for name, billions in (counted | {"deepseek-v3": 671.0}).items():
        shapes = Job.of(config_of(name), GPTQ).source_shapes()
        assert round(sum(map(prod, shapes.values())) / 1e9, 1) == billions, name


@pytest.mark.parametrize("shape", ["qwen3-235b-a22b", "deepseek-v3"])
def test_a_shape_with_experts_is_quantized_at_a_tiny_size(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256}
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 64}
    count = "num_experts" if "num_experts" in SHAPES[shape] else "n_routed_experts"
    tiny |= {count: 16, "num_experts_per_tok": 2}
    if shape == "deepseek-v3":
        tiny |= {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
        tiny |= {"first_k_dense_replace": 1}
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | tiny)
    measured = bench_quantize(
        shape,
        "w4a8-lqq",
        recipe="paper",
        layers=2,
        work=tmp_path,
        keep=True,
        samples=2,
        seqlen=32,
        device="cpu",
    )
    assert measured.planned.job.blocks == 2
    kept = json.loads((tmp_path / f"{shape}-2-w4a8-lqq" / "config.json").read_text())
    assert kept["model_type"] == SHAPES[shape]["model_type"] and kept[count] == 16


def test_random_checkpoints_are_alike(tmp_path: Path) -> None:
    one, two = (make(config_of("llama-tiny", 1), tmp_path / name) for name in "ab")
    name = "model-00001.safetensors"
    assert (one / name).read_bytes() == (two / name).read_bytes()


def test_blocks_that_a_rule_leaves_alone_are_listed() -> None:
    rules = [
        {"match": r"layers\.[013]\.", "scheme": None},
        {"match": ".*", "scheme": "w4a16", "group_size": 128},
    ]
    planned = plan(Job.of(config_of("llama-tiny", 6), recipes.parse({"layers": rules}, "mixed")))
    assert [kind.blocks for kind in planned.kinds] == [[0, 1, 3], [2, 4, 5]]
    assert {x.scheme for x in planned.kinds[0].linears} == {"bfloat16"}
    assert {x.scheme for x in planned.kinds[1].linears} == {"w4a16"}
    rows = [line.split() for line in as_text(planned).splitlines() if "q_proj" in line]
    assert [row[:2] + row[5:7] for row in rows] == [
        ["0-1,", "3", "256", "bfloat16"],
        ["2,", "4-5", "256", "w4a16"],
    ]
    packed = sum(len(k.blocks) * sum(x.nbytes for x in k.linears) for k in planned.kinds)
    norms = 6 * 2 * 256 * 2
    assert packed + norms == sum(planned.shard_bytes[1:-1])


def test_gpus_share_what_is_split(tmp_path: Path) -> None:
    """Of 8B with smoothing, clipping and GPTQ two H200 took 28.65 s and one 53.08."""
    recipe = recipes.load(None, str(PAPER_GPTQ))
    job = Job.of(config_of("llama-3-8b"), recipe)
    one, two, four = (plan(job, host_memory=256e9, gpus=gpus) for gpus in (1, 2, 4))
    assert one.seconds > two.seconds > four.seconds > one.seconds / 4
    assert two.seconds / one.seconds == pytest.approx(28.65 / 53.08, rel=0.1)
    assert one.activation_bytes == two.activation_bytes == four.activation_bytes
    assert two.device_bytes < one.device_bytes and one.host_bytes < two.host_bytes
    assert "on 2 NVIDIA H200s" in as_text(two) and "memory of each about" in as_text(two)
    assert as_dict(two)["gpus"] == 2
    with pytest.raises(QtoolError, match="--gpus 2 needs --device cuda"):
        plan(job, device="cpu", gpus=2)


def test_what_does_not_fit_the_device_is_said() -> None:
    for recipe in (GPTQ, recipes.load("w4a16", "fast")):
        job = Job.of(config_of("llama-3-8b"), recipe)
        needed = plan(job, device_memory=1e9).device_bytes
        tight = plan(job, device_memory=1e9)
        assert "it does not fit: the device has 1.00 GB" in as_text(tight)
        assert as_dict(tight)["device_memory_bytes"] == 1e9 < as_dict(tight)["peak_device_bytes"]
        assert "fit:" not in as_text(plan(job, device_memory=1.2 * needed))
        assert "fit:" not in as_text(plan(job, device="cpu"))


def test_a_run_on_the_cpu_is_planned() -> None:
    job = Job.of(config_of("llama-tiny"), GPTQ)
    cpu, gpu = (plan(job, host_memory=64e9, device=device) for device in ("cpu", "cuda"))
    assert plan(job, host_memory=64e9, device="cpu", place="host") == cpu
    assert (cpu.device_bytes, cpu.place) == (0, "host") and cpu.shard_bytes == gpu.shard_bytes
    assert cpu.host_bytes > cpu.activation_bytes == 2 * gpu.activation_bytes  # float32
    said = as_text(cpu)
    assert "on two CPU cores: time about" in said and "H200" not in said and "device" not in said


@pytest.mark.parametrize(("variant", "pieces"), [("paper", 2), ("best", 7)])
def test_pieces_of_embedding_and_head_are_planned_beside_the_blocks(
    variant: str, pieces: int
) -> None:
    recipe = recipes.load("w8a8", variant)
    few, some, many = (
        plan(Job.of(config_of("llama-tiny") | {"vocab_size": size}, recipe), 2, 32, device="cpu")
        for size in (512, 1024, 1 << 20)
    )
    assert some.host_bytes - few.host_bytes == pieces * 4 * 512 * 256
    assert many.host_bytes - few.host_bytes == pieces * (PIECE_BYTES - 4 * 512 * 256)


def test_weights_are_rounded_to_nearest_on_the_device_of_the_run() -> None:
    rotated = LQQ | {"transforms": ["norm-fusion", {"rotate": {"learn_steps": 0}}]}
    for data in (LQQ, rotated):
        job = Job.of(config_of("llama-tiny"), recipes.parse(data, "mine"))
        assert not job.needs_data and job.is_plain == (data is LQQ)
        cpu, gpu, two = (plan(job, device="cpu"), plan(job), plan(job, gpus=2))
        assert cpu.device_bytes == 0 < gpu.device_bytes == two.device_bytes
        shared = gpu.seconds if data is LQQ else gpu.seconds - H200.start  # the rest is each one's
        assert gpu.seconds - shared / 2 <= two.seconds < gpu.seconds
        for where, planned in (("one NVIDIA H200", gpu), ("two CPU cores", cpu)):
            (said,) = (line for line in as_text(planned).splitlines() if "time about" in line)
            assert said.startswith(f"on {where}: time about") and "calibration" not in said
            assert planned.device == where.removeprefix("one ")


def test_the_first_line_of_a_plan_is_in_its_json(make_model: MakeModel) -> None:
    planned = qtool.plan(make_model(), "w4a8-lqq", recipe="best", kv="kv4", for_export=True)
    said, found = as_text(planned).splitlines(), as_dict(planned)
    methods = " -> ".join(found["methods"])
    assert said[0] == (
        f"{found['family']}, {found['blocks']} blocks, {found['scheme']}, KV cache in "
        f"{found['kv']}, recipe {found['recipe']}: {methods}"
    )
    assert "smooth-attention" in methods and found["kv"] == "kv4"
    assert said[1 : 1 + len(found["notes"])] == found["notes"]


def test_small_sizes_are_not_said_to_be_zero(make_model: MakeModel) -> None:
    said = as_text(plan(Job.of(Checkpoint(make_model()).config, recipes.load("w4a16"))))
    assert " 0.00 GB" not in said and "read 1.90 MB, write 539 kB (3.53 times smaller)" in said


def test_what_grows_is_not_called_smaller() -> None:
    assert (times(3.0, 2.0), times(2.0, 3.0)) == ("1.50 times smaller", "1.50 times larger")


def test_sizes_that_no_model_has_are_refused_at_once() -> None:
    for key, value in (
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12),
        ("intermediate_size", 10**12),
        ("vocab_size", 10**12),
    ):
        with pytest.raises(QtoolError, match=rf"config.json: .*{value}.*at most"):
            Job.of(config_of("llama-tiny") | {key: value}, GPTQ)
    for name, key in (("mixtral-8x22b", "num_local_experts"), ("deepseek-v3", "n_routed_experts")):
        with pytest.raises(QtoolError, match=r"config.json: .*1000000000.*at most"):
            Job.of(LARGE[name] | {key: 10**9}, GPTQ)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 kB"), (1500, "2 kB"), (999_600, "1.00 MB"), (15.23e6, "15.2 MB")),
        *((1e9, "1.00 GB"), (9.996e9, "10.0 GB"), (99.96e9, "100 GB")),
    ],
)
def test_byte_counts_have_three_digits(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_the_bytes_of_a_linear_are_those_of_its_tensors(make_model: MakeModel) -> None:
    """Input permutations too."""
    job = Job.of(Checkpoint(make_model()).config, recipes.load("w4ax-fmpq", "best"))
    stored = job.block_tensors(0)
    assert any(name.endswith(".permutation") for name in stored)
    for linear in plan(job).linears:
        own = [t for name, t in stored.items() if name.startswith(job.full(0, linear.name) + ".")]
        assert own and linear.nbytes == sum(t.numel() * t.dtype.itemsize for t in own)


@pytest.mark.parametrize(
    ("variant", "heads", "scheme", "served"),
    [
        ("llama", 4, "w4a4-mix", False),
        ("llama", 4, "w8a8", True),
        ("falcon", 8, "w4a8-lqq", False),  # heads of 32 rows do not fill tiles of 64
        ("falcon", 4, "w4a8-lqq", True),
        ("falcon", 8, "w8a8", True),
    ],
)
def test_plan_run_and_card_say_alike_what_vllm_does_not_serve(
    variant: str,
    heads: int,
    scheme: str,
    served: bool,
    make_model: MakeModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(variant, hidden_size=256, num_attention_heads=heads)
    planned = qtool.plan(model, scheme)
    said = [line for line in as_text(planned).splitlines() if "vLLM cannot serve it: " in line]
    native = qtool.quantize(model, scheme, out=tmp_path / "native").directory
    card = (native / "README.md").read_text().splitlines()
    assert [line.removesuffix(".") for line in card if "vLLM cannot serve it: " in line] == said
    assert [line for line in caplog.messages if "vLLM cannot serve it: " in line] == said
    assert (as_dict(planned)["not_served"] is None) == (not said) == served


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, r"layers\.0\.\S*experts: only experts that are SiLU"),
        ({"swiglu_limit": 7.0}, r"gate and up are clamped, at 7\.0, are not served"),
        ({}, None),
    ],
)
def test_a_plan_says_that_vllm_computes_no_such_experts(
    change: dict[str, Any], said: str | None, make_model: MakeModel
) -> None:
    found = as_dict(qtool.plan(make_model("mixtral", **change), "w8a8"))["not_served"]
    assert re.search(said, found) if said else found is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [("llama4_text", "weighted at their outputs"), ("nemotron_h", "SiLU"), ("deepseek_v4", "10.0")],
)
def test_a_plan_says_that_vllm_computes_no_experts_of_a_family(
    kind: str, said: str, tmp_path: Path
) -> None:
    planned = qtool.plan(save_tiny(kind, tmp_path / "source"), "w8a8")
    assert said in as_dict(planned)["not_served"]


def test_a_text_needs_a_tokenizer_in_a_plan_as_in_a_run(make_model: MakeModel) -> None:
    source, how = make_model(), {"recipe": "paper"}
    assert qtool.plan(source, "w8a8", **how).host_bytes
    for call in (qtool.plan, qtool.quantize):
        with pytest.raises(QtoolError, match="there is no tokenizer"):
            call(source, "w8a8", calibration="demo", **how)
    assert not list(source.parent.glob("*w8a8*"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_group_that_does_not_divide_names_its_linear(tied: bool) -> None:
    sizes = {"hidden_size": 192, "head_dim": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = config_of("llama-tiny") | sizes | {"tie_word_embeddings": tied}
    with pytest.raises(QtoolError, match=r"q_proj: w4a16: 192 .* \(sizes that do: channel\)"):
        Job.of(config, recipes.load("w4a16", "best"))
