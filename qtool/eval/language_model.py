"""A model as lm-eval's own classes see it.

lm-eval stops at an assertion where a continuation merges with its context into no more tokens than
the context has (a tokenizer with tokens such as "into▁the▁"). Here the continuation then starts at
the first token that differs from the context's. Wherever lm-eval has a number, it is the same
number.
"""

from itertools import takewhile
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase

from qtool.eval.engine import Engine, Model
from qtool.models.auto import text_model


class MergedPairs(TemplateLM):
    """Scores a continuation that adds no token to its context; beside one of lm-eval's classes."""

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        head, tail = super()._encode_pair(context, continuation)
        if tail:
            return head, tail
        whole = self.tok_encode(context + continuation)
        pairs = zip(whole, head, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return whole[:shared] or [self.prefix_token_id], whole[shared:]


class _InProcess(MergedPairs, HFLM):  # type: ignore[misc]
    """lm-eval's own class of transformers' models."""


def language_model(model: Model, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Any:
    """``model`` as lm-eval takes it."""
    if isinstance(model, Engine):
        return model.lm_eval_model()
    return _InProcess(
        pretrained=text_model(model), tokenizer=tokenizer, batch_size=batch_size, backend="causal"
    )
