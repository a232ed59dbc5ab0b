"""llama.cpp's tokenizers: byte-level BPE (``gpt2``), and SentencePiece's BPE (``llama``).

Both are read from tokenizer.json. SentencePiece merges the two neighbours that make the piece of
the highest score; tokenizer.json has lists of merges instead, in the order of the scores of what
they make. A score is the place of a piece's first merge, negative, if that says the same: merges of
one piece are beside each other, and all that could make it are there.

What llama.cpp would split in another way has no tokenizer in the file, which then takes token ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's names of pre-tokenizers, by the expression that splits text
PRE_TOKENIZERS = {
    WORDS % r"\p{N}{1,3}" + SPACES: "llama-bpe",
    WORDS % r"\p{N}" + SPACES: "qwen2",
}
#: what stands for a space in SentencePiece's pieces
SPACE = "▁"
UNDERSCORED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPENDED = {"type": "Prepend", "prepend": SPACE}
#: where a space is put before text, by Metaspace's own words, and what llama.cpp does otherwise
EVERYWHERE, NOWHERE = "everywhere", "never"
CAUTIONS = {
    EVERYWHERE: "",
    NOWHERE: "",
    "always": "tokenizer: llama.cpp puts a space before a text that begins with one too",
    "first": "tokenizer: llama.cpp puts a space before a text that begins with one too, and before "
    "one after a special token",
}
NO_TOKENIZER = (
    "tokenizer: llama.cpp has none that splits text as this model's does; give it token ids"
)


@dataclass(frozen=True)
class Splitter:
    """What llama.cpp calls a tokenizer's rule.

    Attributes:
        model, pre: its names. scores: of SentencePiece's pieces, by piece.
        prefix: a space is put before the text. caution: where that is another space than ours.
    """

    model: str
    pre: str
    scores: Mapping[str, float] | None = None
    prefix: bool = False
    caution: str = ""


def caution(directory: Path) -> str:
    """What llama.cpp does otherwise than the tokenizer in ``directory``; empty if nothing."""
    rule = splitter(directory)
    return NO_TOKENIZER if rule is None else rule.caution


def splitter(directory: Path) -> Splitter | None:
    """How llama.cpp splits text as the tokenizer in ``directory`` does; None if it cannot."""
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        return _byte_level(tokenizer) or _sentence_piece(tokenizer)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _byte_level(tokenizer: Mapping[str, Any]) -> Splitter | None:
    """A BPE of bytes whose rule is one of :data:`PRE_TOKENIZERS`."""
    try:
        rule, bytes_after = tokenizer["pre_tokenizer"]["pretokenizers"]
        name = PRE_TOKENIZERS[rule["pattern"]["Regex"]]
    except (KeyError, TypeError, ValueError):
        return None
    merges_first = not tokenizer["model"].get("ignore_merges", False)
    plain = bytes_after["type"] == "ByteLevel" and not bytes_after["use_regex"]
    fits = plain and merges_first == (name != "llama-bpe")
    return Splitter("gpt2", name) if fits else None


def _sentence_piece(tokenizer: Mapping[str, Any]) -> Splitter | None:
    """A BPE of characters, with bytes for those that are no piece."""
    model, prefix = tokenizer["model"], _prefix(tokenizer)
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if model["type"] != "BPE" or not model["byte_fallback"] or any(map(model.get, odd)):
        return None
    added = {token["content"] for token in tokenizer["added_tokens"]}
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if prefix is None or (scores := _scores(set(model["vocab"]) - added, merges)) is None:
        return None
    return Splitter("llama", "default", scores, prefix != NOWHERE, CAUTIONS[prefix])


def _prefix(tokenizer: Mapping[str, Any]) -> str | None:
    """Where a space is put before text, a key of :data:`CAUTIONS`.

    None where text is changed in another way.
    """
    normalizer, split = tokenizer["normalizer"], tokenizer["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    if not steps and split["type"] == "Metaspace":
        return None if split["split"] or split["replacement"] != SPACE else split["prepend_scheme"]
    # with every space replaced, a rule that splits at spaces splits nothing
    if split and not (split["type"] == "Split" and split["pattern"] == {"String": " "}):
        return None
    if steps == [UNDERSCORED]:
        return NOWHERE
    return EVERYWHERE if steps == [PREPENDED, UNDERSCORED] else None


def _scores(pieces: set[str], merges: Sequence[Sequence[str]]) -> dict[str, float] | None:
    """A score for each of ``pieces``, or None where scores do not say what ``merges`` do."""
    scores = dict.fromkeys(pieces, float(-len(merges)))
    made, last = set[str](), ""
    for rank, (left, right) in enumerate(merges):
        if (piece := left + right) not in pieces:
            continue  # found in the text before it is split
        if piece != last and piece in made:
            return None
        if piece != last:
            scores[piece] = float(-rank)
        made.add(piece)
        last = piece
    pairs = {(left, right) for left, right in merges}
    for piece in pieces:
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pieces.issuperset(pair) and pair not in pairs:
                return None
    return scores


def write_tokenizer(package: Any, writer: Any, directory: Path, size: int) -> None:
    """Write the tokenizer, or that there is none, for ``size`` token ids."""
    if (rule := splitter(directory)) is None:
        writer.add_tokenizer_model("none")
        return
    tokenizer = AutoTokenizer.from_pretrained(directory)
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = package.TokenType

    def kind(number: int) -> Any:
        if rule.scores is not None and words.get(number) == tokenizer.unk_token:
            return kinds.UNKNOWN
        if number in added:
            return kinds.CONTROL if added[number].special else kinds.USER_DEFINED
        if rule.scores is not None and _is_byte(words.get(number, "")):
            return kinds.BYTE
        return kinds.NORMAL if number in words else kinds.UNUSED

    def text(number: int) -> str:
        word = words.get(number, f"[PAD{number}]")
        # these are looked for in text as it is
        found = rule.scores is not None and kind(number) == kinds.USER_DEFINED
        return word.replace(SPACE, " ") if found else word

    writer.add_tokenizer_model(rule.model)
    writer.add_tokenizer_pre(rule.pre)
    writer.add_token_list([text(number) for number in range(size)])
    writer.add_token_types([kind(number) for number in range(size)])
    if rule.scores is not None:
        writer.add_token_scores([rule.scores.get(words.get(n, ""), 0.0) for n in range(size)])
        writer.add_add_space_prefix(rule.prefix)
    merges = rule.scores is None
    package.SpecialVocab(directory, load_merges=merges, n_vocab=size).add_to_gguf(writer)


def _is_byte(word: str) -> bool:
    """Whether ``word`` is a byte, as ``<0x0A>``."""
    return len(word) == len("<0x00>") and word.startswith("<0x") and word.endswith(">")
