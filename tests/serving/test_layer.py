"""A packed linear as an engine's layer, on parameters that load a tensor whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.schemes import get
from qtool.schemes.arithmetic.online_hadamard import rotate
from qtool.schemes.base import Params
from qtool.serving.layer import PackedLinear, ParameterTypes, TrackedLoader
from tests.serving.conftest import FORMATS


def parameter(data: Tensor, weight_loader: Any, **_: Any) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=False)
    made.weight_loader = weight_loader  # type: ignore[attr-defined]
    return made


class Method(PackedLinear):
    types = ParameterTypes(parameter, parameter, parameter, parameter)


def down(found: LinearFormat) -> tuple[nn.Module, Method, Tensor, Params]:
    """A layer that has loaded a random weight ``[128, 256]``; its codes and parameters."""
    torch.manual_seed(0)
    weight = found.scheme_object.prune(torch.randn(128, 256))
    params = found.scheme_object.fit(weight)
    codes = found.scheme_object.quantize(weight, params)
    layer, method = nn.Module(), Method("down", found, ["down"], permuted=False)
    layer.input_size_per_partition = layer.input_size = 256  # type: ignore[assignment]
    sizes = {"input_size": 256, "output_size": 128, "params_dtype": torch.bfloat16}
    method.create_weights(layer, 256, [128], weight_loader=lambda p, t: p.data.copy_(t), **sizes)  # type: ignore[arg-type]
    for name, tensor in found.pack(codes, params).items():
        own: Any = getattr(layer, name)
        own.weight_loader(own, tensor)
    method.process_weights_after_loading(layer)
    return layer, method, codes, params


@pytest.mark.parametrize(("scheme", "layout"), FORMATS)
def test_an_input_whose_rows_lie_apart(scheme: str, layout: str) -> None:
    layer, method, _, _ = down(LinearFormat(scheme, get(scheme).group_size, layout))
    x = torch.randn(3, 512).bfloat16()[:, :256]
    assert torch.equal(method.apply(layer, x), method.apply(layer, x.clone()))


@pytest.mark.parametrize(("scheme", "layout"), FORMATS)
def test_rotated_inputs(scheme: str, layout: str) -> None:
    found = LinearFormat(scheme, get(scheme).group_size, layout, rotated=True)
    layer, method, codes, params = down(found)
    x = torch.randn(3, 256).bfloat16()
    y = method.apply(layer, x).float()
    expected = found.scheme_object.matmul(rotate(x), codes, params)
    assert (y - expected).norm() < 4e-3 * expected.norm()  # 16 bits round what is written
    plain, plain_method, _, _ = down(replace(found, rotated=False))
    assert (plain_method.apply(plain, x).float() - expected).norm() > 0.5 * expected.norm()


def test_every_part_of_a_layer_must_be_loaded() -> None:
    """One of two linears may be loaded in three parts."""
    loader = TrackedLoader(lambda parameter, tensor, shard: None)
    loader(torch.empty(0), torch.empty(0), (0, 1, 2))
    with pytest.raises(QtoolError, match=r"layer.qweight: 3 of 4 tensors were loaded"):
        loader.require("layer.qweight", 4)
    loader(torch.empty(0), torch.empty(0), 3)
    loader.require("layer.qweight", 4)


def test_a_tensor_of_each_linear_needs_parts_that_are_linears() -> None:
    def make(scheme: str, parts: int, permuted: bool) -> None:
        found = LinearFormat(scheme, 128, "dual-mma")
        method = Method("qkvz", found, ["qkv", "z"], permuted=permuted)
        sizes = {"input_size": 256, "output_size": 64 * parts, "params_dtype": torch.bfloat16}
        method.create_weights(
            nn.Module(), 256, [64] * parts, weight_loader=lambda p, t: None, **sizes
        )

    make("w4a8-lqq", 4, False)
    make("w4a8-lqq", 2, True)
    with pytest.raises(QtoolError, match=r"permutation is stored for each of 2 .* in 4 parts"):
        make("w4a8-lqq", 4, True)
