"""The schema of a recipe: the scheme of each layer, and the methods. It imports no torch.

:mod:`qtool.recipes.recipe` reads a recipe from YAML.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qtool.errors import QtoolError

GIVEN, CONTINUED = "given", "continued"
#: default of ``min_expert_tokens``, measured in benchmarks/journal/mixtures.md
MIN_EXPERT_TOKENS = 128


@dataclass(frozen=True)
class Step:
    """A method by name and its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class LayerRule:
    """Assigns ``scheme`` to the linears whose full name matches the regex ``match``.

    ``scheme=None`` leaves them in 16 bits; ``layout=None`` means row-major. ``roles`` are those
    that ``match`` was made of; messages quote them.
    """

    match: str
    scheme: str | None
    group_size: int | None = None
    layout: str | None = None
    roles: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"roles [{', '.join(self.roles)}]" if self.roles else f"match {self.match!r}"


@dataclass(frozen=True)
class Departure:
    """One point where a recipe differs from the paper it is named after, and the effect."""

    what: str
    effect: str


@dataclass(frozen=True)
class Recipe:
    """One complete recipe.

    Attributes:
        scheme: the name of the recipe; its rules say which schemes the layers get.
        about: one sentence that describes the recipe.
        layers: the rules; the first that matches a linear's name applies to it.
        transforms: the transforms in the order in which they run.
        rounding: the method that turns weights into codes.
        kv: KV-cache quantizer, or None.
        windows: ``given``: calibration windows are taken from a text; ``continued``: each starts
            with tokens of a text and the model generates the rest.
        min_expert_tokens: least number of calibration tokens that each expert of a mixture
            observes; with 0 it observes only the tokens routed to it.
        variant: ``fast``, ``paper`` or ``best`` for a built-in recipe; ``custom`` for a file.
        departures: points where the recipe differs from the paper.
        reason: why ``--target`` chose this recipe; empty if the user chose it.
        layout_is_named: whether ``--layout`` names the layers' layout, which no model changes then.
        adaptations: a sentence for each change made to fit the model, with its reason, and one on
            linears that no rule matches.
    """

    scheme: str
    about: str
    layers: tuple[LayerRule, ...]
    transforms: tuple[Step, ...]
    rounding: Step
    kv: str | None = None
    windows: str = GIVEN
    min_expert_tokens: int = MIN_EXPERT_TOKENS
    variant: str = "custom"
    departures: tuple[Departure, ...] = ()
    reason: str = ""
    layout_is_named: bool = False
    adaptations: tuple[str, ...] = ()

    @property
    def built_in(self) -> bool:
        """Whether it is a variant of a built-in recipe, which may be adapted to a model."""
        return self.variant != "custom"

    def step(self, name: str) -> Step | None:
        """The transform ``name``, if the recipe has it."""
        return next((step for step in self.transforms if step.name == name), None)

    def rule_of(self, name: str) -> LayerRule | None:
        """The first rule that matches the linear's full name; None if none does."""
        return next((rule for rule in self.layers if re.search(rule.match, name)), None)

    def with_group_size(self, group_size: int | None) -> "Recipe":
        """The recipe with all quantized layers at ``group_size`` (None: the whole channel)."""
        return self._with_rules(group_size=group_size)

    def with_layout(self, layout: str) -> "Recipe":
        """The recipe with all quantized layers in ``layout``, whether or not it fits a model."""
        return replace(self._with_rules(layout=layout), layout_is_named=True)

    def with_layout_of(self, scheme: str, layout: str) -> "Recipe":
        """The recipe with the layers of ``scheme`` in ``layout``, where it fits a model."""
        return self._with_rules(scheme, layout=layout)

    def _with_rules(self, of: str | None = None, **changes: Any) -> "Recipe":
        layers = (
            replace(rule, **changes) if rule.scheme and of in (None, rule.scheme) else rule
            for rule in self.layers
        )
        return replace(self, layers=tuple(layers))

    def for_kv4(self) -> "Recipe":
        """The recipe with the transforms of a kv4 cache.

        They are ``smooth-attention`` (QServe section 3.2) and, in ``best``, ``value-basis``.
        """
        names = [step.name for step in self.transforms]
        wanted = ["smooth-attention", *(["value-basis"] if self.variant == "best" else [])]
        before = max(
            (i + 1 for i, name in enumerate(names) if name in ("norm-fusion", "rotate", "smooth")),
            default=0,
        )
        added = tuple(Step(name, {}) for name in wanted if name not in names)
        return replace(
            self, transforms=(*self.transforms[:before], *added, *self.transforms[before:])
        )

    def for_export(self) -> "Recipe":
        """The recipe without ``online-hadamard``, which only qtool's runtime and plugins run."""
        kept = tuple(step for step in self.transforms if step.name != "online-hadamard")
        return replace(self, transforms=kept)

    def with_options(self, method: str, **options: Any) -> "Recipe":
        """The recipe with ``options`` set on its transform or rounding ``method``.

        Raises:
            QtoolError: the recipe does not have this method.
        """
        if method not in {step.name for step in (*self.transforms, self.rounding)}:
            raise QtoolError(
                f"recipe {self.scheme}/{self.variant} has no {method} to set "
                f"{', '.join(options)} on"
            )

        def changed(step: Step) -> Step:
            return Step(step.name, {**step.options, **options}) if step.name == method else step

        transforms = tuple(map(changed, self.transforms))
        return replace(self, transforms=transforms, rounding=changed(self.rounding))

    def adapted(self, sentence: str, **changes: Any) -> "Recipe":
        """The recipe with ``changes`` that fit it to a model, and a ``sentence`` that says so."""
        return replace(self, adaptations=(*self.adaptations, sentence), **changes)
