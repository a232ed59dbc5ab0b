"""What a run will do, decided before any weight is read: model, family, recipe, formats, shapes.

``plan`` prints a job, ``quantize`` carries it out.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qtool import plugins
from qtool.calibration import ROUNDINGS, TRANSFORMS
from qtool.calibration.method import Method, Rounding, Transform, check_order
from qtool.calibration.options import check_options
from qtool.errors import QtoolError
from qtool.exchange.sources import already_quantized
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.models import Family, family_of
from qtool.models.parts import Heads
from qtool.pipeline.family_recipe import for_family, for_tied_head
from qtool.pipeline.layer_rules import require_matches
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
        config: the source's config.json.
        dtype: of what is stored unpacked, and of the scales of what is packed.
        source_dtype: of the source's weights; another one where the result is cast.
        format: the native format of the result.
        transforms, rounding: the recipe's methods, in order, with their options.
        other_dtypes: of tensors that stay unpacked in another dtype than ``dtype``, by full name.
        unknown: tensors of the source that the family does not know, on ``meta``, which the last
            shard keeps bit for bit.
    """

    config: dict[str, Any]
    family: Family
    dtype: torch.dtype
    source_dtype: torch.dtype
    recipe: Recipe
    format: CheckpointFormat
    transforms: list[Transform]
    rounding: Rounding
    other_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    unknown: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        recipe: Recipe,
        source_dtype: torch.dtype | None = None,
        *,
        dtype: torch.dtype | None = None,
        planning: bool = False,
    ) -> "Job":
        """Check that ``recipe`` can be carried out on the model of ``config``.

        Args:
            source_dtype: of the stored weights; by default what config.json names.
            dtype: what is not packed is cast to it; by default nothing is cast.
            planning: it will not be carried out, so the shapes of the model are enough.

        Raises:
            QtoolError: unsupported architecture, unknown scheme, layout or method, an impossible
                order of methods, a layer rule that matches no linear, or a linear whose shape the
                scheme or layout cannot hold.
        """
        if "quantization_config" in config:
            raise QtoolError(already_quantized(config))
        family = family_of(config["model_type"], planning=planning)
        family.require_sizes(family.settings(config))
        source_dtype = source_dtype or DTYPES.get(
            str(config.get("dtype") or config.get("torch_dtype")), torch.float32
        )
        recipe = for_family(recipe, family)
        job = cls._composed(config, family, recipe, source_dtype, dtype or source_dtype)
        if job.unties:
            recipe = for_tied_head(recipe, family, job.head_bytes, sum(job.shard_bytes()))
            job = cls._composed(config, family, recipe, source_dtype, dtype or source_dtype)
        _require_all_fit(job)
        return job

    @classmethod
    def _composed(
        cls,
        config: dict[str, Any],
        family: Family,
        recipe: Recipe,
        source_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> "Job":
        """The job of ``recipe`` with its methods made and each layer rule with its format."""
        settings = family.settings(config)
        transforms = [_method(TRANSFORMS, step, "transform") for step in recipe.transforms]
        rounding = _method(ROUNDINGS, recipe.rounding, "rounding")
        check_order(transforms)
        for method in transforms:
            method.prepare(family, settings)
        blocks = range(settings.num_hidden_layers)
        first = {family.at(settings, block): block for block in reversed(blocks)}
        kinds = list(first)[::-1]
        shapes = {
            f"{family.blocks}.{first[kind]}.{n}": kind.shape(f"{n}.weight", settings)
            for kind in kinds
            for n in kind.linears()
        }
        names = (
            f"{family.blocks}.{block}.{linear}"
            for block in blocks
            for linear in family.at(settings, block).linears()
        )
        require_matches(recipe, names, next(iter(shapes)))
        recipe = for_shapes(recipe, shapes)
        rules = tuple(Rule(r.match, _linear_format(r, dtype)) for r in recipe.layers)
        permuted = tuple(
            dict.fromkeys(n for kind in kinds for t in transforms for n in t.permutes(kind))
        )
        checkpoint_format = CheckpointFormat(recipe.scheme, rules, permuted, recipe.kv)
        return cls(
            config, family, dtype, source_dtype, recipe, checkpoint_format, transforms, rounding
        )

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
    def representatives(self) -> list[int]:
        """For each block the first one like it.

        Blocks are alike if they have the same tensors and store them in the same formats.
        """
        firsts: dict[Any, int] = {}
        return [firsts.setdefault(self._kind(block), block) for block in range(self.blocks)]

    @property
    def distinct_blocks(self) -> list[int]:
        """The first block of each kind (:attr:`representatives`)."""
        return sorted(set(self.representatives))

    def _kind(self, block: int) -> Hashable:
        family = self.block_family(block)
        if self.format.rules[0].match == ".*":  # one format for all linears of all blocks
            return family
        return family, *(self.format.of(self.full(block, name)) for name in family.linears())

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
        """The tensors of every output shard, on ``meta``.

        The first has the embedding, the last the final norm and the head (and what is
        :attr:`unknown`), and those between are a block each.
        """
        first, last = (
            {name: self._meta(name, shape) for name, shape in shapes.items()}
            for shapes in self._stored_edges()
        )
        blocks = (self.block_tensors(block) for block in range(self.blocks))
        return [first, *blocks, last | dict(self.unknown)]

    def _stored_edges(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """:meth:`embedding_and_head` of the result, which may have no head of its own."""
        first, last = self.embedding_and_head()
        if self.tied and not self.unties:
            del last[f"{self.family.head}.weight"]
        return first, last

    @property
    def head_bytes(self) -> int:
        """Of the head where it is stored apart from the embedding."""
        dims = self.family.dimensions(self.namespace)
        return int(dims["vocab"]) * int(dims["hidden"]) * self.dtype.itemsize

    def shard_bytes(self) -> list[int]:
        """The bytes of every output shard: those of :meth:`shards`, without making them."""
        first, last = (
            sum(prod(shape) * self.stored_dtype(name).itemsize for name, shape in shapes.items())
            for shapes in self._stored_edges()
        )
        blocks = {block: self.block_bytes(block) for block in self.distinct_blocks}
        kept = sum(t.numel() * t.dtype.itemsize for t in self.unknown.values())
        return [first, *(blocks[block] for block in self.representatives), last + kept]

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
        tensors |= {
            name: self._meta(self.full(block, name), shape) for name, shape in shapes.items()
        }
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
        return stored + sum(
            prod(shape) * self.stored_dtype(self.full(block, name)).itemsize
            for name, shape in shapes.items()
        )

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which tensor ``name`` (by full name) is stored if it is not packed."""
        return self.other_dtypes.get(name, self.dtype)

    def _meta(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.stored_dtype(name), device="meta")


def _require_all_fit(job: Job) -> None:
    """Refuse an unknown KV quantizer, and a linear that its scheme or layout cannot hold."""
    kv_tensors(job.recipe.kv, job.family, Heads.of(job.namespace))
    for block in job.distinct_blocks:
        for name, shape in job.linears(block).items():
            if linear_format := job.format.of(job.full(block, name)):
                linear_format.require(job.full(block, name), *shape)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _linear_format(rule: Any, dtype: torch.dtype) -> LinearFormat | None:
    if rule.scheme is None:
        return None
    scale_dtype = dtype_name(dtype)
    bits = LinearFormat(rule.scheme, rule.group_size, "", scale_dtype).scheme_object.code_bits
    return LinearFormat(rule.scheme, rule.group_size, rule.layout or ROW_MAJOR[bits], scale_dtype)


def _method(table: dict[str, type[Kind]], step: Step, kind: str) -> Kind:
    method = plugins.find(table, step.name, kind)
    check_options(method, step.options)
    return method(**step.options)


def native_format(config: dict[str, Any]) -> CheckpointFormat:
    """The format of a native checkpoint.

    Raises:
        QtoolError: the model is not quantized, or not by qtool.
    """
    if "quantization_config" not in config:
        raise QtoolError("the model is not quantized: config.json has no quantization_config")
    return CheckpointFormat.from_dict(config["quantization_config"])
