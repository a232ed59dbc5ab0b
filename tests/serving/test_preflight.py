"""What cannot be served is refused in a sentence before an engine loads anything."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import qtool
from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, LinearFormat, Rule, native_format
from qtool.io.source import Checkpoint, read_config
from qtool.models import Family, family_of
from qtool.runtime.packed_linears import PackedLinears
from qtool.serving.evaluate import CACHED_WINDOWS, VllmModel, cache_bytes
from qtool.serving.preflight import (
    cache_refused,
    require_gpus,
    require_servable,
    require_shares_and_kernels,
)
from qtool.serving.vllm import engine
from tests.models.tiny import save_tiny, tiny_config
from tests.serving.conftest import FORMATS, ROTATED, Native, rewritten, rule

HOPPER, BLACKWELL = (9, 0), (10, 0)
W4A8 = "w4a8-lqq", 64, "dual-mma"


@pytest.mark.parametrize(
    ("model_type", "kv", "reason"),
    [
        ("llama", "kv4", ""),
        ("llama", "kv4-channel", "kv4-channel has no kernel over pages"),
        ("granitemoehybrid", "kv8", "not all blocks keep keys and values of one shape"),
        ("gemma4_text", "kv8", "not all blocks keep keys and values of one shape"),
    ],
)
def test_which_quantized_caches_vllm_can_use(model_type: str, kv: str, reason: str) -> None:
    config = tiny_config(model_type).to_dict()
    found = cache_refused(PackedLinears(config, CheckpointFormat("", (), kv=kv)))
    assert found.endswith(reason) and bool(found) == bool(reason)


def test_shares_and_kernels_of_every_format(native: Native) -> None:
    for scheme, layout in FORMATS:
        checkpoint = Checkpoint(native(scheme, layout))
        linears = PackedLinears(checkpoint.config, native_format(checkpoint.config))
        require_shares_and_kernels(linears, 1, None)
        if layout in ("compute-aware", "marlin", "marlin-24"):  # by mma.sync
            require_shares_and_kernels(linears, 1, BLACKWELL)
            continue
        with pytest.raises(QtoolError, match=r"this GPU is sm_100; its kernels run on sm_"):
            require_shares_and_kernels(linears, 1, BLACKWELL)


@pytest.mark.parametrize("variant", ["llama", "phi3", "falcon-new", "opt", "mixtral", "qwen2_moe"])
def test_what_ranks_can_share(native: Native, variant: str) -> None:
    require_servable(native(variant=variant), 2, HOPPER)
    with pytest.raises(QtoolError, match=r"8 attention heads cannot be split over 3 GPUs"):
        require_servable(native(variant=variant), 3, HOPPER)


def test_equal_blocks_are_shared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of 94 blocks has 36000 linears, and its family tells the cuts of all of a block."""
    asked, told = [], Family.tensor_parallel

    def counting(family: Family, config: Any, ranks: int) -> dict[str, tuple[int, int]]:
        asked.append(ranks)
        return told(family, config, ranks)

    monkeypatch.setattr(Family, "tensor_parallel", counting)
    config = tiny_config("mixtral", num_hidden_layers=4).to_dict()
    own = PackedLinears(config, CheckpointFormat("", (Rule("", LinearFormat(*W4A8)),)))
    require_shares_and_kernels(own, 1, None)
    assert len(asked) == 4 + 3 * config["num_local_experts"]


def test_kv_heads_that_gpus_can_not_share() -> None:
    """Phi-4 has 40 heads and 10 for keys and values."""
    for kv, ranks, shared in ((10, 2, True), (10, 4, False), (8, 16, True), (12, 8, False)):
        config = {"model_type": "phi3", "num_attention_heads": 240, "num_key_value_heads": kv}
        settings = SimpleNamespace(**config, hidden_size=240 * 8, num_hidden_layers=1)
        family = family_of({"model_type": "phi3"})
        if shared:
            assert family.tensor_parallel(settings, ranks)
            continue
        with pytest.raises(QtoolError, match=f"^{kv} kv heads cannot be split over {ranks} GPUs"):
            family.tensor_parallel(settings, ranks)


def test_latent_projections_are_on_every_gpu() -> None:
    config = tiny_config("deepseek_v3").to_dict()
    family = family_of(config)
    settings = family.settings(config)
    split = family.at(settings, 0).tensor_parallel(settings, 2)
    assert split["self_attn.kv_a_proj_with_mqa"] == split["self_attn.q_a_proj"] == (1, 1)
    assert split["self_attn.q_b_proj"] == (2, 1) and split["self_attn.o_proj"] == (1, 2)


def test_a_model_that_transformers_does_not_know_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(QtoolError, match=r"transformers cannot make the model of config\.json"):
        VllmModel(tmp_path, tokens=8, dtype=None, tensor_parallel=1)


