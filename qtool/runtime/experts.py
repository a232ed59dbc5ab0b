"""The packed experts of a layer in six launches, whatever the router chose.

    y[t] = sum_j weights[t, j] * down_e(SiLU(gate_e(x[t])) * up_e(x[t]))    e = ids[t, j]

Tokens are sorted by expert on the device, quantized or copied in that order, and each stack of
weights is multiplied by one grouped GEMM: nothing waits for the host, and a CUDA graph follows the
ids.

Legend: T tokens, k choices of each, P = T k pairs, E experts, I intermediate channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qtool.format import LinearFormat
from qtool.models.experts import Form, SeparateExperts, is_routed, own_gate
from qtool.runtime.dispatch import ExpertsCall, Kernel
from qtool.runtime.linear import QuantLinear

#: activations that are SiLU, by the name of their class
SILU = ("SiLU", "SiLUActivation")


@dataclass(frozen=True)
class ExpertStack:
    """The packed linears of E experts, of one format.

    Each stored tensor is ``[E, J, ...]``, with J linears per expert, whose outputs are
    concatenated.
    """

    kernel: Kernel
    format: LinearFormat
    stored: Mapping[str, Tensor]

    def multiply(
        self, x: Tensor, place: Tensor | None, expert_offsets: Tensor, fusion: str = "none"
    ) -> Tensor:
        """The outputs ``[P, N]`` in x's dtype, sorted by expert.

        The arguments are those of :class:`~qtool.kernels.experts.rows.ExpertRows`.
        """
        assert self.kernel.experts is not None
        rows = (x, place, expert_offsets, fusion)
        return self.kernel.experts(ExpertsCall(*rows, self.stored, self.format, x.dtype))


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    gate_up: ExpertStack,
    down: ExpertStack,
) -> Tensor:
    """The output ``[T, N]`` of a layer of experts, in x's dtype.

    Args:
        x: ``[T, K]``.
        weights: ``[T, k]``, the router's weights of each token's experts.
        ids: ``[T, k]``, the numbers of each token's experts.
        expert_map: the place in the stacks of each id, -1 for experts of other ranks; None: each id
            is its own place.
        gate_up: stack with ``2 I`` output channels per expert, gate's, then up's.
        down: stack with ``I`` input channels.
    """
    from qtool.kernels.experts.combine import combine_experts
    from qtool.kernels.experts.route import route_experts

    experts = len(gate_up.stored["qweight"])
    offsets, place = route_experts(ids.int().contiguous(), expert_map, experts)
    hidden = gate_up.multiply(x, place, offsets)
    z = down.multiply(hidden, None, offsets, "silu-up")
    return combine_experts(z, place, weights.float().contiguous())


class GroupedExperts:
    """The packed linears of a block's experts as two stacks; each linear becomes a view of one.

    The modules, their names and their single products stay as they were.
    """

    def __init__(self, experts: SeparateExperts) -> None:
        up, down = ("gate", "up"), ("down",)
        self.gate_up, self.down = (_stack(_linears(experts, roles)) for roles in (up, down))
        self.device = self.down.stored["qweight"].device
        self.dtypes = set(self.gate_up.kernel.dtypes) & set(self.down.kernel.dtypes)
        #: for each linear: its parent's modules, its name there, its buffers, its codes
        self.places: list[tuple[dict[str, Any], str, Any, dict[str, Any], Tensor]] = [
            (expert._modules, name, linear, linear._buffers, linear._buffers["qweight"])
            for expert in experts
            for name in experts.roles.values()
            for linear in [getattr(expert, name)]
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied model has tensors of its own, which these stacks do not hold."""

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
        """``[T, H]`` for ``hidden [T, H]``, experts and weights ``[T, k]``.

        None while operators are intercepted, for a dtype that no kernel takes, or if a linear or
        its tensor was replaced.
        """
        if is_in_torch_dispatch_mode() or hidden.device != self.device:
            return None
        if hidden.dtype not in self.dtypes:
            return None
        for modules, name, linear, buffers, codes in self.places:
            if modules.get(name) is not linear or buffers["qweight"] is not codes:
                return None
        x = hidden.contiguous()
        return grouped_experts(x, weights, index, None, self.gate_up, self.down)


def group_experts(model: nn.Module) -> None:
    """Stack the packed experts of ``model`` wherever a kernel multiplies all of them at once."""
    for experts in model.modules():
        if isinstance(experts, SeparateExperts) and _can_be_grouped(experts):
            experts.grouped = GroupedExperts(experts)


def _can_be_grouped(experts: SeparateExperts) -> bool:
    from qtool.kernels.experts.route import MOST_EXPERTS

    stacked: Any = experts.stacked
    silu = type(getattr(stacked, "act_fn", None)).__name__ in SILU and own_gate(stacked) is None
    if not (silu and is_routed(stacked) and Form.of(stacked).gate):
        return False
    alike = all(_are_alike(_linears(experts, roles)) for roles in (("gate", "up"), ("down",)))
    return alike and len(experts) <= MOST_EXPERTS


def _linears(experts: SeparateExperts, roles: Sequence[str]) -> list[list[Any]]:
    """The linears of each expert."""
    return [[getattr(expert, experts.roles[role]) for role in roles] for expert in experts]


def _are_alike(linears: Sequence[Sequence[Any]]) -> bool:
    """Whether the linears are packed alike, and their tensors can be parts of one stack."""
    first, every = linears[0][0], [linear for own in linears for linear in own]
    if not all(isinstance(linear, QuantLinear) for linear in every):
        return False
    kernel = first.bfloat16_kernel()
    return (
        kernel is not None
        and kernel.experts is not None
        and all(linear.format == first.format for linear in every)
        and all(linear.bias is None and linear.permutation is None for linear in every)
        and len({(linear.out_features, linear.in_features) for linear in every}) == 1
    )


def _stack(linears: Sequence[Sequence[Any]]) -> ExpertStack:
    """The linears of each expert as a stack."""
    first, stored = linears[0][0], {}
    for name in first.stored_names:
        parts = [[part.get_buffer(name) for part in own] for own in linears]
        stored[name] = torch.stack([torch.stack(each) for each in parts])
        for own, views in zip(linears, stored[name], strict=True):
            for part, view in zip(own, views, strict=True):
                setattr(part, name, view)
    return ExpertStack(first.bfloat16_kernel(), first.format, stored)
