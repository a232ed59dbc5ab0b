"""vLLM's own loaders give each rank's layers the checkpoint's codes and parameters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

from qtool.errors import QtoolError
from qtool.format import LinearFormat, native_format
from qtool.io.source import Checkpoint
from qtool.pipeline.verify import load_linear
from qtool.runtime.load import load
from qtool.schemes.arithmetic.online_hadamard import rotate
from qtool.serving.preflight import require_servable
from qtool.serving.verify import layers
from qtool.serving.vllm.config import QtoolConfig
from qtool.serving.vllm.moe import QtoolExpertsMethod
from tests.serving.conftest import FORMATS, ROTATED, SHAPES, Native, rewritten, rule
from tests.serving.models import as_rank, configured, loaded

FAMILIES = (
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "opt",
    "falcon",
    "falcon-new",
)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """vLLM's layers of packed linears, by name; not experts."""
    return {
        name: m
        for name, m in model.named_modules()
        if hasattr(getattr(m, "quant_method", None), "pieces")
    }


def rank_rows(layer: Any, rank: int, ranks: int) -> list[Tensor]:
    """The rows that ``rank`` has of each part of a layer, counted over its joined linears."""
    sizes = list(getattr(layer, "output_sizes", [layer.output_size]))
    shares = [1 if isinstance(layer, RowParallelLinear) else ranks] * len(sizes)
    if isinstance(layer, QKVParallelLinear):  # fewer kv heads than ranks are held several times
        sizes[1:] = [layer.total_num_kv_heads * layer.head_size] * 2
        shares[1:] = [min(ranks, layer.total_num_kv_heads)] * 2
    parts = torch.arange(sum(sizes)).split(sizes)
    return [p.chunk(share)[rank * share // ranks] for p, share in zip(parts, shares, strict=True)]


def whole(
    checkpoint: Checkpoint, names: list[str], found: LinearFormat
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Codes of the joined linears, and each one's parameters."""
    each = [load_linear(checkpoint, name, found, torch.device("cpu")).unpack() for name in names]
    return torch.cat([codes for codes, _ in each]), [params for _, params in each]


def require_rank(layer: Any, checkpoint: Checkpoint, rank: int, ranks: int) -> None:
    """The integers, parameters and bias that ``rank`` holds are its share of the checkpoint's."""
    method = layer.quant_method
    found, (piece,) = method.format, method.pieces
    stored = {name: getattr(layer, attribute) for name, attribute in piece.items()}
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    rows = torch.cat(rank_rows(layer, rank, ranks))
    columns = (
        slice(rank * k, (rank + 1) * k) if isinstance(layer, RowParallelLinear) else slice(None)
    )
    codes, params = found.unpack(stored, len(rows), k)
    expected, each = whole(checkpoint, method.names, found)
    assert torch.equal(codes, expected[rows][:, columns])
    for name, param in params.items():
        shared = name in found.scheme_object.shared_params
        full = each[0][name] if shared else torch.cat([one[name] for one in each])
        by_group = shared or (full.dim() == 2 and full.shape[1] > 1)
        mine = full if shared else full[rows]
        if by_group and isinstance(layer, RowParallelLinear):
            mine = mine.chunk(ranks, -1)[rank]
        assert torch.equal(param, mine), name
    if layer.bias is not None:
        bias = torch.cat([checkpoint.read(f"{name}.bias") for name in method.names])
        assert torch.equal(
            layer.bias, bias[rows] if not isinstance(layer, RowParallelLinear) else bias
        )


def test_a_draft_model_is_packed_too(native: Native) -> None:
    directory = native("w4a8-lqq", "dual-mma")
    found = packed_layers(loaded(directory, prefix="draft_model"))
    assert list(found) == list(packed_layers(loaded(directory)))
    for layer in found.values():
        require_rank(layer, Checkpoint(directory), 0, 1)


@pytest.mark.parametrize("scheme, layout", FORMATS)
def test_every_format_under_tensor_parallelism(native: Native, scheme: str, layout: str) -> None:
    directory = native(scheme, layout)
    checkpoint = Checkpoint(directory)
    for ranks in (1, 2, 4):
        # one group a rank is another order in MARLIN's layout, half a tile is nothing
        refused = (ranks > 1 and layout == "compute-aware") or (
            ranks == 4 and layout.startswith("marlin")
        )
        if refused:
            with pytest.raises(QtoolError, match=r"use (a smaller )?tensor-parallel size"):
                loaded(directory, 0, ranks)
            continue
        for rank in range(ranks):
            found = packed_layers(loaded(directory, rank, ranks))
            assert [name.rpartition(".")[2] for name in found] == [
                "qkv_proj",
                "o_proj",
                "gate_up_proj",
                "down_proj",
            ]
            for layer in found.values():
                require_rank(layer, checkpoint, rank, ranks)


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family(native: Native, variant: str) -> None:
    directory = native(variant=variant)
    checkpoint = Checkpoint(directory)
    for ranks in (1, 2):
        for rank in range(ranks):
            found = packed_layers(loaded(directory, rank, ranks))
            names = {name for layer in found.values() for name in layer.quant_method.names}
            assert names == {
                name.removesuffix(".qweight")
                for name in checkpoint.entries
                if name.endswith(".qweight")
            }
            if "falcon" not in variant:  # whose rows go by head: compared by what they compute
                for layer in found.values():
                    require_rank(layer, checkpoint, rank, ranks)
    assert not [row.problem for row in layers(loaded(directory), checkpoint) if row.problem]


@pytest.mark.parametrize("scheme, layout", FORMATS)
def test_layers_compute_what_our_runtime_does(native: Native, scheme: str, layout: str) -> None:
    directory = native(scheme, layout, "llama-biases")
    rows = list(layers(loaded(directory), Checkpoint(directory)))
    assert len(rows) == 4
    assert [row.problem for row in rows] == [""] * 4


@pytest.mark.parametrize("scheme, layout", FORMATS)
@torch.no_grad()
def test_rotated_layers_compute_what_our_runtime_does(
    native: Native, scheme: str, layout: str
) -> None:
    directory = native(scheme, layout, "llama-biases", **ROTATED)
    model = loaded(directory)
    found = packed_layers(model)
    assert [layer.quant_method.format.rotated for layer in found.values()] == [False] * 3 + [True]
    assert [row.problem for row in layers(model, Checkpoint(directory))] == [""] * 4
    ours: Any = load(directory)
    x = torch.randn(5, SHAPES["intermediate_size"]).bfloat16()
    name = "model.layers.0.mlp.down_proj"
    y, expected = found[name](x)[0], ours.get_submodule(name)(x)
    exact = found[name].quant_method.kernel.exact
    assert (y - expected).norm() <= (0 if exact else 4e-3) * expected.norm()


@pytest.mark.parametrize("scheme, layout", FORMATS)
@torch.no_grad()
def test_ranks_rotate_what_they_have(native: Native, scheme: str, layout: str) -> None:
    """Their sums are those of one rank, but for the rounding of tokens by their own scales."""
    directory = native(scheme, layout, **ROTATED)
    if layout == "compute-aware":  # it cannot be cut along the input channels
        with pytest.raises(QtoolError, match="use tensor-parallel size 1"):
            loaded(directory, 0, 2)
        return
    name, checkpoint = "model.layers.0.mlp.down_proj", Checkpoint(directory)
    x = torch.randn(5, SHAPES["intermediate_size"]).bfloat16()
    found = native_format(checkpoint.config).of(name)
    assert found is not None and found.rotated
    whole_weight = load_linear(checkpoint, name, found, torch.device("cpu")).dequantize()
    total, exact = torch.zeros(5, SHAPES["hidden_size"]), x.float() @ whole_weight.t()
    for rank, share in enumerate(x.chunk(2, -1)):
        layer = packed_layers(loaded(directory, rank, 2))[name]
        require_rank(layer, checkpoint, rank, 2)
        y = layer.quant_method.apply(layer, share)
        (piece,) = layer.quant_method.pieces
        stored = {part: getattr(layer, attribute) for part, attribute in piece.items()}
        codes, params = found.unpack(stored, SHAPES["hidden_size"], share.shape[1])
        expected = found.scheme_object.matmul(rotate(share), codes, params)
        assert (y - expected).norm() <= 4e-3 * expected.norm()
        total += y.float()
    bits = found.scheme_object.activation.bits
    assert (total - exact).norm() < (0.2 if bits == 4 else 0.02) * exact.norm()


def test_experts_may_be_rotated(native: Native) -> None:
    directory = native(variant="qwen2_moe", **ROTATED)
    model = loaded(directory)
    assert {n for n, m in packed_layers(model).items() if m.quant_method.format.rotated} == {
        "model.layers.0.mlp.shared_expert.down_proj"
    }
    formats = experts_of(model).quant_method.formats
    assert formats["w2"].rotated and not formats["w13"].rotated
    assert not [row for row in layers(model, Checkpoint(directory)) if row.problem]


def test_experts_whose_gate_and_up_are_rotated_are_refused(native: Native, tmp_path: Path) -> None:
    names = [f"block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w3")]
    rotated = {"rotated": names, "format_version": 2}
    directory = rewritten(native(variant="mixtral"), tmp_path / "rotated", {}, **rotated)
    # vLLM and the check before it say so in the same words
    with pytest.raises(QtoolError, match="are served with rotated inputs of down") as refused:
        loaded(directory)
    with pytest.raises(QtoolError) as before:
        require_servable(directory, 1, None)
    assert str(before.value) == str(refused.value)


@pytest.mark.parametrize("variant", MIXTURES)
def test_experts_compute_what_our_runtime_does(native: Native, variant: str) -> None:
    directory = native(variant=variant)
    checkpoint = Checkpoint(directory)
    rows = list(layers(loaded(directory), checkpoint))
    experts = sum(name.endswith(".qweight") and ".experts." in name for name in checkpoint.entries)
    assert len([row for row in rows if row.name.endswith((".w13", ".w2"))]) == experts // 3 * 2
    assert not [row for row in rows if row.problem]


def experts_of(model: nn.Module) -> Any:
    """The one layer of experts."""
    (layer,) = (m for m in model.modules() if hasattr(getattr(m, "quant_method", None), "formats"))
    return layer


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        ("w4a8-lqq", "dual-mma"),
        ("w4a8-qoq", "dual-mma"),
        ("w8a8", "row-major-8"),
        ("w4a16", "marlin"),
    ],
)
@pytest.mark.parametrize("more", [{}, ROTATED], ids=["plain", "rotated"])
@torch.no_grad()
def test_grouped_experts_compute_what_a_loop_over_them_does(
    native: Native, scheme: str, layout: str, more: dict[str, Any]
) -> None:
    """Each token's choices in its own order, whatever is another rank's."""
    layer = experts_of(loaded(native(scheme, layout, "mixtral", **more)))
    method: Any = layer.quant_method
    assert method.formats["w2"].rotated == bool(more)
    assert method.grouped and sum(gemm.launches for gemm in method.gemms(layer)) == 2
    x = torch.randn(20, 512).bfloat16()
    weights, ids = torch.rand(20, 4).softmax(-1).topk(2)
    each = torch.stack([method._expert(layer, expert, x) for expert in range(4)])
    for expert_map in (None, torch.tensor([1, -1, 0, 3], dtype=torch.int32)):
        layer._expert_map = expert_map
        y = method.apply(layer, x, weights, ids, None, None)
        expected = torch.zeros(20, 512)
        for token, (pair, chosen) in enumerate(zip(weights, ids, strict=True)):
            for weight, expert in zip(pair, chosen, strict=True):
                own = int(expert) if expert_map is None else int(expert_map[expert])
                if own >= 0:
                    expected[token] += weight * each[own, token].float()
        distance = (y - expected.bfloat16()).norm()
        assert distance <= (0 if scheme != "w4a16" else 4e-3) * expected.norm()


