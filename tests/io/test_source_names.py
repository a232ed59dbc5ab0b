"""Sources under other names, and stacked experts: the result is that of the usual form, byte for
byte.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtool import recipes
from qtool.errors import QtoolError
from qtool.io.check_source import check_source
from qtool.io.source import Checkpoint
from qtool.io.source_names import adopt
from qtool.models import family_of
from qtool.models.architecture import Architecture
from qtool.pipeline.job import Job
from qtool.pipeline.quantize import quantize, source_dtype
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.models.proof import exported_right
from tests.models.tiny import save_tiny

IDS = torch.arange(48).reshape(2, 24) * 5 % 320


def weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def run(source: Path, name: str) -> Path:
    return quantize(Checkpoint(source), recipes.load("w4a16"), source.with_name(name))


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe-some-dense"])
def test_stacked_experts(variant: str, make_model: MakeModel, tmp_path: Path) -> None:
    apart, stacked = make_model(variant), tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(apart).save_pretrained(stacked, save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in Checkpoint(stacked).entries)
    source = Checkpoint(stacked)
    adopt(source, Job.of(source.config, recipes.load("w4a16"), source_dtype(source)))
    assert source.entries.keys() == Checkpoint(apart).entries.keys()
    assert all(
        torch.equal(source.read(name), Checkpoint(apart).read(name)) for name in source.entries
    )
    out = run(stacked, "out")
    assert weights(out) == weights(run(apart, "expected"))
    assert torch.isfinite(load(out)(IDS).logits).all()


def test_interleaved_stacks(tmp_path: Path) -> None:
    """Columns of GPT-OSS's stacks are gate and up in turn."""
    source = Checkpoint(save_tiny("gpt_oss", tmp_path / "source"))
    experts = "model.layers.0.mlp.experts"
    stack, bias = (source.read(f"{experts}.gate_up_proj{part}") for part in ("", "_bias"))
    adopt(source, Architecture(source.config, family_of(source.config)))
    for start, linear in enumerate((f"{experts}.1.gate_proj", f"{experts}.1.up_proj")):
        assert torch.equal(source.read(f"{linear}.weight"), stack[1, :, start::2].T)
        assert torch.equal(source.read(f"{linear}.bias"), bias[1, start::2])


@pytest.mark.parametrize(
    ("kind", "name", "shape", "said"),
    [
        *(
            ("gpt_oss", "mlp.experts.down_proj_bias", s, "stacked biases")
            for s in ((), (4,), (3, 64))
        ),
        ("gpt_oss", "mlp.experts.down_proj_bias", None, "experts.0.gate_proj.bias is missing"),
        ("gpt2", "attn.c_attn.weight", (), r"attn.c_attn.weight: shape \[\] found"),
    ],
)
def test_a_tensor_of_another_shape(
    kind: str, name: str, shape: tuple[int, ...] | None, said: str, tmp_path: Path
) -> None:
    source = Checkpoint(save_tiny(kind, tmp_path / "source"))
    model = Architecture(source.config, family_of(source.config))
    entry = source.entries.pop(full := f"{model.family.blocks}.0.{name}")
    if shape is not None:
        source.entries[full] = replace(entry, shape=shape)
    with pytest.raises(QtoolError, match=said):
        check_source(source, model)


