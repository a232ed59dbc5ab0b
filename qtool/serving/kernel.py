"""Which kernel an engine's layer runs, chosen and compiled before the first token."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.runtime.dispatch import KERNELS, Kernel

#: token counts that are run once before serving: those that engines capture in graphs, and larger
#: ones up to a large prefill
TOKEN_COUNTS = [1, 2, 4, *range(8, 513, 8), 768, 1024, 1536, 2048, 3072, 4096, 8192]


@dataclass(frozen=True)
class Gemm:
    """One multiplication of an engine's layer, as :mod:`qtool.serving.verify` checks it.

    Attributes:
        names: the checkpoint's linears whose outputs ``multiply`` concatenates, for inputs ``[M,
            k]`` of ``dtype``.
        launches: GEMMs that ``multiply`` runs; several if the linears' inputs differ.
    """

    name: str
    names: list[str]
    k: int
    dtype: torch.dtype
    multiply: Callable[[torch.Tensor], torch.Tensor]
    kernel: Kernel
    launches: int


def serving_kernel(
    name: str, linear_format: LinearFormat, n: int, k: int, dtype: torch.dtype
) -> Kernel:
    """The kernel of a weight ``[n, k]`` on the device on which the engine makes its layers.

    A CPU gets the kernel of a GPU, whose op runs its reference.

    Raises:
        QtoolError: naming the layer, if no kernel takes it.
    """
    device = torch.empty(0).device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return require_kernel(name, linear_format, n, k, capability, dtype)


def require_kernel(
    name: str,
    linear_format: LinearFormat,
    n: int,
    k: int,
    capability: tuple[int, int] | None,
    dtype: torch.dtype | None,
) -> Kernel:
    """The first kernel that takes a weight ``[n, k]``.

    Args:
        capability: compute capability of the GPU; None: any.
        dtype: dtype of the activations; None: any.

    Raises:
        QtoolError: naming the layer, and what a kernel would accept.
    """
    known = KERNELS.get((linear_format.scheme, linear_format.layout), ())
    what = f"{name}: {linear_format.scheme} in layout {linear_format.layout}, {n} x {k}"
    if not known:
        raise QtoolError(f"{what}: it has no kernel")
    fitting = [kernel for kernel in known if n % kernel.n == 0 and k % kernel.k == 0]
    if not fitting:
        sizes = dict.fromkeys(f"{kernel.n} x {kernel.k}" for kernel in known)
        raise QtoolError(
            f"{what}: no kernel takes it; multiples of {' or '.join(sizes)} are expected"
        )
    taking = [kernel for kernel in fitting if dtype in (None, *kernel.dtypes)]
    if not taking:
        dtypes = dict.fromkeys(str(accepted) for kernel in fitting for accepted in kernel.dtypes)
        raise QtoolError(
            f"{what}: no kernel takes activations in {dtype}; {' or '.join(dtypes)} is expected"
        )
    for kernel in taking:
        if capability in (None, *kernel.capabilities):
            return kernel
    listed = {f"sm_{major}{minor}" for kernel in taking for major, minor in kernel.capabilities}
    assert capability is not None
    raise QtoolError(
        f"{what}: this GPU is sm_{capability[0]}{capability[1]}; its kernels run on "
        f"{', '.join(sorted(listed))}"
    )


#: the keys of :func:`compile_kernels` in this process
_compiled: set[Hashable] = set()


def compile_kernels(
    key: Hashable,
    multiply: Callable[[torch.Tensor], object],
    k: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Run ``multiply`` on zeros ``[M, k]`` for each M whose kernel may differ; not on a CPU.

    ``key``: all that the kernels of ``multiply`` depend on besides k, device and dtype. Calls with
    an equal key run nothing.
    """
    key = key, k, device, dtype
    if device.type == "cuda" and key not in _compiled:
        for tokens in TOKEN_COUNTS:
            multiply(torch.zeros(tokens, k, dtype=dtype, device=device))
        _compiled.add(key)
