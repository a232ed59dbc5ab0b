"""Whether a checkpoint's files hold the packed linears that its ``config.json`` declares."""

import torch

from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.runtime.packed_linears import PackedLinears


def require_stored(checkpoint: Checkpoint, linears: PackedLinears) -> None:
    """Check names, shapes and dtypes of the tensors of packed linears; only headers are read.

    Raises:
        QtoolError: for the first tensor that is missing, left over, or not what the format
            declares.
    """
    packed, expected = linears.formats(), set[str]()
    for name, linear_format in packed.items():
        n, k = linears.shape(name)
        linear_format.require(name, n, k)
        tensors = linear_format.tensors(n, k)
        if linears.format.is_permuted(name):
            tensors["permutation"] = torch.empty(k, dtype=torch.int32, device="meta")
        for part, tensor in tensors.items():
            entry, shape = checkpoint.entry(f"{name}.{part}"), tuple(tensor.shape)
            if (entry.shape, entry.dtype) != (shape, tensor.dtype):
                raise QtoolError(
                    f"{name}.{part}: {entry.dtype} {list(entry.shape)} found, "
                    f"{tensor.dtype} {list(shape)} declared"
                )
        expected.update(f"{name}.{part}" for part in (*tensors, "bias"))
    for full in checkpoint.entries:
        if full.rpartition(".")[0] in packed and full not in expected:
            raise QtoolError(f"{full}: stored, but the format of this linear has no such tensor")
