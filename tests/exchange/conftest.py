"""Random models quantized once a session, whose shapes every format takes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool import recipes
from qtool.exchange.export import Exported, export
from qtool.format import native_format
from qtool.format.stored_linears import packed_names
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.linear import QuantLinear
from qtool.runtime.read_linear import load_linear
from tests.conftest import save_model

#: N of 128, 256 and 384, K of 256 and 384: two and three groups of 128
SHAPES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUT = {"w8a8": "row-major-8"}

#: (scheme, group size, variant of the model, its dtype) -> the directory of the native checkpoint
Native = Callable[..., Path]
#: (native directory, format) -> what the export says
Export = Callable[[Path, str], Exported]


def recipe_of(rules: list[dict[str, Any]], **more: Any) -> recipes.Recipe:
    """A recipe that rounds to nearest by ``rules``."""
    return recipes.parse({"scheme": "test", "layers": rules} | more, "test")


def rule(
    scheme: str | None, group_size: int | str | None = None, match: str = ".*"
) -> dict[str, Any]:
    """A layer rule in the reference layout."""
    found = {"match": match, "scheme": scheme, "layout": LAYOUT.get(str(scheme), "row-major")}
    return found | ({"group_size": group_size} if group_size else {})


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``source(variant, dtype)``: a random model, saved."""

    @cache
    def make(variant: str = "llama", dtype: torch.dtype = torch.float16) -> Path:
        directory = tmp_path_factory.mktemp("source") / variant
        return save_model(directory, variant, dtype=dtype, **SHAPES)

    return make


@pytest.fixture(scope="session")
def native(source: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Native:
    """``native("w4a16", 128, variant=..., dtype=...)``: quantized, every linear alike."""

    @cache
    def make(
        scheme: str,
        group_size: int | str,
        variant: str = "llama",
        dtype: torch.dtype = torch.float16,
    ) -> Path:
        out = tmp_path_factory.mktemp("native") / f"{variant}-{scheme}-{group_size}"
        return quantize(
            Checkpoint(source(variant, dtype)), recipe_of([rule(scheme, group_size)]), out
        )

    return make


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """``exported(native directory, format)``."""

    @cache
    def make(directory: Path, name: str) -> Exported:
        return export(directory, name, tmp_path_factory.mktemp("exported") / name)

    return make


def linears(directory: Path) -> dict[str, QuantLinear]:
    """Every packed linear of a native checkpoint, read without transformers."""
    checkpoint = Checkpoint(directory)
    formats = native_format(checkpoint.config)
    return {
        name: load_linear(checkpoint, name, found, torch.device("cpu"))
        for name in packed_names(checkpoint)
        if (found := formats.of(name))
    }


def stored(directory: Path, linear: str) -> dict[str, torch.Tensor]:
    """The tensors of ``linear`` in an exported checkpoint, by their last name."""
    checkpoint = Checkpoint(directory)
    return {
        name.removeprefix(f"{linear}."): checkpoint.read(name)
        for name in checkpoint.entries
        if name.startswith(f"{linear}.")
    }
