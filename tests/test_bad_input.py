"""Every mistake of design.md's list: one sentence that names the thing, exit code 2, nothing
half-written.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import qtool.cli
from qtool import recipes
from qtool.data.corpora import data_directory
from qtool.errors import QtoolError, in_one_line
from qtool.eval.channel_range import role
from qtool.format.stored_linears import linear_shape
from qtool.io.finite import require_all_finite
from qtool.io.model_directory import DEMO
from qtool.io.output import Output
from qtool.io.safetensors import space_for, write_text
from qtool.io.source import Checkpoint, read_config
from qtool.pipeline.quantize import quantize
from qtool.runtime.load import load
from tests.conftest import MakeModel, copy_tokenizer
from tests.models.tiny import save_tiny

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def qtool_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``qtool_run(ARGUMENTS)``: exit code and message of ``qtool ARGUMENTS``, in this process."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qtool", *map(str, arguments)])
        code = 0
        try:
            qtool.cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.err + captured.out

    return run


@pytest.fixture
def refused(tmp_path: Path, qtool_run: Run):  # type: ignore[no-untyped-def]
    """``refused("text", MODEL, options...)``: quantizing is refused with that text and leaves no
    output.
    """

    def check(text: str, model: object, *options: object, scheme: str = "w4a8-lqq") -> None:
        out = tmp_path / "refused"
        code, message = qtool_run("quantize", model, "--scheme", scheme, "--out", out, *options)
        assert code == 2, message
        assert text in message
        assert "Traceback" not in message
        assert message.strip().splitlines()[-1].startswith("qtool: ")
        assert not out.exists()
        assert not list(tmp_path.glob("refused*/config.json"))
        assert not list(tmp_path.rglob("*.tmp"))

    return check


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(directory: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {name: tensor}, directory / "model.safetensors", {"format": "pt"})


EMBEDDING = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def test_no_such_model(refused, tmp_path) -> None:  # type: ignore[no-untyped-def]
    refused("no such directory", tmp_path / "nowhere")
    for name in ("file", "8b.json"):
        (tmp_path / name).write_text("{}")
    refused("file is a file: the directory of a model or a hub id", tmp_path / "file")
    with pytest.raises(
        QtoolError, match=r"8b.json is a file: .* a file named config.json or a hub"
    ):
        qtool.plan(str(tmp_path / "8b.json"), "w8a8")
    (tmp_path / "empty").mkdir()
    refused("no config.json", tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused("is an adapter (LoRA)", tmp_path / "empty")
    (tmp_path / "begun.partial").mkdir()
    for name in ("begun", "begun.partial"):
        refused("begun.partial is an unfinished run: give the command", tmp_path / name)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_act", "nonesuch", "KeyError: 'nonesuch'"),
        ("rope_scaling", {"rope_type": "nonesuch", "factor": 2.0}, "KeyError: 'nonesuch'"),
    ],
)
def test_a_config_that_transformers_cannot_make(  # type: ignore[no-untyped-def]
    key: str, value: object, said: str, refused, make_model: MakeModel, tmp_path: Path
) -> None:
    """With calibration, and where weights are rounded one by one: before work, and in a plan."""
    model = make_model(vocab_size=4096)
    copy_tokenizer(model)
    edit_config(model, **{key: value})
    paper = ("--recipe", "paper", "--calib", "demo", "--samples", 1, "--seqlen", 16)
    for options in (paper, ("--recipe", "fast")):
        refused(f"transformers cannot make the model of config.json ({said}", model, *options)
        assert not list(tmp_path.glob("refused*"))
    for planned in (model, model / "config.json"):
        with pytest.raises(QtoolError, match=re.escape(f"of config.json ({said}")):
            qtool.plan(planned, "w4a8-lqq")


SENSITIVITY = ("--choices", "w4a16,w8a8", "--budget-bits", 5, "--calib", "demo", "--samples", 2)


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", "MODEL", "--scheme", "w4a8-lqq", "--calib", "demo", "--out", "OUT"),
        ("eval", "demo", "--model", "MODEL", "--limit", 1),
        ("eval", "demo_choice", "--model", "MODEL", "--limit", 1),
        ("sensitivity", "MODEL", *SENSITIVITY, "--out", "OUT.yaml"),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_a_model_whose_blocks_fail(  # type: ignore[no-untyped-def]
    command: tuple[object, ...], make_model: MakeModel, tmp_path: Path, monkeypatch, qtool_run: Run
) -> None:
    """Llama rotates whole heads, and here its frequencies are of half a head."""
    model = make_model(vocab_size=4096)
    copy_tokenizer(model)
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    edit_config(model, rope_parameters=rope)
    monkeypatch.chdir(tmp_path)
    words = [str(model) if word == "MODEL" else word for word in command]
    code, message = qtool_run(*words)
    assert code == 2 and "Traceback" not in message
    assert re.match(
        r"qtool: transformers cannot run the model of config.json \(RuntimeError: The size of .*",
        message.strip().splitlines()[-1],
    )


def test_offline_hub_is_one_sentence(tmp_path: Path) -> None:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "qtool", "quantize", "nobody/nothing", "--scheme", "w4a8-lqq"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert "nobody/nothing" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_encodings_of_config_and_recipe(
    encoding: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """A recipe is read in every form of Unicode, JSON in that which transformers reads."""
    model, recipe = make_model(), tmp_path / "own.yaml"
    config = json.loads((model / "config.json").read_text()) | {"author": "Jürgen"}
    content = json.dumps(config, ensure_ascii=False).encode(encoding)
    recipe.write_text("about: für alle\nlayers: [{match: .*, scheme: w8a8}]", encoding=encoding)
    (model / "config.json").write_bytes(content)
    if encoding == "utf-8":
        assert read_config(model)["author"] == "Jürgen"
    else:
        said = "not readable" if encoding == "latin-1" else f"its encoding is {encoding}, .* UTF-8"
        with pytest.raises(QtoolError, match=rf"config.json: {said}"):
            read_config(model)
    if encoding == "latin-1":
        with pytest.raises(QtoolError, match=r"own.yaml: not valid YAML"):
            recipes.load(None, str(recipe))
    else:
        assert recipes.load(None, str(recipe)).about == "für alle"


@pytest.mark.parametrize("variant", ["llama", "stablelm"])
def test_a_class_of_another_model_type(  # type: ignore[no-untyped-def]
    variant: str, refused, tmp_path: Path
) -> None:
    """Engines would load the one that transformers does not."""
    model = save_tiny(variant, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    own = config | {"architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(own))
    said = (
        f"MistralForCausalLM, the class of model_type 'mistral', and its model_type is '{variant}'"
    )
    refused(said, model)
    with pytest.raises(QtoolError, match=said):
        load(model)
    for wrong in (5, [5], "LlamaForCausalLM", {"0": "LlamaForCausalLM"}):
        (model / "config.json").write_text(json.dumps(config | {"architectures": wrong}))
        refused("a list of names is expected", model)
    for right in (config["architectures"], ["OtherForCausalLM"], None):
        (model / "config.json").write_text(json.dumps(config | {"architectures": right}))
        load(model)


def test_missing_shard(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model(max_shard_size="200KB")
    next(model.glob("model-00002*")).unlink()
    refused("is missing", model)
    (model / "model.safetensors.index.json").unlink()
    refused("model-00001-of-", model)


def test_truncated_file(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused("damaged", model)
    path.write_bytes(path.read_bytes()[:6])
    refused("truncated", model)
    path.write_bytes(b"\xff" * 4000)
    refused("not a safetensors file", model)


def test_pickles_are_not_read(refused, make_model: MakeModel, qtool_run: Run) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused("is a pickle", model)
    code, planned = qtool_run("plan", model, "--scheme", "w8a8")
    note, _, text = planned.partition("\n")
    assert code == 0 and "pytorch_model.bin is a pickle, which qtool never reads; " in note
    assert note.endswith("; the plan is of config.json alone, and the weights were not looked at")
    assert qtool_run("plan", model / "config.json", "--scheme", "w8a8") == (0, text)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "4096", 0, -1, 1.5, True, []])
def test_sizes_that_are_none(key: str, value: object, refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    edit_config(model, **{key: value})
    refused(f"config.json: {key} is {value!r}", model)


def test_sizes_of_one_family(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    edit_config(model, head_dim="64")
    refused("head_dim is '64'", model)
    edit_config(model, head_dim=None, intermediate_size=None)
    refused("the size 'inter' of this Llama model is None", model)
    edit_config(model, model_type="mixtral")
    refused("does not hold the sizes of Mixtral: it has no num_experts", model)
    edit_config(model, model_type=["llama"])
    refused("no model_type", model)
    edit_config(model, model_type="llama", quantization_config="gptq")
    refused("its quantization_config is no object", model)


def test_dense_blocks_of_a_mixture_that_are_damaged(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    edit_config(model, model_type="qwen3_moe", num_experts=4, moe_intermediate_size=128)
    edit_config(model, mlp_only_layers=1)
    refused("config.json: mlp_only_layers is 1; a list of blocks is expected", model)
    edit_config(model, mlp_only_layers=None, decoder_sparse_step="2")
    refused("config.json: decoder_sparse_step '2': a whole number of at least 1", model)
    edit_config(model, mlp_only_layers=[0], decoder_sparse_step=1, intermediate_size=None)
    refused("the size 'inter' of this Qwen3-MoE model is None", model)


def test_a_null_quantization_config_is_none(make_model: MakeModel, qtool_run: Run) -> None:
    model = make_model()
    edit_config(model, quantization_config=None, head_dim=None)
    code, said = qtool_run("plan", model, "--scheme", "w4a8-lqq")
    assert code == 0 and "w4a8-lqq" in said


def test_wrong_shape_dtype_and_tensors(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    rewrite(model, DOWN, torch.zeros(128, 256))
    refused(f"{DOWN}: shape [128, 256] found, [128, 384] expected", model)
    rewrite(model, DOWN, torch.zeros(128, 384, dtype=torch.int8))
    refused(f"{DOWN}: dtype torch.int8 found", model)
    rewrite(model, DOWN, torch.zeros(128, 384))
    rewrite(model, "model.layers.0.mlp.extra.weight", torch.zeros(2))
    refused("model.layers.0.mlp.extra.weight: not a tensor of Llama models of 2 blocks; ", model)
    model = make_model("llama")
    rewrite(model, f"model.layers.{'9' * 5000}.weight", torch.zeros(4))  # too long for int()
    refused("9.weight: not a tensor of Llama models of 2 blocks; ", model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 2}, "q_proj.weight: shape [128, 128] found, [64, 128] expected"),
        ({"num_key_value_heads": 4}, "k_proj.weight: shape [64, 128] found, [128, 128] expected"),
        ({"head_dim": 16}, "q_proj.weight: shape [128, 128] found, [64, 128] expected"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "not a tensor of Llama models of 1 blocks"),
    ],
)
def test_sizes_that_the_weights_contradict(  # type: ignore[no-untyped-def]
    changes: dict[str, int],
    said: str,
    refused,
    make_model: MakeModel,
    qtool_run: Run,
) -> None:
    """A plan of the config alone cannot know them."""
    model = make_model()
    edit_config(model, **changes)
    refused(said, model)
    code, message = qtool_run("plan", model, "--scheme", "w8a8")
    assert code == 2 and said in message and len(message.splitlines()) == 1
    assert qtool.plan(model / "config.json", "w8a8").job.config.items() >= changes.items()


def test_a_plan_reads_no_weights(make_model: MakeModel, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Its sizes are those of what the files hold, whatever config.json says of their dtype."""
    model = make_model("llama-tied")
    rewrite(model, "lm_head.weight", load_file(model / "model.safetensors")[EMBEDDING] + 1)
    rewrite(model, "model.norm.weight", torch.ones(128, dtype=torch.float64))
    with pytest.raises(QtoolError, match=r"model.norm.weight: dtype torch.float64 found"):
        qtool.plan(model, "w8a8")
    rewrite(model, "model.norm.weight", torch.ones(128))
    edit_config(model, dtype="float16")
    monkeypatch.setattr(Checkpoint, "read", None)
    found = qtool.plan(model, "w8a8")
    assert found.job.source_dtype == torch.float32
    assert found.source_bytes == 2 * qtool.plan(model / "config.json", "w8a8").source_bytes


