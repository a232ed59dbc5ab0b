"""What a run will do, decided before any weight is read: model, family, recipe, formats, shapes.

``plan`` prints a job, ``quantize`` carries it out.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qtool.calibration import ROUNDINGS, TRANSFORMS
from qtool.calibration.method import Method, Rounding, Transform, check_order
from qtool.calibration.options import check_options
from qtool.errors import QtoolError, suggest
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.models import Family, family_of
from qtool.models.parts import Heads
from qtool.pipeline.family_recipe import for_family
from qtool.pipeline.tile_fit import ROW_MAJOR, for_shapes
from qtool.recipes import Recipe, Step
from qtool.runtime.packed_kv import kv_tensors
from qtool.schemes.kv import KV_QUANTIZERS

Kind = TypeVar("Kind", Transform, Rounding)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Job:
    """A recipe applied to a model.

    Attributes:
        config: the source's config.json. dtype: of its weights.
        format: the native format of the result.
        transforms, rounding: the recipe's methods, in order, with their options.
    """

    config: dict[str, Any]
    family: Family
    dtype: torch.dtype
    recipe: Recipe
    format: CheckpointFormat
    transforms: list[Transform]
    rounding: Rounding

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        recipe: Recipe,
        dtype: torch.dtype | None = None,
        *,
        planning: bool = False,
    ) -> "Job":
        """Check that ``recipe`` can be carried out on the model of ``config``.

        Args:
            dtype: of the stored weights; by default what config.json names.
            planning: it will not be carried out, so the shapes of the model are enough.

        Raises:
            QtoolError: unsupported architecture, unknown scheme, layout or method, an impossible
                order of methods, or a linear whose shape the scheme or layout cannot hold.
        """
        if "quantization_config" in config:
            method = config["quantization_config"].get("quant_method")
            raise QtoolError(
                f"the model is quantized already (quant_method {method!r}); pass the original checkpoint, or, if it is "
                "symmetric 4-bit GPTQ, AWQ, AutoRound or compressed-tensors, repack it with `qtool import`"
            )
        family = family_of(config["model_type"], planning=planning)
        recipe = for_family(recipe, family)
        settings = family.settings(config)
        family.require_sizes(settings)
        dtype = dtype or DTYPES.get(
            str(config.get("dtype") or config.get("torch_dtype")), torch.float32
        )
        transforms = [_method(TRANSFORMS, step, "transform") for step in recipe.transforms]
        rounding = _method(ROUNDINGS, recipe.rounding, "rounding")
        check_order(transforms)
        for method in transforms:
            method.prepare(family, settings)
        first = {
            family.at(settings, block): block
            for block in reversed(range(settings.num_hidden_layers))
        }
        kinds = list(first)[::-1]
        shapes = {
            f"{family.blocks}.{first[kind]}.{n}": kind.shape(f"{n}.weight", settings)
            for kind in kinds
            for n in kind.linears()
        }
        recipe = for_shapes(recipe, shapes)
        rules = tuple(Rule(r.match, _linear_format(r, dtype)) for r in recipe.layers)
        permuted = tuple(
            dict.fromkeys(n for kind in kinds for t in transforms for n in t.permutes(kind))
        )
        job = cls(
            config,
            family,
            dtype,
            recipe,
            CheckpointFormat(recipe.scheme, rules, permuted, recipe.kv),
            transforms,
            rounding,
        )
        kv_tensors(
            recipe.kv, family, Heads.of(job.namespace)
        )  # an unknown quantizer is refused here
        for block in job.first_of_kinds():
            for name, shape in job.linears(block).items():
                if linear_format := job.format.of(job.full(block, name)):
                    linear_format.require(job.full(block, name), *shape)
        return job

    @property
    def methods(self) -> list[Method]:
        """The transforms and the rounding."""
        return [*self.transforms, self.rounding]

    @property
    def needs_data(self) -> bool:
        """Whether calibration text is needed."""
        static = self.format.kv is not None and KV_QUANTIZERS[self.format.kv].static
        return static or any(method.needs_data for method in self.methods)

    @property
    def is_plain(self) -> bool:
        """Rounding each weight by itself: no transform, no data, so weights can be streamed one by
        one.
        """
        return not self.transforms and not self.needs_data

    @property
    def blocks(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def tied(self) -> bool:
        """Embedding and head are one tensor in the source."""
        return bool(getattr(self.namespace, "tie_word_embeddings", False))

    @property
    def unties(self) -> bool:
        """The result stores embedding and head apart although the source ties them."""
        return self.tied and any(t.rewrites_embedding for t in self.transforms)

    @property
    def namespace(self) -> SimpleNamespace:
        """The config as an object, for what only reads attributes."""
        return self.family.settings(self.config)

    def block_family(self, block: int) -> Family:
        """The family as block ``block`` looks."""
        return self.family.at(self.namespace, block)

    @cached_property
    def kinds(self) -> list[int]:
        """For each block the first that is like it: of the same family, its linears stored in the
        same formats.
        """
        firsts: dict[Any, int] = {}
        return [firsts.setdefault(self._kind(block), block) for block in range(self.blocks)]

    def _kind(self, block: int) -> Hashable:
        family = self.block_family(block)
        if self.format.rules[0].match == ".*":  # one format for all linears of all blocks
            return family
        return family, *(self.format.of(self.full(block, name)) for name in family.linears())

    def first_of_kinds(self) -> list[int]:
        """The first block of each kind there is (:attr:`kinds`)."""
        return sorted(set(self.kinds))

    def full(self, block: int, name: str) -> str:
        """The full name of ``name`` of block ``block``."""
        return f"{self.family.blocks}.{block}.{name}"

    def linears(self, block: int) -> dict[str, tuple[int, int]]:
        """Shape ``(N, K)`` of every linear of a block that the family lets one quantize."""
        shapes = self.block_shapes(block)
        return {name: shapes[f"{name}.weight"] for name in self.block_family(block).linears()}  # type: ignore[misc]

    def block_shapes(self, block: int) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of a block, by its name within the block."""
        return self.block_family(block).block_shapes(self.namespace)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the source must hold, by full name."""
        shapes = self.embedding_and_head()[0]
        for block in range(self.blocks):
            shapes |= {
                self.full(block, name): shape for name, shape in self.block_shapes(block).items()
            }
        last = self.embedding_and_head()[1]
        if self.tied:
            del last[f"{self.family.head}.weight"]
        return shapes | last

    def embedding_and_head(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Shape of every tensor before the blocks (tables) and after them (final norm, head)."""
        family, dims = self.family, self.family.dimensions(self.namespace)
        first = {f"{family.embedding}.weight": (dims["vocab"], dims["hidden"])}
        if family.positions:
            first[f"{family.positions}.weight"] = (dims["positions"], dims["hidden"])
        last: dict[str, tuple[int, ...]] = {f"{family.final_norm}.weight": (dims["hidden"],)}
        if family.layer_norm:
            last[f"{family.final_norm}.bias"] = (dims["hidden"],)
        return dict(first), last | {f"{family.head}.weight": (dims["vocab"], dims["hidden"])}

    def shards(self) -> list[dict[str, Tensor]]:
        """The tensors of every output shard, on ``meta``: embedding, one shard a block, final norm
        and head.
        """
        first, last = (
            {name: self._meta(shape) for name, shape in end.items()}
            for end in self.embedding_and_head()
        )
        if self.tied and not self.unties:
            del last[f"{self.family.head}.weight"]
        return [first, *(self.block_tensors(b) for b in range(self.blocks)), last]

    def block_tensors(self, block: int) -> dict[str, Tensor]:
        """The stored tensors of a block, by full name, on ``meta``."""
        shapes = self.block_shapes(block)
        tensors: dict[str, Tensor] = {}
        for name, (n, k) in self.linears(block).items():
            if linear_format := self.format.of(self.full(block, name)):
                stored = linear_format.tensors(n, k)
                if self.format.is_permuted(self.full(block, name)):
                    stored["permutation"] = torch.empty(k, dtype=torch.int32, device="meta")
                tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
                del shapes[f"{name}.weight"]
        tensors |= {name: self._meta(shape) for name, shape in shapes.items()}
        tensors |= kv_tensors(self.format.kv, self.family, Heads.of(self.namespace))
        return {self.full(block, name): tensor for name, tensor in tensors.items()}

    def block_bytes(self, block: int) -> int:
        """The bytes a block stores: those of :meth:`block_tensors`, without making them."""
        shapes = self.block_shapes(block)
        stored = 0
        for name, (n, k) in self.linears(block).items():
            if linear_format := self.format.of(self.full(block, name)):
                permutation = 4 * k if self.format.is_permuted(self.full(block, name)) else 0
                stored += linear_format.nbytes(n, k) + permutation
                del shapes[f"{name}.weight"]
        scales = kv_tensors(self.format.kv, self.family, Heads.of(self.namespace)).values()
        stored += sum(t.numel() * t.dtype.itemsize for t in scales)
        return stored + sum(map(prod, shapes.values())) * self.dtype.itemsize

    def _meta(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def _linear_format(rule: Any, dtype: torch.dtype) -> LinearFormat | None:
    if rule.scheme is None:
        return None
    scale_dtype = str(dtype).removeprefix("torch.")
    bits = LinearFormat(rule.scheme, rule.group_size, "", scale_dtype).scheme_object.code_bits
    return LinearFormat(rule.scheme, rule.group_size, rule.layout or ROW_MAJOR[bits], scale_dtype)


def _method(table: dict[str, type[Kind]], step: Step, kind: str) -> Kind:
    if step.name not in table:
        raise QtoolError(f"unknown {kind} {step.name!r}: {suggest(step.name, table)}")
    check_options(table[step.name], step.options)
    return table[step.name](**step.options)


def native_format(config: dict[str, Any]) -> CheckpointFormat:
    """The format of a native checkpoint.

    Raises:
        QtoolError: the model is not quantized, or not by qtool.
    """
    if "quantization_config" not in config:
        raise QtoolError("the model is not quantized: config.json has no quantization_config")
    return CheckpointFormat.from_dict(config["quantization_config"])
