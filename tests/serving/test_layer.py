"""A packed linear as an engine's layer, on parameters that load a tensor whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.format import LinearFormat
from qtool.schemes import get
from qtool.schemes.arithmetic.online_hadamard import rotate
from qtool.schemes.base import Params
from qtool.serving.layer import PackedLinear, ParameterTypes
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
