"""w4ax-fmpq: COMET's mixed precision, 4-bit weights under activations of 4 or 8 bits by block.

COMET section 3.2. Input channels are cut into blocks of 128; a block that holds outlier channels
has 8-bit activations, all others have 4-bit ones (:mod:`qtool.schemes.fmpq_blocks` chooses them):

    s[n, b] = max|W| / 7            Q = clamp(rne(W / s), -8, 7)
    sx[m, b] = max|X| / (127 | 7)   Qx = clamp(rne(X / sx))
    Y = sum_b (sum_k Qx * Q) * sx[m, b] * s[n, b]

The kernel's zero extension (codes in the high nibble, times 16) is part of the layout, not of the
scheme.
"""

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.schemes.arithmetic.activation import Activation, fake_groups, quantize_groups
from qtool.schemes.arithmetic.products import group_matmul
from qtool.schemes.arithmetic.symmetric import Symmetric
from qtool.schemes.base import ClipRatio, GroupSize, Params, require

#: input channels of a block, whose inputs have either 4 or 8 bits (COMET section 3.2)
BLOCK = 128


class Fmpq(Symmetric):
    """Parameters: ``scale [N, K/128]``, and ``eight_bit [K/128]`` u8, the map of the blocks.

    The map is 1 for blocks with 8-bit activations. It belongs to one layer:
    ``scheme.with_blocks(eight_bit)`` is the scheme of that layer, whose ``fit`` records the map.
    Without a map no block has 8 bits.
    """

    name = "w4ax-fmpq"
    code_bits = 4
    signed = True
    group_sizes = (BLOCK,)
    default_group_size = BLOCK
    #: activations of 4-bit blocks; :meth:`fake_activation` and :meth:`matmul` follow the map
    activation = Activation(4, BLOCK)
    shared_params = frozenset({"eight_bit"})
    divisor, low, high = 7, -8, 7

    def __init__(
        self,
        group_size: GroupSize = "default",
        scale_dtype: torch.dtype = torch.float32,
        eight_bit: Tensor | None = None,
    ) -> None:
        super().__init__(group_size, scale_dtype)
        self.eight_bit = eight_bit

    def with_blocks(self, eight_bit: Tensor) -> "Fmpq":
        """This scheme for a layer whose ``eight_bit [K/128]`` blocks (1 or 0) are known."""
        return Fmpq(self.group_size, self.scale_dtype, eight_bit)

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        blocks = low.shape[1]
        given = torch.zeros(blocks) if self.eight_bit is None else self.eight_bit
        if given.shape != (blocks,):
            raise QtoolError(
                f"{self.name}: a map of {tuple(given.shape)} blocks for a weight of {blocks} blocks"
            )
        params = super().fit_range(low, high, clip=clip, group_clip=group_clip)
        return params | {"eight_bit": given.to(low.device, torch.uint8)}

    def quantize_activation(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Codes int8 ``[..., K]`` (s8 or s4 by block) and scales ``[..., K/128]`` of ``x``."""
        return quantize_groups(x, BLOCK, largest_codes(params))

    def fake_activation(self, x: Tensor, params: Params) -> Tensor:
        return fake_groups(x, BLOCK, largest_codes(params))

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        qx, sx = self.quantize_activation(x, params)
        return group_matmul(qx, sx, codes, params["scale"].float(), BLOCK, bias)

    def check_range(self, low: Tensor, high: Tensor, params: Params) -> None:
        require(params["eight_bit"] <= 1, "eight_bit is 0 or 1")
        super().check_range(low, high, params)


def largest_codes(params: Params) -> Tensor:
    """The largest code ``[K/128]`` of the inputs of each block."""
    return torch.where(params["eight_bit"].bool(), 127, 7)
