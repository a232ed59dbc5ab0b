"""Float operations that give the same bits on all devices: computed in float64, rounded once.

The result of a reduction depends on its order, and that of exp or rsqrt on the implementation, so a
CPU and a GPU differ in the last place. When activations are quantized, such a difference now and
then changes a code, and then all later values of the token. Two float64 results are 1e-16 apart:
rounded to float32 they differ once in 10^8, to 16 bits once in 10^12. Operations that IEEE 754
specifies (:data:`EXACT`) stay as they are: in float64 and rounded they would give the same number.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce, wraps
from itertools import product
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

P = ParamSpec("P")
R = TypeVar("R")

#: aten operations whose result on floats is specified to the bit, besides views: moves, choices, +
#: - * and the like
EXACT = frozenset(
    name
    for line in (
        "_to_copy _unsafe_view cat clone constant_pad_nd copy_ embedding empty_like expand fill_",
        "flip full_like gather index index_put index_put_ index_select masked_fill masked_fill_",
        "new_empty new_full new_ones new_zeros ones_like repeat roll scatter scatter_",
        "slice_scatter sort stack tril tril_ triu triu_ where zero_ zeros_like",
        "abs amax amin clamp clamp_max clamp_min max maximum min minimum mul mul_ neg relu relu_",
        "round round_ sign",
        "eq ge gt isfinite isinf isnan le lt ne",
        "index_add index_add_",  # to distinct rows (tokens of an expert): no order
    )
    for name in line.split()
)
#: operations whose third argument scales the second; they are exact without it
SUMS = frozenset({"add", "add_", "sub", "sub_"})
#: divisions: to divide by a number, a GPU multiplies by its reciprocal
QUOTIENTS = frozenset({"div", "div_"})
#: torch's grouped matmul, and transformers' own where torch's does not run
GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
LOW = (torch.float32, torch.float16, torch.bfloat16)
#: query tokens of an attention that are computed at once; scores at once on a CPU (as many as its
#: cache holds) and on a GPU (half a gigabyte)
ROWS, SCORES = 128, (2**17, 2**26)


class _Operations(TorchDispatchMode):
    """Computes all float operations that are not exact in float64."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func._schema.name in GROUPED:
            return _grouped_mm(*args, **kwargs)
        if _is_exact(func, args, kwargs):
            return func(*args, **kwargs)
        if func._schema.name == "aten::topk":
            return _topk(*args, **kwargs)
        return _compute_in_float64(func, args, kwargs)


class _Attention(TorchFunctionMode):
    """Replaces scaled dot product attention before torch chooses a kernel for it."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def deterministic_arithmetic() -> Iterator[None]:
    """Let float operations give the same bits on all devices while open.

    Functions that :func:`bit_exact` marks run unchanged.
    """
    with _Attention(), _Operations():
        yield


def bit_exact(function: Callable[P, R]) -> Callable[P, R]:
    """Mark ``function`` as one that gives the same bits on all devices by itself."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