def test_stacks_of_another_shape(make_model: MakeModel, tmp_path: Path) -> None:
    stacked = tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(make_model("qwen3_moe")).save_pretrained(
        stacked, save_original_format=False
    )
    held = load_file(stacked / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for shape, message in (((0, 2, 1), "stacked weights"), ((1, 0, 2), "stacked weights")):
        changed = held | {name: held[name].permute(shape).contiguous()}
        save_file(changed, stacked / "model.safetensors", {"format": "pt"})
        with pytest.raises(QtoolError, match=message):
            run(stacked, "refused")
    save_file(
        held | {name: held[name][:, :-2].contiguous()},
        stacked / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(QtoolError, match=r"stacked weights \[4, 510, 128\] and \[4, 128, 256\]"):
        run(stacked, "refused")


@pytest.mark.parametrize("variant", ["opt", "llama", "llama-tied", "falcon", "gemma2", "mixtral"])
def test_names_without_the_prefix(variant: str, make_model: MakeModel, tmp_path: Path) -> None:
    """As OPT's first checkpoints and every bare decoder have them."""
    full, bare = make_model(variant), tmp_path / "bare"
    prefix = "transformer." if variant == "falcon" else "model."
    bare.mkdir()
    (bare / "config.json").write_text((full / "config.json").read_text())
    held = load_file(full / "model.safetensors")
    save_file(
        {name.removeprefix(prefix): t for name, t in held.items()},
        bare / "model.safetensors",
        {"format": "pt"},
    )
    assert weights(run(bare, "out")) == weights(run(full, "expected"))


@pytest.mark.parametrize(
    ("kind", "embedding"),
    [
        ("llama", "model.embed_tokens"),
        ("llama", "embed_tokens"),
        ("internvl", "language_model.model.embed_tokens"),
    ],
)
def test_the_dtype_is_the_embeddings(kind: str, embedding: str, tmp_path: Path) -> None:
    """Not that of the tensors before it, and of other embeddings among them."""
    model = save_tiny(kind, tmp_path / "model")
    held = load_file(model / "model.safetensors")
    name = f"{embedding}.weight"
    if name not in held:
        held = {name.removeprefix("model."): t for name, t in held.items()}
    held |= {name: held[name].bfloat16(), "a.patch_embedding.weight": torch.ones(3)}
    save_file(held, model / "model.safetensors", {"format": "pt"})
    assert source_dtype(Checkpoint(model)) == torch.bfloat16


#: modules of towers, and what the names of published checkpoints have before them
TOWERS = re.compile(r"_tower\.(?=embeddings|encoder|post_layernorm|pre_layrnorm|head)")


def as_published(directory: Path, out: Path, old: re.Pattern[str], new: str) -> Path:
    """``directory`` with the names that transformers loads, and does not write."""
    shutil.copytree(directory, out)
    held = load_file(out / "model.safetensors")
    named = {old.sub(new, name): tensor for name, tensor in held.items()}
    assert named.keys() != held.keys()
    save_file(named, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("kind", ["gemma3", "llava", "video_llava", "cohere2_vision"])
def test_towers_as_they_are_published(kind: str, tmp_path: Path) -> None:
    """Hub checkpoints have ``vision_tower.vision_model.``; so have exports, which engines load."""
    plain = save_tiny(kind, tmp_path / "plain")
    published = as_published(plain, tmp_path / "published", TOWERS, "_tower.vision_model.")
    out = run(published, "out")
    assert weights(out) == weights(run(plain, "expected"))
    exported_right(out, tmp_path / "exported")
    towers = [
        {name for name in Checkpoint(directory).entries if "_tower" in name}
        for directory in (published, tmp_path / "exported")
    ]
    assert towers[0] == towers[1]
    assert all(".vision_model." in name for name in towers[0])


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe_text-stacked"])
def test_a_text_model_in_the_names_of_its_wrapper(kind: str, tmp_path: Path) -> None:
    """Experts lie one by one or stacked."""
    kind, _, stacked = kind.partition("-")
    plain = save_tiny(kind, tmp_path / "plain")
    if stacked:
        model = AutoModelForCausalLM.from_pretrained(plain)
        model.save_pretrained(plain := tmp_path / "stacked", save_original_format=False)
    text = re.compile(r"^model\.")
    wrapped = as_published(plain, tmp_path / "wrapped", text, "model.language_model.")
    out = run(wrapped, "out")
    assert weights(out) == weights(run(plain, "expected"))
    assert "tower_names" not in Checkpoint(out).config["quantization_config"]  # no tower
