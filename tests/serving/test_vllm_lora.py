"""Adapters that vLLM applies beside packed linears."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from vllm.config import set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora import lora_model, lora_weights, model_manager
from vllm.lora.layers import LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import create_lora_manager
from vllm.lora.peft_helper import PEFTHelper
from vllm.utils import torch_utils

from qtool.errors import QtoolError
from tests.serving.conftest import FORMATS, SHAPES, Native, rewritten
from tests.serving.models import configured, loaded
from tests.serving.test_vllm_load import packed_layers

RANK, ALPHA, TOKENS = 8, 16, 5
HIDDEN, INTER, KV = (
    SHAPES["hidden_size"],
    SHAPES["intermediate_size"],
    SHAPES["num_key_value_heads"] * SHAPES["head_dim"],
)
#: N and K of the linears of a block
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTER, HIDDEN),
    "mlp.up_proj": (INTER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CONFIG = LoRAConfig(max_lora_rank=RANK, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)


@pytest.fixture
def adapter(tmp_path: Path) -> dict[str, Tensor]:
    """A random adapter of all linears in ``tmp_path``; what it adds to each weight."""
    random, tensors, added = torch.Generator().manual_seed(0), {}, {}
    for name, (n, k) in LINEARS.items():
        a = torch.randn(RANK, k, generator=random).div(k**0.5).bfloat16()
        b = torch.randn(n, RANK, generator=random).bfloat16()
        stem = f"base_model.model.model.layers.0.{name}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        added[f"model.layers.0.{name}"] = ALPHA / RANK * (b.float() @ a.float())
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": [name.rpartition(".")[2] for name in LINEARS]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a GPU."""
    for module in (lora_model, lora_weights, model_manager, torch_utils):
        monkeypatch.setattr(module, "PIN_MEMORY", False)


def require_added(directory: Path, adapter: dict[str, Tensor], at: Path) -> None:
    """The adapter in ``at`` is added to the output of each packed linear of ``directory``."""
    model, config = loaded(directory), configured(directory)
    layers, random = packed_layers(model), torch.Generator().manual_seed(1)
    inputs = {
        name: torch.randn(TOKENS, layer.input_size, generator=random).to(layer.quant_method.dtype)
        for name, layer in layers.items()
    }
    before = {name: layer(inputs[name])[0].float() for name, layer in layers.items()}
    config.lora_config = CONFIG
    with set_current_vllm_config(config):
        manager = create_lora_manager(model, 4, 64, 320, CONFIG, config, torch.device("cpu"))
        peft = PEFTHelper.from_local_dir(str(at), 64)
        names = {name.rpartition(".")[2] for name in LINEARS}
        how = {"lora_model_id": 1, "device": "cpu", "dtype": torch.bfloat16}
        manager.add_adapter(LoRAModel.from_local_checkpoint(str(at), names, peft, **how))
        manager.activate_adapter(1)
        every = (1,) * TOKENS
        manager.set_adapter_mapping(LoRAMapping(every, every, is_prefill=True))
    adapted = dict(model.named_modules())
    for name, x in inputs.items():
        parent, _, last = name.rpartition(".")
        added = [adapter[f"{parent}.{part}"] for part in JOINED.get(last, (last,))]
        expected = before[name] + x.float() @ torch.cat(added).T
        error = (adapted[name](x)[0].float() - expected).norm() / expected.norm()
        assert error < 0.01, name


@pytest.mark.parametrize("scheme, layout", FORMATS)
def test_an_adapter_is_added_to_every_packed_linear(
    native: Native, scheme: str, layout: str, adapter: dict[str, Tensor], tmp_path: Path
) -> None:
    require_added(native(scheme, layout), adapter, tmp_path)


def test_an_adapter_is_added_to_linears_that_gather_differently(
    native: Native, adapter: dict[str, Tensor], tmp_path: Path
) -> None:
    names = [f"self_attn.{part}" for part in JOINED["qkv_proj"]]
    orders = {f"model.layers.0.{name}.permutation": torch.randperm(HIDDEN).int() for name in names}
    directory = native("w4a8-lqq", "dual-mma")
    made = rewritten(directory, tmp_path / "gathered", orders, permuted=names)
    require_added(made, adapter, tmp_path)


@pytest.mark.parametrize("targets", [None, ["o_proj", "experts"], ["q_proj", "o_proj"]])
def test_packed_experts_take_no_adapter(native: Native, targets: list[str] | None) -> None:
    directory = native("w4a8-lqq", "dual-mma", "qwen3_moe")
    options = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": targets}
    if targets is None or "experts" in targets:
        with pytest.raises(QtoolError, match="experts: packed experts take no LoRA adapter"):
            loaded(directory, **options)
        return
    model, config = loaded(directory, **options), configured(directory, **options)
    with set_current_vllm_config(config):
        how = config.lora_config, config, torch.device("cpu")
        found = create_lora_manager(model, 4, 64, 320, *how).modules
    assert sorted(name.rpartition(".")[2] for name in found) == ["o_proj", "qkv_proj"]


@pytest.mark.parametrize(("transforms", "said"), [([], False), (["norm-fusion"], True)])
def test_changed_weights_are_said_to_fit_no_adapter_of_the_source(
    native: Native,
    transforms: list[str],
    said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qtool.serving.vllm.config import logger

    directory = native("w8a8", "row-major-8", "llama", transforms=transforms)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger.name):
        loaded(directory, enable_lora=True, max_lora_rank=RANK)
    assert ("adapters that were trained for the source" in caplog.text) is said
