"""The compile pass that fuses a linear's quantization with the operation before it.

vLLM computes RMSNorm, with the residual's addition or without, and SiLU times up as separate
operations, and a packed linear begins with the quantization of its input. The pass finds such pairs
in a compiled graph and replaces each pair by one operation of :mod:`qtool.kernels.activation`,
which gives the numbers of the separate operations.

An operation is not fused if anything else reads its result (a router, a linear of 16 bits, or
another quantization of it).
"""

import hashlib
import operator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

from qtool import __version__
from qtool.kernels.activation import quantize_activation_groups, quantize_packed_groups
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_residual_norm import quantize_residual_norm

#: operators that quantize; their arguments can name an operation to fuse
QUANTIZATIONS: tuple[Any, ...] = (
    quantize_activation,
    quantize_activation_groups.quantize_activation_groups,
    quantize_packed_groups.quantize_packed_groups,
)
#: vLLM's operations by the dispatcher's name
NORM, RESIDUAL_NORM = "vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"
SILU_UP = "_C::silu_and_mul"
#: the custom op that keeps SILU_UP one operation; without it vLLM traces several
SILU_UP_KEPT = "silu_and_mul"


def switch_on(config: VllmConfig) -> None:
    """Add the pass to the compiler of ``config``, before the model's layers are built.

    A user's own pass in its place is kept, and so is a user's setting of :data:`SILU_UP_KEPT`.
    """
    compilation = config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE or compilation.backend != "inductor":
        return
    compilation.inductor_compile_config.setdefault(current_platform.pass_key, FuseQuantization())
    if not {f"+{SILU_UP_KEPT}", f"-{SILU_UP_KEPT}"} & set(compilation.custom_ops):
        compilation.custom_ops.append(f"+{SILU_UP_KEPT}")


class FuseQuantization(InductorPass):
    """:func:`fuse` for vLLM's compiler; vLLM's compile cache is keyed by :meth:`uuid` too."""

    def __call__(self, graph: fx.Graph) -> None:
        fuse(graph)

    def uuid(self) -> str:
        return hashlib.sha256(__version__.encode() + Path(__file__).read_bytes()).hexdigest()


def fuse(graph: fx.Graph) -> int:
    """Fuse all pairs that can be fused in a functional graph of fake values; their number."""
    count = 0
    for quantization in [node for node in graph.nodes if node.target in QUANTIZATIONS]:
        source = _source(quantization)
        if source is not None and (call := _fused(quantization, source)) is not None:
            _replace(quantization, source, *call)
            count += 1
    return count


def _source(quantization: fx.Node) -> fx.Node | None:
    """The node that computes the input of an unfused quantization, if nothing else reads it."""
    given = _arguments(quantization)
    x, order = given["x"], given["order"]
    if given["fusion"] != "none" or len(x.users) > 1:
        return None
    if order is not None and order.op != "placeholder":
        return None  # it may be computed after the source, whose place the fused one takes
    if x.target is not operator.getitem:
        return x if _name(x) == NORM else None
    source, place = x.args
    if _name(source) == SILU_UP and len(source.users) == 1:
        return source
    return source if _name(source) == RESIDUAL_NORM and place == 0 else None


def _fused(quantization: fx.Node, source: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """The fused operation with its arguments, or None if no kernel takes them."""
    given = _arguments(quantization)
    if _name(source) == SILU_UP:
        x: Any = source.kwargs["input"]
        return (quantization.target, given | {"x": x, "fusion": "silu-up"}) if _alike(x) else None
    read = _arguments(source)
    x, norm, epsilon = read["x"], read["weight"], read["epsilon"]
    if norm is None or read.get("variance_size") is not None:
        return None
    if _name(source) == NORM:
        more = {"x": x, "norm": norm, "fusion": "rms-norm", "epsilon": epsilon}
        return (quantization.target, given | more) if _alike(x, norm) else None
    residual = read["x_residual"]
    if quantization.target is not quantize_activation or not _alike(x, norm, residual):
        return None
    if given.get("rotated"):
        return None  # quantize_residual_norm does not rotate
    order = given["order"]
    return quantize_residual_norm, {
        "x": x, "residual": residual, "order": order, "norm": norm, "epsilon": epsilon
    }  # fmt: skip


def _replace(quantization: fx.Node, source: fx.Node, target: Any, given: dict[str, Any]) -> None:
    """Call ``target`` at the place of ``source``; removes both nodes and those between them."""
    graph, values = source.graph, quantization.meta["val"]
    with graph.inserting_after(source):
        fused = graph.call_function(target, tuple(given.values()))
    if target is quantize_residual_norm:
        added = source.meta["val"][1]
        with graph.inserting_after(fused):
            residual = graph.call_function(operator.getitem, (fused, len(values)))
        residual.meta["val"], values = added, (*values, added)
        for user in [user for user in source.users if user.args[1] == 1]:
            user.replace_all_uses_with(residual)
            graph.erase_node(user)
    fused.meta["val"] = values
    # the strides that Inductor gives the inputs
    fused.meta["eager_input_vals"] = fx.map_arg((fused.args, {}), lambda node: node.meta["val"])
    quantization.replace_all_uses_with(fused)
    read = _arguments(quantization)["x"]
    for node in dict.fromkeys((quantization, read, source, source.kwargs.get("result"))):
        if isinstance(node, fx.Node) and not node.users:
            graph.erase_node(node)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, in the order of its schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _name(node: fx.Node) -> str:
    """The dispatcher's name of the operator that a node calls, functionalized or not."""
    target = node.args[0] if node.target is auto_functionalized else node.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else ""


def _alike(*nodes: fx.Node) -> bool:
    """Whether values have one dtype and are vectors or contiguous matrices."""
    values = [node.meta["val"] for node in nodes]
    contiguous = [value.stride() in ((1,), (value.shape[-1], 1)) for value in values]
    return all(contiguous) and len({value.dtype for value in values}) == 1