@pytest.mark.parametrize("left", ["pointers", "some", "none"])
def test_a_plan_before_the_weights_are_there(
    left: str, refused, make_model: MakeModel, qtool_run: Run
) -> None:  # type: ignore[no-untyped-def]
    model = make_model(max_shard_size="200KB")
    shards = sorted(model.glob("*.safetensors"))
    for shard in shards if left == "none" else shards[1:]:
        shard.unlink()
        if left == "pointers":
            shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    absent = shards[0] if left == "none" else shards[1]
    problem = f"{absent.name}: a pointer" if left == "pointers" else f"{absent} is missing"
    refused(problem, model)
    ordered = ("--scheme", "w8a8")
    code, planned = qtool_run("plan", model, *ordered)
    note, _, text = planned.partition("\n")
    assert code == 0 and note.startswith(problem)
    assert note.endswith("; the plan is of config.json alone, and the weights were not looked at")
    assert qtool_run("plan", model / "config.json", *ordered) == (0, text)


def test_a_plan_refuses_what_is_no_file_of_weights(make_model: MakeModel) -> None:
    model = make_model()
    (model / "model.safetensors").write_text("not found")
    with pytest.raises(QtoolError, match="not a safetensors file"):
        qtool.plan(model, "w8a8")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64", "float33", "Tensor", 16])
