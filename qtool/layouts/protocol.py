"""What every layout promises: that its functions undo each other."""

import torch
from torch import Tensor

from qtool.errors import CheckFailed
from qtool.layouts.base import Layout
from qtool.plugins import is_of, require_like


def require_sound(layout: Layout) -> None:
    """Pack and unpack codes and parameters of two tiles by two, unsigned and signed.

    Raises:
        CheckFailed: naming the function that does not give back what was packed, or does not pack
            by rows though the layout says so.
    """
    n, k = (2 * size for size in layout.tile)
    random = torch.Generator().manual_seed(0)
    for signed in (False, True):
        low = -(2 ** (layout.bits - 1)) if signed else 0
        codes = torch.randint(low, low + 2**layout.bits, (n, k), generator=random)
        if layout.sparsity:
            kept, of = layout.sparsity
            codes[:, torch.arange(k) % of >= kept] = 0 if signed else 2 ** (layout.bits - 1)
        codes = codes.to(torch.int8 if signed else torch.uint8)
        packed = layout.pack(codes.clone())
        names = list(packed) if is_of(packed, dict[str, Tensor]) else type(packed).__name__
        if names != list(layout.tensors):
            raise CheckFailed(
                f"pack gives {names}; a dict of {', '.join(layout.tensors)} is expected"
            )
        _require_same("unpack", layout.unpack(packed, n, k, signed=signed), codes)
        for name in packed if layout.by_rows else ():
            parts = [layout.pack(half.clone())[name] for half in codes.chunk(2)]
            _require_one_after_another("pack", packed[name], parts)
    group, channel = torch.rand(n, 2, generator=random), torch.rand(n, generator=random)
    for what, param, rows in ("group", group, [n]), ("channel", channel, []):
        pack, unpack = getattr(layout, f"pack_{what}"), getattr(layout, f"unpack_{what}")
        _require_same(f"unpack_{what}", unpack(pack(param.clone()), *rows), param)
        if layout.by_rows:
            parts = [pack(half.clone()) for half in param.chunk(2)]
            _require_one_after_another(f"pack_{what}", pack(param.clone()), parts)


def _require_one_after_another(function: str, whole: Tensor, parts: list[Tensor]) -> None:
    joined = torch.cat(parts)
    if joined.shape != whole.shape or not torch.equal(joined, whole):
        raise CheckFailed(
            f"by_rows is true, and {function} does not store weights stacked along N one after"
            " another"
        )


def _require_same(function: str, found: Tensor, packed: Tensor) -> None:
    require_like(function, found, packed)
    if not torch.equal(found, packed):
        place = tuple((found != packed).nonzero()[0].tolist())
        raise CheckFailed(
            f"{function} gives {found[place]} at {list(place)}, where {packed[place]} was packed"
        )
