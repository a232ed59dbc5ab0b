"""Renders chats as text with the tokenizer's own chat template."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from qtool.errors import QtoolError, in_one_line

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerBase

#: ``messages``: ``{"role": ..., "content": ...}``, one a turn, the content a text or a list of
#: parts; ``tools``: the schemas of the functions that the model may call, or None; ``name``: where
#: it is in a file
Chat: TypeAlias = dict[str, Any]
#: a document or a chat
Row: TypeAlias = str | Chat
#: the key of a chat's name in messages to the user
NAME = "name"
#: the text by which a template is asked what it takes
PROBE = "qtool"


def render(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", name: str) -> list[str]:
    """The documents of ``rows``; a chat becomes the text that a server would give to the model.

    Raises:
        QtoolError: a tokenizer without a chat template, or a chat that it cannot render.
    """
    has_chats = not all(isinstance(row, str) for row in rows)
    if has_chats and not tokenizer.chat_template:
        raise QtoolError(
            f"{name} holds chats (messages), and the model's tokenizer has no chat template to "
            'render them with: give documents under "text" instead'
        )
    in_parts = has_chats and _takes_parts(tokenizer)
    return [
        row
        if isinstance(row, str)
        else _rendered(row, tokenizer, in_parts, row.get(NAME) or f"{name}, row {number}")
        for number, row in enumerate(rows, 1)
    ]


def _takes_parts(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template writes a message that is a list of parts, but not a text.

    Those of some multimodal models (LLaVA, SmolVLM) loop over parts, and would leave a text out.
    """

    def writes(content: Any) -> bool:
        try:
            turns = [{"role": "user", "content": content}]
            return PROBE in str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # a template is the model author's program and may raise anything
            return False

    return not writes(PROBE) and writes(_parts(PROBE))


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _rendered(chat: Chat, tokenizer: "PreTrainedTokenizerBase", in_parts: bool, name: str) -> str:
    messages = chat["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise QtoolError(f'{name}: a list of messages with "role" and "content" is expected')
    if not messages:
        raise QtoolError(f"{name} is a chat without messages")
    turns = [_turn(message, in_parts, name) for message in messages]
    tools = _parsed(chat.get("tools")) or None
    try:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))
    except Exception as error:  # a template is the model author's program and may raise anything
        raise QtoolError(
            f"{name}: the tokenizer's chat template cannot render it ({in_one_line(error)})"
        ) from error


def _turn(message: dict[str, Any], in_parts: bool, name: str) -> dict[str, Any]:
    """``message`` as servers give it to a template, which may ask whether a key is there.

    A table gives each message the keys of all; not every release of transformers drops empty ones.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"], name)
    if in_parts and isinstance(message.get("content"), str):
        message["content"] = _parts(message["content"])
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return message


def _call(call: Any) -> Any:
    """``call`` of a tool with its arguments as a mapping; OpenAI's API has their JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": _parsed(function.get("arguments"))}}


def _parsed(value: Any) -> Any:
    """What ``value`` says, if it is JSON; else ``value``."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _joined(parts: list[Any], name: str) -> str:
    """The text parts of a message as one text, as servers do for templates that take texts."""
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise QtoolError(
            f"{name}: a part of a message is no text, and calibration is on text alone"
        )
    return "\n".join(texts)
