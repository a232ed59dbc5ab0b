"""Reads recipes from YAML: the built-in files, and files that the user writes.

A recipe is a YAML mapping::

    scheme: w4a8-lqq            # its name
    about: one sentence
    layers:                     # the first rule that matches applies; lm_head stays in 16 bits
      - roles: [v_proj, down_proj]      # or match: a regex on the full module name
        scheme: w4a4                    # null leaves the layer in 16 bits
        group_size: 32                  # or channel, the default whatever the scheme's own is
        layout: row-major         # the default
    kv: kv4                     # optional
    windows: continued          # calibration windows: given (the default) or continued by the model
    min_expert_tokens: 128      # tokens that each expert observes at least; 0: only routed tokens
    transforms: [norm-fusion, {rotate: {seed: 1}}]
    rounding: {gptq: {damping: 0.01}}
    departures:                 # optional: points where the recipe differs from its paper
      - what: the loss is the squared error
        effect: lower KL on every scheme measured

A built-in recipe has ``variants: {fast: ..., paper: ..., best: ...}`` in place of the last three
keys. Each variant has its own ``transforms``, ``rounding`` and ``departures``; a variant that has
``layers`` uses them instead of the recipe's. A recipe that a plugin registers may have variants
too; a user's file is a single recipe.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qtool import plugins
from qtool.errors import QtoolError, expand_home, in_one_line, plain, require_text, suggest
from qtool.recipes.schema import (
    CONTINUED,
    GIVEN,
    MIN_EXPERT_TOKENS,
    Departure,
    LayerRule,
    Recipe,
    Step,
)

BUILT_IN = Path(__file__).parent
VARIANTS = ("fast", "paper", "best")
VARIANT_KEYS = frozenset(
    {"layers", "transforms", "rounding", "kv", "windows", "min_expert_tokens", "departures"}
)
KEYS = VARIANT_KEYS | {"scheme", "about", "variants"}
LAYER_KEYS = frozenset({"match", "roles", "scheme", "group_size", "layout"})
DEPARTURE_KEYS = frozenset({"what", "effect"})
#: recipes of schemes that other packages register: the content of a file, by the scheme's name
ADDED: dict[str, Mapping[str, Any]] = {}


def overview() -> list[tuple[str, str, str]]:
    """The name, recipe variants and description of each scheme that has a recipe."""
    plugins.load()
    data = {name: read(path) for name, path in built_in().items()}
    return [
        (name, " ".join(found.get("variants", ())), found.get("about", ""))
        for name, found in {**data, **ADDED}.items()
    ]


def departures() -> list[tuple[str, str, Departure]]:
    """The departures of all recipes from their papers, each with its scheme and variant."""
    return [
        (name, variant, departure)
        for name, variants, _ in overview()
        for variant in variants.split()
        for departure in load(name, variant).departures
    ]


def built_in() -> dict[str, Path]:
    """The files of the built-in recipes, by scheme."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


def load(scheme: str | None, recipe: str | None = None, *, default: str = "fast") -> Recipe:
    """The recipe of ``scheme``.

    Args:
        scheme: name of a built-in or registered scheme; None if ``recipe`` is a file, which names
            its scheme itself.
        recipe: a variant, ``fast``, ``paper`` or ``best``, or the path of a YAML file. None takes
            the variant ``default``; if the recipe lacks it, ``paper`` or else its first variant;
            and the recipe itself if it has no variants.

    Raises:
        QtoolError: an unknown scheme, variant or key (with a suggestion), a value of the wrong
            kind, a variant of a recipe that has none, or a file with a recipe of another scheme.
    """
    if recipe is not None and recipe not in VARIANTS:
        path = expand_home(recipe)
        if not os.path.isfile(path):  # Path.is_file raises where a name is too long
            raise QtoolError(
                f"--recipe {in_one_line(recipe)}: neither a file nor one of {', '.join(VARIANTS)}"
            )
        content = read(path)
        found = parse(content, path.name)
        if scheme is not None:
            _require_scheme(found, "scheme" in content, scheme, path.name)
        return found
    files = built_in()
    if scheme is None:
        plugins.load()
        raise QtoolError(
            "neither a scheme nor a recipe file is given: pass --scheme, one of "
            f"{', '.join((*files, *ADDED))}, or --recipe FILE"
        )
    require_text("--scheme", scheme)
    if scheme not in files:
        plugins.load()
    data = read(files[scheme]) if scheme in files else ADDED.get(scheme)
    if data is None:
        raise QtoolError(f"unknown scheme {scheme!r}: {suggest(scheme, [*files, *ADDED])}")
    if "variants" in data:
        there = (default, "paper", *data["variants"])
        return parse(data, scheme, recipe or next(v for v in there if v in data["variants"]))
    if recipe is not None:
        raise QtoolError(f"the recipe {scheme!r} has no variants: leave --recipe {recipe} out")
    return parse(data, scheme)


