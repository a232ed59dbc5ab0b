"""A SentencePiece tokenizer in a GGUF: split as llama.cpp splits, text becomes our token ids."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from qtool.exchange.export import export
from qtool.exchange.gguf.tokenizer import NO_TOKENIZER, SPACE, caution
from qtool.exchange.gguf.write import FILE
from tests.exchange.conftest import Native

gguf = pytest.importorskip("gguf")

PIECES = "▁ a b c d ab ▁a ▁ab abc bc cd ▁▁ ▁▁▁ ▁▁▁▁ abcd ▁abc da dab ▁da aa aaa aaaa bb ▁b ba ▁ba é"
CONTROL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LEGACY = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
TEXTS = ["", "a", " a", "abcd  dab", "é€ab", "aaaaaaa   bb\n a", "ab</s> ba</s>ab"]


def merges_of(pieces: list[str]) -> list[tuple[str, str]]:
    """As transformers converts SentencePiece's: all that make a piece, the best piece's first."""
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if known.issuperset((piece[:cut], piece[cut:]))
    ]


def tokenizer(merges: list[tuple[str, str]] | None = None, **parts: Any) -> PreTrainedTokenizerFast:
    pieces = PIECES.split()
    order = [p for p in pieces if len(p) > 1]
    random.Random(0).shuffle(order)
    words = {word: number for number, word in enumerate([*CONTROL, *BYTES, *pieces])}
    merges = merges_of([*order, *(p for p in pieces if len(p) == 1)]) if merges is None else merges
    words = {word: number for word, number in words.items() if word != parts.get("without")}
    made = Tokenizer(
        models.BPE(words, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer, made.pre_tokenizer = parts.get("normalizer"), parts.get("pre_tokenizer")
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback()])
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    made.add_tokens(parts.get("added", []))
    if "around" in parts:
        made.post_processor = parts["around"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def as_llama_cpp(fields: dict[str, Any], text: str) -> list[int]:
    """By llama.cpp's ``llm_tokenizer_spm``: merges the neighbours that make the best piece."""
    ids = {word: number for number, word in enumerate(fields["tokens"])}
    found: list[int] = []
    for number, part in enumerate(text.split("</s>")):
        found += [ids["</s>"]] if number else []
        part = f" {part}" if part and fields["add_space_prefix"] else part
        symbols = list(part.replace(" ", SPACE))
        while True:
            pairs = [
                (-fields["scores"][ids[symbols[i] + symbols[i + 1]]], i)
                for i in range(len(symbols) - 1)
                if symbols[i] + symbols[i + 1] in ids
            ]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            raw = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            found += [ids[symbol]] if symbol in ids else raw
    return found


def fields_of(ours: PreTrainedTokenizerFast, native: Native, tmp_path: Path) -> dict[str, Any]:
    """What the GGUF says of a tokenizer; of the export, its notes."""
    model = shutil.copytree(native("w4a16", 32), tmp_path / "native")
    ours.save_pretrained(model)
    done = export(model, "gguf", tmp_path / "out")
    reader = gguf.GGUFReader(done.directory / FILE)
    prefix = "tokenizer.ggml."
    found = {n.removeprefix(prefix): f.contents() for n, f in reader.fields.items() if prefix in n}
    return found | {"notes": [note for note in done.notes if "tokenizer" in note]}


@pytest.mark.parametrize(
    ("parts", "prefix"),
    [
        ({"normalizer": LEGACY}, True),  # Llama 2
        ({"normalizer": normalizers.Replace(" ", SPACE)}, False),
        # Gemma
        (
            {
                "normalizer": normalizers.Replace(" ", SPACE),
                "pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous"),
            },
            False,
        ),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never", split=False)}, False),
    ],
)
def test_text_becomes_our_token_ids(
    parts: dict[str, Any], prefix: bool, native: Native, tmp_path: Path
) -> None:
    ours = tokenizer(**parts)
    fields = fields_of(ours, native, tmp_path)
    assert (fields["model"], fields["add_space_prefix"], fields["notes"]) == ("llama", prefix, [])
    assert fields["token_type"][:4] == [2, 3, 3, 6]  # unknown, control, control, byte
    normal, total = len(PIECES.split()), len(fields["tokens"])
    unused = total - 3 - 256 - normal
    assert fields["token_type"][3 + 256 :] == [1] * normal + [5] * unused
    generator = random.Random(1)
    texts = ["".join(generator.choices("aaabbcd  é\n€", k=24)) for _ in range(200)]
    for text in TEXTS + texts:
        assert as_llama_cpp(fields, text) == ours(text, add_special_tokens=False)["input_ids"], text


