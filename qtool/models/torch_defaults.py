"""torch as it comes, whatever a caller has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_defaults() -> Iterator[None]:
    """New tensors in float32, gradients where they are asked for, no autocast.

    A caller may be loading a model, which sets a dtype, or be in ``torch.inference_mode()``.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
