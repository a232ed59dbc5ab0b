"""The packed experts of a layer in six launches, whatever the router chose.

    y[t] = sum_j weights[t, j] * down_e(SiLU(gate_e(x[t])) * up_e(x[t]))    e = ids[t, j]

Tokens are sorted by expert on the device, quantized in that order, and each stack of weights is
multiplied by one grouped GEMM: nothing waits for the host, and a CUDA graph follows the ids.

Legend: T tokens, k choices of each, P = T k pairs, E experts, I intermediate channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from qtool.format import LinearFormat
from qtool.runtime.dispatch import ExpertsCall, Kernel


@dataclass(frozen=True)
class ExpertStack:
    """The packed linears of E experts, of one format; each stored tensor is ``[E, ...]``."""

    kernel: Kernel
    format: LinearFormat
    stored: Mapping[str, Tensor]

    def multiply(
        self, x: Tensor, place: Tensor | None, expert_offsets: Tensor, fusion: str = "none"
    ) -> Tensor:
        """``[P, N]`` in x's dtype, sorted by expert.

        Args:
            x, place, expert_offsets, fusion: of
                :class:`~qtool.kernels.experts.quantize.QuantizeExpertRows`.
        """
        from qtool.kernels.experts.quantize import quantize_expert_rows

        assert self.kernel.experts is not None
        rows = quantize_expert_rows(x, place, expert_offsets, fusion)
        return self.kernel.experts(
            ExpertsCall(*rows, expert_offsets, self.stored, self.format, x.dtype)
        )


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    gate_up: ExpertStack,
    down: ExpertStack,
) -> Tensor:
    """``[T, N]`` in x's dtype.

    Args:
        x: ``[T, K]``. weights, ids: ``[T, k]``, of each token's experts.
        expert_map: the place in the stacks of each id, -1 for those of other ranks; None: the ids.
        gate_up: ``2 I`` output channels an expert, gate's, then up's. down: ``I`` input channels.
    """
    from qtool.kernels.experts.combine import combine_experts
    from qtool.kernels.experts.route import route_experts

    experts = len(gate_up.stored["qweight"])
    offsets, place = route_experts(ids.int(), expert_map, experts)
    hidden = gate_up.multiply(x, place, offsets)
    z = down.multiply(hidden, None, offsets, "silu-up")
    return combine_experts(z, place, weights.float())
