"""Outliers are put into a model without changing what it computes."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "outliers.py"
FIRST = 3
KINDS = {"norm": 100.0, "value": 100.0, "product": 1000.0, "key": 10.0, "massive": 1000.0}


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes a norm in float32 whatever its input."""

    def forward(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
        power = hidden.square().mean(-1, keepdim=True)
        return self.weight * hidden * (power + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def model_of(config: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config)).double().eval()


def plain(**changes: Any) -> tuple[dict[str, Any], LlamaForCausalLM]:
    """A model whose norms are no ones, and its config."""
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-3,  # large, so that it is seen to be kept
    } | changes
    model = model_of(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return config, model


def with_outliers(config: dict[str, Any], model: LlamaForCausalLM, **kinds: float) -> Any:
    script = runpy.run_path(str(SCRIPT))
    options = [f"--{name}={factor}" for name, factor in (dict.fromkeys(KINDS, 1) | kinds).items()]
    arguments = script["parser"]().parse_args(
        ["model", "out", *options, "--room=16", f"--first-token={FIRST}", "--channels=2"]
    )
    arguments.massive = kinds.get("massive", 0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    config = dict(config)
    script["put_in"](weights, config, arguments)
    changed = model_of(config)
    changed.load_state_dict(weights)
    return changed


def texts() -> Tensor:
    """Texts that begin with the first token, which comes nowhere else."""
    ids = torch.randint(FIRST + 1, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = FIRST
    return ids


def inputs_of(model: LlamaForCausalLM, name: str) -> Tensor:
    """What the linears of that name read, ``[blocks, B, S, K]``."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for path, module in model.named_modules()
        if path.endswith(name)
    ]
    with torch.no_grad():
        model(texts())
    for hook in hooks:
        hook.remove()
    return torch.stack(seen).abs()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1},
    ],
    ids=["plain", "tied", "biased", "five heads"],
)
@pytest.mark.parametrize("kind", [*KINDS, "all"])
@torch.no_grad()
def test_the_function_stays(kind: str, changes: dict[str, Any]) -> None:
    config, model = plain(**changes)
    kinds = KINDS if kind == "all" else {kind: KINDS[kind]}
    changed = with_outliers(config, model, **kinds)
    expected = model(texts()).logits
    found = changed(texts()).logits
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        changed.float()(texts()).logits.double(), expected, rtol=1e-2, atol=1e-2
    )


def test_the_outliers_are_there() -> None:
    config, model = plain()
    changed = with_outliers(config, model, **KINDS)
    for linear, least in (("q_proj", 30), ("up_proj", 30), ("o_proj", 20), ("down_proj", 200)):
        before, after = inputs_of(model, linear)[:, :, 1:], inputs_of(changed, linear)[:, :, 1:]
        for block in range(3):
            amax = after[block].amax((0, 1))
            assert amax.amax() > least * before[block].amax((0, 1)).median()


def test_the_first_token_is_massive_and_no_other() -> None:
    config, model = plain()
    changed = with_outliers(config, model, massive=1000.0)
    streams = inputs_of(changed, "input_layernorm")
    first = streams[0, 0, 0]
    assert first[config["hidden_size"]] > 0.9 * first.norm()  # no rounding error looks like it
    channel = streams[1:, :, :, config["hidden_size"]]
    usual = streams[1:, :, 1:].median()
    assert (channel[:, :, 0] > 100 * usual).all() and (channel[:, :, 1:] == 0).all()
    products = inputs_of(changed, "down_proj")[0]
    assert (products[:, 0, config["intermediate_size"]] > 100 * products[:, 1:].median()).all()


@pytest.mark.parametrize(
    "config", [{"model_type": "gemma"}, {"model_type": "llama", "hidden_act": "gelu"}]
)
def test_other_arithmetic_than_llamas_is_refused(config: dict[str, str], tmp_path: Path) -> None:
    """Its outputs would change, and nobody would notice."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = runpy.run_path(str(SCRIPT))
    arguments = script["parser"]().parse_args([str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=f"{config['model_type']} with .* found, one of llama,"):
        script["make"](arguments)
