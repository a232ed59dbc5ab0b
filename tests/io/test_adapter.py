"""A LoRA adapter merged on reading: ``W + s B A``, every tensor of it used or refused."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qtool
from qtool.errors import QtoolError
from qtool.io import adapter as adapter_module
from qtool.io.adapter import WEIGHTS, Adapter
from qtool.io.check_source import check_source
from qtool.io.source import Checkpoint
from qtool.io.source_names import as_on_disk
from qtool.models import family_of
from qtool.models.architecture import Architecture
from tests.io.published import CASES
from tests.models import proof
from tests.models.tiny import save_tiny

PREFIX = "base_model.model."
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "model",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "init_lora_weights": True,
    "use_dora": False,
}


def save_adapter(directory: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | settings))
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


def factors(module: str, n: int, k: int, rank: int = 8) -> dict[str, Tensor]:
    """Random ``A [r, K]`` and ``B [N, r]`` of a linear."""
    a, b = torch.randn(rank, k) * 0.1, torch.randn(n, rank) * 0.1
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def merged(weight: Tensor, of: dict[str, Tensor], scaling: float) -> Tensor:
    """``W + scaling B A``, element by element a sum over the rank."""
    a, b = of.values()
    delta = torch.einsum("nr,rk->nk", b.double(), a.double())
    return (weight.double() + scaling * delta).to(weight.dtype)


def read(model: Path, adapter: Path | None = None) -> dict[str, Tensor]:
    """All tensors of ``model`` with ``adapter``, by their names in its family."""
    source = Checkpoint(model, adapter and Adapter(str(adapter)))
    check_source(source, Architecture(source.config, family_of(source.config)))
    return {name: source.read(name) for name in source.entries}


def test_a_note_calls_an_adapter_of_the_hub_by_its_name(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    (snapshots := tmp_path / "models--owner--tuned" / "snapshots").mkdir(parents=True)
    q = load_file(model / "model.safetensors")[f"{Q}.weight"]
    adapter = save_adapter(snapshots / "0123456789", factors(Q, *q.shape))
    notes = Checkpoint(model, Adapter(str(adapter))).notes
    assert notes == ["the adapter tuned is merged into the weights"]


def test_a_tower_that_is_published_under_another_name(tmp_path: Path) -> None:
    """transformers loads SigLIP's old names and gives the module today's, which PEFT takes."""
    model = save_tiny("gemma3", tmp_path / "model", dtype="bfloat16")
    held = load_file(model / "model.safetensors")
    old = {name.replace("tower.", "tower.vision_model.", 1): t for name, t in held.items()}
    save_file(old, model / "model.safetensors", {"format": "pt"})
    name, stored = (
        f"{tower}.encoder.layers.0.self_attn.q_proj"
        for tower in ("model.vision_tower", "vision_tower.vision_model")
    )
    of = factors(name, *old[f"{stored}.weight"].shape)
    adapter = save_adapter(tmp_path / "adapter", of)
    expected = merged(old[f"{stored}.weight"], of, 2.0)
    assert torch.equal(read(model, adapter)[f"{name}.weight"], expected)
    on_disk = as_on_disk(Checkpoint(model, Adapter(str(adapter))))
    assert torch.equal(on_disk.read(f"{stored}.weight"), expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16: hidden 128, intermediate 256, 4 heads of 32, 320 tokens."""
    directory = tmp_path_factory.mktemp("base") / "model"
    return save_tiny("llama", directory, dtype="bfloat16", tie_word_embeddings=False)


def test_linears_with_patterns_of_rank_and_alpha(model: Path, tmp_path: Path) -> None:
    q, down = factors(Q, 128, 128), factors(DOWN, 128, 256, rank=4)
    patterns = {"rank_pattern": {"down_proj": 4}, "alpha_pattern": {r"layers\.1\.mlp\..*": 3}}
    adapter = save_adapter(tmp_path / "adapter", q | down, **patterns)
    found, plain = read(model, adapter), read(model)
    expected = {f"{Q}.weight": (q, 16 / 8), f"{DOWN}.weight": (down, 3 / 4)}
    for name, weight in plain.items():
        if name in expected:
            assert not torch.equal(found[name], weight)
            weight = merged(weight, *expected[name])
        assert torch.equal(found[name], weight), name


