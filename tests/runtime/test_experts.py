"""Experts of a packed mixture in one launch a stack: what they compute, and when they do."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

import qtool
from qtool.models.experts import SeparateExperts
from qtool.runtime.decode import graph_decoding
from qtool.runtime.experts import GroupedExperts, group_experts
from qtool.runtime.huggingface import dequantized
from qtool.runtime.load import load, load_as_stored
from qtool.runtime.merge import merge_linears
from tests.conftest import on_hopper
from tests.models.proof import typical_distance
from tests.models.tiny import save_tiny
from tests.runtime.test_decode import recorded  # noqa: F401  (a fixture)
from tests.runtime.test_merge import with_kernels  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("with_kernels")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Any] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=64
    ),
}
IDS = torch.randint(0, 64, (3, 5), generator=torch.Generator().manual_seed(0))


@pytest.fixture(
    scope="module",
    params=[("mixtral", "w4a8-lqq"), ("qwen3-moe", "w8a8"), ("mixtral", "w4a16")],
    ids="-".join,
)
def packed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed mixture of random weights, in bfloat16."""
    kind, scheme = request.param
    folder = tmp_path_factory.mktemp(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "model")
    qtool.quantize(folder / "model", scheme, recipe="fast", out=folder / "packed")
    return folder / "packed"


def stacks(model: torch.nn.Module) -> list[SeparateExperts]:
    return [module for module in model.modules() if isinstance(module, SeparateExperts)]


@torch.no_grad()
def test_all_at_once_are_one_after_another(packed: Path) -> None:
    model = load_as_stored(packed)
    expected = model(IDS).logits
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    group_experts(model)
    merge_linears(model)
    assert len(stacks(model)) == 2 and all(experts.grouped for experts in stacks(model))
    calls: list[int] = []
    for experts in stacks(model):
        for expert in experts:
            up = expert.get_submodule(experts.roles["up"])
            up.register_forward_pre_hook(lambda *_: calls.append(1))
    found = model(IDS).logits
    assert not calls
    assert typical_distance(found, expected) <= 0.02
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@torch.no_grad()
def test_in_float32_too(packed: Path) -> None:
    """Where a kernel takes 16-bit tokens alone, experts are computed one after another."""
    model = load_as_stored(packed, dtype=torch.float32)
    expected = model(IDS).logits
    group_experts(model)
    assert (model(IDS).logits - expected).norm() <= 0.02 * expected.norm()


@torch.no_grad()
def test_rotated_experts_all_at_once_are_one_after_another(packed: Path) -> None:
    model = load_as_stored(packed)
    plain = model(IDS).logits
    for experts in stacks(model):
        for expert in experts:
            down: Any = expert.get_submodule(experts.roles["down"])
            down.format = replace(down.format, rotated=True)
    exact, expected = dequantized(copy.deepcopy(model))(IDS).logits, model(IDS).logits
    assert (expected - plain).norm() > 0.1 * plain.norm()
    group_experts(model)
    assert all(experts.grouped for experts in stacks(model))
    found = model(IDS).logits
    assert (found - expected).norm() <= 0.02 * expected.norm()
    assert (found - exact).norm() <= 0.1 * exact.norm()


