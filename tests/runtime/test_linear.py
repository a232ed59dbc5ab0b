"""QuantLinear: its packed bytes, its permutation and bias, for every scheme and layout that fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qtool import layouts, schemes
from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, LinearFormat, Rule, of_any_expert
from qtool.layouts.marlin_24 import Marlin24Layout
from qtool.models.auto import running
from qtool.runtime.dispatch import W8A8, Call
from qtool.runtime.linear import QuantLinear
from qtool.schemes import Params
from qtool.schemes.arithmetic.online_hadamard import rotate
from qtool.schemes.w4a16 import Marlin

FITTING = [
    (scheme, layout)
    for scheme, kind in schemes.SCHEMES.items()
    for layout, where in layouts.LAYOUTS.items()
    if kind.code_bits == where.bits and where.sparsity in (None, kind.sparsity)
]


def quantized(
    scheme: str, layout: str, weight: torch.Tensor, *, permuted: bool = False
) -> QuantLinear:
    n, k = weight.shape
    linear_format = LinearFormat(scheme, schemes.SCHEMES[scheme].default_group_size, layout)
    linear = QuantLinear(k, n, linear_format, bias=True, permuted=permuted, dtype=torch.float32)
    kind = linear_format.scheme_object
    params = kind.fit(weight)
    for name, tensor in linear_format.pack(kind.quantize(weight, params), params).items():
        getattr(linear, name).copy_(tensor)
    linear.bias.copy_(torch.randn(n))  # type: ignore[union-attr]
    return linear


@pytest.mark.parametrize(("scheme", "layout"), FITTING)
def test_packed_linear_is_the_scheme(scheme: str, layout: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(128, 256), torch.randn(2, 3, 256)
    linear = quantized(scheme, layout, weight)
    codes, params = linear.unpack()
    expected = linear.format.scheme_object.matmul(x.flatten(0, 1), codes, params, linear.bias)
    assert torch.equal(linear.reference(x.flatten(0, 1)), expected)
    assert (
        torch.equal(linear(x), expected.view(2, 3, 128))
        or schemes.SCHEMES[scheme].activation.bits == 16
    )
    declared = {name: (t.shape, t.dtype) for name, t in linear.format.tensors(128, 256).items()}
    assert {name: (t.shape, t.dtype) for name, t in linear.stored().items()} == declared
    assert linear.format.nbytes(128, 256) == sum(t.nbytes for t in linear.stored().values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("scheme", "layout"), [("w4a16", "marlin"), ("w4a16-24", "marlin-24")])
def test_sixteen_bit_activations_multiply_a_weight_rounded_to_their_dtype(
    scheme: str, layout: str, dtype: torch.dtype
) -> None:
    """What every client of an export computes: one rounding of each weight, the bias inside the
    linear.
    """
    torch.manual_seed(0)
    linear, x = quantized(scheme, layout, torch.randn(128, 256)), torch.randn(2, 3, 256).to(dtype)
    weight = linear.dequantize().to(dtype)
    expected = torch.nn.functional.linear(x, weight, linear.bias.to(dtype))  # type: ignore[union-attr]
    assert torch.equal(linear(x), expected) and linear(x).dtype == dtype
    exact = linear.reference(x.flatten(0, 1)).view(2, 3, 128)
    assert (linear(x) - exact).norm() < 2 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize(
    ("scheme", "layout"), [("w4a8-lqq", "row-major"), ("w4a16", "marlin"), ("w4a4", "apex4")]
)
def test_torch_compile_leaves_the_reference_as_it_is(scheme: str, layout: str) -> None:
    torch.manual_seed(0)
    linear, x = quantized(scheme, layout, torch.randn(128, 256)), torch.randn(3, 256)
    assert torch.equal(torch.compile(linear, backend="aot_eager")(x), linear(x))


def test_what_a_scheme_raises_is_not_said_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul(*given: object) -> None:
        raise KeyError("zero")

    linear = quantized("w8a8", "row-major-8", torch.randn(128, 256))
    monkeypatch.setattr(schemes.SCHEMES["w8a8"], "matmul", matmul)
    said = r"^matmul of the scheme w8a8 fails \(KeyError: 'zero'\)$"
    with pytest.raises(QtoolError, match=said), running():
        linear(torch.ones(1, 256))


@pytest.mark.parametrize("function", ["multiply", "prepare"])
def test_what_a_kernel_raises_is_not_said_of_transformers(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: Call) -> Any:
        raise KeyError("zero")

    linear = quantized("w8a8", "row-major-8", torch.randn(128, 256))
    wrong = replace(W8A8, **{"name": "mine", "prepare": None, function: fail})
    monkeypatch.setattr(linear, "kernel", lambda *_: wrong)
    x = torch.ones(1, 256)
    with pytest.raises(QtoolError, match=r"kernel mine fails \(KeyError: 'zero'\)$"), running():
        linear(x) if function == "multiply" else linear.prepared(x, x.dtype)


def test_the_product_of_a_kernel_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = quantized("w8a8", "row-major-8", torch.randn(128, 256)), torch.ones(1, 256)
    plain = replace(W8A8, prepare=None, multiply=lambda call: call.x[:, :128] * 2)
    monkeypatch.setattr(linear, "kernel", lambda *_: plain)
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), torch.full((1, 128), 2.0))


def test_a_permuted_linear_gathers_its_input() -> None:
    torch.manual_seed(0)
    weight, x, order = torch.randn(64, 128), torch.randn(5, 128), torch.randperm(128)
    linear = quantized("w4a8-lqq", "dual-mma", weight[:, order], permuted=True)
    linear.permutation.copy_(order)  # type: ignore[union-attr]
    plain = torch.nn.functional.linear(x, linear.dequantize(), linear.bias)
    assert (linear(x) - plain).norm() < 0.02 * plain.norm()
    assert (linear.dequantize() - weight).norm() < 0.2 * weight.norm()


def test_a_layout_of_pruned_weights_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Marlin24Layout):
        name = "mine"

    monkeypatch.setitem(layouts.LAYOUTS, "mine", Mine())
    LinearFormat("w4a16-24", 128, "mine").require("down", 128, 128)
    with pytest.raises(QtoolError, match="mine stores 2 of 4 weights, w4a16 has all of them"):
        LinearFormat("w4a16", 128, "mine").require("down", 128, 128)
    with pytest.raises(QtoolError, match=r"^down: w4a16-24: 202 input .* divisible by 4"):
        LinearFormat("w4a16-24", None, "row-major").require("down", 128, 202)


def test_the_format_survives_json() -> None:
    rules = (Rule("down", None), Rule(".*", LinearFormat("w4a4", 32, "apex4", "bfloat16")))
    towers = (("model.tower", "tower.old"),)
    written = CheckpointFormat(
        "mine", rules, permuted=("self_attn.q_proj",), kv="kv4", tower_names=towers
    )
    assert CheckpointFormat.from_dict(written.to_dict()) == written
    assert written.is_permuted("model.layers.3.self_attn.q_proj")
    assert not written.is_permuted("model.layers.3.self_attn.k_proj")
    rule = written.to_dict()["rules"][1]
    damaged: list[tuple[str, Any]] = [("scale_dtype", "float31"), ("scale_dtype", "int8")]
    damaged += [("scale_dtype", None), ("scale_dtype", ["float16"])]
    damaged += [("group_size", True), ("group_size", "32"), ("rotated", True)]
    fields: list[tuple[str, Any]] = [(key, {"rules": [rule | {key: bad}]}) for key, bad in damaged]
    fields += [("permuted", {"permuted": [["down"]]}), ("rotated", {"rotated": "down"})]
    fields += [("rotated", {"rotated": None}), ("tower_names", {"tower_names": ["model.tower"]})]
    fields += [("kv", {"kv": ["kv8"]}), ("kv", {"kv": 8}), ("scheme", {"scheme": None})]
    for key, change in fields:
        with pytest.raises(QtoolError, match=f"quantization_config is damaged: .*{key}"):
            CheckpointFormat.from_dict(written.to_dict() | change)


def test_rotated_linears_are_another_version_of_the_format() -> None:
    rules = (Rule("up", None), Rule(".*", LinearFormat("w8a8", None, "row-major-8")))
    plain = CheckpointFormat("w8a8", rules)
    rotated = replace(plain, rotated=("mlp.down_proj", "mlp.up_proj"))
    assert CheckpointFormat.from_dict(rotated.to_dict()) == rotated
    assert (plain.to_dict()["format_version"], rotated.to_dict()["format_version"]) == (1, 2)
    assert "rotated" not in plain.to_dict()
    down, gate = "model.layers.3.mlp.down_proj", "model.layers.3.mlp.gate_proj"
    found = {name: rotated.of(name) for name in (down, gate)}
    assert found[down] == replace(found[gate], rotated=True)  # type: ignore[type-var]
    assert rotated.of("model.layers.3.mlp.up_proj") is None
    with pytest.raises(QtoolError, match="version 3 cannot be read; this qtool reads version"):
        CheckpointFormat.from_dict(rotated.to_dict() | {"format_version": 3})


def test_a_linear_whose_name_ends_in_that_of_another_is_not_it() -> None:
    """BERT's blocks have ``attention.output.dense`` beside ``output.dense``."""
    rules = (Rule(".*", LinearFormat("w8a8", None, "row-major-8")),)
    names = ("output.dense",)
    for listed in ({"rotated": names}, {"permuted": names}):
        stored = CheckpointFormat("w8a8", rules, **listed)  # type: ignore[arg-type]
        chosen = []
        for name in ("output.dense", "attention.output.dense"):
            full = f"bert.encoder.layer.11.{name}"
            found = stored.of(full)
            assert found is not None
            chosen.append(found.rotated or stored.is_permuted(full))
        assert chosen == [True, False]


