"""A LoRA adapter, merged into a model's weights when they are read (Hu et al. 2021, section 4.1).

    W' = W + s B A        s = alpha / r, or alpha / sqrt(r) (rsLoRA)

``adapter_config.json`` and ``adapter_model.safetensors`` are peft's files, and the result equals
peft's ``merge_and_unload`` but for rounding. The sum is computed in float64, so that the number of
threads and of rows read together do not change it, and rounded once. Unknown settings are refused,
and so is a tensor that belongs to no weight of the model.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.io.finite import require_finite
from qtool.io.integrity import sha256_of
from qtool.io.model_directory import directory_of, provenance
from qtool.io.safetensors import Computed, Entry, read, read_header
from qtool.io.source import read_json

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
#: settings that do not change how an adapter is merged, and settings that are read here
KNOWN = {
    *("auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"),
    *("lora_dropout", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size"),
    *("revision", "runtime_config", "target_modules", "task_type"),
    *("alpha_pattern", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type", "r"),
    *("rank_pattern", "use_rslora"),
}
#: initializations for training that leave the model's own weights unchanged
INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
INSTEAD = "merge it by peft's merge_and_unload, and quantize what that saves"
#: number of weights whose sum is in memory in float64 at a time
PIECE = 1 << 22

_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_UNKNOWN = re.compile(r"\.(lora_|token_adapter\.|trainable_tokens_)")


@dataclass(frozen=True)
class Merged(Computed):
    """``W + scaling left right`` of ``W [N, K]``, ``left [N, r]`` and ``right [r, K]``."""

    scaling: float

    def read(self, rows: slice, *, transposed: bool = False) -> Tensor:
        if transposed:
            return self.read(slice(None)).T[rows].contiguous()
        base, left, right = self.operands
        weight, factor, other = read(base, rows), read(left, rows), read(right).double()
        step = max(1, PIECE // weight.shape[1])
        for start in range(0, len(weight), step):
            piece = slice(start, start + step)
            delta = self.scaling * (factor[piece].double() @ other)
            weight[piece] = (weight[piece].double() + delta).to(weight.dtype)
        return weight


@dataclass(frozen=True)
class Cast(Computed):
    """A tensor in another dtype."""

    dtype: torch.dtype

    def read(self, rows: slice, *, transposed: bool = False) -> Tensor:
        stored = read(self.operands[0]).T[rows] if transposed else read(self.operands[0], rows)
        return stored.to(self.dtype).contiguous()


class Adapter:
    """An adapter on disk.

    Args:
        name: directory or hub id of the adapter.

    Attributes:
        config: content of adapter_config.json.
        entries: tensors of the adapter, by name.

    Raises:
        QtoolError: ``name`` is no adapter or no LoRA adapter, or the adapter is empty, has NaN or
            has an unknown setting.
    """

    def __init__(self, name: str) -> None:
        self.directory = path = directory_of(name, files=[CONFIG, WEIGHTS])
        if not (path / CONFIG).is_file():
            raise QtoolError(f"{path}: no {CONFIG}; expected the directory of a LoRA adapter")
        if not (path / WEIGHTS).is_file() and (path / PICKLE).is_file():
            raise QtoolError(_convert(path))
        self.config, self.entries = read_json(path / CONFIG), read_header(path / WEIGHTS)
        self._require_understood()
        if not self.entries:
            raise QtoolError(f"{path}: {WEIGHTS} holds no tensors, so there is nothing to merge")
        for tensor, entry in self.entries.items():
            require_finite(f"{path}: {tensor}", read(entry))

    @property
    def hashes(self) -> dict[str, str | None]:
        """sha256 of both files as they are now."""
        return {file: sha256_of(self.directory / file) for file in (CONFIG, WEIGHTS)}

    def identity(self) -> dict[str, Any]:
        """The adapter's provenance: directory, hub id if it has one, hashes."""
        return provenance(self.directory) | {"sha256": self.hashes}

    def _require_understood(self) -> None:
        """Refuse settings with which the adapter would be merged in another way."""
        config, where = self.config, f"{self.directory}: {CONFIG}"
        if config.get("peft_type") != "LORA":
            raise QtoolError(f"{where}: peft_type {config.get('peft_type')!r}; LORA is expected")
        unknown = sorted(key for key, value in config.items() if value and key not in KNOWN)
        if unknown:
            value = json.dumps(config[unknown[0]])[:60]
            raise QtoolError(f"{where}: {unknown[0]} = {value} is not understood; {INSTEAD}")
        if (initialization := config.get("init_lora_weights")) not in INITIALIZATIONS:
            raise QtoolError(
                f"{where}: init_lora_weights = {initialization!r} changes the model's own weights;"
                f" {INSTEAD}"
            )

    def merge(
        self,
        entries: dict[str, Entry],
        own_name: Callable[[str], str],
        transposed: Collection[str] = (),
    ) -> None:
        """Merge the adapter into a model's ``entries``; a second call changes nothing.

        Args:
            own_name: function from a name in the adapter to the name in ``entries``.
            transposed: names of ``entries`` that are weights ``[K, N]`` of Conv1D. Like peft, this
                depends on the module, whatever ``fan_in_fan_out`` says.

        Raises:
            QtoolError: a tensor of the adapter belongs to no tensor of the model, or does not fit.
        """
        factors: dict[tuple[str, bool], dict[str, Entry]] = {}
        for full, entry in self.entries.items():
            name = full.removeprefix(PREFIX)
            if found := _FACTOR.fullmatch(name):
                module, embedding, factor = found.groups()
                factors.setdefault((module, bool(embedding)), {})[factor] = entry
            elif _UNKNOWN.search(name) or name == full:
                raise QtoolError(f"{self.directory}: {full} is not understood; {INSTEAD}")
            else:  # a whole tensor, from modules_to_save or a bias
                own = own_name(name.replace(".base_layer.", "."))
                entries[own] = self._replaced(own, entry, self._known(entries, own))
        changed = set()
        for (module, embedding), pair in factors.items():
            own = own_name(f"{module}.weight")
            if own in changed:
                raise QtoolError(f"{self.directory}: two pairs of A and B for {own}; {INSTEAD}")
            changed.add(own)
            weight = self._known(entries, own)
            entries[own] = self._merged(module, pair, weight, embedding or own in transposed)

    def _known(self, entries: Mapping[str, Entry], name: str) -> Entry:
        if name not in entries:
            raise QtoolError(f"{self.directory}: {name} is not a tensor of the model; {INSTEAD}")
        return entries[name]

    def _replaced(self, name: str, entry: Entry, before: Entry) -> Entry:
        """The adapter's own tensor in the dtype of the model's."""
        if isinstance(before.computed, Cast):
            return before
        if before.within and before.within.transposed:  # a weight of Conv1D
            entry = entry.transposed()
        if before.shape != entry.shape:
            raise QtoolError(
                f"{self.directory}: {name} is {list(entry.shape)}, and the model's is "
                f"{list(before.shape)}; {INSTEAD}"
            )
        computed = Cast((entry,), before.dtype)
        return Entry(entry.path, before.dtype, entry.shape, entry.start, computed=computed)

    def _merged(
        self, module: str, pair: Mapping[str, Entry], weight: Entry, transposed: bool
    ) -> Entry:
        """The entry of ``weight``, ``[K, N]`` if ``transposed``, with the factors of ``module``."""
        if isinstance(weight.computed, Merged):
            return weight
        if pair.keys() != {"A", "B"} or any(len(e.shape) != 2 for e in (*pair.values(), weight)):
            raise QtoolError(f"{self.directory}: {module} has no pair of matrices A and B")
        a, b = pair["A"], pair["B"]
        scaling, rank = self._scaling(module)
        shape = (b.shape[0], a.shape[1])  # shape of B A
        fits = (shape[::-1] if transposed else shape) == weight.shape
        if not fits or (a.shape[0], b.shape[1]) != (rank, rank):
            raise QtoolError(
                f"{self.directory}: {module} has A {list(a.shape)} and B {list(b.shape)}; of rank "
                f"{rank} for a weight {list(weight.shape)} they are expected"
            )
        left, right = (a.transposed(), b.transposed()) if transposed else (b, a)
        computed = Merged((weight, left, right), scaling)
        return Entry(weight.path, weight.dtype, weight.shape, weight.start, computed=computed)

    def _scaling(self, module: str) -> tuple[float, int]:
        """The scale and the rank of ``module``, from the patterns of the configuration."""
        try:
            rank = int(self._of_pattern("rank_pattern", module, self.config["r"]))
            alpha = float(self._of_pattern("alpha_pattern", module, self.config["lora_alpha"]))
            scaling = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, re.error) as bad:
            raise QtoolError(f"{self.directory}: {CONFIG} is damaged ({bad!r})") from bad
        if not math.isfinite(scaling):
            raise QtoolError(f"{self.directory}: {CONFIG} is damaged (lora_alpha is {alpha})")
        return scaling, rank

    def _of_pattern(self, key: str, module: str, default: Any) -> Any:
        for pattern, value in (self.config.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default


def _convert(path: Path) -> str:
    """The command that converts an adapter's pickle to safetensors."""
    return (
        f'{path / PICKLE} is a pickle, which qtool never reads; convert it: python -c "import '
        f"torch, safetensors.torch as s; s.save_file(torch.load('{path / PICKLE}', "
        f"weights_only=True), '{path / WEIGHTS}')\""
    )
