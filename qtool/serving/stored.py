"""Whether a checkpoint's files hold the packed linears that its ``config.json`` declares."""

from typing import Any

from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.runtime.packed_linears import PackedLinears


def require_stored(checkpoint: Checkpoint, linears: PackedLinears) -> None:
    """Check names, shapes and dtypes of the tensors of packed linears; only headers are read.

    Raises:
        QtoolError: for the first tensor that is missing, left over, or not what the format
            declares.
    """
    expected: dict[str, tuple[Any, ...] | None] = {}
    packed = linears.formats()
    for name, linear_format in packed.items():
        n, k = linears.shape(name)
        linear_format.require(name, n, k)
        for part, tensor in linear_format.tensors(n, k).items():
            expected[f"{name}.{part}"] = (tuple(tensor.shape), tensor.dtype)
        if linears.format.is_permuted(name):
            expected[f"{name}.permutation"] = None
        if f"{name}.bias" in checkpoint:
            expected[f"{name}.bias"] = None
    for full, declared in expected.items():
        entry = checkpoint.entry(full)
        found = (entry.shape, entry.dtype)
        if declared is not None and found != declared:
            raise QtoolError(
                f"{full}: {found[1]} {list(found[0])} found, "
                f"{declared[1]} {list(declared[0])} declared"
            )
    for full in checkpoint.entries:
        if full.rpartition(".")[0] in packed and full not in expected:
            raise QtoolError(f"{full}: stored, but the format of this linear has no such tensor")
