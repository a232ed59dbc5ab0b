"""Loading: native checkpoints by every way in, and a sentence for whatever cannot be loaded."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, XLMConfig
from transformers.quantizers import auto

import qtool.runtime.load
from qtool import recipes
from qtool.errors import CheckFailed, QtoolError
from qtool.format import NOTICE, QUANT_METHOD, WEIGHTS_FIELD, native_format
from qtool.io.source import Checkpoint, read_config
from qtool.pipeline.quantize import quantize
from qtool.pipeline.verify import verify
from qtool.runtime.huggingface import dequantized, quantized_linears
from qtool.runtime.load import _made_fast, load, load_as_stored, load_tokenizer
from tests.conftest import MakeModel, save_model
from tests.models.tiny import save_tiny

TOKENS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("load")
    source = save_model(directory / "source", dtype=torch.bfloat16, num_hidden_layers=1)
    return quantize(Checkpoint(source), recipes.load("w8a8", "fast"), directory / "native")


@pytest.fixture
def copy(native: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(native, tmp_path / "copy"))


def shard(directory: Path) -> Path:
    """The file that holds the block."""
    return directory / "model-00002-of-00003.safetensors"


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def test_a_transformers_without_qtool_refuses_and_says_what_to_do(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads((native / "config.json").read_text())[WEIGHTS_FIELD] == NOTICE
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, QUANT_METHOD)
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, QUANT_METHOD)
    for options in ({}, {"ignore_mismatched_sizes": True}, {"device_map": "cpu"}):
        with pytest.raises(ValueError, match=NOTICE):
            AutoModelForCausalLM.from_pretrained(native, **options)


def test_qtool_loads_with_the_notice_and_without(native: Path, copy: Path) -> None:
    """Checkpoints written before the notice existed have no such field."""
    config = json.loads((copy / "config.json").read_text())
    del config[WEIGHTS_FIELD]
    (copy / "config.json").write_text(json.dumps(config))
    expected = logits(load(native))
    for model in (load(copy), AutoModelForCausalLM.from_pretrained(native)):
        assert len(quantized_linears(model)) == 7
        assert torch.equal(logits(model), expected)
        assert not hasattr(model.config, WEIGHTS_FIELD)
    assert WEIGHTS_FIELD not in read_config(native)  # no export inherits it


def test_rotated_linears_are_loaded_as_such(tmp_path: Path) -> None:
    """By transformers too; their plain weights are those of the model before."""
    source = save_model(tmp_path / "source", num_hidden_layers=2)
    layers = [{"match": ".*", "scheme": "w8a8", "group_size": "channel"}]
    recipe = {"scheme": "w8a8", "layers": layers, "transforms": ["online-hadamard"]}
    out = quantize(Checkpoint(source), recipes.parse(recipe, "test"), tmp_path / "out")
    exact = logits(AutoModelForCausalLM.from_pretrained(source))
    expected = logits(load(out))
    assert (expected - exact).norm() < 0.05 * exact.norm()
    for model in (load(out), AutoModelForCausalLM.from_pretrained(out)):
        found = quantized_linears(model)
        assert {n.rpartition(".")[2] for n, m in found.items() if m.format.rotated} == {"down_proj"}
        assert torch.equal(logits(model), expected)
        assert (logits(dequantized(model)) - exact).norm() < 0.05 * exact.norm()
    assert not [row.problem for row in verify(out) if row.problem]


def test_a_loaded_model_is_not_saved_without_its_notice(native: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        load(native).save_pretrained(tmp_path / "again")


def test_a_format_that_transformers_does_not_know_is_named(copy: Path) -> None:
    """transformers would warn, and give all packed linears random weights."""
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "mine"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(QtoolError, match="quantized by 'mine', which transformers does not load"):
        load(copy)


@pytest.mark.parametrize("size", ["num_key_value_heads", "vocab_size"])
def test_a_size_of_zero_is_a_sentence(size: str, make_model: MakeModel) -> None:
    """transformers divides by the one and looks for the padding token in the other."""
    model = make_model(pad_token_id=0)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {size: 0}))
    with pytest.raises(QtoolError, match="transformers cannot load it"):
        load(model)


def test_a_device_map_places_the_model(native: Path) -> None:
    assert torch.equal(logits(load(native, device_map={"": "cpu"})), logits(load(native)))


@pytest.mark.parametrize(
    "variant, placed", [("llama", None), ("mixtral", {"": torch.device("cuda")})]
)
def test_experts_are_stacked_on_the_gpu(
    variant: str, placed: Any, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Called(Exception):
        pass

    def loaded(path: Path, dtype: Any, device_map: Any, source: Any) -> None:
        assert device_map == placed
        raise Called

    monkeypatch.setattr(qtool.runtime.load, "require_device", torch.device)
    monkeypatch.setattr(qtool.runtime.load, "_from_pretrained", loaded)
    with pytest.raises(Called):
        load(make_model(variant), device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mixture_on_a_gpu_is_that_of_the_host(kind: str, packed: bool, tmp_path: Path) -> None:
    source = save_tiny(kind, tmp_path / "source")
    if packed:
        source = quantize(Checkpoint(source), recipes.load("w8a8", "fast"), tmp_path / "packed")
    host, found = load_as_stored(source), load_as_stored(source, device="cuda")
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        expected = dict(tensors(host))
        own = dict(tensors(found))
        assert own.keys() == expected.keys()
        for name, tensor in own.items():
            assert tensor.is_cuda and torch.equal(tensor.cpu(), expected[name]), name


def test_demo_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_tokenizer("demo").vocab_size == 4096
    assert load("demo").config.vocab_size == 4096
    with pytest.raises(QtoolError, match="no such directory"):
        load("nowhere")


def test_a_flipped_byte_is_found_before_loading(copy: Path) -> None:
    content = bytearray(shard(copy).read_bytes())
    content[-100] ^= 1
    shard(copy).write_bytes(content)
    for loading in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckFailed, match=rf"{shard(copy).name}: the file's sha256 is not"):
            loading(copy)


def test_a_truncated_file_is_named(copy: Path) -> None:
    shard(copy).write_bytes(shard(copy).read_bytes()[:-100])
    with pytest.raises(CheckFailed, match=rf"{shard(copy).name}: the file's sha256 is not"):
        load(copy)
    (copy / "qtool.json").unlink()  # as of any other model: no hashes
    with pytest.raises(QtoolError, match=rf"{shard(copy).name}: .* the file is damaged"):
        load(copy)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(QtoolError, match=r"pytorch_model.bin is a pickle, which qtool never reads"):
        load(model)


def test_a_model_without_a_tokenizer_is_told_so(native: Path, copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(QtoolError, match=r"there is no tokenizer \(no tokenizer\*, .*copy that"):
        load_tokenizer(copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(QtoolError, match="no usable tokenizer"):
        load_tokenizer(copy)
    (copy / "tokenizer.json").unlink()
    settings = copy / "tokenizer_config.json"
    for kind in ("LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer"):
        settings.write_text(json.dumps({"tokenizer_class": kind}))
        with pytest.raises(QtoolError, match="its tokenizer has no vocabulary: copy all files"):
            load_tokenizer(copy)
    settings.write_text('{"tokenizer_class": "ByT5Tokenizer"}')  # needs none
    assert load_tokenizer(copy)("a").input_ids


def test_a_device_may_be_torch_s(native: Path) -> None:
    assert load(native, device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(QtoolError, match="device 'None': cpu, cuda or cuda:N"):
        load(native, device=None)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda:x", "cpu:", "cpu:²"])
def test_a_device_that_is_not_there(device: str, native: Path) -> None:
    for use in (lambda: load(native, device=device), lambda: list(verify(native, device=device))):
        with pytest.raises(QtoolError, match=f"device '{device}': "):
            use()


def test_a_checkpoint_in_which_nothing_is_quantized_is_a_problem(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["rules"] = []
    (copy / "config.json").write_text(json.dumps(config))
    for path in (shard(copy), copy / "model.safetensors.index.json"):
        path.unlink()
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.zeros(2)}, copy / "model.safetensors")
    assert "no linear is packed" in " ".join(row.problem for row in verify(copy))


@pytest.mark.parametrize("kv", [None, "kv4-channel"])
def test_the_model_without_its_head_is_refused_in_a_sentence(copy: Path, kv: str | None) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["kv"] = kv
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(QtoolError, match=r"LlamaModel has no model.layers: .*AutoModelForCausalLM"):
        AutoModel.from_pretrained(copy)


def test_an_unknown_architecture_is_left_as_transformers_made_it() -> None:
    model = SimpleNamespace(device=torch.device("cuda"), config=XLMConfig())
    assert _made_fast(model) is model  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "said"), [(None, "is not quantized"), ({"group_size": [64]}, "damaged: TypeError")]
)
def test_a_damaged_quantization_config_is_a_sentence(damage: Any, said: str, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    if damage:
        config["quantization_config"]["rules"][0] |= damage
    else:
        config["quantization_config"] = None
    with pytest.raises(QtoolError, match=said):
        native_format(config)


def test_a_directory_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"no config\.json; expected a Hugging Face model dir"):
        load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(QtoolError, match=r"is an adapter \(LoRA\), not a model: pass its base"):
        load(tmp_path)