@bit_exact
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's ``scaled_dot_product_attention`` in float64, without dropout.

    ``[B, Hq, Tq, D]`` for ``query [B, Hq, Tq, D]``; B may be absent. As many heads are computed at
    once as :data:`SCORES` allows. If ``is_causal``, a query's scores are computed only for the
    tokens that it sees.
    """
    how = (dropout_p, is_causal, scale, enable_gqa)
    if query.dim() == 3:
        return attention(query[None], key[None], value[None], attn_mask, *how)[0]
    (batch, heads, rows, dim), (kv_heads, tokens) = query.shape, key.shape[1:3]
    if attn_mask is None and batch > 1:  # more heads of one item: fewer steps
        query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
        return attention(query, key, value, None, *how).unflatten(1, (batch, heads))[0]
    repeats, factor = heads // kv_heads, dim**-0.5 if scale is None else scale
    scores_of_head = max(1, repeats * min(rows, ROWS) * tokens)  # of a kv head
    step = max(1, SCORES[query.is_cuda] // scores_of_head)
    out = query.new_empty(batch, heads, rows, value.shape[3])
    mask = None
    if attn_mask is not None:  # [B, H or 1, repeats or 1, Tq, T]
        mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(batch, -1, rows, tokens)
        mask = mask.unflatten(1, (-1, repeats if mask.shape[1] > 1 else 1))
    for item, head in product(range(batch), range(0, kv_heads, step)):
        k, v = (x[item, head : head + step].double() for x in (key, value))
        mine = slice(head * repeats, (head + step) * repeats)
        q = (query[item, mine].double() * factor).unflatten(0, (len(k), repeats))
        for first in range(0, rows, ROWS):
            some = slice(first, first + ROWS)
            seen = min(first + ROWS, tokens) if is_causal else tokens
            part = q[:, :, some]  # [H, repeats, rows, D]
            scores = (part.flatten(1, 2) @ k[:, :seen].mT).view(*part.shape[:3], seen)
            if is_causal:
                later = torch.ones(
                    part.shape[2], seen, dtype=torch.bool, device=query.device
                ).triu_(first + 1)
                scores.masked_fill_(later, -math.inf)
            here = None
            if mask is not None:
                own = slice(head, head + step) if mask.shape[1] > 1 else slice(None)
                here = mask[item, own, :, some]
            weights = _masked_softmax(scores, here)
            found = (weights.flatten(1, 2) @ v[:, :seen]).view(*part.shape[:3], -1)
            out[item, mine, some] = found.flatten(0, 1)
    return out


def _masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax of ``scores``, which it overwrites; a row that sees no token gets zeros.

    ``mask`` is bool, False hiding a token, or is added to the scores.
    """
    if mask is None:
        return torch.softmax(scores, -1)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    else:
        scores.add_(mask)
    weights = torch.softmax(scores, -1)
    return weights.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0)


def _is_exact(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all devices give the same result of ``func`` as it is.

    They do for operations without floats below float64, for views, for custom operators and for
    operations that IEEE 754 specifies.
    """
    if (
        func.namespace != "aten"
        or func.is_view
        or not any(t.dtype in LOW for t in _tensors((args, kwargs)))
    ):
        return True
    name = func._schema.name.removeprefix("aten::")
    if name in SUMS:
        return kwargs.get("alpha", 1) == 1
    if name in QUOTIENTS:
        return (
            isinstance(args[1], Tensor)
            and args[1].dim() > 0
            and kwargs.get("rounding_mode") is None
        )
    return name in EXACT


def _compute_in_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` on float64 copies, in the dtype that ``func`` gives.

    An operation that works in place writes to its own argument.
    """
    found = [t for t in _tensors((args, kwargs)) if t.dtype in LOW]
    dtype = kwargs.get("dtype") or _promoted(found)
    if func._schema.name in ("aten::_softmax", "aten::_log_softmax") and args[2]:  # half to float
        args, dtype = (*args[:2], False), torch.float32
    if kwargs.get("dtype") in LOW:
        kwargs["dtype"] = torch.float64
    copies = {id(t): t.double() for t in found}
    wide_args, wide_kwargs = tree_map(
        lambda x: copies.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs)
    )
    result = func(*wide_args, **wide_kwargs)
    written = {
        # ``out`` takes the result's shape
        id(copies[id(t)]): t.resize_(copies[id(t)].shape).copy_(copies[id(t)])
        for t in _mutated_arguments(func, args, kwargs)
        if id(t) in copies
    }

    def back(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            return written[id(x)] if id(x) in written else x.to(dtype)
        return x

    return tree_map(back, result)


def _mutated_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The arguments that ``func`` writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """torch's topk, but of equal values it takes the first; devices differ in this."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """A grouped matmul in float64, which torch's lacks: ``[M, K], [E, K, N] -> [M, N]``.

    Rows of group e end at ``offs[e]``.
    """
    groups = x.double().tensor_split(offs[:-1].tolist())
    return torch.cat([rows @ w.double() for rows, w in zip(groups, weight, strict=True)]).to(x)


def _promoted(tensors: list[Tensor]) -> torch.dtype:
    """The dtype of a result; tensors without dimensions count only if all have none."""
    dtypes = [t.dtype for t in tensors if t.dim()] or [t.dtype for t in tensors]
    return reduce(torch.promote_types, dtypes)


def _tensors(nested: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(nested) if isinstance(leaf, Tensor))