def _require_scheme(recipe: Recipe, named: bool, scheme: str, file: str) -> None:
    """Refuse ``scheme`` unless the recipe in ``file`` is named so or its rules quantize to it."""
    schemes = [recipe.scheme] if named else sorted({r.scheme for r in recipe.layers if r.scheme})
    if schemes and scheme not in schemes:
        raise QtoolError(
            f"--scheme {scheme}: {file} is a recipe of {', '.join(schemes)}; leave --scheme out: "
            "the recipe says what it quantizes to"
        )


def parse(data: Mapping[str, Any], where: str, variant: str | None = None) -> Recipe:
    """Check ``data`` against the schema and build the recipe.

    Args:
        where: what messages call the recipe.
        variant: one of the recipe's ``variants``; None if it has no variants.
    """
    try:
        data = plain(data)
    except RecursionError:
        raise QtoolError(f"{where}: an alias (*) stands inside what it is an alias of") from None
    _require_known(data, KEYS, where)
    merged = {**data, **_variant(data, where, variant)}
    layers = merged.get("layers")
    if not isinstance(layers, list) or not layers:
        raise QtoolError(f"{where}: layers must be a list with at least one rule")
    transforms = merged.get("transforms") or []
    if not isinstance(transforms, list):
        raise QtoolError(f"{where}: transforms must be a list of steps, found {transforms!r}")
    return Recipe(
        scheme=_name(data, where) or where.removesuffix(".yaml").removesuffix(".yml"),
        about=_text(data, "about", where) or "",
        layers=tuple(_layer(rule, where) for rule in layers),
        transforms=tuple(_step(step, where) for step in transforms),
        rounding=_step(merged.get("rounding", "rtn"), where),
        kv=_text(merged, "kv", where),
        windows=_windows(merged, where),
        min_expert_tokens=_min_expert_tokens(merged, where),
        variant=variant or "custom",
        departures=_departures(merged, where),
    )


def _variant(data: Mapping[str, Any], where: str, variant: str | None) -> Mapping[str, Any]:
    """The keys of one of the recipe's variants; none if the recipe has no variants."""
    if "variants" not in data:
        return {}
    variants = data["variants"]
    _require_known(variants, frozenset(VARIANTS), f"{where}, variants")
    if not variants:
        raise QtoolError(f"{where}: variants is empty; {', '.join(VARIANTS)} are accepted there")
    if variant is None:
        raise QtoolError(
            f"{where}: variants are for built-in recipes, and this is one recipe: keep one of "
            f"{', '.join(variants)}, with its keys beside layers"
        )
    if variant not in variants:
        raise QtoolError(f"{where}: no variant {variant!r}; it has {', '.join(variants)}")
    chosen = variants[variant] or {}
    _require_known(chosen, VARIANT_KEYS, f"{where}, {variant}")
    return chosen


def as_yaml(recipe: Recipe) -> str:
    """The file that :func:`load` reads as ``recipe``, without departures from a paper."""

    def step(of: Step) -> Any:
        return {of.name: dict(of.options)} if of.options else of.name

    def layer(rule: LayerRule) -> dict[str, Any]:
        size = {"group_size": rule.group_size or "channel"} if rule.scheme else {}
        layout = {"layout": rule.layout} if rule.layout else {}
        which = {"roles": list(rule.roles)} if rule.roles else {"match": rule.match}
        return {**which, "scheme": rule.scheme, **size, **layout}

    content = {
        "scheme": recipe.scheme,
        "about": recipe.about,
        "layers": list(map(layer, recipe.layers)),
        "kv": recipe.kv,
        "windows": recipe.windows,
        "min_expert_tokens": recipe.min_expert_tokens,
        "transforms": list(map(step, recipe.transforms)),
        "rounding": step(recipe.rounding),
    }
    return yaml.safe_dump(content, sort_keys=False)


