"""A forward of a model whose weights are on ``meta``, on activations that have numbers.

A tensor that is made of weights alone is on ``meta`` too. If an operation combines a weight and an
activation, its result is random: only shape and dtype are those of the model. All other operations
are computed, so that a forward may look at numbers (sort tokens by expert, split by a count, index
by a result), which it could not do on ``meta``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from qtool.models.placement import OffMeta

#: operations that choose parts of their first operand: of a weight they choose a weight
CHOOSE = {"index", "index_select", "gather", "select", "slice"}


class RandomNumbers(OffMeta):
    """While open, a forward of a model on ``meta`` runs on the CPU, by random numbers."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = self.placed(kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if not any(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        mixed = not all(t.is_meta for t in tensors if t.dim())
        if mixed and func._schema.is_mutable and first is not None and not first.is_meta:
            return first
        kwargs.pop("device", None)
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        out = func(*args, **kwargs)
        chosen = first is not None and first.is_meta and func.overloadpacket.__name__ in CHOOSE
        if not mixed or chosen:
            return out
        return tree_map_only(Tensor, self._like, out)

    def _like(self, tensor: Tensor) -> Tensor:
        """Random numbers in the shape and dtype of ``tensor``; zeros for integers."""
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=self.generator).to(tensor.dtype)


class AttentionAsProducts(TorchFunctionMode):
    """While open, attention with weights as queries is two products; torch's own fails there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention and [x.is_meta for x in args[:2]] == [True, False]:
            query, key, value = args[:3]
            return (query @ key.mT).softmax(-1) @ value
        return func(*args, **(kwargs or {}))
