"""Exports of every family hold the rules of vLLM's loaders; what they could not run is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool import recipes
from qtool.errors import QtoolError
from qtool.exchange.export import export
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from tests.conftest import MakeModel
from tests.exchange.conftest import recipe_of, rule
from tests.exchange.vllm_rules import check

FAMILIES = (
    "llama",
    "llama-biases",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "opt",
    "falcon",
    "falcon-new",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe-some-dense",
)
W4A16 = ("compressed-tensors", "gptq", "gptq-v2", "awq")
FORMATS = [
    *(("w4a16", 128, name) for name in W4A16),
    ("w4a16", 32, "compressed-tensors"),
    ("w4a16", "channel", "gptq"),
    ("w8a8", "channel", "compressed-tensors"),
    ("w4a8-lqq", 64, "compressed-tensors-w8a8"),
    ("w4a8-qoq-g128", 128, "awq"),
    ("w4a8-qoq-g128", 128, "compressed-tensors-w4a16"),
    ("w4a8-qoq", "channel", "compressed-tensors-w4a16"),
]
IDS = torch.arange(32).reshape(1, 32)


def native(source: Path, rules: list[dict[str, Any]], **more: Any) -> Path:
    out = source.with_name("native")
    return quantize(
        Checkpoint(source), recipe_of(rules, **more), out, calibration=Calibration([IDS])
    )


def shapes(source: Path) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in Checkpoint(source).entries.items()}


@pytest.mark.parametrize(("scheme", "size", "name"), FORMATS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family(
    variant: str, scheme: str, size: Any, name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(variant, dtype=torch.bfloat16)
    out = export(native(source, [rule(scheme, size)]), name, tmp_path / "out").directory
    assert check(out, shapes(source)) >= 6


@pytest.mark.parametrize("variant", ["llama", "phi3", "opt", "falcon"])
@pytest.mark.parametrize("name", W4A16)
def test_layers_in_16_bit(name: str, variant: str, make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(variant, dtype=torch.bfloat16)
    attention = r"\.0\..*(q_proj|k_proj|v_proj|qkv_proj|query_key_value)$"
    rules = [
        rule(None, match=attention),
        rule(None, match=r"\.1\..*(down_proj|fc2|4h_to_h)$"),
        rule("w4a16", 128),
    ]
    out = export(native(source, rules), name, tmp_path / "out").directory
    assert check(out, shapes(source)) == 6


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3_moe", "opt", "gemma2"])
def test_fp8_cache_and_mixed_groups(variant: str, make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(variant, dtype=torch.bfloat16)
    rules = [rule("w4a16", 32, r"(o_proj|out_proj)$"), rule("w4a16", 128)]
    out = export(native(source, rules, kv="kv8"), "compressed-tensors", tmp_path / "out").directory
    assert check(out, shapes(source)) >= 6


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize(
    ("scheme", "size", "name", "message"),
    [
        (
            "w4a16",
            "channel",
            "awq",
            r"experts\.0\..* is an expert; awq cannot hold it: .*; formats that can: .*gptq",
        ),
        (
            "w4a16",
            128,
            "compressed-tensors-w4a8",
            "on CPUs only; formats that can: compressed-tensors,",
        ),
        ("w4a16", 128, "marlin", "its loaders know no mixture of experts"),
        ("w4a16", 128, "qqq", "its loaders know no mixture of experts"),
        ("w4a8-qoq-g128", 128, "qserve", "its loaders know no mixture of experts"),
    ],
)
def test_experts_that_no_loader_runs(
    scheme: str,
    size: Any,
    name: str,
    message: str,
    variant: str,
    make_model: MakeModel,
    tmp_path: Path,
) -> None:
    ours = native(
        make_model(variant, dtype=torch.float16, head_dim=64, hidden_size=256), [rule(scheme, size)]
    )
    with pytest.raises(QtoolError, match=message):
        export(ours, name, tmp_path / "out")


@pytest.mark.parametrize(
    "other", [rule(None, match=r"experts\.1\."), rule("w4a16", 32, r"\.(w2|down_proj)$")]
)
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_experts_of_a_block_must_agree(
    variant: str, other: dict[str, Any], make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(variant, dtype=torch.bfloat16), [other, rule("w4a16", 128)])
    with pytest.raises(QtoolError, match="run the two as one linear"):
        export(ours, "compressed-tensors", tmp_path / "out")


@pytest.mark.parametrize("variant", ["gemma2", "gemma3_text"])
def test_gemmas_head_stays_the_embedding(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """vLLM's Gemma models have no head of their own; the built-in recipes leave them tied."""
    source = make_model(variant, dtype=torch.bfloat16)
    ours = quantize(
        Checkpoint(source),
        recipes.load("w4a16", "best"),
        tmp_path / "native",
        calibration=Calibration([IDS]),
    )
    out = export(ours, "compressed-tensors", tmp_path / "out").directory
    assert check(out, shapes(source)) >= 8 and "lm_head.weight" not in Checkpoint(out)


def test_a_rotated_gemma_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model("gemma", dtype=torch.bfloat16)
    ours = quantize(
        Checkpoint(source),
        replace(recipes.load("w4a16", "best"), variant="custom", windows="given"),
        tmp_path / "native",
        calibration=Calibration([IDS]),
    )
    with pytest.raises(QtoolError, match="serving stacks know no other head of Gemma models"):
        export(ours, "gptq", tmp_path / "out")