def test_rslora_and_rows(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = factors(Q, 128, 128)
    adapter = save_adapter(tmp_path / "adapter", q, use_rslora=True)
    weight = Checkpoint(model).read(f"{Q}.weight")
    found = read(model, adapter)[f"{Q}.weight"]
    assert torch.equal(found, merged(weight, q, 16 / math.sqrt(8)))
    monkeypatch.setattr(adapter_module, "PIECE", 1000)  # some rows at a time
    source = Checkpoint(model, Adapter(str(adapter)))
    check_source(source, Architecture(source.config, family_of(source.config)))
    check_source(source, Architecture(source.config, family_of(source.config)))  # merged once
    assert torch.equal(source.read(f"{Q}.weight", slice(5, 70)), found[5:70])


def test_embedding_whole_tensors_and_fan_in_fan_out(model: Path, tmp_path: Path) -> None:
    a, b = torch.randn(8, 320) * 0.1, torch.randn(128, 8) * 0.1
    head, norm = torch.randn(320, 128), torch.rand(128)
    down = factors(DOWN, 128, 256)
    adapter = save_adapter(
        tmp_path / "adapter",
        {f"{EMBEDDING}.lora_embedding_A": a, f"{EMBEDDING}.lora_embedding_B": b}
        | {f"{HEAD}.weight": head.bfloat16(), "model.norm.weight": norm}
        | down,
        modules_to_save=["lm_head", "norm"],
        fan_in_fan_out=True,  # of another module: this one's weight is [N, K]
    )
    found, source = read(model, adapter), Checkpoint(model)
    turned = {"a": a.T, "b": b.T}
    embedding = source.read(f"{EMBEDDING}.weight")
    delta = torch.einsum("vr,rh->vh", turned["a"].double(), turned["b"].double())
    expected = (embedding.double() + 2 * delta).to(embedding.dtype)
    assert torch.equal(found[f"{EMBEDDING}.weight"], expected)
    assert torch.equal(found[f"{HEAD}.weight"], head.bfloat16())
    assert torch.equal(found["model.norm.weight"], norm.bfloat16())
    weight = source.read(f"{DOWN}.weight")
    assert torch.equal(found[f"{DOWN}.weight"], merged(weight, down, 2))


@pytest.mark.parametrize("setting", [True, False])
def test_the_module_says_which_way_a_weight_lies(
    setting: bool, model: Path, tmp_path: Path
) -> None:
    """Of Conv1D it is ``[K, N]`` in the file, of a linear ``[N, K]``, also if it is a square."""
    gpt2 = save_tiny("gpt2", tmp_path / "gpt2", dtype="bfloat16")
    linear, conv1d = Checkpoint(model), Checkpoint(gpt2)
    shapes = {"attn.c_proj": (128, 128), "attn.c_attn": (384, 128), "mlp.c_proj": (128, 256)}
    for module, shape in shapes.items():
        name, of = f"transformer.h.0.{module}", factors(f"transformer.h.0.{module}", *shape)
        adapter = save_adapter(tmp_path / module, of, fan_in_fan_out=setting)
        expected = merged(conv1d.read(f"{name}.weight").T, of, 2)
        assert torch.equal(read(gpt2, adapter)[f"{name}.weight"], expected), module
        on_disk = as_on_disk(Checkpoint(gpt2, Adapter(str(adapter))))
        assert torch.equal(on_disk.read(f"{name}.weight"), expected.T), module
        saved = save_adapter(tmp_path / f"{module}-saved", {f"{name}.weight": expected.T})
        assert torch.equal(read(gpt2, saved)[f"{name}.weight"], expected), module
    q = factors(Q, 128, 128)
    adapter = save_adapter(tmp_path / "adapter", q, fan_in_fan_out=setting)
    expected = merged(linear.read(f"{Q}.weight"), q, 2)
    assert torch.equal(read(model, adapter)[f"{Q}.weight"], expected)


def test_a_whole_tensor_that_is_no_matrix_of_conv1d(tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    adapter = save_adapter(tmp_path / "adapter", {name: torch.ones(8)})
    with pytest.raises(
        QtoolError, match=r"c_attn.weight is \[8\], and the model's is \[384, 128\]"
    ):
        read(save_tiny("gpt2", tmp_path / "gpt2"), adapter)


def test_a_bare_decoders_names(tmp_path: Path) -> None:
    """As those of GPT-2's own checkpoint; its model is loaded with the adapter too."""
    gpt2, prefix = save_tiny("gpt2", tmp_path / "gpt2", dtype="bfloat16"), "transformer."
    file, name = gpt2 / "model.safetensors", "h.0.attn.c_proj"
    bare = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file, {"format": "pt"})
    of = factors(prefix + name, 128, 128)
    adapter = save_adapter(tmp_path / "adapter", of)
    expected = merged(bare[f"{name}.weight"].T, of, 2)
    assert torch.equal(read(gpt2, adapter)[f"{prefix}{name}.weight"], expected)
    on_disk = as_on_disk(Checkpoint(gpt2, Adapter(str(adapter))))
    assert torch.equal(on_disk.read(f"{name}.weight"), expected.T)


def test_an_embedding_that_is_the_head_too_is_refused(tmp_path: Path) -> None:
    """peft changes one of the two, or says itself that its merge is another model."""
    tied = save_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    embedding = {
        f"{EMBEDDING}.lora_embedding_A": torch.randn(8, 320),
        f"{EMBEDDING}.lora_embedding_B": torch.randn(128, 8),
    }
    file = tied / "model.safetensors"
    tensors = load_file(file)
    for number, of in enumerate((embedding, {f"{EMBEDDING}.weight": torch.randn(320, 128)})):
        adapter = save_adapter(tmp_path / f"adapter-{number}", of)
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(QtoolError, match="which are one tensor in this model; merge it"):
            read(tied, adapter)
        second_head = {f"{HEAD}.weight": tensors[f"{EMBEDDING}.weight"].clone()}
        save_file(tensors | second_head, file, {"format": "pt"})
        with pytest.raises(QtoolError, match="which are one tensor in this model; merge it"):
            read(tied, adapter)


@pytest.mark.parametrize("recipe", ["fast", "paper"])
@pytest.mark.parametrize("case", ["fp8-edges", "mxfp4-gpt-oss"])
def test_the_result_is_that_of_the_merged_model(case: str, recipe: str, tmp_path: Path) -> None:
    """Also where the model itself is published in FP8 or MXFP4: dequantized first, then merged."""
    published, plain = CASES[case].make(tmp_path)
    q = factors(Q, 128, 128)
    adapter = save_adapter(tmp_path / "adapter", q)
    file = plain / "model.safetensors"
    tensors = load_file(file)
    name = f"{Q}.weight"
    save_file(tensors | {name: merged(tensors[name], q, 2)}, file, {"format": "pt"})
    options: dict[str, Any] = {"recipe": recipe}
    if recipe == "paper":
        options |= {"samples": 2, "seqlen": 16, "calibration": proof.windows(plain)}
    out = [tmp_path / "of-adapter", tmp_path / "of-merged"]
    done = qtool.quantize(published, "w4a16", out=out[0], adapter=adapter, **options)
    qtool.quantize(plain, "w4a16", out=out[1], **options)
    for path in sorted(out[1].glob("*.safetensors")):
        assert path.read_bytes() == (out[0] / path.name).read_bytes(), path.name
    record = json.loads((out[0] / "qtool.json").read_text())
    hashes = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in adapter.iterdir()
    }
    assert record["source"]["adapter"] == {"directory": "adapter", "sha256": hashes}
    card = (out[0] / "README.md").read_text()
    assert all(sha256 in card for sha256 in hashes.values())
    assert "--compare" not in str(done)
    other = save_adapter(tmp_path / "other", factors(Q, 128, 128))
    with pytest.raises(QtoolError, match="exists already"):
        # another adapter is another job
        qtool.quantize(published, "w4a16", out=out[0], adapter=other, resume=True, **options)


