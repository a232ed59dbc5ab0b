"""Perplexity: what it must equal, what must not change it, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    MptConfig,
    MptForCausalLM,
    XLNetConfig,
)

from qtool.data import corpora
from qtool.errors import QtoolError
from qtool.eval import perplexity as module
from qtool.eval.perplexity import cut_windows, perplexity
from qtool.models.architecture import context_length

from .conftest import CONTEXT, VOCABULARY, make_model

DATA = Path(__file__).parents[3] / "shared" / "data"
TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times! " * 4  # 232 tokens


def plain_loop(text, model, tokenizer, seqlen) -> tuple[float, list[float]]:
    """The published scripts' arithmetic, one window at a time, through transformers' own loss."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    losses = []
    for start in range(0, ids.shape[1] - seqlen + 1, seqlen):
        window = ids[:, start : start + seqlen]
        with torch.no_grad():
            losses.append(model(window, labels=window).loss.double().item())
    return math.exp(sum(losses) / len(losses)), losses


def test_equals_a_plain_loop(model, tokenizer):
    result = perplexity(TEXT, model, tokenizer, seqlen=20)
    expected, losses = plain_loop(TEXT, model, tokenizer, 20)
    assert result.perplexity == pytest.approx(expected, rel=1e-6)
    assert result.window_nll == pytest.approx(losses, rel=1e-5)
    runs = torch.stack([run.mean() for run in torch.tensor(losses).split([4, 4, 3])])
    of_log = runs.std().item() / math.sqrt(3)
    assert result.metric.stderr == pytest.approx(result.perplexity * of_log, rel=1e-4)
    assert (result.windows, result.tokens, result.seqlen) == (11, 11 * 19, 20)


def test_uniform_logits_give_the_vocabulary_size(tokenizer):
    model = make_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert perplexity(TEXT, model, tokenizer).perplexity == pytest.approx(VOCABULARY, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 10**20])
def test_batch_size_and_chunking_change_nothing(model, tokenizer, monkeypatch, batch_size):
    expected = perplexity(TEXT, model, tokenizer, seqlen=20).perplexity
    monkeypatch.setattr(module, "FLOAT32_LOGITS", 500)
    assert perplexity(
        TEXT, model, tokenizer, seqlen=20, batch_size=batch_size
    ).perplexity == pytest.approx(expected)


def test_window_is_capped_at_the_context_and_limited(model, tokenizer):
    assert perplexity(TEXT, model, tokenizer).seqlen == CONTEXT
    assert perplexity(TEXT, model, tokenizer).windows == 232 // CONTEXT
    assert perplexity(TEXT, model, tokenizer, limit=2).windows == 2


def test_a_context_by_another_name_and_none(model, tokenizer):
    config = MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=1, n_heads=4, max_seq_len=24, expansion_ratio=2
    )
    assert perplexity(TEXT, MptForCausalLM(config), tokenizer).seqlen == 24
    assert context_length(XLNetConfig()) is None  # -1 there
    assert context_length(BloomConfig()) is None
    assert context_length(model.config) == CONTEXT


def test_short_text_is_one_short_window(model, tokenizer):
    result = perplexity("abcdefg", model, tokenizer)
    assert (result.windows, result.tokens, result.metric.stderr) == (1, 6, None)
    assert result.perplexity == pytest.approx(
        plain_loop("abcdefg", model, tokenizer, 7)[0], rel=1e-6
    )


def test_windows_drop_the_partial_one():
    assert cut_windows(torch.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(torch.arange(8), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(QtoolError, match="seqlen 1 scores no token"):
        cut_windows(torch.arange(10), 1)


def test_out_of_memory_halves_the_batch(model, tokenizer, monkeypatch):
    forward, seen = module._forward_sums, []

    def small(model, batch):
        seen.append(len(batch))
        if len(batch) > largest:
            raise torch.OutOfMemoryError
        return forward(model, batch)

    monkeypatch.setattr(module, "_forward_sums", small)
    largest = 2
    expected = plain_loop(TEXT, model, tokenizer, 20)[0]
    result = perplexity(TEXT, model, tokenizer, seqlen=20, batch_size=8)
    assert result.perplexity == pytest.approx(expected, rel=1e-6)
    assert max(seen) == 8
    largest = 0
    with pytest.raises(QtoolError, match="one window of 20 tokens does not fit"):
        perplexity(TEXT, model, tokenizer, seqlen=20)


def test_a_forward_on_a_cpu_has_few_logits(model, tokenizer, monkeypatch):
    """A CPU has no error of its own for memory that is short."""
    forward, seen = module._forward_sums, []

    def watched(model, batch):
        seen.append(len(batch))
        return forward(model, batch)

    monkeypatch.setattr(module, "_forward_sums", watched)
    whole = perplexity(TEXT, model, tokenizer, seqlen=20, limit=7)
    monkeypatch.setattr(module, "CPU_LOGITS", 3 * 20 * model.config.vocab_size)
    parts = perplexity(TEXT, model, tokenizer, seqlen=20, limit=7)
    monkeypatch.setattr(module, "CPU_LOGITS", 1)
    single = perplexity(TEXT, model, tokenizer, seqlen=20, limit=7)
    assert seen == [7, 3, 3, 1] + [1] * 7
    assert parts.window_nll == pytest.approx(whole.window_nll, rel=1e-6)
    assert single.window_nll == pytest.approx(whole.window_nll, rel=1e-6)


def test_refusals(model, tokenizer):
    with pytest.raises(QtoolError, match=r"at least 2 tokens, and the text has 1$"):
        perplexity("a", model, tokenizer)
    with pytest.raises(QtoolError, match=r"token id 92 but the model embeds 50 ids \(0 to 49\)"):
        perplexity(TEXT, make_model(50), tokenizer)
    broken = make_model()
    torch.nn.init.constant_(broken.lm_head.weight, math.nan)
    with pytest.raises(QtoolError, match="NaN in window 0 of 7"):
        perplexity(TEXT, broken, tokenizer)


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_trained_model_on_wikitext2():
    path = DATA / "models" / "tinystories-656K"
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = (DATA / "wikitext2" / "wiki.test.raw").read_text().splitlines(keepends=True)[:200]
    # as the hub's data set script makes rows
    text = "\n\n".join(line if line.strip() else "" for line in lines)
    rows = corpora.load("wikitext2", split="test", data_dir=DATA).documents[:200]
    result = perplexity("\n\n".join(rows), model, tokenizer)
    assert result.seqlen == 512
    assert result.perplexity == pytest.approx(plain_loop(text, model, tokenizer, 512)[0], rel=1e-5)
