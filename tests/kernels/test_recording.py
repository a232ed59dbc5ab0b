"""A recording that fails leaves the thread's stream as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from qtool.kernels.recording import recording


class Torch:
    """torch's streams and recordings, of which each one fails at its end as torch's does."""

    def __init__(self) -> None:
        self.current = "default"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, stream: str, **_: Any) -> Iterator[None]:
        self.current = stream
        yield
        raise RuntimeError("operation not permitted when stream is capturing")


def test_torch_leaves_its_stream_and_recording_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = Torch()
    with pytest.raises(RuntimeError), fake.graph(None, "side"):
        pass
    assert fake.current == "side"
    fake.current = "default"
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    with pytest.raises(RuntimeError), recording(fake, fake):
        assert fake.current is fake
    assert fake.current == "default"


@pytest.mark.cuda
def test_a_failed_recording_keeps_the_stream() -> None:
    own = torch.cuda.current_stream()
    with pytest.raises(RuntimeError), recording(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
        torch.cuda.synchronize()
    assert torch.cuda.current_stream() == own
    assert float(torch.ones(2, device="cuda").sum()) == 2
