"""Blocks that are read, and copied to a GPU, before they are asked for."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from qtool import recipes
from qtool.io.read_ahead import ReadAhead
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import job_of
from tests.conftest import MakeModel


class Side:
    """A stream beside the main one, and the event after its copies."""

    made: ClassVar[list["Side"]] = []

    def __init__(self, device: torch.device) -> None:
        self.waited = 0
        self.made.append(self)

    def wait_stream(self, stream: object) -> None:
        """Nothing is queued here."""

    def record_event(self) -> "Side":
        return self

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def ahead(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadAhead]:
    monkeypatch.setattr(Side, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    source = Checkpoint(make_model(num_hidden_layers=3))
    found = ReadAhead(
        source, job_of(source, recipes.load("w8a8", "fast")), pinned=False, timed=nullcontext
    )
    yield found
    found.close()


def move(ahead: ReadAhead) -> None:
    assert ahead._ahead is not None
    ahead._ahead[1].result()
    ahead.move(torch.device("cpu"))


@pytest.mark.parametrize("asked", [2, 1])
def test_a_copy_is_waited_for_whichever_block_comes_next(ahead: ReadAhead, asked: int) -> None:
    """The memory of a copy that is dropped is used again, while the GPU may still write to it."""
    wanted = {index: ahead.block(index, None) for index in (1, 2)}
    ahead.block(0, 2)
    move(ahead)
    found = ahead.block(asked, None)
    assert [side.waited for side in Side.made] == [1]
    assert found.keys() == wanted[asked].keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted[asked].items())


def test_a_block_is_copied_once(ahead: ReadAhead) -> None:
    """A resumed run may run a written block before the block that was read ahead."""
    ahead.block(0, 2)
    move(ahead)
    move(ahead)
    ahead.block(2, None)
    assert [side.waited for side in Side.made] == [1]
