"""``load_as_export``: what transformers and the compressed-tensors library compute from the export,
to the last bit.
"""

from pathlib import Path

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import qtool
from qtool.cli import cli
from qtool.errors import QtoolError
from qtool.exchange.as_export import RUNS
from qtool.exchange.export import export
from qtool.exchange.export_format import SIXTEEN_BIT, TOKEN_INT8
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load
from tests.conftest import MakeModel
from tests.exchange.conftest import recipe_of, rule
from tests.exchange.test_compressed_tensors import client

IDS = torch.arange(48).reshape(2, 24) * 5 % 320
#: the second sequence begins with seven pads
SEEN = torch.ones_like(IDS).index_fill_(1, torch.arange(7), 0)
SEEN[0] = 1
W8A8, W4A16, W4A8 = (f"compressed-tensors-{kind}" for kind in ("w8a8", "w4a16", "w4a8"))
FAMILIES = [
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "opt",
    "mistral",
    "llama-tied",
]
CASES = [
    ("w4a16", 32, "compressed-tensors"),
    ("w8a8", "channel", "compressed-tensors"),
    ("w4a8-lqq", 64, W8A8),
    ("w4a8-qoq-g128", 128, W8A8),
    ("w4a16", 128, W4A8),
    ("w4a4", 128, W4A16),
    ("w4a8-qoq", "channel", W4A16),
    ("w4a8-qoq-g128", 128, W4A16),
]


@torch.no_grad()
def answers(model: nn.Module) -> list[Tensor]:
    """Logits with a padded sequence, without a cache, and what follows."""
    greedy = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    padded = model(IDS, attention_mask=SEEN).logits[SEEN.bool()]
    alone = model(IDS, use_cache=False).logits
    return [padded, alone, model.generate(IDS, attention_mask=SEEN, **greedy)]  # type: ignore[operator]


def assert_equal(
    native: Path, name: str, out: Path, *, dequantize: bool, dtype: torch.dtype
) -> None:
    theirs = client(out, dequantize=dequantize, dtype=dtype, experts_implementation="eager")
    ours = qtool.load_as_export(native, name, dtype=dtype, dequantize=dequantize)
    for found, expected in zip(answers(ours), answers(theirs), strict=True):
        assert torch.equal(found, expected)


