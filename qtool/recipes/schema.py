"""The schema of a recipe: the scheme of each layer, and the methods. It imports no torch.

:mod:`qtool.recipes.recipe` reads one from YAML.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qtool.errors import QtoolError

GIVEN, CONTINUED = "given", "continued"
#: measured in benchmarks/journal/mixtures.md
MIN_EXPERT_TOKENS = 128


@dataclass(frozen=True)
class Step:
    """A method by name and its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class LayerRule:
    """Linears whose full name matches the regex ``match`` get ``scheme``.

    ``scheme`` None leaves them in 16 bits; ``layout`` None is row-major.
    """

    match: str
    scheme: str | None
    group_size: int | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Departure:
    """One point where a recipe leaves the paper it is named after, and the effect of that."""

    what: str
    effect: str


@dataclass(frozen=True)
class Recipe:
    """One complete recipe.

    Attributes:
        scheme: the name of the recipe; its rules say which schemes the layers get.
        about: one sentence.
        layers: the rules; of a linear the first one holds that matches its name.
        transforms: in their order.
        rounding: the method that turns weights into codes.
        kv: KV-cache quantizer, or None.
        windows: calibration windows are ``given`` by a text, or ``continued`` by the model after
            a start from it.
        min_expert_tokens: calibration tokens that each expert of a mixture observes at least; 0:
            those that are routed to it.
        variant: ``fast``, ``paper`` or ``best`` of a built-in recipe; ``custom`` of a file.
        departures: from the paper.
        reason: why this recipe, where ``--target`` chose it.
        adaptations: what was changed to fit the model, and why; a sentence each.
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
    adaptations: tuple[str, ...] = ()

    @property
    def built_in(self) -> bool:
        """Whether it is a variant of a built-in recipe, which may be adapted to a model."""
        return self.variant != "custom"

    def step(self, name: str) -> Step | None:
        """The transform ``name``, if the recipe has it."""
        return next((step for step in self.transforms if step.name == name), None)

    def rule_of(self, name: str) -> LayerRule | None:
        """The rule of the linear of this full name: the first that matches."""
        return next((rule for rule in self.layers if re.search(rule.match, name)), None)

    def with_group_size(self, group_size: int | None) -> "Recipe":
        """The recipe with all quantized layers at ``group_size`` (None: the whole channel)."""
        return self._with_rules(group_size=group_size)

    def with_layout(self, layout: str) -> "Recipe":
        """The recipe with all quantized layers in ``layout``."""
        return self._with_rules(layout=layout)

    def _with_rules(self, **changes: Any) -> "Recipe":
        layers = (replace(rule, **changes) if rule.scheme else rule for rule in self.layers)
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
        """The recipe without what only qtool's own runtime and plugins do: ``online-hadamard``."""
        kept = tuple(step for step in self.transforms if step.name != "online-hadamard")
        return replace(self, transforms=kept)

    def with_options(self, method: str, **options: Any) -> "Recipe":
        """``options`` set on the transform ``method``.

        Raises:
            QtoolError: if the recipe does not have it.
        """
        if self.step(method) is None:
            raise QtoolError(
                f"recipe {self.scheme}/{self.variant} has no {method} to set "
                f"{', '.join(options)} on"
            )
        steps = tuple(
            Step(s.name, {**s.options, **options}) if s.name == method else s
            for s in self.transforms
        )
        return replace(self, transforms=steps)

    def adapted(self, sentence: str, **changes: Any) -> "Recipe":
        """``changes`` made to fit a model, and the ``sentence`` that says so."""
        return replace(self, adaptations=(*self.adaptations, sentence), **changes)
