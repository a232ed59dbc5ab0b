"""Zero points and act order: imported to the bit where a scheme holds them, else refused with what
to do.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.errors import CheckFailed, QtoolError
from qtool.exchange.export import export
from qtool.exchange.import_ import import_checkpoint
from qtool.io.source import Checkpoint
from qtool.pipeline.verify import verify
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.exchange import readers
from tests.exchange.conftest import linears, stored
from tests.exchange.test_import import IDS, change_config, change_tensor, native, tensors, w4a16

DOWN = "model.layers.1.mlp.down_proj"
QOQ = {"match": ".*", "scheme": "w4a8-qoq", "group_size": "channel"}


@pytest.fixture
def gptq(make_model: MakeModel, tmp_path: Path) -> Path:
    ours = native(make_model(dtype=torch.bfloat16), w4a16(32))
    return export(ours, "gptq", tmp_path / "foreign").directory


def scatter(directory: Path, linear: str, index: str = "g_idx") -> torch.Tensor:
    """Give the input channels of ``linear`` to its groups at random; its weight ``[N, K]``."""
    order = torch.randperm(384, generator=torch.Generator().manual_seed(0))
    change_tensor(directory, f"{linear}.{index}", lambda t: t[order])
    held = stored(directory, linear)
    gptq = index == "g_idx"
    codes, scale, zero = readers.gptq(held, 1) if gptq else readers.compressed_tensors(held)
    return (codes - zero[:, held[index].long()]) * scale[:, held[index].long()]


def refusal(directory: Path) -> str:
    out = directory.with_name("refused")
    with pytest.raises(QtoolError) as caught:
        import_checkpoint(Checkpoint(directory), out)
    assert not list(out.parent.glob("refused*"))
    return str(caught.value)


@pytest.mark.parametrize("layout", [None, "row-major"])
def test_act_order_becomes_an_input_permutation(
    layout: str | None, gptq: Path, tmp_path: Path
) -> None:
    """The weights are those of the file; only linears of the scattered kind store a permutation."""
    change_config(gptq, desc_act=True)
    expected = scatter(gptq, DOWN)
    plain = linears(import_checkpoint(Checkpoint(gptq), tmp_path / "a", layout).directory)
    back = import_checkpoint(Checkpoint(gptq), tmp_path / "b", layout).directory
    assert not [row.problem for row in verify(back) if row.problem]
    found = linears(back)
    assert torch.equal(found[DOWN].dequantize(), expected)
    assert {n for n, linear in found.items() if linear.permutation is not None} == {
        f"model.layers.{block}.mlp.down_proj" for block in range(2)
    }
    first = found["model.layers.0.mlp.down_proj"].permutation
    assert torch.equal(first, torch.arange(384, dtype=torch.int32))
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found[DOWN].reference(x), x @ expected.t())
    model = load(back)
    assert torch.equal(model.get_submodule(DOWN).dequantize(), expected)  # type: ignore[operator]
    assert model(IDS).logits.isfinite().all() and plain.keys() == found.keys()


def test_a_compressed_tensors_group_index(make_model: MakeModel, tmp_path: Path) -> None:
    ours = native(make_model(dtype=torch.bfloat16), w4a16(32))
    foreign = export(ours, "gptq", tmp_path / "gptq").directory
    assert "g_idx" in stored(foreign, DOWN)
    expected = scatter(foreign, DOWN)
    ct = export(ours, "compressed-tensors", tmp_path / "ct").directory
    from safetensors.torch import load_file, save_file

    path = Checkpoint(ct).entry(f"{DOWN}.weight_packed").path
    index = {f"{DOWN}.weight_g_idx": stored(foreign, DOWN)["g_idx"]}
    save_file(load_file(path) | index, path, {"format": "pt"})
    import json

    listed = json.loads((ct / "model.safetensors.index.json").read_text())
    listed["weight_map"] |= dict.fromkeys(index, path.name)
    (ct / "model.safetensors.index.json").write_text(json.dumps(listed))
    (ct / "qtool.json").unlink()
    config = Checkpoint(ct).config["quantization_config"]
    groups = {"group_0": config["config_groups"]["group_0"]}
    groups["group_0"]["weights"]["actorder"] = "group"
    change_config(ct, config_groups=groups)
    back = import_checkpoint(Checkpoint(ct), tmp_path / "back").directory
    assert torch.equal(linears(back)[DOWN].dequantize(), expected)


def test_linears_that_are_fused_are_permuted_together(gptq: Path) -> None:
    """vLLM's plugin runs q, k and v as one linear, whose parts all have a permutation or none."""
    change_tensor(gptq, "model.layers.0.self_attn.k_proj.g_idx", lambda t: t.flip(0))
    back = import_checkpoint(Checkpoint(gptq), gptq.with_name("back")).directory
    permuted = Checkpoint(back).config["quantization_config"]["permuted"]
    assert permuted == [f"self_attn.{x}_proj" for x in "qkv"]
    assert not [row.problem for row in verify(back) if row.problem]


