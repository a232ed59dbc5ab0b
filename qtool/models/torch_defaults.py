"""torch as it comes, whatever a caller has set."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import RLock

import torch

#: default dtype and precision belong to the process: threads take turns
_TURN = RLock()


@contextmanager
def torch_defaults() -> Iterator[None]:
    """New tensors in float32 and on the CPU, gradients where they are asked for, no autocast.

    Products of float32 are not rounded to TF32 or bfloat16. A caller may be loading a model, which
    sets a dtype, or be in ``torch.inference_mode()``. Another thread waits until this one is out.
    """
    with _TURN:
        dtype = torch.get_default_dtype()
        # one that is set slows down every function of torch
        other_device = torch.get_default_device().type != "cpu"
        torch.set_default_dtype(torch.float32)
        try:
            with (
                _precise_products(),
                torch.device("cpu") if other_device else nullcontext(),
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False),
            ):
                yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def _precise_products() -> Iterator[None]:
    """Matrix products of float32 in its own precision, on CPUs and GPUs.

    torch has an old setting for all backends and one for each. It refuses to read the old one if
    a caller has set others.
    """
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    backends = torch.backends.cuda.matmul, cpu
    own, common = [backend.fp32_precision for backend in backends], None
    with suppress(RuntimeError):
        common = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if common is not None:
            torch.set_float32_matmul_precision(common)
        for backend, precision in zip(backends, own, strict=True):
            backend.fp32_precision = precision
