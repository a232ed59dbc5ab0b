"""The kernels that the build test compiles, on any machine.

The module of a new kernel is added to :data:`MODULES`.
"""

from collections.abc import Iterator

from qtool.kernels.activation import (
    quantize_activation,
    quantize_activation_groups,
    quantize_packed_groups,
    quantize_residual_norm,
)
from qtool.kernels.attention import kv_append, kv_gather, kv_plan
from qtool.kernels.build import Build
from qtool.kernels.experts import combine, gather, quantize, route
from qtool.kernels.experts import w4a8 as w4a8_experts
from qtool.kernels.experts import w4a16 as w4a16_experts
from qtool.kernels.experts import w8a8 as w8a8_experts
from qtool.kernels.hopper import w4a8, w4ax, w8a8
from qtool.kernels.hopper import w4a16 as w4a16_wgmma
from qtool.kernels.mma import w4a8 as w4a8_mma
from qtool.kernels.mma import w4a16
from qtool.kernels.mma import w4ax as w4ax_mma

#: modules with a ``builds()``
MODULES = (
    combine,
    gather,
    kv_append,
    kv_gather,
    kv_plan,
    quantize,
    quantize_activation,
    quantize_activation_groups,
    quantize_packed_groups,
    quantize_residual_norm,
    route,
    w4a8,
    w4a8_experts,
    w4a8_mma,
    w4a16,
    w4a16_experts,
    w4a16_wgmma,
    w4ax,
    w4ax_mma,
    w8a8,
    w8a8_experts,
)


def builds() -> Iterator[Build]:
    """Each kernel in each variant and architecture that the tests compile."""
    for module in MODULES:
        yield from module.builds()
