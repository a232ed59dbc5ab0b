"""``demo_choice``: a zero-shot task on the demo's held-out text, without network or data.

A question gives 64 tokens of the text and asks which 16 tokens come next: the true ones, or 16
tokens from one of three other places (chance: 25 %). Places do not overlap and the draw is seeded,
so a model and its quantized copy answer the same questions.
"""

import random
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qtool.data import corpora
from qtool.errors import QtoolError
from qtool.eval import local_tasks

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

NAME = "demo_choice"
CONTEXT, NEXT, CHOICES, QUESTIONS = 64, 16, 4, 200


def load(tokenizer: PreTrainedTokenizerBase) -> "ConfigurableTask":
    """The task over qtool/demo/heldout.txt, cut by the model's own tokenizer."""
    text = corpora.load("demo", split=corpora.TEST).text
    return local_tasks.build(
        NAME,
        questions(text, tokenizer),
        output_type="multiple_choice",
        doc_to_text="query",
        doc_to_choice="choices",
        doc_to_target="gold",
        target_delimiter="",
        metrics=("acc",),
    )


def questions(text: str, tokenizer: PreTrainedTokenizerBase) -> list[local_tasks.Row]:
    """Rows of query, choices and gold: substrings of ``text``, so no decoding can alter them."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise QtoolError(
            f"{NAME} cuts its text at tokens, and {type(tokenizer).__name__} does not say where in "
            "a text they are"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # the start of each token, in characters
    starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
    places = range(0, len(starts) - CONTEXT - NEXT, CONTEXT + NEXT)
    if len(places) < CHOICES:
        raise QtoolError(
            f"{NAME} needs {CHOICES * (CONTEXT + NEXT)} tokens, and the text has {len(starts) - 1}"
        )
    nexts = [text[starts[place + CONTEXT] : starts[place + CONTEXT + NEXT]] for place in places]
    draw = random.Random(0)
    rows = []
    for index, place in enumerate(places[:QUESTIONS]):
        others = draw.sample([n for n in range(len(places)) if n != index], CHOICES - 1)
        choices = [nexts[other] for other in others]
        gold = draw.randrange(CHOICES)
        choices.insert(gold, nexts[index])
        rows.append(
            {
                "query": text[starts[place] : starts[place + CONTEXT]],
                "choices": choices,
                "gold": gold,
            }
        )
    return rows