def test_act_order_that_is_said_but_not_so(gptq: Path) -> None:
    change_config(gptq, desc_act=True)
    back = import_checkpoint(Checkpoint(gptq), gptq.with_name("ok")).directory
    assert not any(name.endswith("permutation") for name in Checkpoint(back).entries)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clamp(max=3),
        lambda t: t - 1,
        lambda t: t[:-1],
        lambda t: torch.cat([t[-1:], t[1:]]),  # one channel in another group
    ],
)
def test_groups_of_unequal_size(change: Any, gptq: Path) -> None:
    change_tensor(gptq, f"{DOWN}.g_idx", change)
    assert f"{DOWN}: its group index does not give each of 12 groups 32 of 384" in refusal(gptq)


@pytest.mark.parametrize("name", ["awq", "compressed-tensors-w4a16"])
def test_zero_points_of_channels_become_qoq(
    name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(dtype=torch.bfloat16), QOQ)
    foreign = export(ours, name, tmp_path / "foreign").directory
    imported = import_checkpoint(Checkpoint(foreign), tmp_path / "back", "row-major")
    expected, found = tensors(ours), tensors(imported.directory)
    if linears(ours)[DOWN].format.layout == "row-major":
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[part], tensor) for part, tensor in expected.items())
    theirs, weights = linears(imported.directory), linears(ours)
    assert all(torch.equal(theirs[n].dequantize(), w.dequantize()) for n, w in weights.items())
    assert Checkpoint(imported.directory).config["quantization_config"]["scheme"] == "w4a8-qoq"
    assert "activations have 16 bits there and 8 here" in str(imported)
    assert not [row.problem for row in verify(imported.directory) if row.problem]


@pytest.mark.parametrize(("name", "offset"), [("gptq", 0x11111111), ("gptq-v2", 0)])
def test_zero_points_of_0_borrow_from_the_next(
    name: str, offset: int, make_model: MakeModel, tmp_path: Path
) -> None:
    """GPTQModel takes v1's 1 from each nibble of a word in one subtraction."""
    ours = native(make_model(dtype=torch.bfloat16), w4a16("channel"))
    foreign = export(ours, name, tmp_path / "foreign").directory
    codes, scale, _ = readers.gptq(stored(foreign, DOWN), 0)
    zero = torch.arange(len(codes))[:, None] % 8 // 2 * 5  # 0 0 5 5 10 10 15 15
    words = (zero.view(-1, 8) << 4 * torch.arange(8)).sum(1).to(torch.int32)
    change_tensor(foreign, f"{DOWN}.qzeros", lambda _: words[None] - offset)
    found = linears(import_checkpoint(Checkpoint(foreign), tmp_path / "back").directory)[DOWN]
    assert torch.equal(found.dequantize(), (codes - zero) * scale)


def test_a_scale_below_zero_beside_zero_points_says_what_to_do(
    make_model: MakeModel, tmp_path: Path
) -> None:
    ours = native(make_model(dtype=torch.bfloat16), QOQ)
    foreign = export(ours, "awq", tmp_path / "foreign").directory
    change_tensor(foreign, f"{DOWN}.scales", lambda t: torch.cat([-t[:, :1], t[:, 1:]], 1))
    with pytest.raises(CheckFailed, match=f"{DOWN}: .*scale finite and above 0.* quantize the ori"):
        import_checkpoint(Checkpoint(foreign), tmp_path / "back", "row-major")


def test_zero_points_of_groups_say_what_to_do(
    gptq: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    first = torch.tensor([0])
    q = "model.layers.0.self_attn.q_proj"
    change_config(gptq, sym=False)
    back = import_checkpoint(Checkpoint(gptq), gptq.with_name("ok"))
    assert not back.notes  # said to be asymmetric, but every zero point is 8
    change_tensor(gptq, f"{q}.qzeros", lambda t: t.index_fill(0, first, 0))
    message = refusal(gptq)
    assert f"{q}: 128 of 512 zero points are not 8, in groups of 32" in message
    assert "quantize the original model, or dequantize this one" in message
    rule = {"match": ".*", "scheme": "w4a8-qoq-g128", "group_size": 128}
    ours = native(make_model(name="q", dtype=torch.bfloat16), rule)
    assert "zero points are not 8" in refusal(export(ours, "awq", tmp_path / "awq").directory)