def test_shares_that_are_no_tiles_name_the_linear(native: Native) -> None:
    directory = native("w4a16", "marlin")
    require_servable(directory, 2, HOPPER)
    with pytest.raises(QtoolError, match=r"^model.layers.0.\S+: .*tensor-parallel size"):
        require_servable(directory, 4, HOPPER)
    with pytest.raises(QtoolError, match=r"o_proj: layout compute-aware cannot be cut"):
        require_servable(native("w4a8-qoq-g128", "compute-aware"), 2, (8, 0))
    with pytest.raises(QtoolError, match=r"this GPU is sm_80; its kernels run on sm_90"):
        require_servable(native(), 1, (8, 0))


@pytest.mark.parametrize("kind", ["mistral3", "gemma3", "llava"])
def test_the_text_model_of_a_wrapper_is_served(kind: str, tmp_path: Path) -> None:
    """Under the wrapper's names, from config.json and from transformers' config, which vLLM has."""
    directory = tmp_path / "native"
    qtool.quantize(save_tiny(kind, tmp_path / "source"), "w4a8-lqq", recipe="fast", out=directory)
    require_servable(directory, 1, HOPPER)
    config = read_config(directory)
    ours, theirs = (
        list(PackedLinears(c, native_format(config)).formats())
        for c in (config, AutoConfig.from_pretrained(directory).to_dict())
    )
    assert ours == theirs and ours[0].startswith("model.language_model.layers.0.")


@pytest.mark.parametrize(
    ("scheme", "layout", "variant", "part", "layer"),
    [
        ("w8a8", "row-major-8", "llama", "self_attn.v_proj", "self_attn.qkv_proj"),
        ("w8a8", "row-major-8", "llama", "mlp.up_proj", "mlp.gate_up_proj"),
        ("w8a8", "row-major-8", "mixtral", "experts.3.w3", "block_sparse_moe.experts"),
        (None, None, "mixtral", "experts.[0-3].w2", "block_sparse_moe.experts"),
    ],
)
def test_linears_that_engines_join_are_stored_alike(
    native: Native, scheme: str | None, layout: str, variant: str, part: str, layer: str
) -> None:
    other = rule(scheme, layout, part) if scheme else {"match": part, "scheme": None}
    directory = native(variant=variant, rules=[other, rule("w4a8-lqq", "dual-mma")])
    with pytest.raises(QtoolError, match=rf"^model.layers.0.{layer}: ") as refused:
        require_servable(directory, 1, HOPPER)
    assert f"vLLM cannot serve it: {refused.value}." in (directory / "README.md").read_text()


def test_permuted_inputs_of_experts_and_of_one_of_several(native: Native, tmp_path: Path) -> None:
    experts = [f"block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")]
    for variant, names, said in (
        ("mixtral", experts, "experts with input permutations are not served"),
        ("llama", ["self_attn.q_proj"], "some of its linears have an input permutation"),
    ):
        orders = {
            f"model.layers.0.{name}.permutation": torch.arange(512, dtype=torch.int32)
            for name in names
        }
        alike = native("w4ax-fmpq", "w4ax-interleaved", variant)
        directory = rewritten(alike, tmp_path / variant, orders, permuted=names)
        with pytest.raises(QtoolError, match=said):
            require_servable(directory, 1, HOPPER)


def test_rotated_inputs_of_experts_and_of_one_of_several(native: Native, tmp_path: Path) -> None:
    up = [f"block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w3")]
    for variant, names, said in (
        ("mixtral", up, r"experts: experts are served with rotated inputs of down alone"),
        ("llama", ["mlp.up_proj"], r"gate_proj \(w8a8, .*8\) and .*up_proj .*, rotated inputs\)"),
    ):
        plain = native("w8a8", "row-major-8", variant)
        rotated = {"rotated": names, "format_version": 2}
        directory = rewritten(plain, tmp_path / variant, {}, **rotated)
        require_servable(plain, 1, HOPPER)
        with pytest.raises(QtoolError, match=rf"^model.layers.0.*{said}"):
            require_servable(directory, 1, HOPPER)


def test_what_ranks_can_share_of_rotated_inputs(native: Native) -> None:
    rules = [rule("w8a8", "row-major-8", "down_proj"), {"match": ".*", "scheme": None}]
    directory = native("w8a8", rules=rules, **ROTATED)
    require_servable(directory, 4, HOPPER)
    config = read_config(directory) | {"intermediate_size": 64 * 17}
    linears = PackedLinears(config, native_format(config))
    require_shares_and_kernels(linears, 1, HOPPER)
    with pytest.raises(QtoolError, match=r"mlp.down_proj: its inputs are rotated .* 544 input"):
        require_shares_and_kernels(linears, 2, HOPPER)