REFUSED: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
    ({}, {"peft_type": "IA3"}, "peft_type 'IA3'; LORA is expected"),
    ({}, {"use_dora": True}, "use_dora = true is not understood; merge it by peft"),
    ({}, {"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters = "),
    ({}, {"init_lora_weights": "pissa"}, "'pissa' changes the model's own weights"),
    (factors(Q, 128, 128), {"r": 4}, r"A \[8, 128\] and B \[128, 8\]; of rank 4"),
    (factors(Q, 128, 64), {}, r"for a weight \[128, 128\]"),
    (factors("model.layers.7.mlp.up_proj", 8, 8), {}, "layers.7.mlp.up_proj.weight is not a ten"),
    ({f"{Q}.lora_A.weight": torch.ones(8, 128)}, {}, "has no pair of matrices A and B"),
    (factors(Q, 128, 128) | {f"{Q}.lora_B.weight": torch.ones(128, 4)}, {}, r"B \[128, 4\]"),
    ({f"{Q}.lora_magnitude_vector": torch.ones(8)}, {}, "lora_magnitude_vector is not understood"),
    ({f"{Q}.lora_B.bias": torch.ones(8)}, {}, "lora_B.bias is not understood"),
    ({f"{HEAD}.weight": torch.ones(321, 128)}, {}, r"lm_head.weight is \[321, 128\], and the"),
    ({f"{Q}.extra": torch.ones(8)}, {}, "q_proj.extra is not a tensor of the model"),
    (factors(Q, 128, 128), {"lora_alpha": "x"}, "adapter_config.json is damaged"),
    (factors(Q, 128, 128), {"lora_alpha": 10**400}, "adapter_config.json is damaged"),
    (factors(Q, 128, 128), {"r": math.inf}, "adapter_config.json is damaged"),
    (factors(Q, 128, 128), {"lora_alpha": math.nan}, r"is damaged \(lora_alpha is nan\)"),
    (factors(Q, 128, 128), {"rank_pattern": ["q_proj"]}, "adapter_config.json is damaged"),
    ({}, {}, "adapter_model.safetensors holds no tensors"),
    (
        {f"{Q}.lora_A.weight": torch.full((8, 128), math.nan)},
        {},
        "lora_A.weight: holds 1024",
    ),
    (
        factors(EMBEDDING, 320, 128)
        | {f"{EMBEDDING}.lora_embedding_A": torch.ones(8, 320)}
        | {f"{EMBEDDING}.lora_embedding_B": torch.ones(128, 8)},
        {},
        "two pairs of A and B for model.embed_tokens.weight",
    ),
]


