"""Trained models: transformers generates from an export the tokens that qtool's own runtime
generates.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import qtool
from qtool import recipes
from qtool.exchange.export import export
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.load import load, load_tokenizer
from tests.exchange.test_compressed_tensors import client

PROMPT = "Once upon a time there was a little girl"
TEXT = (DEMO / "heldout.txt").read_text()[:1000]
TINY = Path(os.environ.get("QTOOL_DATA_DIR", "/nowhere")) / "models" / "tinystories-656K"
CASES = [
    ("w4a16", 128, "compressed-tensors"),
    ("w4a16", None, "compressed-tensors"),
    ("w4a16", 32, "compressed-tensors"),
]


@torch.no_grad()
def logits(model: nn.Module, directory: Path) -> Tensor:
    """``[tokens, vocabulary]`` of one forward over a text: what greedy decoding chooses from."""
    ids = load_tokenizer(directory)(TEXT, return_tensors="pt")["input_ids"]
    return model(ids, use_cache=False).logits[0]


def tokens(model: nn.Module, directory: Path) -> list[int]:
    """The likeliest token after each token of the text."""
    return logits(model, directory).argmax(-1).tolist()


def written(model: nn.Module, directory: Path, count: int) -> list[int]:
    """``count`` tokens that ``generate`` writes, token after token over its cache."""
    ids = load_tokenizer(directory)(PROMPT, return_tensors="pt")["input_ids"]
    kept = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, **kept)[0].tolist()  # type: ignore[operator]


@pytest.fixture(params=[DEMO, TINY], ids=["demo", "tinystories"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A trained model, with a chat template and everything else that lies beside weights."""
    if not request.param.is_dir():
        pytest.skip(f"{request.param} is not here")
    directory = tmp_path / "source"
    shutil.copytree(request.param, directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return directory


@pytest.mark.parametrize(("scheme", "size", "name"), CASES)
def test_same_tokens_in_float32(
    scheme: str, size: int | None, name: str, source: Path, tmp_path: Path
) -> None:
    native = quantize(
        Checkpoint(source), recipes.load(scheme).with_group_size(size), tmp_path / "native"
    )
    out = export(native, name, tmp_path / "out").directory
    plain = load(native, dtype=torch.float32)
    # weights in the dtype of the file first
    twice = qtool.load_as_export(native, name, dtype=torch.float32, dequantize=True)
    for dequantize, ours in ((True, twice), (False, plain)):
        assert tokens(client(out, dequantize=dequantize, dtype=torch.float32), out) == tokens(
            ours, source
        )


@pytest.mark.parametrize("size", [32, 128])
def test_same_tokens_in_bfloat16(size: int, source: Path, tmp_path: Path) -> None:
    """Both round a weight once, to 16 bits, and multiply it by the same routine: nothing can part
    them.
    """
    # a weight's scales have its dtype
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(source)
    native = quantize(
        Checkpoint(source), recipes.load("w4a16").with_group_size(size), tmp_path / "native"
    )
    out = export(native, "compressed-tensors", tmp_path / "out").directory
    ours = load(native, dtype=torch.bfloat16)
    for dequantize in (True, False):
        theirs = client(out, dequantize=dequantize, dtype=torch.bfloat16)
        assert tokens(theirs, out) == tokens(ours, source)
    assert written(theirs, out, 16) == written(ours, source, 16)


INT8 = [
    ("w4a8-lqq", "compressed-tensors-w8a8"),
    ("w8a8", "compressed-tensors"),
    ("w4a16", "compressed-tensors-w4a8"),
]


@pytest.mark.parametrize(("scheme", "name"), INT8)
def test_same_tokens_as_the_export_under_int8_activations(
    scheme: str, name: str, source: Path, tmp_path: Path
) -> None:
    """compressed-tensors rounds activations by another rule than vLLM and qtool; ``load_as_export``
    follows it.
    """
    native = quantize(Checkpoint(source), recipes.load(scheme), tmp_path / "native")
    out = export(native, name, tmp_path / "out").directory
    for dtype in (torch.bfloat16, torch.float32):
        like = logits(qtool.load_as_export(native, name, dtype=dtype), source)
        assert tokens(client(out, dequantize=False, dtype=dtype), out) == like.argmax(-1).tolist()
        assert not torch.equal(logits(load(native, dtype=dtype), source), like)


def test_what_lies_beside_the_weights_is_kept(source: Path, tmp_path: Path) -> None:
    native = quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "native")
    out = export(native, "gptq", tmp_path / "out").directory
    beside = {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    for directory in (native, out):
        for file in beside | {path.name for path in source.glob("special_tokens_map.json")}:
            assert (directory / file).read_bytes() == (source / file).read_bytes()
