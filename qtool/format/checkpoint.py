"""The format of a whole checkpoint: rules that give each linear its format.

``config.json`` holds them as ``quantization_config``.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from qtool import plugins
from qtool.errors import QtoolError
from qtool.format.linear import LinearFormat
from qtool.layouts import LAYOUTS
from qtool.models import family_of
from qtool.models.family_checks import require_sizes
from qtool.models.unsupported import is_built_in
from qtool.schemes import SCHEMES

#: version 2 has linears whose inputs are rotated at run time; a reader of version 1 would not do so
PLAIN, ROTATED = FORMAT_VERSIONS = 1, 2
QUANT_METHOD = "qtool"
#: the field of config.json that names a model's weight file to transformers; :data:`NOTICE` is no
#: such file, so a transformers that does not know qtool stops there instead of loading random
#: linears
WEIGHTS_FIELD = "transformers_weights"
NOTICE = (
    "this checkpoint is quantized by qtool; run `import qtool.transformers` "
    "before `from_pretrained`"
)


@dataclass(frozen=True)
class Rule:
    """Linears whose full name matches the regex ``match`` are stored as ``format``.

    The format None leaves them in 16 bits.
    """

    match: str
    format: LinearFormat | None

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise QtoolError(
                f"layer pattern {self.match!r} is not a regular expression: {error}"
            ) from error


@dataclass(frozen=True)
class CheckpointFormat:
    """The format of a whole checkpoint: the first rule that matches a linear's name applies.

    Args:
        scheme: the recipe's name, which the user asked for; its rules may mix schemes.
        permuted: names within a block of the linears that store an input permutation.
        rotated: names within a block of the linears whose inputs are rotated at run time, with
            ``*`` for any expert's number.
        kv: the KV-cache quantizer, or None.
        tower_names: modules (or tensors) of towers and the names that they had in the source, if
            transformers would write others; other loaders may know the source's alone.
    """

    scheme: str
    rules: tuple[Rule, ...]
    permuted: tuple[str, ...] = ()
    kv: str | None = None
    rotated: tuple[str, ...] = ()
    tower_names: tuple[tuple[str, str], ...] = ()

    @property
    def version(self) -> int:
        """The first format version that can express this format."""
        return ROTATED if self.rotated else PLAIN

    def of(self, name: str) -> LinearFormat | None:
        """The format of the linear ``name`` (full module path); None if it is not quantized."""
        found = next((rule.format for rule in self.rules if re.search(rule.match, name)), None)
        if found and self.rotated:
            names = name, _any_expert(name)
            return replace(found, rotated=any(_ends_in(own, self._rotated) for own in names))
        return found

    def is_permuted(self, name: str) -> bool:
        """Whether the linear ``name`` (full module path) stores an input permutation."""
        return _ends_in(name, self._permuted)

    @cached_property
    def _permuted(self) -> frozenset[str]:
        return frozenset(self.permuted)  # a mixture of experts has hundreds

    @cached_property
    def _rotated(self) -> frozenset[str]:
        return frozenset(self.rotated)

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` of config.json."""
        rules = [
            {"match": r.match} | (_rule_fields(r.format) if r.format else {"scheme": None})
            for r in self.rules
        ]
        rotated = {"rotated": list(self.rotated)} if self.rotated else {}
        names = {"tower_names": dict(self.tower_names)} if self.tower_names else {}
        return {
            "quant_method": QUANT_METHOD,
            "format_version": self.version,
            "scheme": self.scheme,
            "rules": rules,
            "permuted": list(self.permuted),
            "kv": self.kv,
            **rotated,
            **names,
        }

    def in_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of a native checkpoint in this format, from the source's ``config``."""
        formats = [rule.format for rule in self.rules if rule.format]
        parts = [part for one in formats for part in (one.scheme_object, one.layout_object)]
        built_in = all(type(part).__module__.startswith("qtool.") for part in parts)
        built_in &= is_built_in(str(config.get("model_type")))
        packages = {} if built_in else plugins.versions()
        made_with = {"plugins": packages} if packages else {}
        return {**config, "quantization_config": self.to_dict() | made_with, WEIGHTS_FIELD: NOTICE}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "CheckpointFormat":
        """Read ``quantization_config``.

        Raises:
            QtoolError: the config is not qtool's or of a newer version, a field is missing or of
                the wrong type, or a scheme or layout belongs to a plugin that is not installed.
        """
        if config.get("quant_method") != QUANT_METHOD:
            raise QtoolError(
                f"the model is quantized by {config.get('quant_method')!r}, not by qtool: "
                "`qtool quantize` reads floats of 8 and 4 bits, `qtool import` symmetric 4-bit "
                "integers; an export is made from the native checkpoint"
            )
        if (found := config.get("format_version")) not in FORMAT_VERSIONS:
            raise QtoolError(
                f"format version {found} cannot be read; this qtool reads versions "
                + " and ".join(map(str, FORMAT_VERSIONS))
            )
        try:
            made_with = plugins.made_with(config)
            rules = tuple(_rule(dict(rule), made_with) for rule in config["rules"])
            return cls(
                _typed("scheme", config["scheme"], str),
                rules,
                permuted=tuple(_typed("permuted", config.get("permuted", ()), Sequence[str])),
                kv=_typed("kv", config.get("kv"), str | None),
                rotated=tuple(_typed("rotated", config.get("rotated", ()), Sequence[str])),
                tower_names=tuple(
                    _typed("tower_names", config.get("tower_names", {}), dict[str, str]).items()
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise QtoolError(f"quantization_config is damaged: {error!r}") from error


def native_format(config: Mapping[str, Any]) -> CheckpointFormat:
    """The format of a native checkpoint.

    Raises:
        QtoolError: the model is not quantized, or not by qtool, or ``config`` lacks its sizes.
    """
    if not config.get("quantization_config"):
        raise QtoolError(
            "the model is not quantized: config.json has no quantization_config; pass what qtool"
            " quantize made of it"
        )
    found = CheckpointFormat.from_dict(config["quantization_config"])
    family = family_of(config)
    require_sizes(family, family.settings(config))
    return found


def of_any_expert(names: Collection[str], linears: Collection[str]) -> tuple[str, ...]:
    """``names`` of a block's ``linears``, with ``*`` for the number if all experts are in them."""
    others = {_any_expert(name) for name in set(linears) - set(names)}
    short = {name: _any_expert(name) for name in names}
    return tuple(dict.fromkeys(name if own in others else own for name, own in short.items()))


def _any_expert(name: str) -> str:
    """``name`` with ``*`` for each number in it."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _ends_in(name: str, within_block: frozenset[str]) -> bool:
    """Whether the full name ``name`` belongs to one of the linears ``within_block``.

    A name within a block comes after a number: BERT's ``attention.output.dense`` is no
    ``output.dense``.
    """
    numbers = re.finditer(r"(?<=\.)(\d+|\*)\.", name)
    return any(name[number.end() :] in within_block for number in numbers)


def _typed(key: str, value: Any, kind: Any) -> Any:
    """The ``value`` of the field ``key``, after a check that it is of the type ``kind``."""
    if not plugins.is_of(value, kind):
        raise TypeError(f"{key} {value!r}")
    return value


def _rule_fields(linear_format: LinearFormat) -> dict[str, Any]:
    """The fields of a rule, but for ``rotated``: the checkpoint's format lists rotated linears."""
    fields = asdict(linear_format)
    del fields["rotated"]
    return fields


def _rule(rule: dict[str, Any], made_with: str) -> Rule:
    """The rule of its fields; ``made_with`` names the plugins where it was written."""
    match = rule.pop("match")
    if not rule["scheme"]:
        return Rule(match, None)
    if "rotated" in rule:  # rotated linears are listed beside the rules
        raise TypeError(f"rotated {rule['rotated']!r} in a rule")
    linear_format = LinearFormat(**rule)
    _typed("group_size", linear_format.group_size, int | None)
    scale_dtype = getattr(torch, str(linear_format.scale_dtype), None)
    if not isinstance(scale_dtype, torch.dtype) or not scale_dtype.is_floating_point:
        raise ValueError(f"scale_dtype {linear_format.scale_dtype!r}")
    _require_registered(SCHEMES, linear_format.scheme, "scheme", made_with)
    _require_registered(LAYOUTS, linear_format.layout, "layout", made_with)
    return Rule(match, linear_format)


def _require_registered(table: Mapping[str, Any], name: str, kind: str, made_with: str) -> None:
    """Refuse a stored name that is not in ``table``; it was registered where it was written."""
    plugins.load()
    if name not in table:
        raise QtoolError(
            f"the checkpoint has {kind} {name!r}, which is not built in and which no installed "
            f"plugin registers (known are {', '.join(table)}): install the package that does"
            f"{made_with}"
        )
