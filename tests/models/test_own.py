"""What is derived of an architecture of one's own keeps its function, or is left out."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import qtool
from qtool.calibration.transforms.smooth import Smooth
from qtool.eval.kv_error import kv_errors
from qtool.io.source import Checkpoint
from qtool.models import Family, family_of
from qtool.pipeline import quantize as pipeline
from qtool.pipeline.quantize import Calibration
from qtool.pipeline.recipe_fit.family_recipe import for_family
from qtool.recipes import LayerRule, Recipe, Step
from qtool.schemes.kv import require_kv
from tests.models import proof
from tests.models.own import OwnConfig, OwnForCausalLM
from tests.models.proof import distance, logits, smooth_randomly, windows

TRANSFORMS = (
    Step("norm-fusion", {}),
    Step("rotate", {}),
    Step("smooth", {}),
    Step("smooth-attention", {"steps": 5, "starts": 2}),
    Step("value-basis", {"steps": 3}),
    Step("reorder", {}),
)
#: each with what its family says: nothing, why the stream is fixed, or that a method is refused
STRUCTURES = {
    "": "",
    "layernorm bias": "",
    "gqa": "",
    "unit": "",
    "q-norm k-norm": "",
    "offset": "norms do not multiply by their weights in one way",
    "final-layernorm": "",
    "layernorm bias multiple": "norm is read by more than linears",
    "clamp": "the block changes its channels at the end",
    "scale": "the block changes its channels at the end",
    "second": "reads it",
    "skip": "shares its input with one that does",
    "shared sdpa": "no queries, keys and values of one head size were recognized",
    "k-norm": "a norm follows its queries or its keys alone",
    "q-norm": "a norm follows its queries or its keys alone",
    "q-gate": "go into something else than attention too",
}


@pytest.mark.parametrize("how", STRUCTURES)
def test_a_structure_is_proved_or_left_alone(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    source = save(how, tmp_path / "source")
    family = family_of(Checkpoint(source).config)
    assert STRUCTURES[how] in said(family) and bool(said(family)) == bool(STRUCTURES[how])
    recipe = Recipe(
        scheme="w4a16",
        about="",
        layers=(LayerRule(".*", None),),
        transforms=TRANSFORMS,
        rounding=Step("rtn", {}),
        variant="transforms",
    )
    text = Calibration([windows(source)])
    with patch.object(Smooth, "apply", smooth_randomly):
        pipeline.quantize(
            Checkpoint(source), for_family(recipe, family), tmp_path / "out", calibration=text
        )
    with torch.no_grad():
        found, expected = (logits(qtool.load(path)) for path in (tmp_path / "out", source))
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize("kv", ["kv8", "kv4"])
@pytest.mark.parametrize(("how", "module"), [("", ""), ("cached", "cached.")])
def test_what_calls_the_cache_holds_its_tensors(
    how: str, module: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the block, or a module that has no tensors otherwise."""
    register(monkeypatch)
    source, out = save(how, tmp_path / "source"), tmp_path / "out"
    proof.quantize(source, out, "paper", kv=kv)
    of_cache = require_kv(kv).constants
    assert [name for name in Checkpoint(out).entries if name.endswith(of_cache)] == [
        f"model.layers.{n}.{module}{name}" for n in range(3) for name in of_cache
    ]
    assert not [row for row in qtool.verify(out) if row.problem]
    errors = kv_errors(qtool.load(out), windows(source))
    most = {"kv8": 0.02, "kv4": 0.15}[kv]
    assert all(0 < error < most for one in errors.values() for error in (one.keys, one.values))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the architecture known to transformers until the test ends."""
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    AutoConfig.register("own", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)


def said(family: Family) -> str:
    """Why a transform is left out of recipes for ``family``."""
    transforms = (why for what, why in family.refuses.items() if what != "kv")
    return " ".join([family.why_fixed, *transforms]).strip()


@torch.no_grad()
def save(how: str, directory: Path) -> Path:
    torch.manual_seed(0)
    model = OwnForCausalLM(OwnConfig(how, architectures=["OwnForCausalLM"]))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory
