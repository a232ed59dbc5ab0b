"""A job: all that a run will do, decided before any weight is read.

``plan`` prints a job, ``quantize`` carries it out.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from qtool import plugins, recipes, schemes
from qtool.calibration import ROUNDINGS, TRANSFORMS
from qtool.calibration.method import Method, Rounding, Transform, check_order
from qtool.calibration.options import check_options
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.errors import QtoolError, require_count, suggest
from qtool.exchange.import_formats import already_quantized
from qtool.format import CheckpointFormat, LinearFormat, Rule, of_any_expert
from qtool.io.source import dequantized_note, plain_config
from qtool.layouts.row_major import BY_BITS
from qtool.models import Family, family_of
from qtool.models.architecture import DTYPES, Architecture, dtype_name, named_dtype
from qtool.models.auto import running
from qtool.models.family_checks import require_sizes
from qtool.pipeline.recipe_fit.family_recipe import for_family, for_tied_head
from qtool.pipeline.recipe_fit.group_fit import for_groups
from qtool.pipeline.recipe_fit.layer_rules import require_matches, with_unmatched
from qtool.pipeline.recipe_fit.part_names import for_names
from qtool.pipeline.recipe_fit.tile_fit import for_shapes
from qtool.plugins import require_returned
from qtool.recipes import LayerRule, Recipe, Step
from qtool.runtime.packed_kv import kv_tensors
from qtool.schemes import SCHEMES
from qtool.schemes.kv import KV_QUANTIZERS

Kind = TypeVar("Kind", Transform, Rounding)


@dataclass
class Job(Architecture):
    """A recipe applied to a model.

    Attributes:
        dtype: dtype of tensors that are not packed, and of the scales of packed ones.
        source_dtype: dtype of the source's weights; it differs from ``dtype`` if they are cast.
        format: the native format of the result.
        transforms: the recipe's transforms, in order, with their options.
        rounding: the recipe's rounding, with its options.
        other_dtypes: dtypes of unpacked tensors that keep another one than ``dtype``, by full name.
        unknown: tensors of the source that the family does not know, on ``meta``, which the last
            shard keeps bit for bit.
        source_notes: a sentence for each way in which weights are not read as the files hold them.
    """

    dtype: torch.dtype
    source_dtype: torch.dtype
    recipe: Recipe
    format: CheckpointFormat
    transforms: list[Transform]
    rounding: Rounding
    other_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    unknown: Mapping[str, Tensor] = field(default_factory=dict)
    source_notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        recipe: Recipe,
        source_dtype: torch.dtype | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> "Job":
        """Check that ``recipe`` can be carried out on the model of ``config``.

        Args:
            source_dtype: dtype of the stored weights; by default the one that config.json names.
            dtype: dtype to which tensors that are not packed are cast; by default none is cast.

        Raises:
            QtoolError: unsupported architecture, unknown scheme, layout or method, an impossible
                order of methods, a layer rule that matches no linear, or a linear whose shape the
                scheme or layout cannot hold.
        """
        config, dequantized = plain_config(config)
        if "quantization_config" in config:
            raise QtoolError(already_quantized(config))
        family = family_of(config)
        require_sizes(family, family.settings(config))
        source_dtype = source_dtype or DTYPES.get(named_dtype(config), torch.float32)
        dtype = dtype or source_dtype
        if recipe.built_in:
            recipe = for_family(recipe, family)
        job = cls._composed(config, family, recipe, source_dtype, dtype)
        _require_all_fit(job)
        if job.unties:
            recipe = for_tied_head(recipe, family, job.head_bytes, sum(job.shard_bytes()))
            job = cls._composed(config, family, recipe, source_dtype, dtype)
        if job.needs_data and family.streamed_only:
            raise QtoolError(
                f"{recipe.scheme}/{recipe.variant} looks at activations, which {family.name} "
                f"models cannot give block by block: {family.streamed_only}; pass --recipe fast"
            )
        notes = (dequantized_note(dequantized),) if dequantized else ()
        return replace(job, source_notes=notes)

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
        transforms, rounding = _methods(recipe, family, settings)
        first: dict[Family, int] = {}  # the first block of each kind
        for block, own in enumerate(family.of_blocks(settings)):
            first.setdefault(own, block)
        recipe = _fitted(recipe, family, settings, first)
        rules = tuple(Rule(r.match, _linear_format(r, dtype)) for r in recipe.layers)
        permuted: dict[str, None] = {}  # names in their order, each once
        rotated: dict[str, None] = {}
        for kind in first:
            for method in transforms:
                permuted |= _linears(method, kind, "permutes")
                rotated |= _linears(method, kind, "rotates")
        linears = {name for kind in first for name in kind.linears()}
        checkpoint_format = CheckpointFormat(
            recipe.scheme,
            rules,
            permuted=tuple(permuted),
            kv=recipe.kv,
            rotated=of_any_expert(tuple(rotated), linears),
        )
        return cls(
            config, family, dtype, source_dtype, recipe, checkpoint_format, transforms, rounding
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the model's structure, and why the recipe is what it is."""
        family, recipe = self.family, self.recipe
        reasons = [f"{self.format.scheme}: {recipe.reason}"] if recipe.reason else []
        changes = *reasons, *recipe.adaptations
        if not family.derived:
            return self.source_notes + changes
        unquantized = {
            name: reason
            for block in self.distinct_blocks
            for name, reason in self.block_family(block).unquantized.items()
        }
        return (
            *self.source_notes,
            f"no family declares {family.model_types[0]!r}: derived from transformers' own model "
            "(`qtool family` prints it)",
            *(f"in 16 bits: {name}, {reason}" for name, reason in unquantized.items()),
            *changes,
        )

    @property
    def balances_experts(self) -> bool:
        """Whether experts observe more tokens than the router sends to them."""
        return self.family.experts is not None and self.recipe.min_expert_tokens > 0

    @property
    def weighs_outputs(self) -> bool:
        """Whether rounding weighs the outputs of linears by how the logits depend on them."""
        return self.rounding.weighs_outputs and self.needs_data

    @property
    def methods(self) -> list[Method]:
        """The transforms and the rounding, in the order in which they run."""
        return [*self.transforms, self.rounding]

    @property
    def needs_data(self) -> bool:
        """Whether calibration text is needed."""
        static = self.format.kv is not None and KV_QUANTIZERS[self.format.kv].static
        return static or any(method.needs_data for method in self.methods)

    @property
    def is_plain(self) -> bool:
        """Whether weights are rounded to nearest one by one, without transforms or data.

        Such weights can be streamed.
        """
        # not by needs_data alone: a rounding of another package may need no data either
        nearest = type(self.rounding) is RoundToNearest
        return nearest and not self.transforms and not self.needs_data

    @property
    def unties(self) -> bool:
        """Whether the result stores embedding and head apart although the source ties them."""
        return self.tied and any(t.rewrites_embedding for t in self.transforms)

    @cached_property
    def representatives(self) -> list[int]:
        """For each block the number of the first block equal to it.

        Blocks are equal if they have the same tensors and store them in the same formats.
        """
        firsts: dict[Hashable, int] = {}
        return [firsts.setdefault(self._kind(block), block) for block in range(self.blocks)]

    @property
    def distinct_blocks(self) -> list[int]:
        """The first block of each kind (:attr:`representatives`)."""
        return sorted(set(self.representatives))

    def _kind(self, block: int) -> Hashable:
        family = self.block_family(block)
        return family, *(self.format.of(self.full(block, name)) for name in family.linears())

    def linears(self, block: int) -> dict[str, tuple[int, int]]:
        """Shapes ``(N, K)`` of the linears of a block that may be quantized, by name within it."""
        shapes = self.block_shapes(block)
        return {name: shapes[f"{name}.weight"] for name in self.block_family(block).linears()}  # type: ignore[misc]

    def formats(self, block: int) -> dict[str, LinearFormat]:
        """The formats of the linears of a block that are quantized, by name within it."""
        full_names = {name: self.full(block, name) for name in self.linears(block)}
        return {name: found for name, full in full_names.items() if (found := self.format.of(full))}

    def shards(self) -> list[dict[str, Tensor]]:
        """The tensors of all output shards, on ``meta``.

        The first shard has the embedding, the last one the final norm and the head (and the
        :attr:`unknown` tensors); each shard between them is a block.
        """
        first, last = (
            {name: self._meta(name, shape) for name, shape in shapes.items()}
            for shapes in self._stored_outside_blocks()
        )
        blocks = (self.block_tensors(block) for block in range(self.blocks))
        return [first, *blocks, last | dict(self.unknown)]

    def _stored_outside_blocks(
        self,
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """:meth:`embedding_and_head` of the result, which may have no head of its own."""
        first, last = self.embedding_and_head()
        if self.tied and not self.unties:
            del last[f"{self.family.head}.weight"]
        return first, last

    @property
    def head_bytes(self) -> int:
        """Bytes of the head if it is stored apart from the embedding."""
        dims = self.family.dimensions(self.namespace)
        return int(dims["vocab"]) * int(dims["hidden"]) * self.dtype.itemsize

    def shard_bytes(self) -> list[int]:
        """The bytes of all output shards, without making :meth:`shards`."""
        first, last = (
            sum(prod(shape) * self.stored_dtype(name).itemsize for name, shape in shapes.items())
            for shapes in self._stored_outside_blocks()
        )
        blocks = {block: self.block_bytes(block) for block in self.distinct_blocks}
        kept = sum(tensor.nbytes for tensor in self.unknown.values())
        return [first, *(blocks[block] for block in self.representatives), last + kept]

    def block_tensors(self, block: int) -> dict[str, Tensor]:
        """The stored tensors of a block, by full name, on ``meta``."""
        shapes = self.block_shapes(block)
        tensors: dict[str, Tensor] = {}
        for name, linear_format in self.formats(block).items():
            n, k = shapes.pop(f"{name}.weight")
            stored = linear_format.tensors(n, k)
            if self.format.is_permuted(self.full(block, name)):
                stored["permutation"] = torch.empty(k, dtype=torch.int32, device="meta")
            tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
        tensors |= {
            name: self._meta(self.full(block, name), shape) for name, shape in shapes.items()
        }
        tensors |= kv_tensors(self.format.kv, self.block_family(block), self.namespace)
        return {self.full(block, name): tensor for name, tensor in tensors.items()}

    def block_bytes(self, block: int) -> int:
        """The bytes a block stores, without making :meth:`block_tensors`."""
        shapes = self.block_shapes(block)
        stored = 0
        for name in self.formats(block):
            stored += self.packed_bytes(self.full(block, name), *shapes.pop(f"{name}.weight"))
        scales = kv_tensors(self.format.kv, self.block_family(block), self.namespace).values()
        stored += sum(scale.nbytes for scale in scales)
        return stored + sum(
            prod(shape) * self.stored_dtype(self.full(block, name)).itemsize
            for name, shape in shapes.items()
        )

    def packed_bytes(self, name: str, n: int, k: int) -> int:
        """The bytes of the quantized linear ``[n, k]`` with the full name ``name``."""
        linear_format = self.format.of(name)
        assert linear_format is not None
        return linear_format.nbytes(n, k) + (4 * k if self.format.is_permuted(name) else 0)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which tensor ``name`` (by full name) is stored if it is not packed."""
        return self.other_dtypes.get(name, self.dtype)

    def _meta(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.stored_dtype(name), device="meta")


def _require_all_fit(job: Job) -> None:
    """Refuse an unknown KV quantizer, and a linear that scheme, layout or rounding cannot take."""
    for block in job.distinct_blocks:
        kv_tensors(job.recipe.kv, job.block_family(block), job.namespace)
    if job.recipe.kv and not any(job.block_family(n).kv_cache for n in job.distinct_blocks):
        raise QtoolError(f"{job.recipe.kv}: {job.family.name} models declare no kv_cache")
    packed = [
        (job.full(block, name), shapes[name], linear_format)
        for block in job.distinct_blocks
        for shapes in [job.linears(block)]
        for name, linear_format in job.formats(block).items()
    ]
    common: dict[LinearFormat, int] = {}
    for _, (_, k), linear_format in packed:
        common[linear_format] = gcd(common.get(linear_format, 0), k)
    for name, shape, linear_format in packed:
        linear_format.require(name, *shape, common[linear_format])
    for linear_format in common:
        job.rounding.require_scheme(linear_format.scheme_object)


def _linear_format(rule: LayerRule, dtype: torch.dtype) -> LinearFormat | None:
    if rule.scheme is None:
        return None
    if rule.scheme not in SCHEMES and rule.scheme in recipes.built_in():
        meant = "; ".join(
            f"scheme: {of.scheme}, group_size: {of.group_size or 'channel'}"
            for of in recipes.load(rule.scheme).layers
        )
        raise QtoolError(f"a layer rule has {rule.scheme}, a recipe, for its scheme: say {meant}")
    try:
        scheme = schemes.get(rule.scheme, rule.group_size, dtype)
    except QtoolError as error:
        sentence = f"layer rule ({rule}): {error}"
        if rule.group_size is None and rule.scheme in SCHEMES:
            size = SCHEMES[rule.scheme].default_group_size
            sentence += (
                f"; {size} is usual, and a recipe's rule without group_size has the whole channel"
            )
        raise QtoolError(sentence) from error
    if rule.layout is None and (bits := scheme.code_bits) not in BY_BITS:
        raise QtoolError(
            f"a layer rule has {rule.scheme}, whose {bits}-bit codes no row-major layout holds, and"
            " no layout: say one that does"
        )
    layout = rule.layout or BY_BITS[scheme.code_bits].name
    return LinearFormat(rule.scheme, rule.group_size, layout, dtype_name(scheme.scale_dtype))


def _require_transforms(what: str, names: Iterable[str]) -> None:
    """Refuse a name among ``names``, of which a message says ``what``, that no transform has."""
    for name in names:
        if name not in TRANSFORMS:
            raise QtoolError(f"{what} {name!r}, which is no transform: {suggest(name, TRANSFORMS)}")


def _linears(method: Transform, family: Family, does: str) -> dict[str, None]:
    """Names of the linears whose inputs ``method`` permutes or rotates, in their order.

    Raises:
        QtoolError: it fails, one of them is no linear of a block, or they are no names.
    """
    linears = set(family.linears())
    with running(fails=f"{method.name}: {does} fails on {family.name} models"):
        names = getattr(method, does)(family)
    for name in require_returned(method, does, names, Sequence[str]):
        if name not in linears:
            raise QtoolError(
                f"{method.name}: it {does} the inputs of {name!r}, no linear of {family.name} "
                f"blocks: {suggest(name, linears)}"
            )
    return dict.fromkeys(names)


def _fitted(recipe: Recipe, family: Family, settings: Any, first: Mapping[Family, int]) -> Recipe:
    """``recipe`` with layer rules for the linears of a model with ``settings``.

    ``first`` has the number of the first block of each kind.

    Raises:
        QtoolError: a rule of a user's recipe matches no linear.
    """
    if recipe.built_in:  # its rules name the linears of every family
        shapes = {
            f"{family.blocks}.{block}.{name}": kind.shape(f"{name}.weight", settings)
            for kind, block in first.items()
            for name in kind.linears()
        }
        return for_shapes(for_groups(for_names(recipe, first), shapes), shapes)
    names = list(family.all_linears(settings))
    require_matches(recipe, names)
    return with_unmatched(recipe, names)


def _methods(recipe: Recipe, family: Family, settings: Any) -> tuple[list[Transform], Rounding]:
    """The transforms and the rounding of ``recipe``, prepared for a model with ``settings``.

    Raises:
        QtoolError: an unknown method, an impossible order, or the family cannot have one of them.
    """
    transforms = [_method(TRANSFORMS, step, "transform") for step in recipe.transforms]
    rounding = _method(ROUNDINGS, recipe.rounding, "rounding")
    check_order(transforms)
    _require_transforms(f"family {family.name}: it refuses", family.refuses.keys() - {"kv"})
    for method in transforms:
        _require_transforms(f"{method.name}: it comes after", method.after)
        with running(fails=f"{method.name}: prepare fails on {family.name} models"):
            method.prepare(family, settings)
        plugins.require_kinds(method, method.name, plugins.properties(Transform))
    plugins.require_kinds(rounding, rounding.name, plugins.properties(Rounding))
    require_count(f"{rounding.name}: iteration", rounding.iteration)
    return transforms, rounding


def _method(table: dict[str, type[Kind]], step: Step, kind: str) -> Kind:
    method = plugins.find(table, step.name, kind)
    check_options(method, step.options)
    return method(**step.options)
