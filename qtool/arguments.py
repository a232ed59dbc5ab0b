"""Kinds of command-line arguments that click does not know: a device that is there, a directory to
be made.
"""

import os
from pathlib import Path
from typing import Any

import click

POSITIVE, NOT_NEGATIVE, TWO_OR_MORE = (click.IntRange(min=least) for least in (1, 0, 2))
GIGABYTES = click.FloatRange(min=0, min_open=True)


class Device(click.ParamType):
    """``cpu``, ``cuda`` or ``cuda:N``, as torch finds it on this machine."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        import torch

        kind, _, number = str(value).partition(":")
        if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
            self.fail(f"{value!r}; cpu, cuda or cuda:N is expected", param, ctx)
        if kind == "cuda" and int(number or 0) >= (there := torch.cuda.device_count()):
            self.fail(
                f"{value!r}; this machine has {there or 'no'} CUDA device{'s' * (there > 1)}",
                param,
                ctx,
            )
        return str(value)


class NewPath(click.Path):
    """A path to be written, with ``~`` for the home directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        path = Path(value).expanduser()
        if path.name in ("", ".."):
            self.fail(f"{str(value)!r} names nothing that could be made", param, ctx)
        return path
