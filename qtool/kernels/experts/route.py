"""``qtool::route_experts``: tokens sorted by the experts that they go to.

A *pair* is a token and one of the experts it chose. The *row* of a pair is its place among all
pairs, sorted by expert and within an expert by token. Legend: T tokens, k choices of each, E
experts.
"""

import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build, Source, cubin
from qtool.kernels.checks import Expected, optional, require_tensors
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import launch, load, pointers
from qtool.kernels.op import operator

#: csrc/hopper/work.cuh keeps the counts of so many experts in shared memory
MOST_EXPERTS = 512
THREADS = 1024
#: source name, prologue and macros
DEFINITION: Source = ("experts/route", "", {"THREADS": THREADS})
#: csrc/experts/route.cu
PARAMETERS = struct.Struct("<4Q3i4x")


class RouteExperts(NamedTuple):
    """``expert_offsets [E + 1]`` and ``place [T, k]``, int32.

    Rows ``expert_offsets[e]`` to ``expert_offsets[e + 1]`` are expert e's; pair (t, j) has row
    ``place[t, j]``, -1 if its expert is not here.

    Args:
        ids: int32 ``[T, k]``, the experts that each token chose; numbers beyond 0 .. E - 1 are left
            out.
        expert_map: int32, this rank's number of each id, -1 for experts of other ranks; None: the
            id itself.
        experts: E.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    ids: Tensor
    expert_map: Tensor | None
    experts: int

    def require(self) -> None:
        op, ids = "route_experts", self.ids
        mapped = 0 if self.expert_map is None else self.expert_map.numel()
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise QtoolError(f"{op}: ids has shape {tuple(ids.shape)}; expected [T, k]")
        if not 0 < self.experts <= MOST_EXPERTS:
            raise QtoolError(f"{op}: {self.experts} experts; accepted: 1 to {MOST_EXPERTS}")
        expected: dict[str, Expected] = {
            "ids": (ids, tuple(ids.shape), (torch.int32,)),
            # the address of an empty tensor is null, which the kernel takes for no map
            "expert_map": optional(self.expert_map, (max(1, mapped),), (torch.int32,)),
        }
        require_tensors(op, ids.device, expected)

    def empty(self) -> tuple[Tensor, Tensor]:
        return self.ids.new_empty((self.experts + 1,)), self.ids.new_empty(self.ids.shape)

    def reference(self) -> tuple[Tensor, Tensor]:
        ids = self.ids.flatten().long()
        if self.expert_map is not None:
            known = (ids >= 0) & (ids < len(self.expert_map))
            here = self.expert_map.long()
            ids = torch.where(known, here[ids.where(known, ids.new_zeros(()))], -1)
        ids = torch.where((ids >= 0) & (ids < self.experts), ids, self.experts)
        order = ids.argsort(stable=True)
        counts = ids.bincount(minlength=self.experts + 1)
        offsets = torch.cat([counts.new_zeros(1), counts[: self.experts].cumsum(0)])
        rows, place = torch.arange(len(ids)), torch.empty_like(ids)
        place[order] = torch.where(rows < offsets[-1], rows, -1)
        return offsets.int(), place.view(self.ids.shape).int()

    def launch(self, out: tuple[Tensor, Tensor]) -> None:
        device, ids = self.ids.device, self.ids
        require_hopper(device)
        mapped = 0 if self.expert_map is None else len(self.expert_map)
        numbers = (ids.numel(), self.experts, mapped)
        parameters = PARAMETERS.pack(*pointers(ids, self.expert_map, *out), *numbers)
        shared = shared_bytes(self.experts)
        launch(_kernel(device.index), 1, THREADS, shared, parameters, device, overlap=True)


route_experts = operator("route_experts", RouteExperts)


def shared_bytes(experts: int) -> int:
    """Shared memory of a block: a count of each expert for each warp, and two sums."""
    return 4 * ((THREADS // 32 + 1) * experts + THREADS // 32)


@cache
def _kernel(device: int) -> int:
    return load(cubin(*DEFINITION, "sm_90a"), "route", shared_bytes(MOST_EXPERTS), device)


def builds() -> Iterator[Build]:
    """The one kernel."""
    yield Build("route_experts", "sm_90a", DEFINITION, THREADS, calls=True)
