"""Measures how far a model's output diverges from the float model's if some linears are rounded."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.models.auto import running, text_model


class Probe:
    """A float model and its log-probabilities on windows, for comparison with rounded models.

    Args:
        windows: batches ``[B, S]`` of token ids.
    """

    def __init__(self, model: PreTrainedModel, windows: Sequence[Tensor]) -> None:
        self.model = model
        self.windows = [window for ids in windows for window in ids.split(1)]
        self.expected = [self._log_probabilities(ids).cpu() for ids in self.windows]

    def divergence(self, formats: Mapping[str, LinearFormat | None]) -> float:
        """KL(float || rounded) in nats a token, with the linears of these full names rounded.

        Raises:
            QtoolError: the model's output has NaN or Inf, or as
                :func:`~qtool.models.auto.running`.
        """
        total = 0.0
        with ExitStack() as stack:
            for name, linear_format in formats.items():
                if linear_format is not None:
                    stack.enter_context(rounded(self.model.get_submodule(name), linear_format))
            for ids, expected in zip(self.windows, self.expected, strict=True):
                found = self._log_probabilities(ids)
                given = expected.to(found.device)
                lost = torch.where(given == -torch.inf, 0.0, given.exp() * (given - found))
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
def rounded(linear: nn.Module, linear_format: LinearFormat) -> Iterator[None]:
    """While open, ``linear`` has weight and inputs rounded to nearest in its format."""
    scheme, weight = linear_format.scheme_object, linear.weight
    assert isinstance(weight, nn.Parameter)
    kept, params = weight.data, scheme.fit(weight.data)

    def on_inputs(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return scheme.fake_activation(given[0], params), *given[1:]

    hook = linear.register_forward_pre_hook(on_inputs)
    weight.data = scheme.fake_weight(kept, params).to(kept.dtype)
    try:
        yield
    finally:
        weight.data = kept
        hook.remove()
