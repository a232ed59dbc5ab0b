"""The device that a caller names, checked before anything is read."""

import re

import torch

from qtool.errors import QtoolError


def require_device(name: str | torch.device) -> torch.device:
    """The torch device ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        QtoolError: another name, or a GPU that this machine or this build of torch does not have.
    """
    if not (found := re.fullmatch("(cpu|cuda)(?::([0-9]+))?", str(name))):
        raise QtoolError(f"device {str(name)!r}: cpu, cuda or cuda:N is expected")
    kind, number = found.groups()
    if kind == "cuda" and int(number or 0) >= (there := torch.cuda.device_count()):
        raise QtoolError(
            f"device {str(name)!r}: torch {torch.__version__} finds {there or 'no'} CUDA "
            f"device{'s' * (there > 1)} on this machine"
        )
    return torch.device(name)
