"""Registration of the kernels as torch operators, each from one statement of its signature.

An operator is a NamedTuple (:class:`Operator`). Its fields are the arguments, and torch's schema
follows from them. Its methods check the arguments, make empty tensors for the result, compute it by
torch, and compute it on a GPU. Registration with the dispatcher, instead of
``torch.library.custom_op``, keeps Python's autograd and its copies out of every call.

An engine calls the operators of a layer with the same weight for each batch of tokens, and launches
large batches one kernel after another, so that the time of Python counts. :class:`Plans` keeps what
such calls share (:class:`Planned`).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

LIBRARY = torch.library.Library("qtool", "DEF")
#: the NamedTuple of each registered operator
OPERATORS: dict[Any, Callable[..., "Operator[Any]"]] = {}
#: plans of an operator that are kept: one for each linear of a model, of few models
MOST_PLANS = 4096
#: bytes on which the kernels want their tensors to begin
ALIGNMENT = 16

#: fills the result of a call by the CUDA kernel, on the current stream
Launch = Callable[[Any, Any], None]


class Operator(Protocol[R_co]):
    """The arguments of one call of an operator, with its implementations.

    On CUDA it has ``launch(out)``, which fills ``out`` on the current stream, or ``plan`` if it is
    :class:`Planned`.
    """

    def require(self) -> None:
        """Refuse arguments that the kernel cannot take, with QtoolError."""

    def empty(self) -> R_co:
        """Tensors for the result, not filled; on ``meta`` too."""

    def reference(self) -> R_co:
        """The result by plain torch operations."""


class Planned(Operator[R_co], Protocol):
    """An operator whose calls share what does not depend on the tokens."""

    def plan(self) -> Launch:
        """The launch of all calls with one key in :class:`Plans`; it keeps no tensor."""


class Plans:
    """Plans of an operator's calls, by all that checks and launches depend on.

    That is everything about the arguments, but of tensors with a row for each token neither the
    number of tokens nor the address.

    Args:
        rows: for each argument, whether it has a row for each token.
    """

    def __init__(self, rows: Sequence[bool]) -> None:
        self.rows = rows
        self.plans: dict[tuple[object, ...], Launch] = {}

    def of(self, call: Planned[Any]) -> Launch:
        """The plan of ``call``; if there is none yet, the arguments are checked first."""
        key = self.key(call)
        plan = self.plans.get(key)
        if plan is None:
            call.require()
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            self.plans[key] = plan = call.plan()
        return plan

    def key(self, call: Any) -> tuple[object, ...]:
        """What the plan of ``call`` depends on."""
        key: list[object] = []
        tokens = None
        for value, has_rows in zip(call, self.rows, strict=True):
            if not isinstance(value, torch.Tensor):
                key.append(value)
                continue
            address, shape = value.data_ptr(), value.shape
            if has_rows:
                tokens = shape[:1] if tokens is None else tokens
                key += address % ALIGNMENT, shape[1:], shape[:1] == tokens
            else:
                key += address, shape
            key += value.stride(), value.dtype, value.get_device()
        return tuple(key)


def operator(
    name: str,
    arguments: Callable[P, Operator[R]],
    *,
    mutates: tuple[str, ...] = (),
    rows: tuple[str, ...] = (),
) -> Callable[P, R]:
    """Register ``qtool::name``: the reference on a CPU, the kernel on CUDA, shapes elsewhere.

    Args:
        arguments: the NamedTuple class.
        mutates: the arguments that a call writes to.
        rows: the tensors with a row for each token, of an operator that is :class:`Planned`.
    """
    reference: Any = arguments.reference  # type: ignore[attr-defined]

    # torch infers a schema from the signature of a function, and ``arguments`` is a class
    def prototype() -> None: ...

    prototype.__signature__ = inspect.signature(arguments).replace(  # type: ignore[attr-defined]
        return_annotation=inspect.signature(reference).return_annotation
    )
    schema = torch.library.infer_schema(prototype, mutates_args=mutates, op_name=name)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    def compute(*values: P.args, **named: P.kwargs) -> R:
        call = arguments(*values, **named)
        call.require()
        return call.reference()

    def launch(*values: P.args, **named: P.kwargs) -> R:
        call: Any = arguments(*values, **named)
        call.require()
        out: R = call.empty()
        call.launch(out)
        return out

    fields: Any = arguments._fields  # type: ignore[attr-defined]
    plans = Plans([field in rows for field in fields])

    def launch_planned(*values: P.args, **named: P.kwargs) -> R:
        call: Any = arguments(*values, **named)
        plan = plans.of(call)
        out: R = call.empty()
        plan(call, out)
        return out

    def shape(*values: P.args, **named: P.kwargs) -> R:
        call = arguments(*values, **named)
        call.require()
        return call.empty()

    LIBRARY.impl(name, compute, "CPU")
    LIBRARY.impl(name, launch_planned if rows else launch, "CUDA")
    torch.library.register_fake(f"qtool::{name}", shape, lib=LIBRARY)
    overload = getattr(torch.ops.qtool, name).default
    overload.__doc__ = arguments.__doc__
    OPERATORS[overload] = arguments
    return cast(Callable[P, R], overload)
