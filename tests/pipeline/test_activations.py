"""Activations are kept on the device up to its room, the others in host memory."""

from pathlib import Path

import pytest
import torch

from qtool.calibration.batch import Batch
from qtool.pipeline.streaming import activations
from qtool.pipeline.streaming.activations import Activations

HIDDEN = torch.randn(2, 8, 4)


class OnHost(Batch):
    """Stands for pinned memory, which takes CUDA."""


@pytest.mark.parametrize(("place", "on_host"), [("device", 0), ("both", 3), ("host", 5)])
def test_what_the_device_has_no_room_for_is_on_the_host(
    place: str, on_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "HostBatch", OnHost)
    kept = Activations(place, None, tmp_path, room=2.5 * HIDDEN.nbytes)
    batches = [kept.batch({"hidden": HIDDEN}, []) for _ in range(5)]
    assert [isinstance(batch, OnHost) for batch in batches] == [False] * (5 - on_host) + [
        True
    ] * on_host
    assert all(torch.equal(batch.hidden, HIDDEN) for batch in batches)


def test_what_is_kept_in_16_bits_takes_half_the_room(tmp_path: Path) -> None:
    kept = Activations("both", torch.bfloat16, tmp_path, room=HIDDEN.nbytes)
    batches = [kept.batch({"hidden": HIDDEN}, []) for _ in range(2)]
    assert kept.room == 0 and all(batch.hidden.dtype == torch.bfloat16 for batch in batches)
