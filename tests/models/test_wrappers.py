"""Multimodal wrappers: refused, and the lines of docs/limits.md give their text model by itself."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.source import DEMO, Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import quantized_linears
from qtool.runtime.load import load
from tests.conftest import SMALL

LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": SMALL | {"model_type": "gemma3_text", "tie_word_embeddings": True},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 319,
    },
    "mistral3": {
        "text_config": SMALL | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral"},
        "image_token_index": 319,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_model_of_a_wrapper(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    wrapper, text, out = (tmp_path / name for name in ("wrapper", "text", "out"))
    config = AutoConfig.for_model(kind, **WRAPPERS[kind])
    AutoModelForImageTextToText.from_config(config).save_pretrained(wrapper)
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, wrapper)
    with pytest.raises(QtoolError, match=f"'{kind}': a multimodal wrapper; .*docs/limits.md"):
        quantize(Checkpoint(wrapper), recipes.load("w4a16"), out)
    lines = re.search(r"```python\n(from transformers.*?)```", LIMITS.read_text(), re.DOTALL)
    assert lines is not None
    exec(lines[1], {"MODEL": wrapper, "OUT": text})
    ids = torch.arange(1, 21)[None]
    whole = AutoModelForImageTextToText.from_pretrained(wrapper)
    alone = AutoModelForCausalLM.from_pretrained(text)
    assert torch.equal(whole(ids).logits, alone(ids).logits)
    quantized = load(quantize(Checkpoint(text), recipes.load("w4a16"), out))
    assert len(quantized_linears(quantized)) == 14
