"""Train the demo model's tokenizer on a corpus of books and encode the corpus with it.

The tokenizer is a byte-level BPE (any text round-trips), by default of 4,096 tokens. A run of
newlines is a pre-token of its own, so that a blank line is one token and a window of tokens that
begins with a blank line has the same tokens when its text is tokenized again (`sample.py` depends
on it).

    python benchmarks/demo/tokenize_corpus.py --train books.train.txt --valid books.valid.txt --out
    WORK

It writes `WORK/tokenizer/` (for `AutoTokenizer`) and `WORK/train.bin`, `WORK/valid.bin` (uint16
ids).
"""

import argparse
import json
import lzma
import re
from array import array
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_BOOK = "<|endofbook|>"
BOOKS_AT_ONCE = 256  # books that are encoded together on all cores
PRE_TOKENS = (
    r"\n+|'(?:[sdmt]|ll|ve|re)\b| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_BOOK,
    "pad_token": END_OF_BOOK,
    "clean_up_tokenization_spaces": False,
}


def read_books(path: Path) -> list[str]:
    """The books of one file: Unix newlines, at most one blank line, no invisible characters."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    text = data.decode("utf-8").replace("\r\n", "\n").replace("\u00a0", " ")
    text = re.sub("[\ufeff\u200b\u2060]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"^(#+) +", r"\1 ", text, flags=re.MULTILINE)
    return [book.strip() for book in text.split(END_OF_BOOK) if book.strip()]


def train_tokenizer(books: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_BOOK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, books: list[str]) -> np.ndarray:
    """All books as one row of ids, an end-of-book token before, between and after them."""
    end = tokenizer.token_to_id(END_OF_BOOK)
    ids = array("H", [end])
    for first in range(0, len(books), BOOKS_AT_ONCE):
        for encoded in tokenizer.encode_batch_fast(books[first : first + BOOKS_AT_ONCE]):
            ids.extend([*encoded.ids, end])
    return np.asarray(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="UTF-8 text, plain or .xz")
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens, at most 65,536")
    arguments = parser.parse_args()

    train, valid = read_books(arguments.train), read_books(arguments.valid)
    tokenizer = train_tokenizer(train, arguments.vocabulary)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, books in (("train", train), ("valid", valid)):
        ids = encode(tokenizer, books)
        ids.tofile(arguments.out / f"{name}.bin")
        characters = sum(map(len, books))
        print(
            f"{name}: {len(books)} books, {len(ids):,} tokens, {characters / len(ids):.3f} "
            "characters a token"
        )
    (arguments.out / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer/tokenizer.json"))
    (arguments.out / "tokenizer/tokenizer_config.json").write_text(
        json.dumps(CONFIG, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
