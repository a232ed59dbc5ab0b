"""How the stored tensors of a linear are cut among ranks and joined in a fused layer.

A layout puts tiles of output channels one after another along one dimension of a stored tensor, and
tiles of input channels along another. So the tensors of a fused layer (q, k and v; gate and up) are
the tensors of its linears joined along the output dimension, and a rank's share is a slice along
one of the two: bytes are copied, nothing is packed again. The shapes alone tell which dimensions
these are.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.format import SLAB_ROWS, LinearFormat, same_bytes


@dataclass(frozen=True)
class Axes:
    """The dimensions of one stored tensor that grow with the output and the input channels.

    A dimension is None if no dimension grows. ``per_output`` is the number of output channels that
    one step along ``output`` covers.
    """

    output: int | None
    input: int | None
    per_output: Fraction


@cache
def axes(linear_format: LinearFormat, n: int, k: int) -> dict[str, Axes]:
    """The :class:`Axes` of every stored tensor of a weight ``[n, k]``."""
    here, taller, wider = (
        linear_format.tensors(*size) for size in ((n, k), (2 * n, k), (n, 2 * k))
    )
    found = {}
    for name, tensor in here.items():
        output, input_ = (_grown(tensor, other[name]) for other in (taller, wider))
        found[name] = Axes(
            output, input_, Fraction(n, tensor.shape[output]) if output is not None else Fraction(1)
        )
    return found


def _grown(tensor: Tensor, other: Tensor) -> int | None:
    return next((dim for dim, size in enumerate(tensor.shape) if other.shape[dim] != size), None)


def require_shares(
    name: str,
    linear_format: LinearFormat,
    outputs: tuple[int, ...],
    k: int,
    ranks: int,
    *,
    permuted: bool,
) -> None:
    """Refuse a layer that cannot be loaded as it is stored.

    Args:
        outputs: output channels, on one rank, of each linear that the layer joins.
        k: input channels on one rank.
        ranks: number of ranks among which the input channels are cut.

    Raises:
        QtoolError: naming the layer; one sentence.
    """
    for rows in outputs:
        try:
            linear_format.require(name, rows, k)
        except QtoolError as error:
            raise QtoolError(
                f"{error}; this is one rank's share: use a smaller tensor-parallel size, or "
                "another layout"
            ) from error
    if ranks == 1:
        return
    if permuted:
        raise QtoolError(
            f"{name}: its input channels are permuted across {ranks} ranks; use tensor-parallel "
            "size 1, or quantize without reordering this layer"
        )
    if not cuts_inputs(linear_format, k * ranks, ranks):
        raise QtoolError(
            f"{name}: layout {linear_format.layout} cannot be cut along its {k * ranks} input "
            f"channels among {ranks} ranks; use tensor-parallel size 1, or quantize it in another "
            "layout"
        )


@cache
@torch.no_grad()
def cuts_inputs(linear_format: LinearFormat, k: int, ranks: int) -> bool:
    """Whether cutting the stored tensors of ``k`` input channels equals packing the cut weight.

    It is tried on a random weight.
    """
    scheme, n = linear_format.scheme_object, SLAB_ROWS
    weight = torch.randn(
        n, k, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    weight.view(n, -1, 4)[..., ::2] = 0  # two of four, for 2:4 sparse layouts
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    whole = linear_format.pack(codes, params)
    for rank in range(ranks):
        own = {
            name: _share(param, name in scheme.shared_params, rank, ranks)
            for name, param in params.items()
        }
        packed = linear_format.pack(codes.chunk(ranks, 1)[rank].contiguous(), own)
        for name, axis in axes(linear_format, n, k).items():
            cut = whole[name] if axis.input is None else whole[name].chunk(ranks, axis.input)[rank]
            if not same_bytes(cut, packed[name]):
                return False
    return True


def _share(param: Tensor, shared: bool, rank: int, ranks: int) -> Tensor:
    """A rank's groups of a parameter ``[N, G]`` or, ``shared``, ``[G]``.

    A parameter with one value per channel belongs to every rank.
    """
    by_group = shared or (param.dim() == 2 and param.shape[1] > 1)
    return param.chunk(ranks, -1)[rank].contiguous() if by_group else param
