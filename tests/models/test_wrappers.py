"""Multimodal wrappers: the text model is quantized, towers and projectors are what they were."""

import json
from pathlib import Path

import pytest
import torch

import qtool
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.auto import auto_class, text_model
from qtool.runtime.huggingface import quantized_linears
from tests.models.proof import exported_right, quantize, quantized_right, windows
from tests.models.tiny import INNER, save_tiny, tiny_config


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_5"])
def test_the_text_model_of_a_wrapper_is_quantized(kind: str, tmp_path: Path) -> None:
    source = save_tiny(kind, tmp_path / "source")
    quantized_right(source, tmp_path / "out", "paper")
    loaded, whole = qtool.load(tmp_path / "out"), qtool.load(source)
    assert type(loaded) is type(whole)
    assert all("language_model.layers" in name for name in quantized_linears(loaded))
    state = loaded.state_dict()
    towers = [name for name in whole.state_dict() if "language_model" not in name]
    assert any("visi" in name or "visual" in name for name in towers)
    for name in towers:
        assert torch.equal(state[name], whole.state_dict()[name]), name
    source_file, result = Checkpoint(source), Checkpoint(tmp_path / "out")
    assert source_file.config["vision_config"] == result.config["vision_config"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("blip-2", "language_model"), ("kosmos-2", "text_model"), ("qwen3_omni_moe", "thinker")],
)
def test_the_part_that_takes_text_alone_is_run(kind: str, text: str, tmp_path: Path) -> None:
    """The whole wants pixels too, as an argument or when it looks, or has no forward at all."""
    source = save_tiny(kind, tmp_path / "source")
    assert family_of(Checkpoint(source).config).text == text
    quantized_right(source, tmp_path / "out", "best")


@pytest.mark.parametrize(
    ("recipe", "scheme"), [("best", "w4a16"), ("paper", "w4a4-g128"), ("paper", "w8a8")]
)
def test_blocks_that_text_alone_passes_over_stay_as_they_are(
    recipe: str, scheme: str, tmp_path: Path
) -> None:
    """Those of Llama 3.2 Vision's cross-attention, which wait for a picture."""
    source, out = save_tiny("mllama", tmp_path / "source"), tmp_path / "out"
    qtool.plan(source, scheme, recipe=recipe)
    if scheme == "w4a16":
        quantized_right(source, out, recipe)
    else:
        quantize(source, out, recipe, scheme)
    found, own = (qtool.load(path).state_dict() for path in (out, source))
    crossing = [name for name in own if "language_model.layers.1." in name]
    assert any(name.endswith("cross_attn.k_proj.weight") for name in crossing)
    assert all(torch.equal(found[name], own[name]) for name in crossing)


def test_the_first_block_may_be_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What enters the second one is then what the residual stream begins with."""
    monkeypatch.setitem(INNER, "mllama", {"text_config": {"cross_attention_layers": [0]}})
    quantized_right(save_tiny("mllama", tmp_path / "source"), tmp_path / "out", "paper")


def test_a_model_without_a_family_is_run_as_it_is() -> None:
    with torch.device("meta"):
        model = auto_class(config := tiny_config("zamba")).from_config(config)
    assert text_model(model) is model


@pytest.mark.parametrize("kind", ["llava", "step3p7"])
def test_an_export_names_what_is_in_16_bit_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """And as checkpoints do, for other loaders: one tower is called otherwise, one is fused."""
    source = save_tiny(kind, tmp_path / "source")
    quantize(source, tmp_path / "native", "fast")
    exported_right(tmp_path / "native", tmp_path / "exported", dequantize=False)
    ignored = Checkpoint(tmp_path / "exported").config["quantization_config"]["ignore"]
    stored = {name.removesuffix(".weight") for name in Checkpoint(tmp_path / "exported").entries}
    towers = [name for name in stored if "vision" in name and name.endswith("out_proj")]
    assert towers and set(ignored).issuperset(towers)


@pytest.mark.parametrize("kind", ["mistral3", "gemma3", "llava"])
def test_scales_of_the_cache_are_named_as_the_linears_beside_them(
    kind: str, tmp_path: Path
) -> None:
    source = save_tiny(kind, tmp_path / "source")
    kv8 = {"kv": "kv8", "calibration": windows(source), "samples": 2, "seqlen": 16}
    qtool.quantize(source, "w4a16", recipe="fast", out=tmp_path / "native", **kv8)
    out = qtool.export(tmp_path / "native", "compressed-tensors", tmp_path / "out").directory
    linears = {name for name in Checkpoint(out).entries if name.endswith(".k_proj.weight_packed")}
    scales = {name for name in Checkpoint(out).entries if name.endswith(".self_attn.k_scale")}
    assert scales == {name.replace("k_proj.weight_packed", "k_scale") for name in linears}
    assert len(scales) == 2


@pytest.mark.parametrize(
    ("kind", "wrapper"), [("mistral3", ""), ("qwen3_omni_moe", "thinker_config")]
)
def test_another_dtype_is_that_of_the_text_model(kind: str, wrapper: str, tmp_path: Path) -> None:
    """Towers are stored as they were."""
    source = save_tiny(kind, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    whole = config[wrapper] if wrapper else config
    for part in (whole["text_config"], whole["vision_config"]):
        part["torch_dtype"] = part.pop("dtype", "float32")
    (source / "config.json").write_text(json.dumps(config))
    out = qtool.quantize(source, "w4a16", dtype="float16", out=tmp_path / "out").directory
    found = json.loads((out / "config.json").read_text())
    assert found["dtype"] == "float16"
    found = found[wrapper] if wrapper else found
    assert found["dtype"] == "float16" and found["vision_config"] == whole["vision_config"]
    assert found["text_config"]["dtype"] == "float16"
    assert "torch_dtype" not in found["text_config"]


def test_a_wrapper_saved_as_its_text_model_is_that() -> None:
    config = tiny_config("qwen3_5")
    assert auto_class(config).__name__ == "AutoModelForMultimodalLM"
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert auto_class(config).__name__ == "AutoModelForCausalLM"


def test_a_wrapper_whose_text_config_ties_the_head_is_told_so(tmp_path: Path) -> None:
    """LLaVA's class ties the two where either part of config.json does."""
    source = save_tiny("llava", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    config["text_config"]["tie_word_embeddings"] = True
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(QtoolError, match=r"to false there, and in its text_config if it has one"):
        qtool.quantize(source, "w4a16", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