def test_rotated_experts_are_one_entry_where_they_are_all() -> None:
    up, down = ([f"mlp.experts.{e}.{part}_proj" for e in range(11)] for part in ("up", "down"))
    linears, of_all = ["mlp.down_proj", *up, *down], "mlp.experts.*.down_proj"
    assert of_any_expert([*down, "mlp.down_proj"], linears) == (of_all, "mlp.down_proj")
    assert of_any_expert(down[:3], linears) == tuple(down[:3])
    rules = (Rule(".*", LinearFormat("w8a8", None, "row-major-8")),)

    def rotated(*names: str) -> set[str]:
        stored = CheckpointFormat("w8a8", rules, rotated=names)
        found = {name: stored.of(f"model.layers.7.{name}") for name in linears}
        return {name for name, own in found.items() if own and own.rotated}

    assert rotated(of_all) == set(down)
    assert rotated(down[10], "mlp.down_proj") == {down[10], "mlp.down_proj"}


@pytest.mark.parametrize(("scheme", "layout"), FITTING)
def test_a_rotated_linear_multiplies_rotated_inputs(scheme: str, layout: str) -> None:
    torch.manual_seed(0)
    linear, x = quantized(scheme, layout, torch.randn(128, 256), permuted=True), torch.randn(3, 256)
    linear.permutation.copy_(torch.randperm(256))  # type: ignore[union-attr]
    order = linear.permutation.long()  # type: ignore[union-attr]
    plain = linear.dequantize()[:, order]
    linear.format = replace(linear.format, rotated=True)
    codes, params = linear.unpack()
    kind, rotated = linear.format.scheme_object, rotate(x[:, order])
    assert torch.equal(linear.reference(x), kind.matmul(rotated, codes, params, linear.bias))
    assert torch.equal(linear.dequantize()[:, order], rotate(plain))