def test_dtypes_that_no_model_has(  # type: ignore[no-untyped-def]
    key: str, dtype: object, refused, make_model: MakeModel
) -> None:
    model = make_model()
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config | {key: dtype}))
    said = f"config.json: its dtype is {str(dtype)!r}; weights in one of float32, "
    refused(said, model)
    for call in (lambda: qtool.plan(model, "w8a8"), lambda: qtool.evaluate("demo", model)):
        with pytest.raises(QtoolError, match=re.escape(said)):
            call()
    for right in ("bfloat16", "half", None):
        (model / "config.json").write_text(json.dumps(config | {key: right}))
        qtool.plan(model, "w8a8")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("kind", "place"),
    [("mistral3", "text_config"), ("qwen3_omni_moe", "thinker_config.text_config")],
)
def test_dtypes_that_no_text_model_has(  # type: ignore[no-untyped-def]
    key: str, kind: str, place: str, refused, tmp_path: Path
) -> None:
    """A plan counts bytes by the text model's dtype where the wrapper names none."""
    model = save_tiny(kind, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    text = config
    for part in ["", *place.split(".")]:
        text = text[part] if part else text
        text.pop("dtype", None)
    sizes = {}
    for dtype in ("int8", "nonsense", "bfloat16", "float32"):
        text[key] = dtype
        (model / "config.json").write_text(json.dumps(config))
        if dtype in ("bfloat16", "float32"):
            sizes[dtype] = qtool.plan(model / "config.json", "w8a8").source_bytes
            continue
        said = f"config.json: its {place}'s dtype is {dtype!r}; weights in one of float32, "
        refused(said, model)
        with pytest.raises(QtoolError, match=re.escape(said)):
            qtool.plan(model / "config.json", "w8a8")
    assert sizes["float32"] == 2 * sizes["bfloat16"]


def test_missing_tensor(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    tensors = load_file(model / "model.safetensors")
    del tensors[DOWN]
    save_file(tensors, model / "model.safetensors")
    refused(f"tensor {DOWN} is missing", model)


def test_a_tied_head_with_values_of_its_own(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model("llama-tied")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    embedding[-1, -1] += 1
    rewrite(model, "lm_head.weight", embedding)
    refused("lm_head.weight is not model.embed_tokens.weight", model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [DOWN, "model.norm.weight", "model.embed_tokens.weight"])
def test_nan_and_inf(value: float, name: str, refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    tensor = load_file(model / "model.safetensors")[name]
    tensor.view(-1)[3] = value
    rewrite(model, name, tensor)
    refused(name, model)


def test_values_that_a_transform_cannot_scale(
    refused,  # type: ignore[no-untyped-def]
    make_model: MakeModel,
    tmp_path: Path,
) -> None:
    """A norm's weight is folded into them."""
    model, recipe = make_model(), tmp_path / "recipe.yaml"
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(model / "model.safetensors")[name]
    weight[3, 5] = 3e38
    rewrite(model, name, weight)
    rewrite(model, "model.layers.1.post_attention_layernorm.weight", torch.full((128,), 2.0))
    layers = "layers: [{match: .*, scheme: w8a8}]"
    recipe.write_text(f"{layers}\ntransforms: [norm-fusion]\nrounding: rtn\n")
    refused(f"{name}: its values are too large", model, "--recipe", recipe, scheme="w8a8")


def test_shapes_the_layout_cannot_hold(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    refused(
        "mlp.down_proj: w4a8-lqq: 352 input channels are not divisible by group size 64 (sizes "
        "that do: 32)",
        make_model(intermediate_size=352),
    )
    refused(
        "q_proj: w4a16: 192 input channels are not divisible by group size 128 (sizes that do: "
        "32, 64, channel)",
        make_model(hidden_size=192, head_dim=48),
        scheme="w4a16",
    )
    refused(
        "group size 128 (sizes that do: 32, channel)",  # 64 would not divide down_proj's
        make_model(hidden_size=192, head_dim=48, intermediate_size=352),
        scheme="w4a16",
    )
    small = make_model(num_key_value_heads=1, head_dim=16)
    refused(
        "k_proj: layout marlin: a weight of 16 x 128 does not divide", small, "--layout", "marlin"
    )


def test_a_mistake_is_named_once(make_model: MakeModel, tmp_path: Path, qtool_run: Run) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        code, message = qtool_run(*arguments)
        return code, message.strip().splitlines()[-1]

    out = tmp_path / "out"
    assert run("quantize", make_model(), "--scheme", "w8a8", "--out", out)[0] == 0
    again = run("quantize", out, "--scheme", "w8a8", "--out", tmp_path / "again")
    once = "qtool: the model is a qtool checkpoint already, in w8a8: to quantize it otherwise pass"
    assert again == (2, f"{once} the original model")
    assert run("quantize", out, "--scheme", "w4a16", "--out", tmp_path / "again") == again
    assert run("import", out, "--out", tmp_path / "again") == again
    data = run("report", out, "--data-dir", tmp_path)
    assert data == (2, f"qtool: --data-dir {tmp_path}: it is for --tasks, and none is named")
    (out / "config.json").rename(tmp_path / "config.json")
    (out / "config.json").write_text("{")
    damaged = run("eval", "demo", "--model", out)
    assert damaged[0] == 2 and "config.json: not readable as JSON" in damaged[1]
    (config := out / "config.json").unlink()
    config.mkdir()
    assert run("inspect", out) == (2, f"qtool: {config} cannot be read: Is a directory")
    config.rmdir()
    (tmp_path / "config.json").rename(out / "config.json")
    shard = next(out.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for problem in ("the file's sha256 is not the one recorded", "the file is missing"):
        code, message = qtool_run("verify", out)
        assert code == 1 and f"\n{shard.name}: {problem}" in f"\n{message}"
        assert f"qtool: {out}: 1 of 1 checks failed" in message
        shard.unlink(missing_ok=True)


def test_unknown_names(refused, make_model: MakeModel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    refused("did you mean w4a8-lqq?", model, scheme="w4a8-lq")
    refused("did you mean w4a8-lqq or w4a8-qoq or w4a8-qoq-g128?", model, scheme="w4a8")
    refused("'seven'", model, "--group-size", "seven")
    refused("(match '.*'): w4a8-lqq: group size 48 is not", model, "--group-size", "48")
    unsized = tmp_path / "unsized.yaml"
    unsized.write_text("scheme: w4a8-lqq\nlayers: [{roles: [q_proj], scheme: w4a8-lqq}]\n")
    refused(
        "(roles [q_proj]): w4a8-lqq: group size channel is not supported",
        model,
        "--recipe",
        unsized,
    )
    usual = "accepted: 32, 64, 128; 64 is usual, and a recipe's rule without group_size has"
    refused(usual, model, "--recipe", unsized)
    refused(usual, model, "--group-size", "channel")
    refused("did you mean kv4?", model, "--kv", "kv-4")
    refused("neither a file nor one of fast, paper, best", model, "--recipe", "bst")
    edit_config(model, model_type="whisper")
    refused("unsupported architecture 'whisper': an encoder-decoder", model)


@pytest.mark.parametrize("number", ["3²", "٣"])
def test_only_ascii_digits_are_digits(  # type: ignore[no-untyped-def]
    number: str, refused, make_model: MakeModel, monkeypatch, qtool_run: Run
) -> None:
    model = make_model()
    refused(f"--group-size {number!r}: a number of input channels", model, "--group-size", number)
    monkeypatch.setattr("qtool.bench._require_gpu", lambda *given: None)
    for options in (
        ["gemm", "--tokens", f"16,{number}"],
        ["kv", "--shapes", f"64x4096x8x32x{number}"],
        ["serve", model, "--batches", f"16,{number}"],
    ):
        code, message = qtool_run("bench", *options)
        assert code == 2 and f"{options[-1]!r}" in message.replace(f"{options[-1]}:", "")
    name = f"model.layers.{number}.mlp.up_proj"
    with pytest.raises(QtoolError, match=f"{name}: not a linear of Llama blocks"):
        linear_shape(Checkpoint(model), name)
    assert role(f"model.layers.0.{number}.up_proj") == f"{number}.up_proj"


def test_recipes(refused, make_model: MakeModel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, path = make_model(), tmp_path / "recipe.yaml"
    rule = "layers: [{match: '.*', scheme: w4a8-lqq, group_size: 64, layout: dual-mma}]\n"
    for text, message in {
        rule + "roundig: rtn": "unknown key 'roundig'; did you mean rounding?",
        rule + "rounding: gtpq": "unknown rounding 'gtpq': did you mean gptq?",
        rule + "transforms: [{rotate: {sed: 1}}]": "unknown option 'sed'; did you mean seed?",
        rule + "rounding: {rtn: {seed: 1}}": "rtn: unknown option 'seed'; known: none",
        rule + "transforms: [norm-fusion, rotate, rotate]": "rotate is listed twice",
        rule + "rounding: {gptq: {damping: 1e-2}}": "damping is '1e-2'; expected a number of 0",
        rule
        + "rounding: {gptq: {clip_steps: 0}}": "clip_steps is 0; expected a whole number above 0",
        rule
        + "rounding: {gptq: {rounds: -1}}": "rounds is -1; expected a whole number of 0 or more",
        rule + "rounding: {gptq: {act_order: 1}}": "act_order is 1; expected true or false",
        rule + "rounding: {distill: {start: [gptq]}}": "start is ['gptq']; expected a text",
        rule + "transforms: [{smooth: {groups: heads}}]": "groups is 'heads'; expected a list",
        rule + "transforms: [{gather-outliers: {w4a4_share: .nan}}]": "w4a4_share is nan; expected",
        "layers: []": "layers must be a list with at least one rule",
        "layers: [{match: '(', scheme: w8a8}]": "is not a regular expression",
        "layers: [{match: '.*', group_size: 64}]": "without scheme, found ['group_size', 'match']",
        "layers: [{match: 5, scheme: w8a8}]": "match must be a text, found 5",
        "layers: [{roles: v_proj, scheme: w8a8}]": "roles must be a list of names like [v_proj",
        "layers: [{roles: [5], scheme: w8a8}]": "found [5]",
        "layers: [{match: '.*', scheme: 8}]": "scheme must be a text, found 8",
        "layers: [{match: '.*', scheme: w8a8, layout: [row-major-8]}]": "layout must be a text",
        rule + "kv: 4": "kv must be a text, found 4",
        rule + "transforms: rotate": "transforms must be a list of steps, found 'rotate'",
        "layers: [{match: '.*', scheme: w8a8, layout: dual-nma}]": "did you mean dual-mma?",
        "layers: [{match: '.*', scheme: w8a8, layout: dual-mma}]": "8-bit",
        "a: [": "not valid YAML (line 1: expected the node content",
        "layers:\n\t- match: '.*'": "line 2: found character '\\t' that cannot start any token",
        "- 1": "a mapping expected",
    }.items():
        path.write_text(text)
        refused(message, model, "--recipe", path, scheme="w8a8" if "w8a8" in text else "w4a8-lqq")


def test_a_shortened_message_says_that_it_is() -> None:
    assert in_one_line(OSError("no connection\nto the hub\n\nmore")) == "no connection to the hub"
    assert in_one_line(OSError("x" * 300)) == "x" * 300
    assert in_one_line(OSError("x" * 301)) == "x" * 297 + "..."


def test_calibration_text(refused, make_model: MakeModel, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = make_model(vocab_size=4096)
    text = tmp_path / "text.txt"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "layers: "
        "[{match: '.*', scheme: w4a8-lqq, group_size: 64, layout: dual-mma}]\ntransforms: "
        "[norm-fusion, smooth]"
    )
    copy_tokenizer(model)
    options = ("--recipe", recipe, "--calib", text, "--seqlen", "64")
    refused("text.txt", model, *options)
    text.write_text("")
    refused("text.txt", model, *options)
    text.write_text("too short")
    refused("fewer than one window of 64", model, *options)
    text.write_text("The captain was not at all able to endure it. " * 50)
    small = make_model(vocab_size=300, name="small")
    copy_tokenizer(small)
    refused("the model embeds 300 ids (0 to 299)", small, *options)
    for file in model.glob("tokenizer*"):
        file.unlink()
    refused("tokenizer", model, *options)


def test_quantized_models_are_not_quantized_again(refused, make_model: MakeModel) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    edit_config(model, quantization_config={"quant_method": "gptq"})
    refused("quantized already (quant_method 'gptq')", model)


def test_an_output_with_a_name_too_long_for_the_files_beside_it(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source, place = Checkpoint(make_model()), tmp_path / "out"
    quantize(source, recipes.load("w4a16"), place / ("é" * 117))
    for length in (235, 250, 300):
        with pytest.raises(QtoolError, match=f"has {length} bytes; at most 234 leave room"):
            quantize(source, recipes.load("w4a16"), place / ("o" * length))
    assert len(list(place.iterdir())) == 2


def test_output_that_holds_something_else(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    code, message = qtool_run("quantize", make_model(), "--scheme", "w8a8", "--out", out)
    assert code == 2 and "exists already" in message
    assert [p.name for p in out.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_link(there: bool, make_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    if there:
        (tmp_path / "disk").mkdir()
    with pytest.raises(QtoolError, match=r"out is a symbolic link .*a new directory inside it"):
        quantize(Checkpoint(make_model()), recipes.load("w8a8"), tmp_path / "out")
    assert not list(tmp_path.glob("*.partial"))


def test_an_output_that_is_a_mount_point(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    with pytest.raises(QtoolError, match=r"out is .* a mount point"):
        quantize(Checkpoint(make_model()), recipes.load("w8a8"), tmp_path / "out")


def test_no_space_left(refused, make_model: MakeModel, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import errno

    from qtool.io import safetensors
    from qtool.pipeline import quantize as main_job

    model = make_model()
    usage = shutil.disk_usage(model)
    with monkeypatch.context() as patch:
        patch.setattr(main_job.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        refused("no space left", model)
    assert not (model.parent / "refused.partial").exists()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.os, "fsync", full)
        refused("no space left on the disk", model)
    assert not (model.parent / "refused.partial").exists()

    def copy(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(main_job.shutil, "copyfileobj", copy)
    refused("refused.partial (writing generation_config.json)", model)


def test_a_disk_without_locks_is_called_so(  # type: ignore[no-untyped-def]
    refused, make_model: MakeModel, tmp_path: Path, monkeypatch
) -> None:
    import errno
    import fcntl

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for _ in range(2):
        refused("lock cannot be locked (Function not implemented)", make_model())
        assert not list(tmp_path.glob("refused*"))
    with pytest.raises(QtoolError, match="cannot be locked"):
        Output(tmp_path / "above" / "out", {}, 1, resume=False)
    assert not (tmp_path / "above").exists()


def test_a_full_disk_that_numpy_meets_is_called_so(tmp_path: Path) -> None:
    """As GGUF's writer does on /dev/full: its error has no number."""
    with pytest.raises(QtoolError, match="no space left"), space_for(tmp_path / "x"):
        np.zeros(1 << 20).tofile("/dev/full")


def test_a_file_that_cannot_grow_is_named(refused, make_model: MakeModel, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A file system's own limit, or a shell's (ulimit -f)."""
    import errno

    from qtool.io import safetensors

    def limited(_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(safetensors.os, "fsync", limited)
    refused("refused.partial/.run/job.json: File too large", make_model())


def test_a_directory_that_takes_no_file_is_said_of_the_file_asked_for() -> None:
    """Not even root may write to this one."""
    with pytest.raises(OSError) as found:
        write_text(Path("/proc/report.html"), "")
    assert found.value.filename == "/proc/report.html"


def test_files_that_are_copied_need_space(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.pipeline import quantize as main_job

    model = make_model()
    (model / "LICENSE").write_text("x" * (1 << 24))
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(main_job.shutil, "disk_usage", lambda _: usage._replace(free=1 << 24))
    with pytest.raises(QtoolError, match="no space left"):
        quantize(Checkpoint(model), recipes.load("w8a8"), tmp_path / "out")


def test_the_output_is_not_the_model(refused, make_model: MakeModel, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model = make_model(name="models/tiny")
    for out in (model, model.parent, model.parent / ".." / "models"):
        with pytest.raises(QtoolError, match="the model that is read lies there") as error:
            quantize(Checkpoint(model), recipes.load("w8a8"), out)
        assert "remove" not in str(error.value)
    assert not list(tmp_path.glob("**/*.partial"))


def test_the_output_is_in_no_model(make_model: MakeModel, tmp_path: Path, qtool_run: Run) -> None:
    model = make_model(dtype=torch.float16)
    native = quantize(Checkpoint(model), recipes.load("w4a16"), tmp_path / "native")
    for outer, inside in ((model, model / "q"), (native, native / "new" / "q")):
        for command in (
            ("quantize", model, "--scheme", "w8a8"),
            ("export", native, "--format", "gptq"),
            ("export", native, "--format", "gguf"),
        ):
            code, message = qtool_run(*command, "--out", inside)
            assert code == 2 and f"{inside} lies inside the model {outer}, " in message
    assert not list(tmp_path.glob("**/*.partial")) and not (native / "new").exists()


def test_a_config_without_weights_is_no_model(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    shutil.copyfile(model / "config.json", tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    quantize(Checkpoint(model), recipes.load("w8a8"), Path("q"))


def test_a_billion_blocks(make_model: MakeModel, tmp_path: Path, qtool_run: Run) -> None:
    model, out = make_model(), tmp_path / "q"
    quantize(Checkpoint(model), recipes.load("w8a8"), out)
    for directory in (model, out):
        edit_config(directory, num_hidden_layers=10**9)
    for command in (
        ("quantize", model, "--scheme", "w8a8", "--out", tmp_path / "again"),
        ("plan", model, "--scheme", "w8a8"),
        ("verify", out),
        ("inspect", out),
        ("export", out, "--format", "compressed-tensors", "--out", tmp_path / "ct"),
    ):
        code, message = qtool_run(*command)
        assert code == 2 and "1000000000" in message, message
        assert "Traceback" not in message


def test_a_native_checkpoint_without_a_size_of_its_family(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    out = quantize(Checkpoint(make_model("qwen3_moe")), recipes.load("w8a8"), tmp_path / "q")
    edit_config(out, moe_intermediate_size=None)
    for command in (
        ("verify", out),
        ("inspect", out),
        ("export", out, "--format", "compressed-tensors", "--out", tmp_path / "ct"),
    ):
        code, message = qtool_run(*command)
        assert code == 2 and "the size 'expert' of this Qwen3-MoE model is None" in message, message


def test_a_checkpoint_without_packed_linears_is_not_verified(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    none = recipes.parse({"layers": [{"match": ".*", "scheme": None}]}, "none")
    out = quantize(Checkpoint(make_model()), none, tmp_path / "q")
    code, message = qtool_run("verify", out)
    assert code == 1 and "no linear is packed, so nothing was verified" in message


def test_foreign_and_damaged_checkpoints(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    model = make_model()
    for command in ("verify", "inspect"):
        code, message = qtool_run(command, model)
        assert code == 2 and "not quantized" in message
    out = tmp_path / "q"
    assert qtool_run("quantize", model, "--scheme", "w4a8-lqq", "--out", out)[0] == 0
    config = json.loads((out / "config.json").read_text())
    edit_config(out, quantization_config=config["quantization_config"] | {"format_version": 99})
    code, message = qtool_run("inspect", out)
    assert code == 2 and "format version 99 cannot be read" in message


def test_what_transformers_cannot_load(make_model: MakeModel) -> None:
    model = make_model()
    rewrite(model, "model.norm.weight", torch.ones(64))
    with pytest.raises(QtoolError, match="transformers cannot load it"):
        qtool.load(model)
    (model / "model.safetensors").unlink()
    index = make_model(max_shard_size="200KB") / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["metadata"]
    index.write_text(json.dumps(content))
    with pytest.raises(QtoolError, match=r'has no "metadata": add "metadata": \{\} to it'):
        qtool.load(model)
    index.write_text(json.dumps(content | {"metadata": {}}))
    qtool.load(index.parent)


def test_loading_names_the_damaged_file(make_model: MakeModel) -> None:
    """transformers names none, or ends in a traceback."""
    shard, index = "model-00002-of-00010.safetensors", "model.safetensors.index.json"
    for name, content, said in (
        (shard, None, f"{shard} is missing"),
        (shard, b"12345678", f"{shard}: not a safetensors file, or truncated (8 bytes)"),
        (index, None, "not the index that says which tensor is where"),
        (index, b'{"weight_map": []}', f"{index}: no weight_map in it"),
        (index, b"[]", f"{index}: a JSON object expected"),
    ):
        model = make_model(max_shard_size="200KB")
        (model / name).unlink()
        if content is not None:
            (model / name).write_bytes(content)
        with pytest.raises(QtoolError, match=re.escape(said)):
            qtool.load(model)


def test_verify_misses_a_linear_that_is_left_out(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    out = tmp_path / "q"
    qtool_run("quantize", make_model(), "--scheme", "w4a8-lqq", "--out", out)
    index, name = out / "model.safetensors.index.json", "model.layers.1.mlp.up_proj"
    content = json.loads(index.read_text())
    kept = {
        tensor: file
        for tensor, file in content["weight_map"].items()
        if not tensor.startswith(name)
    }
    index.write_text(json.dumps(content | {"weight_map": kept}))
    shard = content["weight_map"][next(t for t in content["weight_map"] if t.startswith(name))]
    code, message = qtool_run("verify", out)
    assert code == 1 and f"{index.name}: the file's sha256 is not the one recorded" in message
    tensors = {n: t for n, t in load_file(out / shard).items() if n in kept}
    save_file(tensors, out / shard, metadata={"format": "pt"})
    code, message = qtool_run("verify", out)
    assert (
        code == 1
        and f"{name}: quantization_config has it packed, but it is not stored so" in message
    )


def test_a_text_with_fewer_windows_than_asked_for_is_said(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    model, text = make_model(vocab_size=4096), tmp_path / "text.txt"
    copy_tokenizer(model)
    text.write_text("The captain was not at all able to endure it. " * 20)
    options = ("--calib", text, "--seqlen", "64", "--out", tmp_path / "q")
    code, said = qtool_run("quantize", model, "--scheme", "w8a8", *options)
    assert code == 0 and "text.txt holds 3 of the 128 requested windows of 64 tokens" in said


def test_the_package_keeps_no_results_of_the_demo(qtool_run: Run) -> None:
    code, message = qtool_run("eval", "demo", "--save")
    assert code == 2 and "the demo's belongs to the package" in message
    assert not (DEMO / "eval.json").exists()


def test_a_recipe_that_quantizes_nothing(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    recipe, out = tmp_path / "none.yaml", tmp_path / "q"
    recipe.write_text("layers: [{match: '.*', scheme: null}]")
    options = ("--recipe", recipe, "--out", out)
    code, said = qtool_run("quantize", make_model(), *options)
    assert code == 2 and "nothing would be quantized" in said and not out.exists()


def test_verify_finds_a_flipped_byte(make_model: MakeModel, tmp_path: Path, qtool_run: Run) -> None:
    out = tmp_path / "q"
    qtool_run("quantize", make_model(), "--scheme", "w4a8-lqq", "--out", out)
    assert qtool_run("verify", out)[0] == 0
    name = "model.layers.0.mlp.up_proj.s2"
    shard = next(p for p in sorted(out.glob("*.safetensors")) if name in load_file(p))
    tensors = load_file(shard)
    tensors[name].view(-1)[5] = 77
    save_file(tensors, shard, {"format": "pt"})
    code, message = qtool_run("verify", out)
    assert code == 1
    assert "sha256" in message and "1 <= s2 <= 16" in message and "up_proj" in message


def test_usage_errors_exit_2() -> None:
    runner = CliRunner()
    assert runner.invoke(qtool.cli.cli, ["quantize"]).exit_code == 2
    for command in qtool.cli.cli.commands:
        shown = runner.invoke(qtool.cli.cli, [command, "-h"])
        assert shown.exit_code == 0 and "Example: qtool " in shown.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--device", "cuda:99"),
        ("--device", "cpux"),
        ("--samples", 0),
        ("--samples", -1),
        ("--seqlen", 0),
        ("--max-8bit-blocks", -1),
        ("--out", ""),
        ("--out", "."),
        ("--out", ".."),
    ],
)
def test_values_that_no_run_could_have(
    option: str, value: object, tmp_path: Path, monkeypatch, qtool_run: Run
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    code, message = qtool_run("quantize", DEMO, "--scheme", "w8a8", option, value)
    assert code == 2 and f"Invalid value for '{option}'" in message and "Traceback" not in message
    assert not list(tmp_path.parent.glob("*.partial")) and not list(tmp_path.iterdir())


#: how each command that has an option for a number with a point is called
FLOATS: dict[tuple[str, ...], list[str]] = {
    ("plan", "--device-memory"): ["demo", "--scheme", "w8a8"],
    ("sensitivity", "--budget-bits"): ["demo", "--choices", "w4a16,w8a8", "--out", "a.yaml"],
    ("bench", "serve", "--memory"): ["demo"],
    ("bench", "quantize", "--device-memory"): ["llama-tiny", "--scheme", "w8a8"],
}


def options_of(kind: type[click.ParamType]) -> set[tuple[str, ...]]:
    """Command and name of every option of ``kind``."""
    commands: dict[tuple[str, ...], click.Command] = {(): qtool.cli.cli}
    for group in ((), ("bench",)):
        within = commands[group]
        assert isinstance(within, click.Group)
        commands |= {(*group, name): command for name, command in within.commands.items()}
    return {
        (*path, option.opts[0])
        for path, command in commands.items()
        for option in command.params
        if isinstance(option, click.Option) and isinstance(option.type, kind)
    }


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "1e400"])
def test_no_number_is_none(value: str, tmp_path: Path, monkeypatch, qtool_run: Run) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert options_of(click.types.FloatParamType) == FLOATS.keys()
    for (*path, option), arguments in FLOATS.items():
        code, message = qtool_run(*path, *arguments, f"{option}={value}")
        assert code == 2 and "a number above 0 is expected" in message and option in message
        assert len(message.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_model_has_its_own_number_of_blocks(tmp_path: Path, monkeypatch, qtool_run: Run) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    code, message = qtool_run("bench", "quantize", "demo", "--scheme", "w8a8", "--layers=1")
    assert code == 2 and "--layers 1 is for a random checkpoint, and demo is none" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["nan", "inf", "1.5"])
def test_no_count_is_none(value: str) -> None:
    counted = options_of(click.types.IntParamType)
    assert ("quantize", "--seed") in counted and ("eval", "--limit") in counted
    for *path, option in counted:
        done = CliRunner().invoke(qtool.cli.cli, [*path, f"{option}={value}", "demo"])
        assert done.exit_code == 2 and f"Invalid value for '{option}'" in done.output


def test_places_that_cannot_be_written(
    make_model: MakeModel, tmp_path: Path, qtool_run: Run
) -> None:
    model, file = make_model(), tmp_path / "file"
    file.write_text("")
    code, message = qtool_run("quantize", model, "--scheme", "w8a8", "--out", file / "out")
    assert code == 2 and message.endswith(
        f"qtool: {file / 'out'}: {file} is a file, where a directory is expected\n"
    )
    assert "Traceback" not in message


def test_home_in_paths(make_model: MakeModel, tmp_path: Path, monkeypatch, qtool_run: Run) -> None:  # type: ignore[no-untyped-def]
    """A shell leaves ``--out=~/out`` as it is, and so does Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model, recipe = make_model(), tmp_path / "own.yaml"
    recipe.write_text("layers: [{match: .*, scheme: w8a8}]")
    code, _ = qtool_run("quantize", f"~/{model.name}", "--recipe=~/own.yaml", "--out=~/out")
    assert code == 0 and (tmp_path / "out" / "config.json").exists()
    qtool.quantize(f"~/{model.name}", recipe="~/own.yaml", out="~/again")
    assert (tmp_path / "again" / "config.json").exists()
    assert data_directory("~") == tmp_path


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, bad: float, device: str) -> None:
    for n in (1, 31, 1000):
        weight = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device, dtype)
        require_all_finite({"weight": weight, "empty": weight[:0]})
        for place in {0, n // 2, n - 1}:
            damaged = weight.clone()
            damaged[place] = bad
            with pytest.raises(QtoolError, match="damaged: holds 1 NaN or Inf"):
                require_all_finite({"weight": weight, "damaged": damaged})
