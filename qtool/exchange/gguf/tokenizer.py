"""llama.cpp's tokenizers: byte-level BPE (``gpt2``), and SentencePiece's BPE (``llama``).

Both are read from transformers' tokenizer. SentencePiece merges the two neighbours that make the
piece of the highest score. transformers' tokenizer has a list of merges instead, in the order of
the scores of the merged pieces. The score of a piece is the negative place of its first merge, if
such scores say the same as the list: all merges of a piece are neighbours in the list, and every
merge that could make the piece is there. Runs of spaces have one score in SentencePiece, and their
merges alternate.

If llama.cpp would split text in another way, the file has no tokenizer and takes token ids.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT2 = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def _splits(expression: str) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer that splits text by ``expression``."""
    rule = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return [rule | {"invert": False}, BYTES]


#: by llama.cpp's name of a pre-tokenizer: its steps, and whether a word that is a token stays whole
PRE_TOKENIZERS = {
    "llama-bpe": (_splits(WORDS % r"\p{N}{1,3}" + SPACES), True),
    "dbrx": (_splits(WORDS % r"\p{N}{1,3}" + SPACES), False),
    "qwen2": (_splits(WORDS % r"\p{N}" + SPACES), False),
    "gpt-2": ([GPT2], False),
    "smollm": ([DIGITS, GPT2], False),
}
#: the characters for a space, and the pieces for bytes, in SentencePiece
SPACE, BYTE_PIECES = "▁", frozenset(f"<0x{byte:02X}>" for byte in range(256))
UNDERSCORED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPENDED = {"type": "Prepend", "prepend": SPACE}
#: places where a space is put before text, in Metaspace's words, and how llama.cpp differs
EVERYWHERE, NOWHERE = "everywhere", "never"
CAUTIONS = {
    EVERYWHERE: "",
    NOWHERE: "",
    "always": "tokenizer: llama.cpp puts a space before a text that begins with one too",
    "first": "tokenizer: llama.cpp puts a space before a text that begins with one too, and before "
    "one after a special token",
}
NFC = "tokenizer: llama.cpp does not compose characters (NFC) before it splits them"
#: options of a BPE that llama.cpp does not have
UNSUPPORTED = "dropout", "continuing_subword_prefix", "end_of_word_suffix"
NO_TOKENIZER = (
    "tokenizer: llama.cpp has none that splits text as this model's does; give it token ids"
)


@dataclass(frozen=True)
class Splitter:
    """The settings with which llama.cpp splits text as a tokenizer does.

    Attributes:
        model: ``tokenizer.ggml.model``.
        pre: ``tokenizer.ggml.pre``.
        scores: scores of SentencePiece's pieces, by piece.
        prefix: a space is put before the text.
        cautions: sentences on where llama.cpp differs from the tokenizer.
    """

    model: str
    pre: str
    scores: Mapping[str, float] | None = None
    prefix: bool = False
    cautions: tuple[str, ...] = ()


def caution(directory: Path) -> str:
    """Where llama.cpp differs from the tokenizer in ``directory``; empty if nowhere."""
    tokenizer = _loaded(directory)
    if (rule := splitter(tokenizer)) is None:
        return NO_TOKENIZER
    _, otherwise = _bos_and_eos(tokenizer)
    return "; ".join(filter(None, (*rule.cautions, otherwise)))


def _loaded(directory: Path) -> Any:
    """transformers' tokenizer, which may split text otherwise than its tokenizer.json says.

    It is None if the file is absent or damaged.
    """
    try:
        known = (directory / "tokenizer.json").is_file()
        return AutoTokenizer.from_pretrained(directory) if known else None
    except Exception:  # transformers' readers raise exceptions of several types
        return None


def splitter(tokenizer: Any) -> Splitter | None:
    """The settings with which llama.cpp splits text as ``tokenizer`` does; None if it cannot."""
    try:
        rule = json.loads(tokenizer.backend_tokenizer.to_str())
        return _byte_level(rule) or _sentence_piece(rule)
    except (AttributeError, KeyError, TypeError):
        return None