def in_turns(first: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """:func:`merges_of`, those of runs of spaces ordered by the neighbours and not by the run."""
    whole = merges_of(PIECES.split())
    runs = [pair for pair in whole if set("".join(pair)) == {SPACE}]
    longest = sorted(runs, key=lambda pair: [-len(part) for part in pair])
    ordered = first + [pair for pair in longest if pair not in first]
    return [pair for pair in whole if pair not in runs] + ordered


def test_runs_of_spaces_whose_merges_come_in_turns(native: Native, tmp_path: Path) -> None:
    """As transformers orders those of one score; not where the order splits them otherwise."""
    two = SPACE * 2
    ours = tokenizer(in_turns([(SPACE, SPACE)]), normalizer=LEGACY)
    fields = fields_of(ours, native, tmp_path)
    for length in range(40):
        text = "a" + " " * length + "b"
        assert as_llama_cpp(fields, text) == ours(text, add_special_tokens=False)["input_ids"], text
    other = tokenizer(in_turns([(SPACE, SPACE), (two, SPACE), (two, two)]), normalizer=LEGACY)
    other.save_pretrained(tmp_path)
    assert caution(tmp_path) == NO_TOKENIZER


@pytest.mark.parametrize("bos", [False, True])
def test_what_is_put_around_a_text(bos: bool, native: Native, tmp_path: Path) -> None:
    template = processors.TemplateProcessing(
        single="<s> $A" if bos else "$A", pair="$A $B", special_tokens=[("<s>", 1)]
    )
    fields = fields_of(tokenizer(normalizer=LEGACY, around=template), native, tmp_path)
    assert (fields["add_bos_token"], fields["add_eos_token"]) == (bos, False)
    assert not fields["notes"]


def test_another_token_than_bos_before_a_text(tmp_path: Path) -> None:
    template = processors.TemplateProcessing(
        single="<unk> <s> $A", pair="$A $B", special_tokens=[("<unk>", 0), ("<s>", 1)]
    )
    tokenizer(normalizer=LEGACY, around=template).save_pretrained(tmp_path)
    assert "puts no <unk> before" in caution(tmp_path)


def test_an_added_run_of_spaces_comes_of_merges(native: Native, tmp_path: Path) -> None:
    """It is looked for in a text whose spaces are spaces yet, so it is never found."""
    run = AddedToken(SPACE * 2, special=False, normalized=False)
    ours = tokenizer(normalizer=normalizers.Replace(" ", SPACE), added=[run])
    fields = fields_of(ours, native, tmp_path)
    place = fields["tokens"].index(SPACE * 2)
    assert fields["token_type"][place] == 1 and fields["notes"] == []
    for text in ("a  b", "a   ab", "  a", "a    da"):
        assert as_llama_cpp(fields, text) == ours(text, add_special_tokens=False)["input_ids"]


def test_added_tokens_that_are_found_elsewhere(tmp_path: Path) -> None:
    run, think = AddedToken(SPACE * 2, normalized=True), AddedToken("<think>", normalized=True)
    tokenizer(normalizer=LEGACY, added=[think]).save_pretrained(tmp_path)
    assert "finds <think> anywhere" in caution(tmp_path)
    tokenizer(normalizer=normalizers.Replace(" ", SPACE), added=[think]).save_pretrained(tmp_path)
    assert not caution(tmp_path)
    tokenizer(normalizer=normalizers.Replace(" ", SPACE), added=[run]).save_pretrained(tmp_path)
    assert caution(tmp_path) == NO_TOKENIZER


def test_a_byte_without_a_piece_has_no_tokenizer(tmp_path: Path) -> None:
    """llama.cpp ends where text has it."""
    tokenizer(normalizer=LEGACY, without="<0xFF>").save_pretrained(tmp_path)
    assert caution(tmp_path) == NO_TOKENIZER


@pytest.mark.parametrize(("scheme", "said"), [("always", "with one too"), ("first", "after a sp")])
def test_spaces_that_llama_cpp_puts_elsewhere_are_said(
    scheme: str, said: str, native: Native, tmp_path: Path
) -> None:
    split = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    fields = fields_of(tokenizer(pre_tokenizer=split), native, tmp_path)
    assert fields["model"] == "llama" and fields["add_space_prefix"]
    (note,) = fields["notes"]
    assert said in note


def test_the_rule_is_that_of_transformers_class(tmp_path: Path) -> None:
    """LlamaTokenizer does not look at its tokenizer.json for where spaces are put."""
    tokenizer(normalizer=LEGACY).save_pretrained(tmp_path)
    assert caution(tmp_path) == ""
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "after a special token" in caution(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert caution(tmp_path) == NO_TOKENIZER


def test_merges_that_scores_cannot_say_are_not_written(tmp_path: Path) -> None:
    """Two ways to a piece of which one is learned; a piece made before and after another."""
    whole = merges_of(PIECES.split())
    twice = next(pair for pair in whole if [a + b for a, b in whole].count("".join(pair)) > 1)
    rest = [pair for pair in whole if pair != twice]
    for merges in (rest, [*rest, twice]):
        tokenizer(merges, normalizer=LEGACY).save_pretrained(tmp_path)
        assert caution(tmp_path) == NO_TOKENIZER
    tokenizer(whole, normalizer=LEGACY).save_pretrained(tmp_path)
    assert caution(tmp_path) == ""
    for parts in (
        {"normalizer": normalizers.Sequence([normalizers.NFKC(), LEGACY])},
        {"normalizer": LEGACY, "pre_tokenizer": pre_tokenizers.Split(Regex(r"\d"), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},  # no merge goes over a space
    ):
        tokenizer(whole, **parts).save_pretrained(tmp_path)
        assert caution(tmp_path) == NO_TOKENIZER
