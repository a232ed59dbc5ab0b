"""torch as it comes, whatever a caller has set."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch

#: the default dtype belongs to the process: threads take turns
_TURN = RLock()


@contextmanager
def torch_defaults() -> Iterator[None]:
    """New tensors in float32 and on the CPU, gradients where they are asked for, no autocast.

    A caller may be loading a model, which sets a dtype, or be in ``torch.inference_mode()``.
    Another thread waits until this one is out.
    """
    with _TURN:
        dtype = torch.get_default_dtype()
        # one that is set slows down every function of torch
        other_device = torch.get_default_device().type != "cpu"
        torch.set_default_dtype(torch.float32)
        try:
            with (
                torch.device("cpu") if other_device else nullcontext(),
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False),
            ):
                yield
        finally:
            torch.set_default_dtype(dtype)