def test_experts_that_clamp_are_refused() -> None:
    """vLLM's name of the activation does not tell."""
    clamped = SimpleNamespace(
        moe_config=SimpleNamespace(swiglu_limit=10.0),
        activation=MoEActivation.SILU,
        apply_router_weight_on_input=False,
    )
    with pytest.raises(QtoolError, match=r"^experts: .* are clamped, at 10\.0, are not served"):
        QtoolExpertsMethod("experts", clamped, {}, {})


@torch.no_grad()
def test_few_tokens_go_through_all_experts_many_through_their_own(native: Native) -> None:
    """Of a scheme without grouped kernels."""
    layer = experts_of(loaded(native("w4a8-lqq", "compute-aware", "mixtral")))
    method: Any = layer.quant_method
    assert not method.grouped
    x = torch.randn(600, 512).bfloat16()
    weights, ids = torch.rand(600, 4).softmax(-1).topk(2)

    def apply(rows: slice) -> Tensor:
        return method.apply(layer, x[rows], weights[rows], ids[rows], None, None)

    assert torch.equal(apply(slice(600)), torch.cat([apply(slice(300)), apply(slice(300, 600))]))
    expected = torch.zeros(600, 512)
    for token, (pair, chosen) in enumerate(zip(weights[:8], ids[:8], strict=True)):
        for weight, expert in zip(pair, chosen, strict=True):
            expected[token] += weight * method._expert(layer, int(expert), x[token, None])[0]
    assert torch.allclose(apply(slice(8)).float(), expected[:8], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("variant", MIXTURES)
def test_experts_under_tensor_parallelism(native: Native, variant: str) -> None:
    directory = native(variant=variant)
    checkpoint = Checkpoint(directory)
    for rank in range(2):
        require_experts(experts_of(loaded(directory, rank, 2)), checkpoint, rank)


def require_experts(layer: Any, checkpoint: Checkpoint, rank: int) -> None:
    """The codes that ``rank`` of two holds of every expert are half of the checkpoint's."""
    method = layer.quant_method
    for stack, names in method.names.items():
        found, each = method.formats[stack], len(names) // method.experts
        for expert in range(method.experts):
            stored = {p: getattr(layer, f"{stack}_{p}")[expert] for p in method.axes[stack]}
            codes, _ = found.unpack(stored, *method.sizes[stack])
            halves = []
            for name in names[expert * each : (expert + 1) * each]:
                whole_codes, _ = whole(checkpoint, [name], found)
                halves.append(whole_codes.chunk(2, int(stack == "w2"))[rank])
            assert torch.equal(codes, torch.cat(halves)), (stack, expert)


def test_different_permutations_are_applied_linear_by_linear(
    native: Native, tmp_path: Path
) -> None:
    """q, k and v whose inputs are gathered in different orders are three GEMMs; alike, one."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for pieces in (1, 3):
        seeds = [torch.Generator().manual_seed(seed if pieces > 1 else 0) for seed in range(3)]
        orders = {
            f"model.layers.0.{name}.permutation": torch.randperm(512, generator=seed).int()
            for name, seed in zip(names, seeds, strict=True)
        }
        alike = native("w4a4", "apex4", "llama-biases")
        directory = rewritten(alike, tmp_path / str(pieces), orders, permuted=names)
        model = loaded(directory)
        layer = next(iter(packed_layers(model).values()))
        assert len(layer.quant_method.pieces) == pieces
        assert [row.problem for row in layers(model, Checkpoint(directory))] == [""] * 4


@pytest.mark.parametrize(
    ("variant", "parts", "said"),
    [
        ("llama", "q_proj", r"qkv_proj: the engine joins .*q_proj \(w8a8, .*k_proj \(w4a8-lqq"),
        ("opt", "v_proj", r"qkv_proj: the engine joins .*q_proj \(w4a8-lqq, .*v_proj \(w8a8"),
        ("qwen3", "up_proj", r"gate_up_proj: the engine joins .*gate_proj .*up_proj \(w8a8"),
        ("mixtral", r"1\.w2", r"experts: the engine joins .*0.w2 .*1.w2 \(w8a8"),
    ],
)
def test_rules_must_not_part_what_vllm_joins(
    native: Native, variant: str, parts: str, said: str
) -> None:
    """vLLM, the check before it and the model card say so in the same words."""
    rules = [rule("w8a8", "row-major-8", rf"\.{parts}$"), rule("w4a8-lqq", "dual-mma")]
    directory = native(variant=variant, rules=rules)
    with pytest.raises(QtoolError, match=said) as refused:
        loaded(directory)
    with pytest.raises(QtoolError) as before:
        require_servable(directory, 1, None)
    assert str(before.value) == str(refused.value)
    assert f"vLLM cannot serve it: {refused.value}." in (directory / "README.md").read_text()


def test_a_model_that_is_not_quantized_is_refused() -> None:
    """vLLM makes the config without arguments where a flag alone asks for it."""
    with pytest.raises(QtoolError, match="quantize it first"):
        QtoolConfig()


def test_mixed_schemes_and_16_bit_layers(native: Native) -> None:
    untouched = {"match": r"\.o_proj$", "scheme": None}
    directory = native(
        rules=[
            rule("w8a8", "row-major-8", r"\.down_proj$"),
            untouched,
            rule("w4a8-lqq", "dual-mma"),
        ]
    )
    found = packed_layers(loaded(directory))
    schemes = {
        name.rpartition(".")[2]: layer.quant_method.format.scheme for name, layer in found.items()
    }
    assert schemes == {"qkv_proj": "w4a8-lqq", "gate_up_proj": "w4a8-lqq", "down_proj": "w8a8"}


def test_a_tensor_that_never_came_is_named(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not check that a quantized model was loaded whole."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    whole_stream = DefaultModelLoader.get_all_weights

    def without(self: Any, *args: Any) -> Any:
        return (
            (name, tensor)
            for name, tensor in whole_stream(self, *args)
            if not name.endswith("k_proj.s2")
        )

    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", without)
    with pytest.raises(QtoolError, match=r"qkv_proj.s2: 2 of 3 tensors were loaded"):
        loaded(native())


@pytest.mark.parametrize(
    ("scheme", "layout", "variant", "tensor", "layer"),
    [
        ("w4a8-lqq", "dual-mma", "llama", "self_attn.k_proj.s1", "self_attn.qkv_proj.s1"),
        ("w4a16", "marlin", "llama", "mlp.down_proj.scale", "mlp.down_proj.scale"),
        (
            "w8a8",
            "row-major-8",
            "mixtral",
            "block_sparse_moe.experts.2.w3.scale",
            "block_sparse_moe.experts.w13_scale",
        ),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(
    native: Native,
    tmp_path: Path,
    scheme: str,
    layout: str,
    variant: str,
    tensor: str,
    layer: str,
    value: float,
) -> None:
    directory = native(scheme, layout, variant)
    stored = Checkpoint(directory).read(f"model.layers.0.{tensor}").clone()
    stored.view(-1)[-1] = value
    damaged = rewritten(directory, tmp_path / "damaged", {f"model.layers.0.{tensor}": stored})
    with pytest.raises(QtoolError, match=rf"layers\.0\.{layer}: holds 1 NaN or Inf values"):
        loaded(damaged)


def test_what_a_kv_cache_stores_is_not_loaded(native: Native, tmp_path: Path) -> None:
    each = torch.ones(4, 64)
    for kv, names in {"kv8": ("k_scale", "v_scale"), "kv4": ("k_offset", "k_importance")}.items():
        scales = {f"model.layers.0.self_attn.{name}": each.clone() for name in names}
        assert packed_layers(loaded(rewritten(native(), tmp_path / kv, scales, kv=kv)))


def test_the_compile_cache_sees_our_version(native: Native) -> None:
    import qtool

    config = configured(native())
    assert config.model_config.hf_config.quantization_config["qtool_version"] == qtool.__version__


def test_ranks_are_simulated() -> None:
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    with as_rank(3, 4):
        assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (3, 4)
    assert get_tensor_model_parallel_world_size() == 1
