"""Packed linears on SGLang's parameter classes, loaded as its layers load them."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("sglang", reason="SGLang is not installed")

from qtool.format import LinearFormat
from qtool.schemes import get
from qtool.serving.layer import PackedLinear
from qtool.serving.sglang.parameters import TYPES
from tests.serving.conftest import FORMATS


class Method(PackedLinear):
    types = TYPES


ROWS = {"q": 256, "k": 128, "v": 128}


@pytest.mark.parametrize("scheme, layout", FORMATS)
@pytest.mark.parametrize("rank", [0, 1])
def test_joined_columns(scheme: str, layout: str, rank: int) -> None:
    """q, k and v, of which each of two ranks has half."""
    if layout == "marlin-24":
        pytest.skip("half of 128 rows is half a tile")
    found = LinearFormat(scheme, get(scheme).group_size, layout)
    weights = {name: found.scheme_object.prune(torch.randn(n, 512)) for name, n in ROWS.items()}
    fitted = {name: found.scheme_object.fit(weight) for name, weight in weights.items()}
    codes = {name: found.scheme_object.quantize(weights[name], fitted[name]) for name in ROWS}
    shares = [n // 2 for n in ROWS.values()]
    layer, method = nn.Module(), Method("qkv_proj", found, list(ROWS), permuted=False)
    layer.input_size_per_partition = layer.input_size = 512  # type: ignore[assignment]

    def loader(parameter: Any, loaded: torch.Tensor, shard: str) -> None:
        """What SGLang's QKVParallelLinear does with a shard."""
        names = list(ROWS)
        parameter.load_qkv_weight(
            loaded,
            tp_rank=rank,
            num_heads=1,
            shard_id=shard,
            shard_offset=sum(shares[: names.index(shard)]),
            shard_size=shares[names.index(shard)],
        )

    sizes = {"input_size": 512, "output_size": 512, "params_dtype": torch.bfloat16}
    method.create_weights(layer, 512, shares, weight_loader=loader, **sizes)  # type: ignore
    for name in ROWS:
        for part, tensor in found.pack(codes[name], fitted[name]).items():
            parameter = getattr(layer, part)
            parameter.weight_loader(parameter, tensor, name)
    method.process_weights_after_loading(layer)
    (piece,) = method.pieces
    stored = {name: getattr(layer, attribute) for name, attribute in piece.items()}
    mine, params = found.unpack(stored, sum(shares), 512)
    assert torch.equal(mine, torch.cat([codes[name].chunk(2)[rank] for name in ROWS]))
    for part, param in params.items():
        shared = part in found.scheme_object.shared_params
        each = [fitted[name][part] for name in ROWS]
        own = each[0] if shared else torch.cat([whole.chunk(2)[rank] for whole in each])
        assert torch.equal(param, own), part
    x = torch.randn(3, 512).bfloat16()
    assert method.apply(layer, x).shape == (3, sum(shares))