def test_rotated_inputs_are_a_multiple_of_64() -> None:
    with pytest.raises(QtoolError, match=r"down: .* 64 at a time, .* 96 input channels"):
        LinearFormat("w8a8", None, "row-major-8", rotated=True).require("down", 64, 96)


@pytest.mark.parametrize("scheme, layout", [("w8a8", "row-major-8"), ("w4a8-qoq", "dual-mma")])
def test_autocast_leaves_integer_sums_as_they_are(scheme: str, layout: str) -> None:
    torch.manual_seed(0)
    linear, x = quantized(scheme, layout, torch.randn(128, 256)), torch.randn(3, 256)
    alone = linear(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x), alone)


def test_inputs_that_a_scheme_rounds_by_itself_are_not_taken_as_floats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Halves(Marlin):
        """Inputs rounded to halves."""

        name = "halves"

        def fake_activation(self, x: torch.Tensor, params: Params) -> torch.Tensor:
            return (x * 2).round() / 2

        def matmul(
            self,
            x: torch.Tensor,
            codes: torch.Tensor,
            params: Params,
            bias: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return super().matmul(self.fake_activation(x, params), codes, params, bias)

    monkeypatch.setitem(schemes.SCHEMES, "halves", Halves)
    linear, x = quantized("halves", "row-major", torch.randn(128, 256)), torch.randn(3, 256)
    assert torch.equal(linear(x), linear.reference((x * 2).round() / 2))
