"""Perplexity by the rules of the GPTQ and AWQ papers' scripts, so that numbers are comparable.

Documents are joined by blank lines (C4's by spaces) and tokenized at once; if the tokenizer adds a
BOS, it is there once, at the start. The tokens are cut into non-overlapping windows of ``seqlen``
tokens (at most the model's context), and the last, partial window is dropped. A window of s tokens
is predicted from its own start, so it scores s - 1 tokens:

    perplexity = exp( sum over windows and tokens of -log p(token | its window so far) / tokens )

A text shorter than one window is scored as one short window; the scripts would score nothing.
Logits are in the model's dtype, their log-softmax is in float32, and sums are kept in float64. The
model runs as it is served, or with ``deterministic`` so that every device has the same hidden
states (:mod:`qtool.eval.deterministic`).

Shapes: b windows a batch, s tokens a window, v vocabulary.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qtool import progress
from qtool.data.defaults import EVALUATION_SEQLEN
from qtool.data.windows import require_embedded
from qtool.errors import QtoolError
from qtool.eval.deterministic import arithmetic
from qtool.eval.engine import Engine, Model
from qtool.eval.results import Metric, batch_means, standard_error
from qtool.models.architecture import context_length
from qtool.models.auto import running, text_model

#: logits that are converted to float32 at once: 128 MiB
FLOAT32_LOGITS = 2**25
#: most logits of a forward on a CPU, unless one window has more: 2 GiB in float32
CPU_LOGITS = 2**29


@dataclass(frozen=True)
class Perplexity:
    """The score of a text.

    Attributes:
        nll: negative log-likelihood in nats, summed over the scored tokens.
        tokens: number of scored tokens.
        window_nll: mean negative log-likelihood of each window, in nats a token.
        token_ids: sha256 of the windows' token ids.
    """

    nll: float
    tokens: int
    seqlen: int
    window_nll: list[float]
    token_ids: str

    @property
    def windows(self) -> int:
        return len(self.window_nll)

    @property
    def perplexity(self) -> float:
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def metric(self) -> Metric:
        """:attr:`perplexity` with its standard error to first order, None for a single window.

        It is the perplexity times the error of its logarithm, which is a mean over runs of windows.
        """
        runs = batch_means(self.window_nll)
        of_log = standard_error(runs)
        stderr = None if of_log is None else self.perplexity * of_log
        return Metric(self.perplexity, stderr, higher_is_better=False, freedom=len(runs) - 1)


def perplexity(
    text: str,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seqlen: int = EVALUATION_SEQLEN,
    limit: int | None = None,
    batch_size: int = 8,
    deterministic: bool = False,
    label: str = "perplexity",
) -> Perplexity:
    """Perplexity of ``text``, or of its first ``limit`` windows.

    Args:
        batch_size: most windows in a forward; it is halved if they do not fit a GPU's memory, and
            on a CPU as large as :data:`CPU_LOGITS` allows. An engine makes its own batches.
        deterministic: compute hidden states that are the same on every device, not as served.
        label: name of the progress bar.

    Raises:
        QtoolError: a text of fewer than two tokens, token ids that the model does not embed, NaN
            logits, a single window that does not fit the device's memory, or as
            :func:`~qtool.models.auto.running`.
    """
    scorer = model if isinstance(model, Engine) else _InProcess(model, batch_size, deterministic)
    ids = _tokenize(text, scorer.vocabulary, tokenizer)
    windows = cut_windows(ids, min(seqlen, scorer.context_length or seqlen))[:limit]  # [windows, s]
    sums: list[float] = []
    with progress.bar(label, len(windows), "window") as bar:
        for batch in windows.split(min(scorer.batch_size, len(windows))):  # [b, s]
            sums += scorer.nll(batch)
            bar.update(len(batch))
    scored = windows.shape[1] - 1
    for index, value in enumerate(sums):
        if math.isnan(value):
            raise QtoolError(
                f"the model's logits are NaN in window {index} of {len(sums)}: it has no perplexity"
            )
    return Perplexity(
        math.fsum(sums),
        len(sums) * scored,
        scored + 1,
        [value / scored for value in sums],
        hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest(),
    )


class _InProcess:
    """A model in this process that scores windows as an :class:`Engine` does."""

    def __init__(self, model: PreTrainedModel, batch_size: int, deterministic: bool) -> None:
        self.model = text_model(model.eval())
        self.batch_size, self.deterministic = batch_size, deterministic
        embeddings = cast(torch.nn.Embedding, self.model.get_input_embeddings())
        self.vocabulary = embeddings.num_embeddings
        self.context_length = context_length(self.model.config.get_text_config())

    def nll(self, windows: torch.Tensor) -> list[float]:
        device, most = self.model.device, len(windows)
        if device.type == "cpu":  # where the system kills a process that wants too much memory
            most = max(1, CPU_LOGITS // (windows.shape[1] * self.vocabulary))
        with torch.no_grad(), arithmetic(self.model, self.deterministic):
            parts = windows.to(device).split(most)
            return torch.cat([_window_sums(self.model, part) for part in parts]).tolist()


def cut_windows(ids: torch.Tensor, seqlen: int) -> torch.Tensor:
    """[tokens] -> [windows, seqlen] without the partial last window.

    The result is [1, tokens] for a text shorter than one window.
    """
    if seqlen < 2:
        raise QtoolError(f"seqlen {seqlen} scores no token: at least 2 is needed")
    count = len(ids) // seqlen
    return ids[: count * seqlen].view(count, seqlen) if count else ids[None]


def _tokenize(text: str, vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)  # [tokens]
    if len(ids) < 2:
        raise QtoolError(f"a perplexity needs at least 2 tokens, and the text has {len(ids)}")
    require_embedded(int(ids.max()), vocabulary)
    return ids


def _window_sums(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """[b, s] ids -> [b] float64 sums of -log p; a batch that does not fit the memory is halved."""
    try:
        return _forward_sums(model, batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise QtoolError(
                f"one window of {batch.shape[1]} tokens does not fit the memory of {batch.device}: "
                "try a smaller --seqlen"
            ) from None
    torch.cuda.empty_cache()
    return torch.cat([_window_sums(model, half) for half in batch.chunk(2)])


def _forward_sums(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    with running():
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]  # [b, s - 1, v]
    targets = batch[:, 1:]  # [b, s - 1]
    step = max(1, FLOAT32_LOGITS // (logits.shape[0] * logits.shape[2]))
    sums = torch.zeros(len(batch), dtype=torch.float64, device=batch.device)
    for part, wanted in zip(logits.split(step, dim=1), targets.split(step, dim=1), strict=True):
        # [b * step]
        nll = cross_entropy(part.float().flatten(0, 1), wanted.flatten(), reduction="none")
        sums += nll.view_as(wanted).double().sum(dim=1)
    return sums
