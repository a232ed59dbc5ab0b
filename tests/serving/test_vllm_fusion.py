"""Fused with what computes their input, quantizations give the same numbers in a compiled graph."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import CompilationMode
from vllm.config.utils import Range
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform

from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_activation_groups import quantize_activation_groups
from qtool.kernels.activation.quantize_packed_groups import quantize_packed_groups
from qtool.serving.vllm import fusion
from tests.serving.conftest import Native
from tests.serving.models import configured, loaded
from tests.serving.test_vllm_compile import Captured

K, EPSILON = 128, 1e-5
NORM = torch.ops.vllm_ir.rms_norm.default
RESIDUAL_NORM = torch.ops.vllm_ir.fused_add_rms_norm.default


@pytest.fixture(scope="module")
def silu_and_mul() -> Iterator[None]:
    """vLLM's operation, which its wheel has for GPUs only."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("silu_and_mul(Tensor(a!) result, Tensor input) -> ()")

    def compute(result: Tensor, input: Tensor) -> None:
        gate, up = input.chunk(2, -1)
        result.copy_(torch.nn.functional.silu(gate) * up)

    library.impl("silu_and_mul", compute, "CPU")
    library.impl("silu_and_mul", lambda result, input: None, "Meta")
    yield
    library._destroy()


def silu_up(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    op = torch.ops._C.silu_and_mul.default
    return auto_functionalized(op, result=out, input=x)[1]


def plain(x: Tensor, order: Tensor | None = None) -> tuple[Tensor, ...]:
    return quantize_activation(x, order, None, "none", 0.0)


def rotated(x: Tensor) -> tuple[Tensor, ...]:
    return quantize_activation(x, None, None, "none", 0.0, True)


def in_groups(x: Tensor) -> tuple[Tensor, ...]:
    return quantize_activation_groups(x, None, None, None, "none", 0.0, 32, "apex4")


def in_packed_groups(x: Tensor) -> tuple[Tensor, ...]:
    return quantize_packed_groups(x, None, None, None, "none", 0.0, 32, "apex4")


def values(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def rewritten(function: Callable[..., Any], given: list[Tensor]) -> tuple[int, list[str]]:
    """Fuse the graph of ``function``, which still gives the same; how many, and what is called."""
    graph = make_fx(function, tracing_mode="symbolic")(*given)
    graph.graph.eliminate_dead_code()  # as AOTAutograd does
    count = fusion.fuse(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for got, want in zip(
        torch.utils._pytree.tree_leaves(graph(*given)),
        torch.utils._pytree.tree_leaves(function(*given)),
        strict=True,
    ):
        assert torch.equal(got, want)
    return count, called(graph.graph)


def called(graph: fx.Graph) -> list[str]:
    """What the graph computes with, without where results are."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    names = [fusion._name(node) for node in nodes]
    return [name for name in names if name and not name.startswith("aten::sym_size")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("permuted", [False, True])
def test_a_norm_with_its_residual(dtype: torch.dtype, permuted: bool) -> None:
    """The residual goes on as it did."""
    order = torch.randperm(K).int() if permuted else None

    def block(x: Tensor, residual: Tensor, norm: Tensor, *order: Tensor) -> tuple[Any, Tensor]:
        y, residual = RESIDUAL_NORM(x, residual, norm, EPSILON)
        return plain(y, *order), residual * 2

    given = values((5, K), (5, K), (K,), dtype=dtype) + ([] if order is None else [order])
    count, names = rewritten(block, given)
    assert count == 1 and names == ["qtool::quantize_residual_norm", "aten::mul.Tensor"]


@pytest.mark.parametrize("quantize", [plain, rotated, in_groups, in_packed_groups])
def test_the_first_norm(quantize: Callable[..., Any]) -> None:
    def block(x: Tensor, norm: Tensor) -> tuple[Any, Tensor]:
        return quantize(NORM(x, norm, EPSILON)), x + 1

    count, names = rewritten(block, values((5, K), (K,)))
    assert (
        count == 1 and names[0].startswith("qtool::quantize") and names[1:] == ["aten::add.Tensor"]
    )


@pytest.mark.parametrize("quantize", [plain, rotated, in_groups, in_packed_groups])
def test_silu_times_up(quantize: Callable[..., Any], silu_and_mul: None) -> None:
    count, names = rewritten(lambda x: quantize(silu_up(x)), values((5, 2 * K)))
    assert count == 1 and len(names) == 1 and names[0].startswith("qtool::quantize")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, r, n: (plain(y := RESIDUAL_NORM(x, r, n, EPSILON)[0]), y),  # a router reads it
        lambda x, r, n: (plain(y := NORM(x, n, EPSILON)), in_groups(y)),  # two schemes
        lambda x, r, n: plain(NORM(x, n, EPSILON)[:, torch.arange(K - 1, -1, -1)]),  # gathered
        lambda x, r, n: plain(NORM(x, n, EPSILON), torch.arange(K).int()),  # by an order made here
        lambda x, r, n: plain(NORM(x, n.float(), EPSILON)),  # Gemma's: rounded once
        lambda x, r, n: plain(NORM(x, None, EPSILON)),
        lambda x, r, n: plain(NORM(x, n, EPSILON, K // 2)),
        lambda x, r, n: plain(NORM(x[:, : K // 2], n[: K // 2], EPSILON)),  # strided
        lambda x, r, n: in_groups(RESIDUAL_NORM(x, r, n, EPSILON)[0]),  # no kernel
        lambda x, r, n: rotated(RESIDUAL_NORM(x, r, n, EPSILON)[0]),  # nor does one rotate
        lambda x, r, n: plain(RESIDUAL_NORM(x, r, n, EPSILON)[1]),  # the residual itself
        lambda x, r, n: quantize_activation(NORM(x, n, EPSILON), None, n, "rms-norm", EPSILON),
        lambda x, r, n: plain(x + r),
    ],
)
def test_what_is_left_alone(function: Callable[..., Any]) -> None:
    assert rewritten(function, values((5, K), (5, K), (K,)))[0] == 0


def test_two_linears_of_one_residual_stream() -> None:
    """As in a block: each norm is joined with its own quantization."""

    def block(x: Tensor, residual: Tensor, norm: Tensor) -> Any:
        y, residual = RESIDUAL_NORM(x, residual, norm, EPSILON)
        codes, _, _ = plain(y)
        y, residual = RESIDUAL_NORM(codes.bfloat16(), residual, norm, EPSILON)
        return plain(y), residual

    count, names = rewritten(block, values((5, K), (5, K), (K,)))
    assert count == 2 and Counter(names)["qtool::quantize_residual_norm"] == 2


@torch.no_grad()
@pytest.mark.parametrize("variant, fused", [("llama", 2), ("qwen3", 2), ("gemma2", 0)])
def test_the_norms_of_vllms_models(native: Native, variant: str, fused: int) -> None:
    """In vLLM's own code, as Inductor passes it on: the norms before qkv and gate_up."""
    directory = native(variant=variant)
    model: Any = loaded(directory)
    config = configured(directory)
    found: list[int] = []

    def stop(graph: fx.Graph) -> None:
        found.append(fusion.fuse(graph))
        raise Captured

    options = {
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
        "post_grad_custom_post_pass": stop,
        "enable_auto_functionalized_v2": False,
        "fx_graph_cache": False,
    }
    tokens = torch.arange(5), torch.arange(5)
    for tensor in tokens:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.reset()
    with (
        set_forward_context(None, config),
        pass_context(Range(1, 64)),
        pytest.raises(Exception, match="Captured"),
    ):
        compiled = torch.compile(model.model.forward, fullgraph=True, options=options)
        compiled(*tokens, None, None)
    assert found == [fused]


def test_vllm_is_given_the_pass_by_default(native: Native) -> None:
    """Where it compiles; a pass or a choice of the user's stays."""
    directory, key = native(), current_platform.pass_key
    compiling = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor"}

    def switched(**options: Any) -> Any:
        config = configured(directory)
        for name, value in options.items():
            setattr(config.compilation_config, name, value)
        fusion.switch_on(config)
        fusion.switch_on(config)
        return config.compilation_config

    ours = switched(**compiling, custom_ops=["none"])
    assert isinstance(ours.inductor_compile_config[key], fusion.FuseQuantization)
    assert ours.custom_ops == ["none", "+silu_and_mul"]
    assert ours.compute_hash() != switched(**compiling, inductor_compile_config={}).compute_hash()
    theirs = switched(
        **compiling, custom_ops=["all", "-silu_and_mul"], inductor_compile_config={key: "theirs"}
    )
    assert theirs.inductor_compile_config == {key: "theirs"}
    assert theirs.custom_ops == ["all", "-silu_and_mul"]
    assert key not in switched(mode=CompilationMode.NONE).inductor_compile_config


def test_building_a_model_switches_it_on(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(fusion, "switch_on", seen.append)
    loaded(native())
    assert seen
