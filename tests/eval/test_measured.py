"""What the report measures by running models: input ranges by channel, errors of the KV cache."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from qtool import recipes
from qtool.eval.channel_range import channel_amax, outlier, role, worst
from qtool.eval.kv_error import kv_errors
from qtool.io.source import Checkpoint
from qtool.models.cache_argument import CACHE
from qtool.pipeline.quantize import quantize
from qtool.runtime.kv_cache import QuantCache
from qtool.runtime.load import load
from qtool.schemes.arithmetic.online_hadamard import rotate


@pytest.fixture
def quantized(make_model, tmp_path):
    """A tiny random Llama, and it quantized with a 4-bit KV cache."""
    base = make_model(hidden_size=256, intermediate_size=256, head_dim=64)
    recipe = {"scheme": "w4a16", "layers": [{"match": ".*", "scheme": None}], "kv": "kv4"}
    return base, quantize(Checkpoint(base), recipes.parse(recipe, "test"), tmp_path / "quantized")


def test_channel_ranges_are_the_largest_inputs(quantized):
    base = load(quantized[0])
    windows = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    seen = []
    layer = base.get_submodule("model.layers.1.mlp.down_proj")
    with torch.no_grad():
        handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        base(windows)
        handle.remove()
    amax = channel_amax(base, windows)
    assert torch.allclose(amax["model.layers.1.mlp.down_proj"], seen[0].abs().amax((0, 1)))
    assert {role(name) for name in amax} == {
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
    }
    assert not any(m._forward_pre_hooks for m in base.model.layers.modules())


@torch.no_grad()
def test_ranges_of_rotated_inputs_are_those_that_are_quantized(make_model, tmp_path):
    base = make_model(hidden_size=256, intermediate_size=256, head_dim=64)
    layers = [{"match": ".*", "scheme": "w8a8", "group_size": "channel"}]
    recipe = {"scheme": "w8a8", "layers": layers, "transforms": ["online-hadamard"]}
    out = quantize(Checkpoint(base), recipes.parse(recipe, "test"), tmp_path / "rotated")
    model, windows, seen = load(out), torch.arange(3, 35)[None], []
    down = model.get_submodule("model.layers.1.mlp.down_proj")
    hook = down.register_forward_pre_hook(lambda _, given: seen.append(rotate(given[0])))
    amax = channel_amax(model, windows)
    hook.remove()
    assert torch.equal(amax["model.layers.1.mlp.down_proj"], seen[0].abs().amax((0, 1)))


def test_the_block_with_the_worst_outlier_is_shown():
    flat, spiky = torch.ones(8), torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 40])
    before = {"l.0.a": flat, "l.0.b": flat, "l.1.a": spiky, "l.1.b": flat}
    shown = worst(before, {name: flat for name in before})
    assert [one.name for one in shown] == ["l.1.a", "l.0.b"]
    assert (outlier(shown[0].before), outlier(shown[0].after)) == (40, 1)


def test_kv_error_is_small_positive_and_absent_without_a_quantizer(quantized):
    windows = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    errors = kv_errors(load(quantized[1]), windows)
    assert len(errors) == 2 and all(
        0 < e < 0.2 for one in errors.values() for e in (one.keys, one.values)
    )
    assert kv_errors(load(quantized[0]), windows) == {}


def test_kv_errors_are_relative(quantized):
    """Of the first block, whose keys and values no quantized cache has changed yet."""
    windows = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    model, cache = load(quantized[1]), DynamicCache()
    first = kv_errors(model, windows)[0]
    with torch.no_grad():
        load(quantized[0])(windows, **{CACHE: cache})
    quantizers = QuantCache.of(model).layers[0].quantizers
    exact = cache.layers[0].keys, cache.layers[0].values
    for found, x, quantizer in zip((first.keys, first.values), exact, quantizers, strict=True):
        read = quantizer.dequantize(quantizer.quantize(x))
        assert found == pytest.approx(float((read - x).norm() / x.norm()), rel=1e-3)


def test_values_that_are_zeros_have_no_error(make_model, tmp_path):
    source = make_model()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    first, second = kv_errors(load(source, kv="kv4"), torch.arange(16)[None]).values()
    assert first.values == 0 < min(first.keys, second.values)
