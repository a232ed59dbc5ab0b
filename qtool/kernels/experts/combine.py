"""``qtool::combine_experts``: the outputs of each token's experts, weighted and added.

    y[t] = sum_j weights[t, j] * z[place[t, j]]

It is computed in float32, product by product in the order of j, and rounded once.
"""

import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build, Source, cubin
from qtool.kernels.checks import Expected, require_tensors
from qtool.kernels.dtypes import FLOATS, NUMBERS
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import launch, load, pointers
from qtool.kernels.op import operator

SOURCE = "experts/combine"
THREADS = 128
#: csrc/experts/combine.cu
PARAMETERS = struct.Struct("<4Q2i")


class CombineExperts(NamedTuple):
    """The weighted sums ``[T, N]`` in z's dtype.

    Args:
        z: ``[rows, N]``, outputs of the experts; N a multiple of 8.
        place: int32 ``[T, k]``, rows of z, as :func:`route_experts` gives them; -1: none.
        weights: float32 ``[T, k]``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    z: Tensor
    place: Tensor
    weights: Tensor

    def require(self) -> None:
        op, z, place = "combine_experts", self.z, self.place
        if z.dim() != 2 or place.dim() != 2:
            raise QtoolError(
                f"{op}: z is {z.dim()}-D and place {place.dim()}-D; expected [rows, N] and [T, k]"
            )
        if z.shape[1] % 8:
            raise QtoolError(f"{op}: N = {z.shape[1]}; expected a multiple of 8")
        expected: dict[str, Expected] = {
            "z": (z, tuple(z.shape), FLOATS),
            "place": (place, tuple(place.shape), (torch.int32,)),
            "weights": (self.weights, tuple(place.shape), (torch.float32,)),
        }
        require_tensors(op, z.device, expected)

    def empty(self) -> Tensor:
        return self.z.new_empty((self.place.shape[0], self.z.shape[1]))

    def reference(self) -> Tensor:
        y = torch.zeros(self.place.shape[0], self.z.shape[1])
        for rows, weights in zip(self.place.unbind(1), self.weights.unbind(1), strict=True):
            here = (rows >= 0).nonzero()[:, 0]
            y[here] += self.z[rows[here].long()].float() * weights[here, None]
        return y.to(self.z.dtype)

    def launch(self, out: Tensor) -> None:
        device, (tokens, columns) = self.z.device, out.shape
        require_hopper(device)
        if out.numel():
            grid = tokens * -(-columns // (8 * THREADS))
            addresses = pointers(self.z, self.place, self.weights, out)
            parameters = PARAMETERS.pack(*addresses, columns, self.place.shape[1])
            kernel = _kernel(self.z.dtype, device.index)
            launch(kernel, grid, THREADS, 0, parameters, device, overlap=True)


combine_experts = operator("combine_experts", CombineExperts)


def definition(dtype: torch.dtype) -> Source:
    """Source name, prologue and macros of one kernel."""
    return SOURCE, "", {"DTYPE": NUMBERS[dtype]}


@cache
def _kernel(dtype: torch.dtype, device: int) -> int:
    return load(cubin(*definition(dtype), "sm_90a"), "combine", 0, device)


def builds() -> Iterator[Build]:
    """Each dtype."""
    for dtype in FLOATS:
        yield Build(f"combine_experts {dtype}", "sm_90a", definition(dtype), 4 * THREADS)
