"""The code that the grouped GEMMs of all schemes share.

The kernels are the dense ones of :mod:`qtool.kernels.hopper` with another order of tiles: E weights
``[N, K]``, one after another, are one weight of ``E N`` rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.checks import require_tensors
from qtool.kernels.experts.route import MOST_EXPERTS
from qtool.kernels.hopper.gemm import THREADS, Operand
from qtool.kernels.op import Operator

#: csrc/hopper/work.cuh: first token and first tile of each expert, and a sum of each warp
TABLE_BYTES = 4 * (2 * (MOST_EXPERTS + 1) + THREADS // 32)


def experts_operand(dense: Operand) -> Operand:
    """The operand of a stack of weights like ``dense``."""
    defines = (*dense.defines, ("EXPERTS", 1))
    return replace(dense, defines=defines, table_bytes=TABLE_BYTES)


def require_experts(
    op: str, x: Tensor, expert_offsets: Tensor, stacks: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The stacks ``[E, ...]`` of all experts as the tensors of one weight.

    Raises:
        QtoolError: if they have not as many experts as the offsets, or are not contiguous.
    """
    experts = expert_offsets.numel() - 1
    require_tensors(
        op, x.device, {"expert_offsets": (expert_offsets, (experts + 1,), (torch.int32,))}
    )
    if not 0 < experts <= MOST_EXPERTS:
        raise QtoolError(f"{op}: {experts} experts; accepted: 1 to {MOST_EXPERTS}")
    given = [stack for stack in stacks if stack is not None]
    for stack in given:
        if stack.dim() < 2 or len(stack) != experts or not stack.is_contiguous():
            raise QtoolError(
                f"{op}: a tensor of the weights has shape {tuple(stack.shape)} and strides "
                f"{stack.stride()}; expected a contiguous stack of {experts} experts"
            )
    return tuple(None if stack is None else stack.flatten(0, 1) for stack in stacks)


def products(
    out: Tensor,
    expert_offsets: Tensor,
    stacks: Sequence[Tensor | None],
    dense: Callable[[slice, tuple[Tensor | None, ...]], Operator[Tensor]],
) -> Tensor:
    """``out [P, N]`` filled expert by expert with the references of ``dense``; 0 beyond."""
    ends = expert_offsets.tolist()
    for expert, (first, end) in enumerate(pairwise(ends)):
        own = tuple(None if stack is None else stack[expert] for stack in stacks)
        out[first:end] = dense(slice(first, end), own).reference()
    out[ends[-1] :] = 0
    return out
