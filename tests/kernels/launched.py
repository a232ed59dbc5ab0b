"""An op's launch on tensors of any device, where a test stands in for the driver."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from qtool.kernels.op import OPERATORS

P = ParamSpec("P")
R = TypeVar("R")


def launched(op: Callable[P, R], *values: P.args, **named: P.kwargs) -> R:
    """What ``op`` does with CUDA tensors, whatever device ``values`` are on."""
    call: Any = OPERATORS[op](*values, **named)
    call.require()
    out = call.empty()
    if hasattr(call, "launch"):
        call.launch(out)
    else:
        call.plan()(call, out)
    return cast(R, out)
