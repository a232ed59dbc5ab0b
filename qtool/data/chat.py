"""Renders chats as text with the tokenizer's own chat template."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from qtool.errors import QtoolError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerBase

#: ``{"role": ..., "content": ...}``, one a turn; the content is a text, or a list of parts
Messages: TypeAlias = list[dict[str, Any]]
#: a document or a chat
Row: TypeAlias = str | Messages


def render(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", name: str) -> list[str]:
    """The documents of ``rows``; a chat becomes the text that a server would give to the model.

    Raises:
        QtoolError: a tokenizer without a chat template, or a chat that it cannot render.
    """
    chats = [number for number, row in enumerate(rows) if not isinstance(row, str)]
    if chats and not tokenizer.chat_template:
        raise QtoolError(
            f"{name} holds chats (messages), and the model's tokenizer has no chat template to "
            'render them with: give documents under "text" instead'
        )
    return [
        row if isinstance(row, str) else _rendered(row, tokenizer, f"{name}, chat {number + 1}")
        for number, row in enumerate(rows)
    ]


def _rendered(messages: Messages, tokenizer: "PreTrainedTokenizerBase", name: str) -> str:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise QtoolError(f'{name}: a list of messages with "role" and "content" is expected')
    joined = [
        m | {"content": _joined(m["content"], name)} if isinstance(m.get("content"), list) else m
        for m in messages
    ]
    try:
        return str(tokenizer.apply_chat_template(joined, tokenize=False))
    except Exception as error:  # a template is the model author's program and may raise anything
        raise QtoolError(
            f"{name}: the tokenizer's chat template cannot render it ({error})"
        ) from error


def _joined(parts: list[Any], name: str) -> str:
    """The text parts of a message as one text, as servers do for templates that take texts."""
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise QtoolError(
            f"{name}: a part of a message is no text, and calibration is on text alone"
        )
    return "\n".join(texts)
