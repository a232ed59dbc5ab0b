"""Every family's compressed-tensors export, loaded by transformers and the compressed-tensors
library: our logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.exchange.as_export import load_as_export
from qtool.exchange.export import export
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import dequantized
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.exchange.conftest import linears, recipe_of, rule
from tests.exchange.test_compressed_tensors import client

IDS = torch.arange(48).reshape(2, 24) * 5 % 320
DENSE = (
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "opt",
    "falcon",
    "falcon-new",
    "mistral",
)
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe-some-dense")


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def native(source: Path, scheme: str, size: int | str) -> Path:
    return quantize(Checkpoint(source), recipe_of([rule(scheme, size)]), source.with_name("native"))


@pytest.mark.parametrize("variant", DENSE)
@pytest.mark.parametrize(
    ("scheme", "size", "name"),
    [
        ("w4a16", 128, "compressed-tensors"),
        ("w4a8-lqq", 64, "compressed-tensors-w8a8"),
        ("w4a8-qoq", "channel", "compressed-tensors-w4a16"),
    ],
)
def test_dense(
    scheme: str, size: int | str, name: str, variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(variant, dtype=torch.float16), scheme, size)
    found = logits(client(export(ours, name, tmp_path / "out").directory, dequantize=True))
    assert torch.equal(found, logits(dequantized(load(ours))))


@pytest.mark.parametrize("variant", ["falcon", "falcon-new"])
def test_packed_linears_that_it_loads_dequantized_only(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(variant, dtype=torch.float16)
    for scheme, told in (("w4a16", ["packed linears of falcon models"]), ("w8a8", [])):
        ours = quantize(Checkpoint(source), recipe_of([rule(scheme)]), tmp_path / scheme)
        done = export(ours, "compressed-tensors", tmp_path / f"{scheme}-out")
        how = "transformers loads {} with CompressedTensorsConfig(dequantize=True) only"
        assert done.notes == [how.format(what) for what in told]
        if told:
            with pytest.raises(AttributeError, match="has no attribute 'weight'"):
                client(done.directory, dequantize=False)
        else:
            client(done.directory, dequantize=False)


def test_packed_linears_of_two_group_sizes_that_it_does_not_load(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source = Checkpoint(make_model("falcon", dtype=torch.float16))
    recipe = recipe_of([rule("w4a16", 64, match="dense_4h_to_h"), rule("w4a16", 128)])
    ours = quantize(source, recipe, tmp_path / "native")
    done = export(ours, "compressed-tensors", tmp_path / "out")
    linears = "packed linears of falcon models beside linears of another scheme or group size"
    assert done.notes == [f"transformers cannot load {linears}"]
    for dequantize, error in ((False, AttributeError), (True, RuntimeError)):
        with pytest.raises(error):
            client(done.directory, dequantize=dequantize)


@pytest.mark.parametrize("variant", EXPERTS)
@pytest.mark.parametrize("size", [32, 128, "channel"])
def test_experts(size: int | str, variant: str, make_model: MakeModel, tmp_path: Path) -> None:
    """Equal where transformers runs experts one by one; its default may sum differently."""
    ours = native(make_model(variant), "w4a16", size)
    out = export(ours, "compressed-tensors", tmp_path / "out").directory
    expected = logits(load(ours))
    assert torch.equal(
        logits(client(out, dequantize=True, experts_implementation="eager")), expected
    )
    assert (logits(client(out, dequantize=True)) - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("variant", EXPERTS)
def test_experts_beside_linears_of_another_group_size(
    variant: str, dequantize: bool, make_model: MakeModel, tmp_path: Path
) -> None:
    rules = [rule("w4a16", 32, r"\.experts\."), rule("w4a16", 64)]
    source = Checkpoint(make_model(variant))
    ours = quantize(source, recipe_of(rules), tmp_path / "native")
    out = export(ours, "compressed-tensors", tmp_path / "out").directory
    theirs = client(out, dequantize=dequantize, experts_implementation="eager")
    assert torch.equal(logits(theirs), logits(load(ours)))


@pytest.mark.parametrize("other", [("w4a16", 32), (None,)])
def test_experts_stored_in_two_ways(
    other: tuple[Any, ...], make_model: MakeModel, tmp_path: Path
) -> None:
    """Those of the first block in another group size, or in 16 bits."""
    rules = [rule(*other, match=r"layers\.0\..*\.experts\."), rule("w4a16", 64)]
    source = Checkpoint(make_model("mixtral"))
    ours = quantize(source, recipe_of(rules), tmp_path / "native")
    done = export(ours, "compressed-tensors", tmp_path / "out")
    assert done.notes[-1] == "experts: transformers loads them in one scheme and group size alone"
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        client(done.directory, dequantize=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dequantize", [False, True])
def test_experts_are_our_weights_in_the_dtype_of_their_scales(
    dequantize: bool, dtype: torch.dtype, make_model: MakeModel, tmp_path: Path
) -> None:
    """Whatever dtype transformers is told to load them in."""
    ours = native(make_model("mixtral", dtype=torch.bfloat16), "w4a16", 32)
    out = export(ours, "compressed-tensors", tmp_path / "out").directory
    theirs, packed = client(out, dequantize=dequantize, dtype=dtype), linears(ours)
    theirs(IDS)  # what is not dequantized when it is loaded is when it first runs
    for block, layer in enumerate(theirs.model.layers):
        for number in range(4):
            expert = f"model.layers.{block}.block_sparse_moe.experts.{number}"
            gate, down, up = (
                packed[f"{expert}.{name}"].dequantize().bfloat16() for name in ("w1", "w2", "w3")
            )
            assert torch.equal(layer.mlp.experts.gate_up_proj[number], torch.cat([gate, up]))
            assert torch.equal(layer.mlp.experts.down_proj[number], down)


@pytest.mark.parametrize(
    ("scheme", "size", "name"),
    [
        ("w4a8-lqq", 64, "compressed-tensors-w8a8"),
        ("w4a8-qoq", "channel", "compressed-tensors-w4a16"),
    ],
)
def test_experts_that_it_does_not_load(
    scheme: str, size: int | str, name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model("mixtral"), scheme, size)
    done = export(ours, name, tmp_path / "out")
    assert "transformers cannot load them" in done.notes[-1]
    with pytest.raises(QtoolError, match="transformers cannot load them"):
        load_as_export(ours, name)
    for dequantize in (False, True):
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            client(done.directory, dequantize=dequantize)


@pytest.mark.parametrize("variant", (*DENSE, *EXPERTS))
def test_the_packed_weights_generate_the_clients_tokens(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(variant, dtype=torch.bfloat16), "w4a16", 32)
    out = export(ours, "compressed-tensors", tmp_path / "out").directory
    theirs, packed = client(out, dequantize=True, experts_implementation="eager"), load(ours)
    assert torch.equal(logits(theirs), logits(packed))
    greedy = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        *(m.generate(IDS, attention_mask=torch.ones_like(IDS), **greedy) for m in (theirs, packed))
    )
