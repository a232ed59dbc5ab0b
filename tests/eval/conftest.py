"""A tiny random Llama and a word-level tokenizer, made here: nothing is downloaded."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 98
CONTEXT = 32


def make_model(vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True, scope="session")
def index_of_few(few_tasks):
    """Whatever is looked up in lm-eval's index, here it is among few tasks."""


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII and newline; ids 0 and 1 are special."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {"<unk>": 0, "<s>": 1} | {letter: index for index, letter in enumerate(letters, 2)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="<s>"
    )
