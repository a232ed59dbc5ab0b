"""What a recipe is: data that says which scheme each layer gets and by which methods. No torch
here.

A recipe is a YAML mapping::

    scheme: w4a8-lqq            # its name
    about: one sentence
    layers:                     # first match wins; lm_head stays in 16 bit
      - roles: [v_proj, down_proj]      # or match: a regex on the full module name
        scheme: w4a4                    # null leaves the layer in 16 bit
        group_size: 32                  # or channel, the default
        layout: row-major         # the default
    kv: kv4                     # optional
    windows: continued          # of calibration: given, the default, or continued by the model
    transforms: [norm-fusion, {rotate: {seed: 1}}]
    rounding: {gptq: {damping: 0.01}}

A built-in recipe has ``variants: {fast: ..., paper: ..., best: ...}``, each with its own
``transforms`` and ``rounding``, in place of the last two keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from qtool.errors import QtoolError, suggest

BUILT_IN = Path(__file__).parent
VARIANTS = ("fast", "paper", "best")
GIVEN, CONTINUED = "given", "continued"
KEYS = frozenset(
    {"scheme", "about", "layers", "kv", "windows", "transforms", "rounding", "variants"}
)
LAYER_KEYS = frozenset({"match", "roles", "scheme", "group_size", "layout"})
VARIANT_KEYS = frozenset({"transforms", "rounding", "kv", "windows"})


@dataclass(frozen=True)
class Step:
    """A method by name and its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class LayerRule:
    """Layers whose full name matches ``match`` get ``scheme`` (None: stay in 16 bit); no
    ``layout``: row-major.
    """

    match: str
    scheme: str | None
    group_size: int | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Recipe:
    """One complete recipe.

    ``windows`` says whether calibration windows are a text's or, but for their beginnings, the
    model's own words. ``reason`` says why this one, where something chose it; ``left_out`` what of
    it the model's family cannot have.
    """

    scheme: str
    about: str
    layers: tuple[LayerRule, ...]
    transforms: tuple[Step, ...]
    rounding: Step
    kv: str | None = None
    windows: str = GIVEN
    variant: str = "custom"
    reason: str = ""
    left_out: tuple[str, ...] = ()

    def with_group_size(self, group_size: int | None) -> "Recipe":
        """Every quantized layer at ``group_size`` (None: the whole channel)."""
        layers = tuple(
            replace(rule, group_size=group_size) if rule.scheme else rule for rule in self.layers
        )
        return replace(self, layers=layers)

    def with_layout(self, layout: str) -> "Recipe":
        """Every quantized layer in ``layout``."""
        return replace(
            self, layers=tuple(replace(r, layout=layout) if r.scheme else r for r in self.layers)
        )

    def for_kv4(self) -> "Recipe":
        """What a kv4 cache wants added: ``smooth-attention`` (QServe 3.2) and, to ``best``,
        ``value-basis``.
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

    def with_options(self, method: str, **options: Any) -> "Recipe":
        """``options`` set on the transform ``method``.

        Raises:
            QtoolError: if the recipe does not have it.
        """
        if method not in [step.name for step in self.transforms]:
            raise QtoolError(
                f"recipe {self.scheme}/{self.variant} has no {method} to set {', '.join(options)} on"
            )
        steps = tuple(
            Step(s.name, {**s.options, **options}) if s.name == method else s
            for s in self.transforms
        )
        return replace(self, transforms=steps)


def overview() -> list[tuple[str, str, str]]:
    """Every built-in scheme: name, the variants of its recipe, what it is."""
    files = {path.stem: _mapping(path) for path in sorted(BUILT_IN.glob("*.yaml"))}
    return [(name, " ".join(data["variants"]), data["about"]) for name, data in files.items()]


def load(scheme: str, recipe: str | None = None) -> Recipe:
    """The recipe of ``scheme``: variant ``fast`` (default), ``paper`` or ``best``, or a YAML file.

    Raises:
        QtoolError: unknown scheme, variant or key (with a suggestion), or a value of the wrong
            kind.
    """
    if recipe is not None and recipe not in VARIANTS:
        path = Path(recipe)
        if not path.is_file():
            raise QtoolError(f"--recipe {recipe}: neither a file nor one of {', '.join(VARIANTS)}")
        return parse(_mapping(path), path.name)
    names = [path.stem for path in BUILT_IN.glob("*.yaml")]
    if scheme not in names:
        raise QtoolError(f"unknown scheme {scheme!r}: {suggest(scheme, names)}")
    return parse(_mapping(BUILT_IN / f"{scheme}.yaml"), scheme, recipe or "fast")


def parse(data: Mapping[str, Any], where: str, variant: str | None = None) -> Recipe:
    """Check ``data`` against the schema and build the recipe; ``where`` names it in messages."""
    _known(data, KEYS, where)
    chosen: Mapping[str, Any] = data
    if "variants" in data:
        variants = data["variants"]
        _known(variants, frozenset(VARIANTS), f"{where}, variants")
        variant = variant or "fast"
        if variant not in variants:
            raise QtoolError(f"{where}: no variant {variant!r}; it has {', '.join(variants)}")
        chosen = variants[variant] or {}
        _known(chosen, VARIANT_KEYS, f"{where}, {variant}")
    layers = data.get("layers")
    if not isinstance(layers, list) or not layers:
        raise QtoolError(f"{where}: layers must be a list with at least one rule")
    transforms = chosen.get("transforms") or []
    if not isinstance(transforms, list):
        raise QtoolError(f"{where}: transforms must be a list of steps, found {transforms!r}")
    return Recipe(
        scheme=str(data.get("scheme", where)),
        about=str(data.get("about", "")),
        layers=tuple(_layer(rule, where) for rule in layers),
        transforms=tuple(_step(step, where) for step in transforms),
        rounding=_step(chosen.get("rounding", "rtn"), where),
        kv=_name({**data, **chosen}, "kv", where),
        windows=_windows({**data, **chosen}, where),
        variant=variant or "custom",
    )


def _layer(rule: Any, where: str) -> LayerRule:
    _known(rule, LAYER_KEYS, f"{where}, layers")
    if ("match" in rule) == ("roles" in rule):
        raise QtoolError(f"{where}: a layer rule has either match or roles, found {sorted(rule)}")
    if "scheme" not in rule:
        raise QtoolError(
            f"{where}: a layer rule without scheme, found {sorted(rule)}; null leaves its layers in 16 bit"
        )
    match, roles = _name(rule, "match", where), rule.get("roles")
    if match is None:
        if (
            not isinstance(roles, list)
            or not roles
            or not all(isinstance(role, str) for role in roles)
        ):
            raise QtoolError(
                f"{where}: roles must be a list of names like [v_proj, down_proj], found {roles!r}"
            )
        match = rf"\.({'|'.join(map(re.escape, roles))})$"
    size = rule.get("group_size")
    if size is not None and size != "channel" and (not isinstance(size, int) or size < 1):
        raise QtoolError(f"{where}: group_size {size!r} is neither a positive number nor 'channel'")
    size = size if isinstance(size, int) else None
    return LayerRule(match, _name(rule, "scheme", where), size, _name(rule, "layout", where))


def _windows(data: Mapping[str, Any], where: str) -> str:
    found = _name(data, "windows", where) or GIVEN
    if found not in (GIVEN, CONTINUED):
        raise QtoolError(f"{where}: windows is {GIVEN} or {CONTINUED}, found {found!r}")
    return found


def _name(data: Mapping[str, Any], key: str, where: str) -> str | None:
    """The value of ``key``, a text; None where it is absent or null."""
    value = data.get(key)
    if value is None or isinstance(value, str):
        return value
    raise QtoolError(f"{where}: {key} must be a text, found {value!r}")


def _step(step: Any, where: str) -> Step:
    if isinstance(step, str):
        return Step(step, {})
    if isinstance(step, Mapping) and len(step) == 1:
        ((name, options),) = step.items()
        if isinstance(name, str) and isinstance(options or {}, Mapping):
            return Step(name, dict(options or {}))
    raise QtoolError(
        f"{where}: a step is a method's name or {{name: {{option: value}}}}, found {step!r}"
    )


def _known(data: Any, keys: frozenset[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise QtoolError(f"{where}: a mapping expected, found {type(data).__name__}")
    for key in data:
        if key not in keys:
            raise QtoolError(f"{where}: unknown key {key!r}; {suggest(str(key), keys)}")


def _mapping(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise QtoolError(f"{path.name}: not valid YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(data, dict):
        raise QtoolError(f"{path.name}: a mapping expected, found {type(data).__name__}")
    return data
