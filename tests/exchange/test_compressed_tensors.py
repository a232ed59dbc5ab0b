"""compressed-tensors: element by element, and through transformers with the compressed-tensors
library.
"""

import json
from collections.abc import Callable
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
from tests.exchange import readers
from tests.exchange.conftest import Export, Native, linears, recipe_of, rule, stored

IDS = torch.arange(48).reshape(2, 24) * 5 % 320
SYMMETRIC = [("w4a16", 32), ("w4a16", 64), ("w4a16", 128), ("w4a16", "channel"), ("w4a16-24", 128)]
#: every scheme and the target that expresses its weights exactly
EXACT = [
    *((scheme, size, "compressed-tensors") for scheme, size in SYMMETRIC),
    ("w8a8", "channel", "compressed-tensors"),
    ("w4a4", 128, "compressed-tensors-w4a16"),
    ("w4a8-qoq", "channel", "compressed-tensors-w4a16"),
    ("w4a8-qoq", "channel", "compressed-tensors-w4a8"),
    ("w4a16", 128, "compressed-tensors-w4a8"),
    ("w4a8-lqq", 64, "compressed-tensors-w8a8"),
    ("w4a8-lqq", 32, "compressed-tensors-w8a8"),
    ("w4a8-qoq-g128", 128, "compressed-tensors-w8a8"),
]


def client(
    directory: Path, *, dequantize: bool, dtype: torch.dtype | str = "auto", **more: str
) -> nn.Module:
    """The model as transformers and compressed-tensors load it."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=dequantize)  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=config, dtype=dtype, **more
    ).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize(("scheme", "size", "name"), EXACT)
def test_the_file_holds_our_integers(
    scheme: str, size: int | str, name: str, native: Native, exported: Export
) -> None:
    ours = native(scheme, size)
    done = exported(ours, name)
    assert set(done.errors.values()) == {0.0}
    for linear, module in linears(ours).items():
        tensors = stored(done.directory, linear)
        if "weight" in tensors:
            assert tensors["weight"].dtype == torch.int8
            found = tensors["weight"].float() * tensors["weight_scale"].float()
        else:
            codes, scales, zeros = readers.compressed_tensors(tensors)
            found = (codes - readers.per_input(zeros, codes.shape[1])) * readers.per_input(
                scales, codes.shape[1]
            )
            assert torch.equal(
                codes & 15, module.unpack()[0].long() + (8 if scheme == "w4a4" else 0) & 15
            )
        assert torch.equal(found, module.dequantize())


VARIANTS = ["llama", "qwen2", "llama-tied", "llama-biases"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("scheme", "size", "name"),
    [
        ("w4a16", 128, "compressed-tensors"),
        ("w8a8", "channel", "compressed-tensors"),
        ("w4a8-lqq", 64, "compressed-tensors-w8a8"),
    ],
)
def test_transformers_dequantizes_it_to_our_logits(
    scheme: str,
    size: int | str,
    name: str,
    variant: str,
    dtype: torch.dtype,
    native: Native,
    exported: Export,
) -> None:
    ours = native(scheme, size, variant=variant, dtype=dtype)
    found = logits(client(exported(ours, name).directory, dequantize=True))
    assert found.dtype == dtype
    assert torch.equal(found, logits(dequantized(load(ours))))


@pytest.mark.parametrize(("scheme", "size", "name"), EXACT)
def test_transformers_dequantizes_every_scheme(
    scheme: str, size: int | str, name: str, native: Native, exported: Export
) -> None:
    ours = native(scheme, size, dtype=torch.float32)
    found = logits(client(exported(ours, name).directory, dequantize=True))
    assert torch.equal(found, logits(dequantized(load(ours))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [32, "channel"])
def test_transformers_runs_it_compressed(
    size: int | str, variant: str, dtype: torch.dtype, native: Native, exported: Export
) -> None:
    ours = native("w4a16", size, variant=variant, dtype=dtype)
    found = logits(client(exported(ours, "compressed-tensors").directory, dequantize=False))
    assert torch.equal(found, logits(load(ours)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scheme", "size", "name"),
    [
        ("w8a8", "channel", "compressed-tensors"),
        ("w4a8-lqq", 64, "compressed-tensors-w8a8"),
        ("w4a8-qoq-g128", 128, "compressed-tensors-w8a8"),
        ("w4a16", 128, "compressed-tensors-w4a8"),
    ],
)
def test_transformers_quantizes_the_activations(
    scheme: str, size: int | str, name: str, dtype: torch.dtype, native: Native, exported: Export
) -> None:
    """compressed-tensors rounds activations to amax / 127.5 and -128..127; with that rule our model
    is its.
    """
    ours = native(scheme, size, dtype=dtype)
    found = logits(client(exported(ours, name).directory, dequantize=False))
    assert torch.equal(found, logits(with_activations(dequantized(load(ours)), library_activation)))
    # the same number of steps as ours, so the same distance from the unquantized activations
    exact, runtime = logits(dequantized(load(ours))), logits(load(ours))
    if scheme != "w4a16":
        assert (found - exact).norm() < 1.5 * (runtime - exact).norm()


def library_activation(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def with_activations(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (change(args[0]),))
    return model


def test_product_of_scales_is_rounded_and_reported(native: Native, exported: Export) -> None:
    ours = native("w4a8-qoq-g128", 128, dtype=torch.bfloat16)
    done = exported(ours, "compressed-tensors-w4a16")
    assert 0 < min(done.errors.values()) <= max(done.errors.values()) < 2**-8
    for linear, module in linears(ours).items():
        codes, scales, zeros = readers.compressed_tensors(stored(done.directory, linear))
        assert torch.equal(codes, module.unpack()[0].long())
        found = (codes - readers.per_input(zeros, codes.shape[1])) * readers.per_input(
            scales, codes.shape[1]
        )
        error = (found - module.dequantize()).norm() / module.dequantize().norm()
        assert float(error) == pytest.approx(done.errors[linear], rel=1e-3)


def test_fp8_activations_cost_what_cutlass_rounds(native: Native, exported: Export) -> None:
    """The file holds our integers; the report has the loader's fp8 weights, rounded twice."""
    ours = native("w4a16", 128, dtype=torch.bfloat16)
    done = exported(ours, "compressed-tensors-w4a8-fp8")
    for linear, module in linears(ours).items():
        codes, scales, _ = readers.compressed_tensors(stored(done.directory, linear))
        assert torch.equal(codes, module.unpack()[0].long())
        assert torch.equal(scales, module.unpack()[1]["scale"].float())
        assert 0.01 < done.errors[linear] < 2**-4
    assert done.notes == ["activations of w4a16: 16-bit here, fp8 per token there"]


