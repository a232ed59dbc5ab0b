"""The device that a caller names, checked before anything is read."""

import torch

from qtool.errors import QtoolError


def require_device(name: str | torch.device) -> torch.device:
    """The torch device ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        QtoolError: another name, or a GPU that this machine or this build of torch does not have.
    """
    kind, _, number = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise QtoolError(f"device {str(name)!r}: cpu, cuda or cuda:N is expected")
    if kind == "cuda" and int(number or 0) >= (there := torch.cuda.device_count()):
        raise QtoolError(
            f"device {str(name)!r}: torch {torch.__version__} finds {there or 'no'} CUDA "
            f"device{'s' * (there > 1)} on this machine"
        )
    return torch.device(name)
