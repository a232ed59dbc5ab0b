"""Where tensors are made while a model's weights lie on ``meta``."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OffMeta(TorchDispatchMode):
    """While open, what a model asks for where its weights are, on ``meta``, is on ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **self.placed(kwargs))

    def placed(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """``kwargs`` of an operation with another device in the place of ``meta``."""
        found = dict(kwargs or {})
        if found.get("device") is not None and torch.device(found["device"]).type == "meta":
            found["device"] = self.device
        return found