def test_what_ranks_can_share_of_experts_rotated_inputs(native: Native) -> None:
    require_servable(native("w8a8", "row-major-8", "qwen3_moe", **ROTATED), 4, HOPPER)
    rules = [rule("w8a8", "row-major-8", "down_proj"), {"match": ".*", "scheme": None}]
    directory = native("w8a8", variant="qwen3_moe", rules=rules, **ROTATED)
    config = read_config(directory) | {"moe_intermediate_size": 64 * 6}
    linears = PackedLinears(config, native_format(config))
    require_shares_and_kernels(linears, 2, HOPPER)
    with pytest.raises(QtoolError, match=r"experts.0.down_proj: its inputs are rotated .* 96 inp"):
        require_shares_and_kernels(linears, 4, HOPPER)


def test_a_damaged_checkpoint_names_the_tensor(native: Native, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.s2"
    directory = rewritten(native(), tmp_path / "damaged", {}, drop=name)
    with pytest.raises(QtoolError, match=name.replace(".", r"\.")):
        require_servable(directory, 1, HOPPER)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu() -> None:
    with pytest.raises(QtoolError, match="vLLM would run on 1 NVIDIA GPU; this machine has none"):
        require_gpus(1)
    with pytest.raises(QtoolError, match="on 2 NVIDIA GPUs; this machine has none"):
        require_gpus(2)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None or torch.cuda.is_available(),
    reason="vLLM is installed",
)
def test_a_machine_without_vllm(native: Native) -> None:
    directory = native()
    calls: list[Callable[[], object]] = [
        lambda: qtool.verify(directory, engine="vllm"),
        lambda: qtool.evaluate(["demo"], directory, engine="vllm"),
    ]
    for call in calls:
        with pytest.raises(QtoolError, match=r"vLLM is needed: pip install 'qtool\[vllm\]'"):
            call()


def test_what_needs_no_vllm_is_said_before_it_is_imported(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes a minute."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which an engine changes
    monkeypatch.setattr(engine, "version", lambda name: "0.26.0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # which ends its import
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(QtoolError, match="on 2 NVIDIA GPUs; this machine has 1"):
        engine.require_vllm(native(), 2)
    parted = [rule("w8a8", "row-major-8", "v_proj"), rule("w4a8-lqq", "dual-mma")]
    with pytest.raises(QtoolError, match="the engine joins"):
        engine.require_vllm(native(rules=parted), 1)
    with pytest.raises(QtoolError, match=r"no kernel takes activations in torch\.float32"):
        engine.engine(native("w4a16", "marlin"), dtype="float32")
    for dtype in ("auto", "float16"):
        with pytest.raises(QtoolError, match="vLLM is needed"):
            engine.engine(native("w4a16", "marlin"), dtype=dtype)


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        *(("0.26", True), ("0.26rc1", True), ("0.26.1.dev3+g123", True), ("0.27", True)),
        *(("0.100.0", True), ("1.0", True), ("0.23.1", False), ("0.25.9rc2", False)),
        *(("dev", False), ("0.2²", False)),
    ],
)
def test_an_old_vllm(version: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interfaces of 0.23 and 0.26 differ: the plugin says so itself."""
    from qtool.serving.vllm import register

    registered: list[str] = []

    def registration(name: str) -> Callable[[object], None]:
        return lambda config: registered.append(name)

    stubs: dict[str, dict[str, object]] = {
        "vllm": {"__version__": version},
        "vllm.model_executor.layers.quantization": {"register_quantization_config": registration},
        "qtool.serving.vllm.config": {"QtoolConfig": object},
    }
    for module, names in stubs.items():
        stub = ModuleType(module)
        vars(stub).update(names)
        monkeypatch.setitem(sys.modules, module, stub)
    said = rf"vLLM {re.escape(version)} is installed; .* needs 0.26 or newer"
    with nullcontext() if taken else pytest.raises(QtoolError, match=said):
        register()
    assert registered == ["qtool"] * taken


@pytest.mark.parametrize("kind", ["gemma4_text", "mamba"])
def test_models_whose_layers_differ_or_have_no_attention_have_a_cache_too(kind: str) -> None:
    config = tiny_config(kind)
    assert cache_bytes(config, 64) == 1 << 30
    found, tokens = cache_bytes(config, 1 << 22), CACHED_WINDOWS << 22
    if kind == "mamba":
        assert found == 1 << 30
    else:  # keys and values in float32
        heads = config.to_dict()["num_key_value_heads"] * config.to_dict()["head_dim"]
        assert found == tokens * 2 * 4 * config.num_hidden_layers * heads


def test_an_error_of_vllm_is_its_last_line_that_says_something() -> None:
    link = "    For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal"
    error = ValueError(f"1 validation error\nmemory\n  Input should be at most 1\n{link}\n")
    assert engine._last_line(error) == "Input should be at most 1"
    assert engine._last_line(AssertionError()) == "AssertionError"
