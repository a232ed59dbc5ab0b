"""The demo model that ships with the package: what it is, and that its texts are its own."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qtool

DEMO = Path(qtool.__file__).parent / "demo"
CONTEXT = 512


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def windows(name: str, tokenizer) -> torch.Tensor:
    """The file's tokens as rows of 512, as an evaluation cuts them."""
    ids = tokenizer((DEMO / name).read_text(encoding="utf-8"))["input_ids"]
    assert len(ids) % CONTEXT == 0
    return torch.tensor(ids).view(-1, CONTEXT)


@torch.no_grad()
def log_p(model, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [rows, 511, vocabulary] of every token but the first."""
    return model(input_ids=rows).logits[:, :-1].log_softmax(-1)


def surprisal(log_probabilities: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return -log_probabilities.gather(-1, rows[:, 1:, None])[..., 0]


def test_shape(model):
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert config.max_position_embeddings == CONTEXT
    assert not config.tie_word_embeddings
    assert model.num_parameters() == 6_819_072
    for name, parameter in model.named_parameters():
        assert all(size % 128 == 0 for size in parameter.shape), name
        assert parameter.isfinite().all(), name


def test_package_stays_small():
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 16 * 2**20


@pytest.mark.parametrize(("name", "count"), [("heldout.txt", 64), ("calibration.txt", 128)])
def test_text_cuts_into_the_sampled_windows(tokenizer, name, count):
    rows = windows(name, tokenizer)
    assert len(rows) == count
    assert rows[:, 0].tolist() == tokenizer("\n\n")["input_ids"] * count


@pytest.mark.parametrize(
    "text",
    ["", " ", 'He said: "No."\n\n\n  Then\tnothing.\r\n', "naïve — 漢字 🙂 1,234.5", "\ufeff\x00"],
)
def test_tokenizer_is_lossless(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_end_of_book_is_one_token(tokenizer, model):
    assert (
        tokenizer("<|endofbook|>")["input_ids"]
        == [tokenizer.eos_token_id]
        == [model.config.eos_token_id]
    )


def test_model_is_as_surprised_by_its_own_text_as_it_is_uncertain(model, tokenizer):
    """On sampled text, surprisal minus entropy has mean zero; any other text or model gives more or
    less.
    """
    rows = windows("heldout.txt", tokenizer)[:8]
    log_probabilities = log_p(model, rows)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    difference = surprisal(log_probabilities, rows) - entropy
    assert difference.mean().abs() < 4 * difference.std() / difference.numel() ** 0.5
    assert 3.3 < entropy.mean() < 3.8


def test_model_tells_text_from_shuffled_tokens(model, tokenizer):
    rows = windows("heldout.txt", tokenizer)[:2]
    shuffled = rows.flatten()[
        torch.randperm(rows.numel(), generator=torch.Generator().manual_seed(0))
    ].view_as(rows)
    assert (
        surprisal(log_p(model, shuffled), shuffled).mean()
        > surprisal(log_p(model, rows), rows).mean() + 4
    )


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_generates_words(model, tokenizer, options):
    torch.manual_seed(1)
    prompt = tokenizer("\n\nIt was a dark night, and", return_tensors="pt")
    new = model.generate(**prompt, max_new_tokens=32, **options)[0, prompt["input_ids"].shape[1] :]
    assert len(set(new.tolist())) > 6  # greedy decoding of so small a model soon goes in circles
    text = tokenizer.decode(new)
    assert sum(character.isalpha() or character == " " for character in text) > 0.8 * len(text)