def quantized(source: Path, scheme: str, size: int | str, kv: str | None = None) -> Path:
    recipe = recipe_of([rule(scheme, size)], **({"kv": kv} if kv else {}))
    return quantize(
        Checkpoint(source), recipe, source.with_name("native"), calibration=Calibration([IDS])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(("scheme", "size", "name"), CASES)
def test_every_scheme(
    scheme: str,
    size: int | str,
    name: str,
    dequantize: bool,
    dtype: torch.dtype,
    make_model: MakeModel,
    tmp_path: Path,
) -> None:
    native = quantized(make_model(dtype=torch.bfloat16), scheme, size)
    done = export(native, name, tmp_path / "out")
    out = done.directory
    # transformers loads them one way only
    zero_points = scheme.startswith("w4a8-qoq") and name == W4A16
    assert any("dequantize=True" in note for note in done.notes) == zero_points
    assert_equal(native, name, out, dequantize=dequantize or zero_points, dtype=dtype)
    if zero_points:
        found, expected = (qtool.load_as_export(native, name, dequantize=d) for d in (False, True))
        assert torch.equal(answers(found)[1], answers(expected)[1])


@pytest.mark.parametrize("file", [torch.float32, torch.float16])
@pytest.mark.parametrize(("scheme", "size", "name"), [CASES[0], CASES[2], CASES[6]])
def test_in_another_dtype_than_the_files(
    scheme: str,
    size: int | str,
    name: str,
    file: torch.dtype,
    make_model: MakeModel,
    tmp_path: Path,
) -> None:
    """Its scales are rounded when it is loaded, its weights if they are dequantized then."""
    native = quantized(make_model(dtype=file), scheme, size)
    out = export(native, name, tmp_path / "out").directory
    for dtype in (torch.bfloat16, torch.float32):
        for dequantize in (True,) if name == W4A16 else (False, True):
            assert_equal(native, name, out, dequantize=dequantize, dtype=dtype)


@pytest.mark.parametrize("kv", ["kv8", "kv4"])
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("variant", ["llama", "gemma2", "opt"])
def test_the_cache_is_the_exports(
    variant: str, dequantize: bool, kv: str, make_model: MakeModel, tmp_path: Path
) -> None:
    native = quantized(make_model(variant, dtype=torch.bfloat16), "w4a16", 32, kv)
    out = export(native, "compressed-tensors", tmp_path / "out").directory
    assert_equal(native, "compressed-tensors", out, dequantize=dequantize, dtype=torch.bfloat16)
    assert not torch.equal(
        *(answers(m)[1] for m in (load(native), qtool.load_as_export(native, "compressed-tensors")))
    )


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_under_int8_activations(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    native = quantized(make_model(variant, dtype=torch.bfloat16), "w4a8-lqq", 32)
    out = export(native, W8A8, tmp_path / "out").directory
    assert_equal(native, W8A8, out, dequantize=False, dtype=torch.bfloat16)


def test_experts(make_model: MakeModel, tmp_path: Path) -> None:
    native = quantized(make_model("qwen3_moe", dtype=torch.bfloat16), "w4a16", 32)
    out = export(native, "compressed-tensors", tmp_path / "out").directory
    assert_equal(native, "compressed-tensors", out, dequantize=True, dtype=torch.bfloat16)


def test_the_formats_it_runs_are_those_with_activations_it_knows() -> None:
    for name, target in EXPORT_FORMATS.items():
        known = all(
            target.activations(scheme) in (SIXTEEN_BIT, TOKEN_INT8) for scheme in target.expressible
        )
        assert (name in RUNS) == (known and name.startswith("compressed-tensors"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gptq", "transformers runs no gptq by itself"),
        (f"{W4A8}-fp8", "formats that it runs: compressed-tensors,"),
        ("gtpq", "did you mean gptq"),
        (W8A8, "cannot express w4a16"),
    ],
)
def test_refusals(name: str, message: str, make_model: MakeModel) -> None:
    native = quantized(make_model(), "w4a16", 32)
    with pytest.raises(QtoolError, match=message):
        qtool.load_as_export(native, name)


def test_a_model_in_16_bits(make_model: MakeModel) -> None:
    with pytest.raises(QtoolError, match="; pass what qtool quantize made of it"):
        qtool.load_as_export(make_model(), "compressed-tensors")


def test_a_hub_id(make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = quantized(make_model(), "w4a16", 32)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(native))
    found, expected = (
        qtool.load_as_export(model, "compressed-tensors") for model in ("owner/name", native)
    )
    assert torch.equal(answers(found)[1], answers(expected)[1])


def test_eval_as_an_export(tmp_path: Path) -> None:
    native = quantize(Checkpoint(DEMO), recipe_of([rule("w8a8", "channel")]), tmp_path / "native")

    def run(*more: str) -> tuple[int, str]:
        few = ["--limit", "2", "--seqlen", "64"]
        done = CliRunner().invoke(cli, ["eval", "demo", "--model", str(native), *few, *more])
        return done.exit_code, done.output + str(done.exception)

    plain, exported = run(), run("--as-export", "compressed-tensors")
    assert plain[0] == exported[0] == 0 and plain[1] != exported[1]
    assert "goes without --kv kv4" in run("--as-export", "compressed-tensors", "--kv", "kv4")[1]
    assert "goes without --save" in run("--as-export", "compressed-tensors", "--save")[1]
    assert "transformers runs no awq" in run("--as-export", "awq")[1]


def test_only_transformers_own_arithmetic_is_evaluated() -> None:
    with pytest.raises(QtoolError, match="--as-export compressed-tensors goes without --determ"):
        qtool.evaluate(DEMO, "demo", as_export="compressed-tensors", deterministic=True)
