"""A model that a serving engine has loaded, as evaluations use it.

The windows and the requests are the same as for a model in this process; the engine only returns
the log-likelihoods of their tokens.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from qtool.errors import QtoolError, require_count


class Engine(ABC):
    """A loaded model of a serving engine.

    Attributes:
        vocabulary: number of token ids that the model embeds.
        context_length: tokens of the longest window that the model was made for; None if its config
            names none.
        batch_size: number of windows in a call of :meth:`nll`.
    """

    vocabulary: int
    context_length: int | None
    batch_size: int

    @abstractmethod
    def __init__(
        self, directory: Path, *, tokens: int | None, dtype: str | None, tensor_parallel: int
    ) -> None:
        """Load the model of ``directory``.

        Args:
            tokens: tokens of the longest window; None for requests of any length.
            dtype: name of the dtype; by default the checkpoint's own.
            tensor_parallel: number of GPUs over which the model is split.
        """

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """The engine and its version, for results.

        Raises:
            QtoolError: the engine is not installed.
        """

    @abstractmethod
    def nll(self, windows: Tensor) -> list[float]:
        """``[b, s]`` ids -> b sums of -log p(token | its window so far), nats."""

    @abstractmethod
    def lm_eval_model(self) -> Any:
        """The model as lm-eval takes it, a :class:`qtool.eval.language_model.MergedPairs`."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine's memory; no other method may be called afterwards."""


#: a model on which tasks are evaluated
Model: TypeAlias = PreTrainedModel | Engine


def engine_name(model: Model) -> str:
    """The engine and version of ``model``; empty for a model in this process."""
    return model.version() if isinstance(model, Engine) else ""


def require_engine(
    engine: type[Engine] | None, tensor_parallel: int, **others: str | bool | None
) -> None:
    """Refuse an engine that is not installed, and options ``others`` that it does not support."""
    require_count("--tensor-parallel", tensor_parallel)
    if engine is None:
        if tensor_parallel != 1:
            raise QtoolError(f"--tensor-parallel {tensor_parallel} is for --engine vllm")
        return
    for option, value in others.items():
        if value:
            raise QtoolError(
                f"--engine vllm goes without --{option.replace('_', '-')}: the engine computes as "
                "it serves"
            )
    engine.version()
