"""torch's defaults belong to the process: what sets them has them alone."""

import contextlib
from threading import Event, Thread

import pytest
import torch

from qtool.calibration.precision import tensor_cores
from qtool.models.torch_defaults import torch_defaults


def test_another_thread_waits_until_the_defaults_are_back() -> None:
    inside, seen = Event(), list[torch.dtype]()

    def other() -> None:
        with torch_defaults():
            seen.append(torch.get_default_dtype())
            inside.set()

    thread = Thread(target=other)
    with torch_defaults(), torch_defaults():
        torch.set_default_dtype(torch.bfloat16)  # as loading a model does
        thread.start()
        assert not inside.wait(0.2)
    thread.join()
    assert seen == [torch.float32] == [torch.get_default_dtype()]


@pytest.mark.parametrize(
    ("old", "cuda", "cpu"),
    [("medium", None, None), ("high", None, None), (None, "tf32", None), (None, None, "bf16")],
)
def test_a_precision_of_the_caller_is_not_that_of_a_run(
    old: str | None, cuda: str | None, cpu: str | None
) -> None:
    """torch refuses to read its old setting if those of single backends contradict it."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]

    def found() -> list[str]:
        with contextlib.suppress(RuntimeError):
            return [torch.get_float32_matmul_precision(), *(b.fp32_precision for b in backends)]
        return ["refused", *(backend.fp32_precision for backend in backends)]

    try:
        if old:
            torch.set_float32_matmul_precision(old)
        for backend, precision in zip(backends, (cuda, cpu), strict=True):
            if precision:
                backend.fp32_precision = precision
        given = found()
        with torch_defaults():
            assert found() == ["highest", "ieee", "ieee"]
            with tensor_cores():
                assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert found() == ["highest", "ieee", "ieee"]
        assert found() == given
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
