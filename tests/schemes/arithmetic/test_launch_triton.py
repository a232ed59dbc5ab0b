"""Triton's kernels run on the GPU that holds their tensors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import qtool
from qtool.schemes.arithmetic.launch_triton import launch


def test_a_kernel_runs_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]

    @contextmanager
    def device(of: str) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: ran.append((current[-1], grid, args, options))

    ran: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor: Any = SimpleNamespace(device="cuda:1")
    launch(Kernel(), (3, 2), tensor, 7, SIZE=8)
    assert ran == [("cuda:1", (3, 2), (tensor, 7), {"SIZE": 8})] and current == ["cuda:0"]


def test_every_kernel_is_launched_so() -> None:
    found = 0
    for path in Path(qtool.__file__).parent.rglob("*_triton.py"):
        text = path.read_text()
        for name in re.findall(r"@triton\.jit.*\n    def (\w+)", text):
            found += 1
            assert f"{name}[" not in text, path
    assert found >= 9