@pytest.mark.parametrize("tensors, settings, said", REFUSED)
def test_what_is_not_understood_is_refused(
    tensors: dict[str, Tensor], settings: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tensors, **settings)
    with pytest.raises(QtoolError, match=said):
        qtool.quantize(model, "w4a16", out=tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_changes_meanwhile_makes_no_result(model: Path, tmp_path: Path) -> None:
    """A training that goes on may save again while blocks are read."""
    name = "model.layers.1.self_attn.o_proj"
    adapter = save_adapter(tmp_path / "adapter", factors(name, 128, 128))

    def change(done: int, total: int, notes: object) -> None:
        # a rename, since another thread reads ahead and must find a file at all times
        saved = save_adapter(tmp_path / f"saved-{done}", factors(name, 128, 128))
        (saved / WEIGHTS).replace(adapter / WEIGHTS)

    with pytest.raises(QtoolError, match="changed while it was read"):
        qtool.quantize(model, "w4a16", out=tmp_path / "out", adapter=adapter, progress=change)
    assert not (tmp_path / "out").exists()


def test_no_adapter_and_a_pickle(model: Path, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"no adapter_config\.json"):
        Adapter(str(model))
    adapter = save_adapter(tmp_path / "adapter", {})
    with pytest.raises(QtoolError, match="pass its base model, and it as --adapter"):
        Checkpoint(adapter)
    tensors = {"base_model.model.x": torch.ones(2)}
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    with pytest.raises(QtoolError, match="is a pickle") as refused:
        Adapter(str(adapter))
    exec(str(refused.value).split('python -c "')[1].removesuffix('"'), {})  # the command it names
    assert load_file(adapter / "adapter_model.safetensors").keys() == tensors.keys()


def test_it_is_what_peft_merges(tmp_path: Path) -> None:
    """In float32: peft rounds the product and the sum."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    directory = save_tiny("llama", tmp_path / "model", tie_word_embeddings=False)
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory),
        peft.LoraConfig(
            r=8,
            lora_alpha=5,
            use_rslora=True,
            target_modules=["q_proj", "down_proj", "embed_tokens"],
            modules_to_save=["lm_head"],
            rank_pattern={"down_proj": 4},
            alpha_pattern={"q_proj": 7},
            task_type="CAUSAL_LM",
        ),
    )
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = wrapped.merge_and_unload().state_dict()
    found = read(directory, tmp_path / "adapter")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], rtol=1e-5, atol=1e-6), name
