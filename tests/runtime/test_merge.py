"""Merged linears: one product of all, to the bit that of each, in the modules that were there."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.runtime import linear as linear_module
from qtool.runtime.dispatch import KERNELS, Kernel
from qtool.runtime.huggingface import dequantized, quantized_linears, replace_linears
from qtool.runtime.linear import QuantLinear
from qtool.runtime.merge import MergedLinears, merge_linears, norms_taken_along
from tests.runtime.test_linear import quantized

#: whose packed tensors are stored by rows
BY_ROWS = [("w4a8-lqq", "dual-mma"), ("w4a8-qoq", "dual-mma"), ("w8a8", "row-major-8")]


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU runs the references of the kernels' ops, as a GPU its kernels."""

    def kernel_for(linear_format: LinearFormat, *given: Any) -> Kernel | None:
        kernel = KERNELS.get((linear_format.scheme, linear_format.layout), (None,))[0]
        return kernel if kernel is not None and given[-1] in kernel.dtypes else None

    monkeypatch.setattr(linear_module, "kernel_for", kernel_for)


def llama(scheme: str, layout: str, layers: int = 2) -> Any:
    """A packed Llama of random weights; v is wider than k would be, gate and up are alike."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64}
    config = LlamaConfig(**sizes, **heads, attention_bias=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    linear_format = LinearFormat(scheme, None if scheme != "w4a8-lqq" else 64, layout)
    weights = {name: module.weight for name, module in model.named_modules() if _linear(module)}
    replace_linears(model, CheckpointFormat(scheme, (Rule(r"layers\.", linear_format),)))
    for name, packed in quantized_linears(model).items():
        kind, weight = packed.format.scheme_object, weights[name].detach().float()
        params = kind.fit(weight)
        for part, tensor in packed.format.pack(kind.quantize(weight, params), params).items():
            packed.get_buffer(part).copy_(tensor)
        if packed.bias is not None:
            packed.bias.copy_(torch.randn(packed.out_features))
    return model


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(("scheme", "layout"), BY_ROWS)
@pytest.mark.usefixtures("with_kernels")
def test_one_product_is_that_of_each(scheme: str, layout: str) -> None:
    torch.manual_seed(0)
    parts = [quantized(scheme, layout, torch.randn(n, 256)) for n in (128, 64, 64)]
    x = torch.randn(2, 3, 256)
    expected = [part(x) for part in parts]
    stored = [{name: t.clone() for name, t in part.state_dict().items()} for part in parts]
    MergedLinears(parts)
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
        for i in order:
            assert torch.equal(parts[i](x), expected[i])
    for part, before in zip(parts, stored, strict=True):
        after = part.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert all(tensor.is_contiguous() for tensor in after.values())


@pytest.mark.usefixtures("with_kernels")
def test_a_merged_model_computes_the_same_with_a_product_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama(*BY_ROWS[0])
    ids = torch.randint(0, 64, (2, 9))
    expected = model(ids).logits
    products = []
    multiply = QuantLinear.multiply

    def counted(linear: QuantLinear, *arguments: Any) -> Any:
        products.append(linear.out_features)
        return multiply(linear, *arguments)

    monkeypatch.setattr(QuantLinear, "multiply", counted)
    merge_linears(model)
    assert torch.equal(model(ids).logits, expected)
    assert products == [128 + 64 + 64, 128, 192 + 192, 128] * 2
    plain = dequantized(copy.deepcopy(model))
    assert not quantized_linears(plain) and len(quantized_linears(model)) == 14
    weight = model.model.layers[0].mlp.up_proj.dequantize()
    assert torch.equal(plain.model.layers[0].mlp.up_proj.weight, weight.to(torch.bfloat16))


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(("scheme", "layout"), BY_ROWS)
def test_what_reads_rotated_inputs_is_merged_with_its_norm(scheme: str, layout: str) -> None:
    model = llama(scheme, layout)
    for block in model.model.layers:
        for linear in (block.mlp.gate_proj, block.mlp.up_proj, block.self_attn.q_proj):
            linear.format = replace(linear.format, rotated=True)
    ids = torch.randint(0, 64, (2, 9))
    expected = model(ids).logits
    merge_linears(model)
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    assert mlp.gate_proj.merged is mlp.up_proj.merged is not None
    assert attention.q_proj.merged is None  # k and v read the same, not rotated
    assert torch.equal(model(ids).logits, expected)
    with norms_taken_along():
        assert torch.equal(model(ids).logits, expected)
    plain = dequantized(model)(ids).logits
    assert (plain - expected).norm() < 0.1 * expected.norm()


@pytest.mark.usefixtures("with_kernels")
def test_moved_or_copied_linears_are_on_their_own() -> None:
    model = llama(*BY_ROWS[0])
    merge_linears(model)
    ids = torch.randint(0, 64, (1, 5))
    expected = model(ids).logits
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, expected)
    attention = model.model.layers[0].self_attn
    attention.k_proj.qweight = attention.k_proj.qweight.clone()
    attention.k_proj.qweight.zero_()
    assert not torch.equal(model(ids).logits, expected)
    assert torch.equal(other(ids).logits, expected)


@pytest.mark.usefixtures("with_kernels")
def test_other_layouts_formats_and_permutations_are_not_merged() -> None:
    model = llama("w4a8-lqq", "compute-aware")  # level-2 parameters are stored by groups
    merge_linears(model)
    assert all(linear.merged is None for linear in quantized_linears(model).values())
    model = llama(*BY_ROWS[0])
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    attention.k_proj.format = LinearFormat("w4a8-lqq", 32, "dual-mma")
    mlp.up_proj.permutation = torch.arange(128, dtype=torch.int32)
    merge_linears(model)
    alone = {name for name, linear in quantized_linears(model).items() if linear.merged is None}
    assert {name for name in alone if name.split(".")[-1][0] in "qkvgu"} == {
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qkv"),
        *(f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up")),
    }


def test_without_a_kernel_nothing_is_merged() -> None:
    model = llama(*BY_ROWS[0])
    merge_linears(model)
    assert all(linear.merged is None for linear in quantized_linears(model).values())


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(("scheme", "layout"), BY_ROWS)
def test_norms_are_taken_along_only_where_asked_and_only_by_their_readers(
    scheme: str, layout: str
) -> None:
    """The reference of the fused op rounds as transformers' norm: the same logits to the bit."""
    model = llama(scheme, layout)
    for name, norm in model.named_parameters():
        if name.endswith("layernorm.weight"):
            nn.init.normal_(norm)
    ids, calls = torch.randint(0, 64, (1, 5)), []
    model.model.layers[0].input_layernorm.register_forward_hook(
        lambda _, given, out: calls.append(out is given[0])
    )
    expected = model(ids).logits
    merge_linears(model)
    assert torch.equal(model(ids).logits, expected)
    with norms_taken_along():
        assert torch.equal(model(ids).logits, expected)
        replaced = copy.deepcopy(model)
        assert torch.equal(replaced(ids).logits, expected)
        attention = model.model.layers[0].self_attn
        plain = nn.Linear(128, 64, dtype=torch.bfloat16)
        weight, bias = attention.v_proj.dequantize().bfloat16(), attention.v_proj.bias
        plain.load_state_dict({"weight": weight, "bias": bias})
        attention.v_proj = plain
        close = model(ids).logits
    assert calls[:3] == [False, False, True] and calls[-1] is False
    assert (close - expected).norm() < 0.05 * expected.norm()