@torch.no_grad()
def test_a_mixture_quantized_with_the_rotation_computes_what_its_unrotated_weights_do(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(CONFIGS["qwen3-moe"], dtype=torch.float32)
    source.save_pretrained(tmp_path / "model")
    rule = {"match": ".*", "scheme": "w8a8", "group_size": "channel"}
    recipe = {"scheme": "w8a8", "layers": [rule], "transforms": ["online-hadamard"]}
    out = qtool.quantize(tmp_path / "model", recipe=recipe, out=tmp_path / "out").directory
    stored = json.loads((out / "config.json").read_text())["quantization_config"]
    assert stored["rotated"] == ["mlp.experts.*.down_proj"] and stored["format_version"] == 2
    model = load(out)
    downs = [one.down_proj for experts in stacks(model) for one in experts]
    assert len(downs) == 12 and all(down.format.rotated for down in downs)
    assert not any(one.gate_proj.format.rotated for experts in stacks(model) for one in experts)
    expected = source(IDS).logits
    for found in (model, dequantized(copy.deepcopy(model))):
        assert (found(IDS).logits - expected).norm() < 0.03 * expected.norm()
    own = source.model.layers[1].mlp.experts.down_proj[3]  # [H, I]
    weight = stacks(dequantized(model))[1][3].down_proj.weight
    assert (weight - own).norm() < 0.01 * own.norm()


@torch.no_grad()
def test_a_token_s_experts_are_weighted(packed: Path) -> None:
    """By the experts' own linears, an expert beyond the last one adds nothing."""
    experts = stacks(load_as_stored(packed))[0]
    x = torch.randn(4, 128).bfloat16()
    index = torch.tensor([[0, 3], [2, 1], [len(experts), 2], [3, 2]])
    weights = torch.rand(4, 2).bfloat16()
    expected = experts(x, index, weights)
    assert experts.grouped is None
    group_experts(torch.nn.ModuleList([experts]))
    assert experts.grouped is not None
    found = experts.grouped(x, index, weights)
    assert found is not None and found.dtype == x.dtype
    assert (found - expected).norm() <= 0.01 * expected.norm()
    apart = experts.grouped(x, index.mT.contiguous().mT, weights.mT.contiguous().mT)
    assert apart is not None and torch.equal(apart, found)  # routers that index give such
    assert experts.grouped(x[:0], index[:0], weights[:0]).shape == (0, 128)  # type: ignore[union-attr]


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("tokens", [1, 20, 500])
@torch.no_grad()
def test_a_gpu_computes_them_as_a_cpu(packed: Path, tokens: int) -> None:
    here, there = (stacks(load(packed, device=device))[0] for device in ("cpu", "cuda"))
    assert here.grouped is None and there.grouped is not None
    x, index = torch.randn(tokens, 128).bfloat16(), torch.rand(tokens, len(here)).topk(2).indices
    weights = torch.rand(tokens, 2).bfloat16()
    expected, found = here(x, index, weights), there(x.cuda(), index.cuda(), weights.cuda()).cpu()
    assert (found - expected).norm() <= 0.02 * expected.norm()


@torch.no_grad()
def test_what_was_replaced_or_is_watched_is_called(packed: Path) -> None:
    model = load_as_stored(packed)
    group_experts(model)
    expected, other = model(IDS).logits, copy.deepcopy(model)
    assert all(experts.grouped is None for experts in stacks(other))
    assert typical_distance(other(IDS).logits, expected) <= 0.02
    seen: list[int] = []
    experts = stacks(model)[0]
    experts.observers[experts.roles["up"]] = lambda x, counts: seen.append(len(x))
    model(IDS)
    assert seen == [IDS.numel() * (2 if len(experts) == 4 else 3)]
    experts.observers.clear()
    down: Any = experts[1].get_submodule(experts.roles["down"])
    down.qweight = torch.zeros_like(down.qweight)
    assert experts.grouped is not None
    assert experts.grouped(torch.zeros(1, 128), torch.tensor([[1]]), torch.ones(1, 1)) is None
    plain = dequantized(other)
    assert (plain(IDS).logits - expected).norm() <= 0.1 * expected.norm()


@torch.no_grad()
def test_steps_of_a_grouped_mixture_are_recorded(packed: Path, recorded: list[str]) -> None:  # noqa: F811
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model = load_as_stored(packed)
    assert not graph_decoding(model)
    group_experts(model)
    merge_linears(model)
    mask = torch.ones_like(IDS)
    expected = model.generate(IDS, attention_mask=mask, **how)
    assert graph_decoding(model)
    assert torch.equal(model.generate(IDS, attention_mask=mask, **how), expected)
    assert recorded[:2] == ["run", "record"] and "replay" in recorded


def test_experts_with_another_function_stay_apart(packed: Path) -> None:
    experts = stacks(load_as_stored(packed))[0]
    experts.stacked.act_fn = torch.nn.GELU()
    group_experts(torch.nn.ModuleList([experts]))
    assert experts.grouped is None


def test_a_stack_needs_a_kernel_for_all_experts(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.runtime.linear.kernel_for", lambda *_: None)
    experts = stacks(load_as_stored(packed))[0]
    group_experts(torch.nn.ModuleList([experts]))
    assert experts.grouped is None
    assert GroupedExperts.__doc__


@pytest.mark.parametrize("kind", ["gpt_oss", "minimax_m3_vl_text"])
def test_experts_with_a_gate_of_their_own_stay_apart(kind: str, tmp_path: Path) -> None:
    qtool.quantize(save_tiny(kind, tmp_path / "m"), "w4a16", recipe="fast", out=tmp_path / "q")
    model = load_as_stored(tmp_path / "q")
    group_experts(model)
    assert stacks(model) and all(experts.grouped is None for experts in stacks(model))
