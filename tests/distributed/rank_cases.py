"""Small quantizations that any number of ranks does alike."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qtool import recipes
from qtool.calibration.rounding.gptq import hessian
from qtool.distributed import ranks
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import Calibration, quantize
from qtool.recipes import Recipe

MODELS = ("llama", "mixtral")
#: blocks that hand on an indexer's choice, and keys and values (:mod:`tests.models.tiny`)
TINY = ("glm_moe_dsa", "gemma4_text")
#: sequences of each calibration batch: neither 2 nor 3 ranks can share them out evenly
SEQUENCES = (2, 2, 2, 2, 1)
GATHER = [{"gather-outliers": {"w4a4_share": 0.8}}]
DISTILL = {"distill": {"epochs": 1, "weight_lr": 0.05}}
#: directory -> model, scheme, variant of its recipe or a rounding
CASES: dict[str, tuple[str, str, str | Mapping[str, Any]]] = {
    "llama-lqq-fast": ("llama", "w4a8-lqq", "fast"),
    "llama-lqq-paper": ("llama", "w4a8-lqq", "paper"),
    "llama-lqq-best": ("llama", "w4a8-lqq", "best"),
    "llama-lqq-kv4": ("llama", "w4a8-lqq", {"kv": "kv4"}),
    "llama-w4a4-best": ("llama", "w4a4-g128", "best"),
    "llama-fmpq-kv8": ("llama", "w4ax-fmpq", {"kv": "kv8", "transforms": GATHER}),
    "llama-w4a16-best": ("llama", "w4a16", "best"),
    "llama-24-gptq": ("llama", "w4a16-24", {"rounding": "gptq"}),
    "mixtral-lqq-paper": ("mixtral", "w4a8-lqq", "paper"),
    "mixtral-lqq-best": ("mixtral", "w4a8-lqq", "best"),
    "llama-lqq-panels": ("llama", "w4a8-lqq", "best"),
    "glm-fmpq": ("glm_moe_dsa", "w4ax-fmpq", {"transforms": GATHER}),
    "gemma-w4a16-best": ("gemma4_text", "w4a16", "best"),
    "llama-distill": ("llama", "w4a4-g128", {"rounding": DISTILL}),
}


def recipe_of(scheme: str, chosen: str | Mapping[str, Any]) -> Recipe:
    """The built-in recipe, its best one for a KV quantizer, or one with another rounding."""
    if isinstance(chosen, str):
        return recipes.load(scheme, chosen)
    data = recipes.read(recipes.built_in()[scheme])
    del data["variants"]
    made = recipes.parse(data | {"rounding": "rtn"} | chosen, scheme)
    return made.for_kv4() if made.kv == "kv4" else made


def make(name: str, models: Path, out: Path) -> None:
    """Quantize as the case ``name`` says, to ``OUT/name``."""
    model, scheme, chosen = CASES[name]
    random = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, 320, (count, 24), generator=random) for count in SEQUENCES]
    calibration = Calibration(tokens, {"text": "random"})
    whole = hessian.panels
    hessian.panels = narrow_panels if "panels" in name else whole
    quantize(
        Checkpoint(models / model), recipe_of(scheme, chosen), out / name, calibration=calibration
    )
    hessian.panels = whole


def narrow_panels(k: int) -> Iterator[tuple[slice, slice]]:
    """Panels so narrow that a small Hessian has several."""
    for start in range(0, k, 40):
        stop = min(start + 40, k)
        yield slice(0, stop), slice(start, stop)


def make_all(models: Path, out: Path) -> None:
    """Every case, on as many ranks as there are."""
    with ranks.process_group("cpu"):
        for name in CASES:
            make(name, models, out)