def config_of(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert isinstance(found, dict)
    return found


def test_configs(native: Native, exported: Export) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    for scheme, size, name in EXACT:
        config = config_of(exported(native(scheme, size), name).directory)
        # no unknown key, no impossible combination
        library.QuantizationConfig.model_validate(config)
        (group,) = config["config_groups"].values()
        assert config["format"] == group["format"]
        assert group["targets"] == ["Linear"]
        assert config["ignore"] == ["lm_head"]
        weight_only = name.endswith("w4a16") or (name == "compressed-tensors" and scheme != "w8a8")
        assert (group["input_activations"] is None) == weight_only


def test_mixed_groups_and_plain_layers(source: Callable[..., Path], tmp_path: Path) -> None:
    rules = [
        rule(None, match="o_proj"),
        rule("w8a8", "channel", match="down_proj"),
        rule("w4a16", 64),
    ]
    ours = quantize(
        Checkpoint(source("llama", torch.float32)), recipe_of(rules), tmp_path / "native"
    )
    done = export(ours, "compressed-tensors", tmp_path / "ct")
    config = config_of(done.directory)
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == [
        "pack-quantized",
        "int-quantized",
    ]
    assert config["ignore"] == [
        "lm_head",
        *(f"model.layers.{i}.self_attn.o_proj" for i in range(2)),
    ]
    found = logits(client(done.directory, dequantize=False))
    model = dequantized(load(ours))
    for block in model.model.layers:
        with_activations(block.mlp.down_proj, library_activation)
    assert torch.equal(found, logits(model))


@pytest.mark.parametrize("dequantize", [False, True])
def test_zero_points_beside_others_are_said_not_to_load(
    dequantize: bool, source: Callable[..., Path], tmp_path: Path
) -> None:
    rules = [rule("w4a8-qoq-g128", 64, match="down_proj"), rule("w4a4", 64)]
    ours = quantize(
        Checkpoint(source("llama", torch.float32)), recipe_of(rules), tmp_path / "native"
    )
    done = export(ours, "compressed-tensors-w4a16", tmp_path / "ct")
    sentence = "transformers cannot load zero points beside linears of another scheme"
    assert [note for note in done.notes if note.startswith(sentence)]
    with pytest.raises(RuntimeError, match=r"automatic conversion|mismatched"):
        client(done.directory, dequantize=dequantize)
    with pytest.raises(QtoolError, match=sentence):
        load_as_export(ours, "compressed-tensors-w4a16", dequantize=dequantize)


@pytest.mark.parametrize(
    "others", [rule("w4a16", 32), rule("w8a8", "channel")], ids=["group size", "scheme"]
)
def test_several_groups_are_not_dequantized(
    others: dict[str, Any], source: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_of([rule("w4a16", 64, match="down_proj"), others])
    ours = quantize(Checkpoint(source("llama", torch.float32)), recipe, tmp_path / "native")
    done = export(ours, "compressed-tensors", tmp_path / "ct")
    with pytest.raises(RuntimeError, match="automatic conversion"):
        client(done.directory, dequantize=True)
    with pytest.raises(QtoolError, match="by its first config group, and this one has several"):
        load_as_export(ours, "compressed-tensors", dequantize=True)


def test_two_schemes_that_are_stored_alike_load_together(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_of([rule("w4a16-24", 64, match="down_proj"), rule("w4a16", 64)])
    ours = quantize(Checkpoint(source("llama", torch.float32)), recipe, tmp_path / "native")
    done = export(ours, "compressed-tensors", tmp_path / "ct")
    found = logits(client(done.directory, dequantize=True))
    assert torch.equal(found, logits(load_as_export(ours, "compressed-tensors", dequantize=True)))
