"""A model as an object of lm-eval's own classes.

lm-eval fails an assertion if context and continuation together have no more tokens than the context
alone (a tokenizer with tokens such as "into▁the▁"). Here the continuation then starts at the first
token that differs from the context's.

lm-eval computes log p in the model's dtype by default. In bfloat16 a log-likelihood of -300 is a
multiple of 2 nats, and two choices are often equal. Here it is computed in float32, as perplexities
and an engine's log-likelihoods are. Every number that lm-eval can compute with
``softmax_dtype=float32`` is the same here.
"""

import math
from itertools import takewhile
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase

from qtool.data.windows import require_embedded
from qtool.errors import QtoolError
from qtool.eval.engine import Engine, Model
from qtool.models.architecture import context_length
from qtool.models.auto import running, text_model


class MergedPairs(TemplateLM):
    """A mixin for lm-eval's classes that scores a continuation which adds no token to its context.

    Attributes:
        vocabulary: number of token ids that the model embeds.
    """

    vocabulary: int

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        head, tail = super()._encode_pair(context, continuation)
        if tail:
            return head, tail
        whole = self.tok_encode(context + continuation)
        pairs = zip(whole, head, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return whole[:shared] or [self.prefix_token_id], whole[shared:]

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
        highest = max((max(head + tail) for _, head, tail in requests), default=0)
        require_embedded(highest, self.vocabulary)
        for texts, _, tail in requests:
            if len(tail) > self.max_length:
                begins = f" that begins with {texts[1][:40]!r}" if texts else ""
                raise QtoolError(
                    f"a continuation{begins} has {len(tail)} tokens, and the model's context "
                    f"{self.max_length}"
                )
        found = super()._loglikelihood_tokens(requests, *args, **options)
        if any(math.isnan(log_p) for log_p, _ in found):
            raise QtoolError("the model's logits are NaN: it answers no question")
        return found


class _InProcess(MergedPairs, HFLM):
    """lm-eval's own class for transformers' models."""

    def _model_call(self, *args: Any, **options: Any) -> Any:
        with running():
            return super()._model_call(*args, **options)

    def _model_generate(self, *args: Any, **options: Any) -> Any:
        with running():
            return super()._model_generate(*args, **options)


def language_model(model: Model, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Any:
    """``model`` as lm-eval takes it.

    Raises:
        QtoolError: the tokenizer has no token for the beginning or the end of a text.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise QtoolError(
            "the tokenizer has neither a BOS nor an EOS token, one of which lm-eval puts before a "
            "continuation without a context: name one in tokenizer_config.json"
        )
    if isinstance(model, Engine):
        found = model.lm_eval_model()
        found.vocabulary = model.vocabulary
        return found
    found = _InProcess(
        pretrained=text_model(model),
        tokenizer=tokenizer,
        max_length=context_length(model.config.get_text_config()),
        batch_size=batch_size,
        backend="causal",
        softmax_dtype="float32",
    )
    found.vocabulary = found.model.get_input_embeddings().num_embeddings
    return found
