"""One tiny model and its quantized forms, for every command and block of the docs."""

import json
from types import SimpleNamespace

import pytest
import torch

import qtool
from tests.conftest import copy_tokenizer, save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """``model``: one block of 128 channels with the demo's tokenizer; ``native``: it in w4a8-lqq;
    ``w4a16``; ``gptq``: that exported.
    """
    folder = tmp_path_factory.mktemp("docs")
    model = save_model(folder / "tiny", num_hidden_layers=1, vocab_size=4096, dtype=torch.bfloat16)
    copy_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (model / "config.json").write_text(json.dumps(config))
    native, w4a16 = folder / "tiny-lqq", folder / "tiny-w4a16"
    qtool.quantize(model, "w4a8-lqq", out=native)
    qtool.quantize(model, "w4a16", out=w4a16)
    exported = qtool.export(w4a16, "gptq", folder / "tiny-gptq").directory
    return SimpleNamespace(model=model, native=native, w4a16=w4a16, gptq=exported)
