"""Registration of the kernels as torch operators, each from one statement of its signature.

An operator is a NamedTuple (:class:`Operator`). Its fields are the arguments, and torch's schema
follows from them. Its methods check the arguments, make empty tensors for the result, compute it by
torch, and compute it on a GPU. Registration with the dispatcher, instead of
``torch.library.custom_op``, keeps Python's autograd and its copies out of every call.
"""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("qtool", "DEF")
#: the NamedTuple of each registered operator
OPERATORS: dict[Any, Callable[..., "Operator[Any]"]] = {}


class Operator(Protocol[R]):
    """The arguments of one call of an operator, with its implementations."""

    def require(self) -> None:
        """Refuse arguments that the kernel cannot take, with QtoolError."""

    def empty(self) -> R:
        """Tensors for the result, not filled; on ``meta`` too."""

    def reference(self) -> R:
        """The result by plain torch operations."""

    def launch(self, out: R) -> None:
        """Fill ``out`` by the CUDA kernel, on the current stream."""


def operator(
    name: str, arguments: Callable[P, Operator[R]], *, mutates: tuple[str, ...] = ()
) -> Callable[P, R]:
    """Register ``qtool::name``: the reference on a CPU, the kernel on CUDA, shapes elsewhere.

    Args:
        arguments: the NamedTuple class.
        mutates: the arguments that a call writes to.
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
        call = arguments(*values, **named)
        call.require()
        out = call.empty()
        call.launch(out)
        return out

    def shape(*values: P.args, **named: P.kwargs) -> R:
        call = arguments(*values, **named)
        call.require()
        return call.empty()

    LIBRARY.impl(name, compute, "CPU")
    LIBRARY.impl(name, launch, "CUDA")
    torch.library.register_fake(f"qtool::{name}", shape, lib=LIBRARY)
    overload = getattr(torch.ops.qtool, name).default
    overload.__doc__ = arguments.__doc__
    OPERATORS[overload] = arguments
    return cast(Callable[P, R], overload)
