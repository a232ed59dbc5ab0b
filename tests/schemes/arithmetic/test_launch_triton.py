"""Triton's kernels run on the GPU that holds their tensors."""

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import qtool
from qtool.schemes.arithmetic.launch_triton import launch


def test_a_kernel_runs_on_the_gpu_of_its_tensors(current_gpus: list[object]) -> None:
    ran: list[Any] = []
    kernel = defaultdict(
        lambda: lambda *given, **options: ran.append((*current_gpus, given, options))
    )
    tensor: Any = SimpleNamespace(device="cuda:1")
    launch(kernel, (3, 2), tensor, 7, SIZE=8)
    assert list(kernel) == [(3, 2)] and ran == [("cuda:1", (tensor, 7), {"SIZE": 8})]
    assert not current_gpus


def test_every_kernel_is_launched_so() -> None:
    found = 0
    for path in Path(qtool.__file__).parent.rglob("*_triton.py"):
        text = path.read_text()
        for name in re.findall(r"@triton\.jit.*\n    def (\w+)", text):
            found += 1
            assert f"{name}[" not in text, path
    assert found >= 9
