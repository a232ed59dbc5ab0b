"""What every layout promises: that its functions undo each other."""

import torch

from qtool.errors import CheckFailed
from qtool.layouts.base import Layout
from qtool.plugins import require_returned


def require_sound(layout: Layout) -> None:
    """Pack and unpack codes and parameters of two tiles by two, unsigned and signed.

    Raises:
        QtoolError: a function returns no tensor.
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
        names = list(packed) if isinstance(packed, dict) else type(packed).__name__
        if names != list(layout.tensors):
            raise CheckFailed(
                f"layout {layout.name}: pack gives {names}; a dict of {', '.join(layout.tensors)}"
                " is expected"
            )
        _require_same(layout, "unpack", layout.unpack(packed, n, k, signed=signed), codes)
        for name in packed if layout.by_rows else ():
            parts = [layout.pack(half.clone())[name] for half in codes.chunk(2)]
            _require_one_after_another(layout, "pack", packed[name], parts)
    group, channel = torch.rand(n, 2, generator=random), torch.rand(n, generator=random)
    found = layout.unpack_group(layout.pack_group(group.clone()), n)
    _require_same(layout, "unpack_group", found, group)
    found = layout.unpack_channel(layout.pack_channel(channel.clone()))
    _require_same(layout, "unpack_channel", found, channel)
    for name, param in {"pack_group": group, "pack_channel": channel}.items():
        if layout.by_rows:
            whole, *parts = (getattr(layout, name)(p.clone()) for p in (param, *param.chunk(2)))
            _require_one_after_another(layout, name, whole, parts)


def _require_one_after_another(
    layout: Layout, function: str, whole: torch.Tensor, parts: list[torch.Tensor]
) -> None:
    joined = torch.cat(parts)
    if joined.shape != whole.shape or not torch.equal(joined, whole):
        raise CheckFailed(
            f"layout {layout.name}: by_rows is true, and {function} does not store weights stacked"
            " along N one after another"
        )


def _require_same(layout: Layout, function: str, found: torch.Tensor, packed: torch.Tensor) -> None:
    require_returned(layout, function, found, torch.Tensor)
    if (found.dtype, found.shape) != (packed.dtype, packed.shape):
        raise CheckFailed(
            f"layout {layout.name}: {function} gives {found.dtype} {list(found.shape)}, not what"
            f" was packed, {packed.dtype} {list(packed.shape)}"
        )
    if not torch.equal(found, packed):
        place = tuple((found != packed).nonzero()[0].tolist())
        raise CheckFailed(
            f"layout {layout.name}: {function} gives {found[place]} at {list(place)}, where"
            f" {packed[place]} was packed"
        )