def _byte_level(tokenizer: Mapping[str, Any]) -> Splitter | None:
    """The settings for a byte-level BPE with one of :data:`PRE_TOKENIZERS`; None for others."""
    model, normalizer, rule = (tokenizer[key] for key in ("model", "normalizer", "pre_tokenizer"))
    if normalizer not in (None, {"type": "NFC"}) or any(map(model.get, UNSUPPORTED)) or not rule:
        return None
    found = [
        {key: value for key, value in step.items() if key != "trim_offsets"}
        for step in rule.get("pretokenizers", [rule])
    ]
    whole = bool(model.get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if known == (found, whole):
            cautions = NFC if normalizer else "", _added_tokens_caution(tokenizer["added_tokens"])
            return Splitter("gpt2", name, cautions=cautions)
    return None


def _sentence_piece(tokenizer: Mapping[str, Any]) -> Splitter | None:
    """The settings for a BPE of characters that falls back to bytes; None for other tokenizers."""
    model, added, prefix = tokenizer["model"], tokenizer["added_tokens"], _prefix(tokenizer)
    if model["type"] != "BPE" or any(map(model.get, (*UNSUPPORTED, "ignore_merges"))):
        return None
    if not model["byte_fallback"] or not model["vocab"].keys() >= BYTE_PIECES or prefix is None:
        return None
    spaces = {t["content"] for t in added if SPACE in t["content"] and not t["special"]}
    if any(t["normalized"] for t in added if t["content"] in spaces):
        return None
    # such tokens are looked for before spaces are replaced, so only merges make these pieces
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    pieces = model["vocab"].keys() - {t["content"] for t in added} | spaces
    if (scores := _scores(pieces, merges)) is None:
        return None
    cautions = CAUTIONS[prefix], _added_tokens_caution(added, prefix == EVERYWHERE)
    return Splitter("llama", "default", scores, prefix != NOWHERE, cautions)


def _added_tokens_caution(added: Sequence[Mapping[str, Any]], prefixed: bool = False) -> str:
    """A caution about added tokens that match only in some places, or swallow adjacent spaces.

    Args:
        prefixed: a space is put before each token that is looked for in normalized text.
    """
    options = ("lstrip", "rstrip", "single_word", *(("normalized",) if prefixed else ()))
    odd = [token["content"] for token in added if any(token[option] for option in options)]
    more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    said = "tokenizer: llama.cpp finds {}{} anywhere in text, and keeps the spaces there"
    return said.format(odd[0], more) if odd else ""


def _prefix(tokenizer: Mapping[str, Any]) -> str | None:
    """Where a space is put before text, a key of :data:`CAUTIONS`.

    It is None if the tokenizer changes text in another way.
    """
    normalizer, split = tokenizer["normalizer"], tokenizer["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    if not steps and split["type"] == "Metaspace":
        return None if split["split"] or split["replacement"] != SPACE else split["prepend_scheme"]
    # every space is already replaced, so a rule that splits at spaces splits nothing
    if split and not (split["type"] == "Split" and split["pattern"] == {"String": " "}):
        return None
    if steps == [UNDERSCORED]:
        return NOWHERE
    return EVERYWHERE if steps == [PREPENDED, UNDERSCORED] else None


def _scores(pieces: set[str], merges: Sequence[Sequence[str]]) -> dict[str, float] | None:
    """A score for each of ``pieces``; None if scores cannot say the same as ``merges``."""
    ranks = {(left, right): float(rank) for rank, (left, right) in enumerate(merges)}
    for piece in pieces:
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pieces.issuperset(pair) and pair not in ranks:
                return None
    spans: dict[str, tuple[float, float]] = {}  # from the first merge of a piece to its last
    for (left, right), rank in ranks.items():
        if (piece := left + right) in pieces:  # others are found in the text before it is split
            spans[piece] = spans.get(piece, (rank, rank))[0], rank
    turns, end = list[list[str]](), -1.0  # pieces whose merges are not beside each other
    for piece, (first, last) in spans.items():
        if first > end:
            turns.append([])
        turns[-1].append(piece)
        end = max(end, last)
    if not all(len(turn) == 1 or _runs_alike(set(turn), ranks) for turn in turns):
        return None
    scores = {piece: -spans[turn[0]][0] for turn in turns for piece in turn}
    return dict.fromkeys(pieces, float(-len(merges))) | scores


def _runs_alike(pieces: set[str], ranks: Mapping[tuple[str, str], float]) -> bool:
    """Whether ``pieces``, whose merges alternate, may have one score.

    SentencePiece's runs of spaces, tabs and line ends do. The test splits such runs in both ways.
    """
    if any(len(set(piece)) > 1 for piece in pieces):
        return False
    alike = {pair: rank for pair, rank in ranks.items() if len(set("".join(pair))) == 1}
    first = min(rank for (left, right), rank in alike.items() if left + right in pieces)
    tied = {pair: first if "".join(pair) in pieces else rank for pair, rank in alike.items()}
    lengths = range(2, 4 * max(map(len, pieces)))
    runs = [character * length for character in set("".join(pieces)) for length in lengths]
    return all(_merged(run, alike) == _merged(run, tied) for run in runs)


def _merged(text: str, ranks: Mapping[tuple[str, str], float]) -> list[str]:
    """The pieces of ``text``; neighbours of the lowest rank are merged first, from the left."""
    parts = list(text)
    while True:
        pairs = [(ranks.get(pair, math.inf), i) for i, pair in enumerate(pairwise(parts))]
        rank, at = min(pairs, default=(math.inf, 0))
        if rank == math.inf:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def write_tokenizer(package: Any, writer: Any, directory: Path, size: int) -> None:
    """Write the tokenizer for ``size`` token ids, or a note that there is none."""
    tokenizer = _loaded(directory)
    if (rule := splitter(tokenizer)) is None:
        writer.add_tokenizer_model("none")
        return
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added, scores = tokenizer.added_tokens_decoder, rule.scores or {}
    kinds = package.TokenType

    def kind(number: int) -> Any:
        word = words.get(number)
        if word in scores:
            return kinds.BYTE if word in BYTE_PIECES else kinds.NORMAL
        if rule.scores is not None and word == tokenizer.unk_token:
            return kinds.UNKNOWN
        if number in added:
            return kinds.CONTROL if added[number].special else kinds.USER_DEFINED
        return kinds.UNUSED if word is None else kinds.NORMAL

    writer.add_tokenizer_model(rule.model)
    writer.add_tokenizer_pre(rule.pre)
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([kind(number) for number in range(size)])
    if rule.scores is not None:
        writer.add_token_scores([scores.get(words.get(n, ""), 0.0) for n in range(size)])
        writer.add_add_space_prefix(rule.prefix)
    special = package.SpecialVocab(directory, load_merges=rule.scores is None, n_vocab=size)
    special.add_special_token, _ = _bos_and_eos(tokenizer)  # the default is what most tokenizers do
    special.add_to_gguf(writer)


def _bos_and_eos(tokenizer: Any) -> tuple[dict[str, bool], str]:
    """Whether BOS and EOS are put around a text, and a caution if other tokens are."""
    ids = tokenizer("a")["input_ids"]
    put = {
        "bos": ids[:1] == [tokenizer.bos_token_id],
        "eos": ids[-1:] == [tokenizer.eos_token_id],
    }
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    if len(ids) == len(alone) + sum(put.values()):
        return put, ""
    return put, f"tokenizer: llama.cpp puts no {tokenizer.decode(ids[:1])} before a text"
