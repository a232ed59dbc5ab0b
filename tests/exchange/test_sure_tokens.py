"""Models that know a sequence by heart: every stack must go on with it, whatever each of them
rounds on the way.

Where the best two logits are as near as rounding, two stacks need not agree
(benchmarks/journal/formats.md); here they never are, so a token that differs is a fault. What is a
little wrong everywhere tokens do not show: logits have a bound beside them.
benchmarks/serving/memorize.py makes such models for GPUs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from qtool import recipes
from qtool.exchange.export import export
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load
from tests.conftest import save_model
from tests.exchange.test_compressed_tensors import client

PROMPT, REST = 8, 24
BOUND = 0.015  # relative, of logits in bf16; a scale 10 % wrong gives twice as much
SEQUENCES = torch.randint(3, 320, (4, PROMPT + REST), generator=torch.Generator().manual_seed(0))
INT8 = [
    ("llama-rope-scaling", "w4a8-lqq", "compressed-tensors-w8a8"),
    ("qwen2", "w4a8-lqq", "compressed-tensors-w8a8"),
    ("qwen3", "w8a8", "compressed-tensors"),
    ("phi3", "w4a8-qoq-g128", "compressed-tensors-w8a8"),
    ("gemma2", "w4a8-lqq", "compressed-tensors-w8a8"),
    ("gemma3_text", "w4a16", "compressed-tensors-w4a8"),
]

Sure = Callable[[str], Path]


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Sure:
    """``sure("llama")`` saves a model of the variant that has learnt :data:`SEQUENCES`, in bf16."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = memorized(
                save_model(tmp_path_factory.mktemp("sure") / variant, variant)
            )
        return made[variant]

    return make


def memorized(directory: Path) -> Path:
    """The model of ``directory``, trained until each next token of :data:`SEQUENCES` is e^5
    likelier than any other.
    """
    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    target = SEQUENCES[:, PROMPT:, None]
    for _ in range(200):
        logits = model(SEQUENCES).logits[:, PROMPT - 1 : -1]
        others = logits.detach().scatter(2, target, -torch.inf).amax(2)
        if (logits.detach().gather(2, target).squeeze(2) - others).min() > 5:
            model.to(torch.bfloat16).save_pretrained(directory)
            return directory
        optimizer.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError("it did not learn")


@torch.no_grad()
def knows(model: nn.Module) -> Tensor:
    """Its logits; fails if its greedy tokens are not those of :data:`SEQUENCES`."""
    ids = SEQUENCES[:, :PROMPT]
    options = {
        "max_new_tokens": REST,
        "min_new_tokens": REST,
        "do_sample": False,
        "pad_token_id": 0,
    }
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    assert torch.equal(found, SEQUENCES)
    return model(SEQUENCES).logits[:, PROMPT - 1 :].float()


def apart(first: Tensor, second: Tensor) -> float:
    """Relative distance of logits."""
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize(("variant", "scheme", "name"), INT8)
def test_int8_activations_by_two_rules(
    variant: str, scheme: str, name: str, sure: Sure, tmp_path: Path
) -> None:
    """compressed-tensors scales by amax / 127.5, qtool by amax / 127: sure tokens are the same."""
    native = quantize(Checkpoint(sure(variant)), recipes.load(scheme), tmp_path / "native")
    out = export(native, name, tmp_path / "out").directory
    assert apart(knows(load(native)), knows(client(out, dequantize=False))) < BOUND


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_mixtures(variant: str, sure: Sure, tmp_path: Path) -> None:
    """transformers adds experts in another order by default."""
    native = quantize(Checkpoint(sure(variant)), recipes.load("w4a16"), tmp_path / "native")
    out = export(native, "compressed-tensors", tmp_path / "out").directory
    assert apart(knows(load(native)), knows(client(out, dequantize=False))) < BOUND


def test_a_cache_of_ours_and_one_of_theirs(sure: Sure, tmp_path: Path) -> None:
    """kv8 has int8 by channel, the export's cache fp8 by layer."""
    recipe = replace(recipes.load("w4a16"), kv="kv8")
    calibration = Calibration((SEQUENCES,))
    native = quantize(
        Checkpoint(sure("qwen3")), recipe, tmp_path / "native", calibration=calibration
    )
    out = export(native, "compressed-tensors", tmp_path / "out").directory
    assert apart(knows(load(native)), knows(client(out, dequantize=False))) < BOUND


@pytest.mark.parametrize("scheme", ["w4a8-qoq", "w4a8-qoq-g128", "w4a4-g128", "w4a4-mix"])
def test_every_other_scheme(scheme: str, sure: Sure, tmp_path: Path) -> None:
    native = quantize(
        Checkpoint(sure("llama-rope-scaling")), recipes.load(scheme), tmp_path / "native"
    )
    knows(load(native))