def _layer(rule: Any, where: str) -> LayerRule:
    _require_known(rule, LAYER_KEYS, f"{where}, layers")
    given = sorted(key for key, value in rule.items() if value is not None)
    if ("match" in given) == ("roles" in given):
        raise QtoolError(f"{where}: a layer rule has either match or roles, found {given}")
    if "scheme" not in rule:
        raise QtoolError(
            f"{where}: a layer rule without scheme, found {sorted(rule)}; "
            "null leaves its layers in 16 bits"
        )
    match, roles = _text(rule, "match", where), _roles(rule, where)
    if match is None:
        match = rf"\.({'|'.join(map(re.escape, roles))})$"
    try:
        re.compile(match)
    except re.error as error:
        raise QtoolError(
            f"{where}: match {match!r} is not a regular expression: {error}"
        ) from error
    size = rule.get("group_size")
    if size not in (None, "channel") and (type(size) is not int or size < 1):
        raise QtoolError(f"{where}: group_size {size!r} is neither a positive number nor 'channel'")
    size = size if isinstance(size, int) else None
    scheme, layout = (_text(rule, key, where) for key in ("scheme", "layout"))
    return LayerRule(match, scheme, size, layout, roles)


def _roles(rule: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The last parts of the names of linears that ``rule`` lists; none if it has ``match``."""
    roles = rule.get("roles", [])
    named = isinstance(roles, list) and all(isinstance(role, str) for role in roles)
    if not named or bool(roles) != ("roles" in rule):
        raise QtoolError(
            f"{where}: roles must be a list of names like [v_proj, down_proj], found {roles!r}"
        )
    return tuple(roles)


def _departures(data: Mapping[str, Any], where: str) -> tuple[Departure, ...]:
    listed = data.get("departures") or []
    if not isinstance(listed, list):
        raise QtoolError(f"{where}: departures must be a list, found {listed!r}")
    found = []
    for entry in listed:
        _require_known(entry, DEPARTURE_KEYS, f"{where}, departures")
        what, effect = (_text(entry, key, where) for key in ("what", "effect"))
        if what is None or effect is None:
            raise QtoolError(f"{where}: a departure has what and effect, found {sorted(entry)}")
        found.append(Departure(what, effect))
    return tuple(found)


def _windows(data: Mapping[str, Any], where: str) -> str:
    found = _text(data, "windows", where) or GIVEN
    if found not in (GIVEN, CONTINUED):
        raise QtoolError(f"{where}: windows is {GIVEN} or {CONTINUED}, found {found!r}")
    return found


def _min_expert_tokens(data: Mapping[str, Any], where: str) -> int:
    found = data.get("min_expert_tokens", MIN_EXPERT_TOKENS)
    if type(found) is not int or not 0 <= found < 2**63:
        raise QtoolError(
            f"{where}: min_expert_tokens is {found!r}; expected a whole number of 0 or more, with "
            "at most 63 bits"
        )
    return found


def _text(data: Mapping[str, Any], key: str, where: str) -> str | None:
    """The text value of ``key``; None if it is absent or null."""
    value = data.get(key)
    if value is None or isinstance(value, str):
        return value
    raise QtoolError(f"{where}: {key} must be a text, found {value!r}")


def _name(data: Mapping[str, Any], where: str) -> str | None:
    """The recipe's name, of which the default name of a result is made; None if it has none."""
    name = _text(data, "scheme", where)
    if name is not None and not (name.strip(" .") and name.isprintable()):
        raise QtoolError(f"{where}: scheme {name!r}: a name of printable characters is expected")
    return name


def _step(step: Any, where: str) -> Step:
    if isinstance(step, str):
        return Step(step, {})
    if isinstance(step, Mapping) and len(step) == 1:
        ((name, options),) = step.items()
        if isinstance(name, str) and isinstance(options, Mapping | None):
            return Step(name, dict(options or {}))
    raise QtoolError(
        f"{where}: a step is a method's name or {{name: {{option: value}}}}, found {step!r}"
    )


def _require_known(data: Any, keys: frozenset[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise QtoolError(f"{where}: a mapping expected, found {type(data).__name__}")
    for key in data:
        if key not in keys:
            raise QtoolError(f"{where}: unknown key {key!r}; {suggest(str(key), keys)}")


class _Loader(yaml.SafeLoader):
    """Loads YAML and refuses a mapping that has a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = []
        for key, _ in node.value:
            if key.value in found:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: the key {key.value!r} is there twice")
            found.append(key.value)
        return super().construct_mapping(node, deep)


def _mistake(error: Exception) -> str:
    """A description of ``error``, preceded by the line number if YAML knows it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return in_one_line(error)


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        data = yaml.load(path.read_bytes(), _Loader)
    except RecursionError as error:
        raise QtoolError(f"{path.name}: nested too deeply for a recipe") from error
    except OSError as error:
        raise QtoolError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: a date that is none
        raise QtoolError(f"{path.name}: not valid YAML ({_mistake(error)})") from error
    if not isinstance(data, dict):
        raise QtoolError(f"{path.name}: a mapping expected, found {type(data).__name__}")
    return data
