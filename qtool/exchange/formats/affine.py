"""Our schemes in the form that foreign formats store: ``w = (codes - zero) * scale``.

Three forms cover every format of this package. No form rounds a code. A scale is rounded (to the
dtype that scales are stored in) only if it is the product of two of ours, and every export reports
the error. If a linear gathers its input, its columns are put back in the model's order
(``params["permutation"]``). This needs one scale a channel, since groups would be torn apart.

    symmetric 4-bit    codes u8 0..15, zero 8    w4a16, w4a16-24; w4a4 (codes + 8)
    asymmetric 4-bit   codes u8 0..15, zero u8   w4a8-qoq (s1, z); w4a8-qoq-g128 (s1 * s2, z);
                                                 the symmetric ones
    8-bit              codes s8, zero 0          w8a8; w4a8-lqq and w4a8-qoq-g128 (the level-1
                                                 integers Q8', s1)

Legend: N output channels, K input channels, G groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.format import LinearFormat
from qtool.schemes import Params
from qtool.schemes.two_level import TwoLevel

GroupSizes = Mapping[str, tuple[int | None, ...]]

#: group sizes of w4a16; None: the whole channel
W4A16_GROUP_SIZES = (32, 64, 128, None)
#: group sizes by scheme, for each form
SYMMETRIC_4: GroupSizes = {
    "w4a16": W4A16_GROUP_SIZES,
    "w4a16-24": W4A16_GROUP_SIZES,
    "w4a4": W4A16_GROUP_SIZES,
}
ASYMMETRIC_4: GroupSizes = {**SYMMETRIC_4, "w4a8-qoq": (None,), "w4a8-qoq-g128": (32, 64, 128)}
INT_8: GroupSizes = {"w8a8": (None,), "w4a8-lqq": (32, 64, 128), "w4a8-qoq-g128": (32, 64, 128)}


@dataclass(frozen=True)
class Affine:
    """A weight in one of the forms.

    Attributes:
        codes: ``[N, K]``, uint8 (4-bit) or int8 (8-bit).
        scale: ``[N, G]``, as stored or float32.
        zero: uint8 ``[N, G]``; None means 8 for 4-bit codes and 0 for 8-bit codes.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def weight(self) -> Tensor:
        """The float32 weight ``[N, K]``."""
        groups = self.codes.unflatten(1, (self.scale.shape[1], -1)).to(torch.float32, copy=True)
        if self.zero is not None:
            groups.sub_(self.zero.float()[..., None])
        elif self.codes.dtype == torch.uint8:
            groups.sub_(8)
        return groups.mul_(self.scale.float()[..., None]).flatten(1)


#: a function from a linear's format, codes and parameters to one of the forms
Form = Callable[[LinearFormat, Tensor, Params], Affine]


def symmetric_4(linear_format: LinearFormat, codes: Tensor, params: Params) -> Affine:
    """The affine form of a scheme of :data:`SYMMETRIC_4`: its own codes and scale."""
    unsigned = (codes + 8).view(torch.uint8) if codes.dtype == torch.int8 else codes
    return Affine(in_model_order(unsigned, params), params["scale"])


def asymmetric_4(linear_format: LinearFormat, codes: Tensor, params: Params) -> Affine:
    """The affine form of a scheme of :data:`ASYMMETRIC_4`: its own codes and zero points."""
    if "scale" in params:
        plain = symmetric_4(linear_format, codes, params)
        return Affine(plain.codes, plain.scale, torch.full_like(plain.scale, 8, dtype=torch.uint8))
    if "s2" in params:
        product = params["s1"].float()[:, None] * params["s2"]
        return Affine(in_model_order(codes, params), product.to(params["s1"].dtype), params["zero"])
    return Affine(in_model_order(codes, params), params["s1"][:, None], params["zero"][:, None])


def int_8(linear_format: LinearFormat, codes: Tensor, params: Params) -> Affine:
    """The affine form of a scheme of :data:`INT_8`: the int8 weight that its kernel multiplies."""
    scheme = linear_format.scheme_object
    if isinstance(scheme, TwoLevel):
        return Affine(in_model_order(scheme.level2(codes, params), params), params["s1"][:, None])
    return Affine(in_model_order(codes, params), params["scale"])


def in_model_order(codes: Tensor, params: Params) -> Tensor:
    """``codes [N, K]`` with column i back at ``permutation[i]``, if there is one."""
    if "permutation" not in params:
        return codes
    return torch.empty_like(codes).index_copy_(1, params["permutation"].long(), codes)
