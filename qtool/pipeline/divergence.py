"""Measures how far a model's output diverges from the float model's if some linears are rounded."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qtool.calibration.rounding.rounded import Rounded, SimulatedLinear
from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.models.auto import running, text_model
from qtool.pipeline.trial_rounding import Trial, linear, moved


class Probe:
    """A float model and its log-probabilities on windows, for comparison with rounded models.

    Args:
        windows: batches ``[B, S]`` of token ids.

    Attributes:
        rounded: the linears that may be rounded, in each format, as :func:`.trial_rounding.rounded`
            gives them; the caller fills it.
        parked: copies of float weights in host memory, by the full names of their linears.
    """

    def __init__(self, model: PreTrainedModel, windows: Sequence[Tensor]) -> None:
        self.model = model
        self.rounded: dict[Trial, Rounded] = {}
        self.parked: dict[str, Tensor] = {}
        self.windows = [window for ids in windows for window in ids.split(1)]
        self.expected = [self._log_probabilities(ids) for ids in self.windows]

    def divergence(
        self, formats: Mapping[str, LinearFormat | None], *, parked: bool = False
    ) -> float:
        """KL(float || rounded) in nats a token, with the linears of these full names rounded.

        A linear whose format is None stays as it is.

        Args:
            parked: the float weights of the rounded linears wait in host memory, so that a GPU
                does not hold many linears twice.

        Raises:
            QtoolError: the model's output has NaN or Inf, or as
                :func:`~qtool.models.auto.running`.
        """
        total = 0.0
        with ExitStack() as stack:
            for name, linear_format in formats.items():
                if linear_format is not None:
                    one = self.rounded[name, linear_format]
                    if parked and name not in self.parked:
                        self.parked[name] = linear(self.model, name).weight.data.cpu()
                    waiting = self.parked[name] if parked else None
                    stack.enter_context(simulated(self.model, name, linear_format, one, waiting))
            for ids, expected in zip(self.windows, self.expected, strict=True):
                found = self._log_probabilities(ids)
                lost = torch.where(expected == -torch.inf, 0.0, expected.exp() * (expected - found))
                total += float(lost.sum(dtype=torch.float64))
        if not isfinite(total):
            raise QtoolError("the model's output on the calibration windows has NaN or Inf")
        return total / sum(ids.numel() for ids in self.windows)

    @torch.no_grad()
    def _log_probabilities(self, ids: Tensor) -> Tensor:
        model = text_model(self.model)
        with running():
            logits: Tensor = model(ids.to(self.model.device), use_cache=False).logits
        return logits.log_softmax(-1, dtype=torch.float32)


@contextmanager
def simulated(
    model: PreTrainedModel,
    name: str,
    linear_format: LinearFormat,
    rounded: Rounded,
    parked: Tensor | None,
) -> Iterator[None]:
    """While open, a linear computes as the quantized one will.

    ``parked`` is a copy of its weight in host memory, to which the weight moves meanwhile; None: it
    stays where it is.
    """
    scheme, exact = linear_format.scheme_object, linear(model, name)
    weight, device = exact.weight, exact.weight.device
    own = moved(rounded, device)
    simulation = SimulatedLinear(
        exact,
        scheme,
        own,
        scheme.dequantize(own.codes, own.params).to(weight.dtype),
        rotated=linear_format.rotated,
    )
    if parked is not None:
        weight.data = parked
    model.set_submodule(name, simulation)
    try:
        yield
    finally:
        model.set_submodule(name, exact)
        weight.data = weight.data.to(device)
