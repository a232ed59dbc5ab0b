"""In vLLM's compiled models our layers are two operations for any number of tokens."""

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from vllm.forward_context import set_forward_context

from tests.serving.conftest import FORMATS, ROTATED, Native
from tests.serving.models import configured, loaded
from tests.serving.test_vllm_load import packed_layers

BLOCK = "model.layers.0"
#: operations of a layer: those that quantize tokens, and GEMMs
QUANTIZE = ("quantize_activation", "quantize_activation_groups", "quantize_packed_groups")


@pytest.mark.parametrize("scheme, layout", FORMATS)
@torch.no_grad()
def test_one_graph_of_two_operations(native: Native, scheme: str, layout: str) -> None:
    """Without a graph break, for any number of tokens, with fakes that agree with what runs."""
    require_one_graph(packed_layers(loaded(native(scheme, layout)))[f"{BLOCK}.self_attn.qkv_proj"])
    rotated = packed_layers(loaded(native(scheme, layout, **ROTATED)))[f"{BLOCK}.mlp.down_proj"]
    assert rotated.quant_method.format.rotated
    require_one_graph(rotated)


def require_one_graph(layer: Any) -> None:
    """``layer`` compiled computes what it does."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=record)
    for tokens in (5, 3, 17):
        x = torch.randn(tokens, layer.input_size).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x)[0], layer(x)[0])
    assert len(graphs) == 1
    ops = Counter(
        str(node.target).split(".")[1]
        for node in graphs[0].graph.nodes
        if "qtool" in str(node.target)
    )
    quantize = sum(ops[name] for name in QUANTIZE)
    assert quantize == (layer.quant_method.format.scheme_object.activation.bits < 16)
    assert sum(ops.values()) == quantize + 1

    torch._dynamo.reset()
    x = torch.randn(6, layer.input_size).bfloat16()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0], layer(x)[0])


class Captured(Exception):
    """Stands for running the graph, which needs vLLM's attention kernels."""


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3", "phi3", "gemma2"])
@torch.no_grad()
def test_a_whole_model_is_one_graph(native: Native, variant: str) -> None:
    """vLLM's model code, traced for any number of tokens: no break, every linear is ours."""
    directory = native(variant=variant)
    model: Any = loaded(directory)
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)

        def stop(*tensors: Any) -> Any:
            raise Captured

        return stop

    tokens = torch.arange(5), torch.arange(5)
    for tensor in tokens:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.reset()
    with set_forward_context(None, configured(directory)), pytest.raises(Captured):
        torch.compile(model.model.forward, fullgraph=True, backend=record)(*tokens, None, None)
    [graph] = graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ops = Counter(".".join(name.split(".")[:2]) for name in names)
    layers = len(packed_layers(model))
    assert layers == 4 and ops["vllm.unified_attention_with_output"] == 1
    assert ops["qtool.w4a8_gemm"] == ops["qtool.quantize_activation"] == layers
    assert not any("linear" in name or "matmul" in name for name in names)
