"""The options of a run, filled from Python keywords or from the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import torch

from qtool import recipes
from qtool.data.defaults import CALIBRATION_SEQLEN
from qtool.errors import (
    QtoolError,
    plain,
    require_count,
    require_path,
    suggest,
)
from qtool.io.source import plain_config
from qtool.models.architecture import require_dtype
from qtool.plugins import require_keywords
from qtool.recipes import Recipe
from qtool.recipes.schema import CONTINUED, GIVEN
from qtool.schemes import hardware
from qtool.schemes.kv import KV4, require_kv
from qtool.units import whole_number

WHOLE_CHANNEL = "channel"
ACTIVATIONS = ("auto", "device", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class RecipeOverrides:
    """Choices that replace a recipe's own; None leaves the recipe's.

    Attributes:
        target: a GPU (``a100``, ``l40s``, ``h200``, ...), which decides the granularity and,
            of W4A8, the layout.
        group_size: input channels a group, or ``"channel"``.
        layout: packed layout of every quantized layer.
        kv: KV-cache quantizer: ``kv8``, ``kv4`` or ``kv4-channel``.
        windows: calibration windows are all of the text (``given``), or started by it and continued
            by the model (``continued``).
        max_8bit_blocks: most 8-bit blocks of 128 channels in a layer of w4ax-fmpq.
        for_export: leave out ``online-hadamard``, which only qtool's runtime and plugins run.
    """

    target: str | None = None
    group_size: int | str | None = None
    layout: str | None = None
    kv: str | None = None
    windows: str | None = None
    max_8bit_blocks: int | None = None
    for_export: bool = False

    def recipe(
        self,
        scheme: str | None,
        recipe: str | PathLike[str] | Mapping[str, Any] | Recipe | None = None,
        *,
        calibrated: bool = False,
    ) -> Recipe:
        """The recipe of ``scheme`` with these overrides.

        Args:
            recipe: a variant (``fast``, ``paper``, ``best``), a YAML file, its content, or a
                recipe; by default ``fast``, or ``paper`` if ``calibrated``.

        Raises:
            QtoolError: an unknown scheme, variant, GPU or KV quantizer, a recipe that does not
                read or quantizes nothing, or a group size that is no number.
        """
        reasons, layout = [], None
        if self.target is not None:
            scheme, why, layout = granularity(scheme, self.target)
            if why and self.group_size is None:
                reasons.append(why)
            if layout and self.layout is None:
                reasons.append(f"the W4A8 kernel for {self.target} reads {layout}")
        elif scheme == "w4a4" and recipe in (None, *recipes.VARIANTS):
            raise QtoolError(
                "w4a4 comes in two granularities: write w4a4-g128 or w4a4-mix, or name the GPU"
                " with --target (a100, l40s, h200, ...), which chooses one"
            )
        if recipe is None:
            chosen = recipes.load(scheme, default="paper" if calibrated else "fast")
        elif isinstance(recipe, Recipe):
            chosen = recipe
        elif isinstance(recipe, Mapping):
            chosen = recipes.parse(recipe, scheme or "recipe")
        else:
            chosen = recipes.load(scheme, str(require_path("recipe", recipe)))
        if reasons:
            chosen = replace(chosen, reason="; ".join(reasons))
        if layout is not None:
            assert scheme is not None
            chosen = chosen.with_layout_of(scheme, layout)
        chosen = self._applied(chosen)
        if chosen.kv is not None:
            require_kv(chosen.kv)
        elif all(rule.scheme is None for rule in chosen.layers):
            raise QtoolError(
                f"{chosen.scheme}: nothing would be quantized: no layer rule has a scheme, and "
                "there is no kv"
            )
        return chosen

    def _applied(self, chosen: Recipe) -> Recipe:
        """The recipe ``chosen`` with these overrides but the target, which chooses the recipe."""
        if self.group_size is not None:
            chosen = chosen.with_group_size(group_size("--group-size", self.group_size))
        if self.layout is not None:
            chosen = chosen.with_layout(self.layout)
        if self.max_8bit_blocks is not None:
            chosen = chosen.with_options("gather-outliers", max_8bit_blocks=self.max_8bit_blocks)
        if self.for_export:
            chosen = chosen.for_export()
        if self.windows is not None:
            if self.windows not in (GIVEN, CONTINUED):
                raise QtoolError(f"--windows {self.windows!r}: {GIVEN} or {CONTINUED} is expected")
            chosen = replace(chosen, windows=self.windows)
        if self.kv is not None:
            chosen = replace(chosen, kv=self.kv)
            if self.kv == KV4.name and chosen.variant in ("paper", "best"):
                chosen = chosen.for_kv4()
        return chosen


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(RecipeOverrides):
    """All options of a run; :class:`QuantizeKeywords` are the same as keywords of a function.

    Attributes:
        samples: number of calibration windows; by default that of the parts of a mix, or 128.
        seqlen: tokens in a window, at most the model's context.
        seed: seed of the choice of windows, and of the tokens with which the model continues them.
        data_dir: directory with local copies of corpora; by default that of ``QTOOL_DATA_DIR``.
        activations: place of calibration activations between blocks: ``device``, ``host``,
            ``disk``, or ``auto``: on the device, the rest on the host; all on disk if these have no
            room.
        resume: continue an unfinished run; not of a model in memory.
        dtype: ``bfloat16``, ``float16`` or ``float32``, to which tensors that are not packed are
            cast; by default they are not cast.
        keep_unknown: copy tensors that neither the family nor transformers' class knows.
        adapter: a LoRA adapter (a directory or a hub id) that is merged into the weights as they
            are read.
    """

    samples: int | None = None
    seqlen: int = CALIBRATION_SEQLEN
    seed: int = 0
    data_dir: str | Path | None = None
    activations: str = "auto"
    resume: bool = False
    dtype: str | torch.dtype | None = None
    keep_unknown: bool = False
    adapter: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.samples is not None:
            require_count("--samples", self.samples)
        require_count("--seqlen", self.seqlen, 2)
        if type(self.seed) is not int or self.seed.bit_length() > 63:
            raise QtoolError(f"--seed {self.seed!r}: a whole number of at most 63 bits is expected")
        if self.dtype is not None:
            require_dtype("--dtype", self.dtype)
        if self.activations not in ACTIVATIONS:
            raise QtoolError(
                f"--activations {self.activations!r}: {suggest(self.activations, ACTIVATIONS)}"
            )
        if self.adapter is not None:
            require_path("--adapter", self.adapter)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "QuantizeOptions":
        """Options by name.

        Raises:
            QtoolError: an unknown name, with a suggestion, or a value that it cannot have.
        """
        options = plain(options)
        require_keywords(options, cls)
        return cls(**options)

    def repacks(self, config: Mapping[str, Any], recipe: Recipe, text: Any) -> bool:
        """Whether a run imports the model of ``config`` as it is, code for code.

        It does if the model is quantized already, and nothing but its layout is to change.

        Args:
            recipe: recipe of the run.
            text: the calibration text; None: none is given.
        """
        changes = self.target, self.group_size, self.kv, self.windows, self.max_8bit_blocks
        return (
            "quantization_config" in plain_config(dict(config))[0]
            and (recipe.scheme, recipe.variant) == ("w4a16", "fast")
            and all(value is None for value in (*changes, self.adapter, self.dtype, text))
        )


class QuantizeKeywords(TypedDict, total=False):
    """The fields of :class:`QuantizeOptions` but ``kv``; each of them may be left out."""

    target: str | None
    group_size: int | str | None
    layout: str | None
    windows: str | None
    max_8bit_blocks: int | None
    for_export: bool
    samples: int | None
    seqlen: int
    seed: int
    data_dir: str | Path | None
    activations: str
    resume: bool
    dtype: str | torch.dtype | None
    keep_unknown: bool
    adapter: str | PathLike[str] | None


def granularity(scheme: str | None, target: str) -> tuple[str, str, str | None]:
    """The scheme whose granularity suits the GPU ``target``, the reason, and the GPU's layout.

    The layout is None where the recipe's holds; ``w4a8-lqq`` has a layout to choose alone, and the
    reason is empty.

    The rules are those of APEX4 section 3.2.2 and QServe section 5.3.

    Raises:
        QtoolError: an unknown GPU, or a scheme for which nothing is chosen.
    """
    if scheme in ("w4a4", "w4a4-g128", "w4a4-mix"):
        size, reason = hardware.choose_w4a4(hardware.gpu(target))
        return f"w4a4-{size}", reason, None
    if scheme in ("w4a8-qoq", "w4a8-qoq-g128"):
        gpu = hardware.gpu(target)
        return *hardware.choose_qoq(gpu), gpu.w4a8_layout
    if scheme == "w4a8-lqq":
        return scheme, "", hardware.gpu(target).w4a8_layout
    found = f"{scheme} has no such choice" if scheme else "pass --scheme with one of them"
    raise QtoolError(f"--target chooses for w4a4, w4a8-qoq and w4a8-lqq; {found}")


def group_size(name: str, value: int | str) -> int | None:
    """The input channels of a group; None for the whole channel.

    Raises:
        QtoolError: ``value`` is no group size; the message names it.
    """
    if value == WHOLE_CHANNEL:
        return None
    if size := whole_number(str(value)):
        return size
    raise QtoolError(f"{name} {value!r}: a number of input channels or 'channel' is expected")
