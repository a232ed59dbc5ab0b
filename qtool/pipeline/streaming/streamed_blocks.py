"""Blocks whose weights are read, rounded, packed, written and forgotten one by one.

That is enough for a recipe without transforms whose methods look at no data.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.rounding.rtn import round_to_nearest
from qtool.io.finite import require_finite
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.streaming.embedding_and_head import as_stored
from qtool.pipeline.streaming.method_checks import check_codes
from qtool.runtime.packed_kv import NEUTRAL


class StreamedBlocks:
    """Blocks whose weights are rounded one by one, on ``device``."""

    def __init__(self, source: Checkpoint, job: Job, device: torch.device) -> None:
        self.source, self.job, self.device = source, job, device

    def tensors(
        self, index: int, following: int | None, spec: Mapping[str, Tensor], notes: dict[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """``(full name, tensor)`` of all that block ``index`` stores, in the order of ``spec``."""
        job = self.job
        for name, linear_format in job.formats(index).items():
            full, scheme = job.full(index, name), linear_format.scheme_object
            pinned = self.device.type == "cuda"
            weight = self.source.read(f"{full}.weight", pinned=pinned).to(self.device)
            require_finite(f"{full}.weight", weight)
            rounded = round_to_nearest(scheme, weight)
            check_codes(scheme, {full: rounded})
            notes.setdefault("rtn", {})[name] = {"weight_error": rounded.weight_error}
            for part, tensor in linear_format.pack(rounded.codes, rounded.params).items():
                yield f"{full}.{part}", tensor
        for full, tensor in spec.items():
            if full in self.source:
                yield full, as_stored(full, require_finite(full, self.source.read(full)), job)
            elif (neutral := NEUTRAL.get(full.rpartition(".")[2])) is not None:
                yield full, torch.full(tensor.shape, neutral)  # nothing was calibrated

    def close(self) -> None:
        """Do nothing: no thread is open."""
