"""Schemes, layouts, kernels, recipes, families, methods and formats from outside the package.

Call these from the function that an entry point of the group ``qtool.plugins`` names
(:mod:`qtool.plugins`), or before the first use in a script. Names that are taken are refused.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import getmembers, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

from qtool import plugins, recipes
from qtool.errors import QtoolError, checking
from qtool.recipes.recipe import ADDED

if TYPE_CHECKING:
    from qtool.calibration.method import Rounding, Transform
    from qtool.exchange.export_format import ExportFormat
    from qtool.layouts import Layout
    from qtool.models import Family
    from qtool.runtime.dispatch import Kernel
    from qtool.schemes import Scheme


def register_scheme(
    scheme: "type[Scheme]",
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    layout: str | None = None,
) -> None:
    """Let ``--scheme NAME`` mean ``scheme``, everywhere: quantize, verify, eval, load.

    Args:
        scheme: a subclass of :class:`qtool.schemes.Scheme`; its ``name`` is the command line's.
        recipe: a YAML file or its content; by default every linear at the scheme's own group size,
            in ``layout``, rounded to nearest (``fast``) or, if GPTQ takes the scheme, by it
            (``paper``).
        layout: the name of the default recipe's layout; by default a row-major one.

    Raises:
        QtoolError: it is no scheme, lacks an attribute or a function or has one of another type,
            a function returns another type, the name is taken, the recipe does not read, or a
            layout is given beside it, or neither for codes that are neither 4 nor 8 bits wide,
            which no built-in layout holds.
        CheckFailed: two of its functions contradict each other (:mod:`qtool.schemes.protocol`).
    """
    from qtool.format.linear import forget
    from qtool.models.torch_defaults import torch_defaults
    from qtool.schemes import SCHEMES
    from qtool.schemes.protocol import probe, require_clips, require_sound

    _require_scheme(scheme)
    if layout is not None and recipe is not None:
        raise QtoolError(
            f"scheme {scheme.name!r}: a recipe and the layout {layout!r} are given; a recipe names"
            " layouts in its rules"
        )
    if recipe is None and layout is None and scheme.code_bits not in (4, 8):
        raise QtoolError(
            f"scheme {scheme.name!r} has {scheme.code_bits}-bit codes, the row-major layouts hold"
            " 4-bit and 8-bit ones: register a layout too, and pass its name as layout"
        )
    plugins.require_free(SCHEMES, scheme.name, scheme, "scheme")
    with torch_defaults():
        for size in scheme.group_sizes:
            with checking(f"{scheme.name} at group size {size or 'channel'}"):
                require_sound(scheme(size), probe(scheme(size)))
                require_clips(scheme(size))
        recipe = _plain_recipe(scheme, layout) if recipe is None else recipe
    register_recipe(scheme.name, recipe)
    plugins.add(SCHEMES, scheme.name, scheme, "scheme")
    forget()


def register_recipe(scheme: str, recipe: str | Path | Mapping[str, Any]) -> None:
    """Add ``recipe``, a YAML file or its content, for ``--scheme SCHEME``.

    Raises:
        QtoolError: a recipe that does not read, or a scheme that has one already.
    """
    data = recipes.read(Path(recipe)) if isinstance(recipe, str | Path) else recipe
    _require_instance(data, Mapping)
    for variant in data.get("variants") or [None]:
        if (named := recipes.parse(data, scheme, variant).scheme) != scheme:
            raise QtoolError(
                f"the recipe to register for {scheme!r} says scheme: {named}; expected {scheme}"
            )
    if scheme in recipes.built_in():
        raise QtoolError(f"the recipe {scheme!r} is built in; choose another name")
    plugins.add(ADDED, scheme, data, "recipe")


def register_layout(layout: "Layout") -> None:
    """Let recipes and ``--layout`` name ``layout``.

    Raises:
        QtoolError: it is no layout, lacks an attribute or the tensor ``qweight``, has an attribute
            of another type, invalid bits, tile or names of tensors, or the name is taken.
        CheckFailed: its functions do not give back what they packed, or do not pack by rows though
            ``by_rows`` is true.
    """
    from qtool.format.linear import CODES, RESERVED, forget
    from qtool.layouts import LAYOUTS, Layout
    from qtool.layouts.protocol import require_sound
    from qtool.models.torch_defaults import torch_defaults

    _require_instance(layout, Layout)
    _require_declared(layout, Layout)
    if not 1 <= layout.bits <= 8:
        raise _unexpected(layout, "bits", "a whole number of 1 to 8")
    _require_tile(layout)
    if CODES not in layout.tensors:
        raise QtoolError(
            f"layout {layout.name!r} has no tensor {CODES}, by which packed linears are found"
        )
    for name in layout.tensors:
        if not name.isidentifier() or name in RESERVED:
            raise QtoolError(
                f"layout {layout.name!r} has a tensor {name!r}; a name of letters, digits and _,"
                f" and none of {', '.join(sorted(RESERVED))}, is expected"
            )
    plugins.require_free(LAYOUTS, layout.name, layout, "layout")
    with torch_defaults(), checking(f"layout {layout.name}"):
        require_sound(layout)
    plugins.add(LAYOUTS, layout.name, layout, "layout")
    forget()


def register_kernel(scheme: str, layout: str, kernel: "Kernel") -> None:
    """Let ``kernel`` multiply weights of ``scheme`` in ``layout``, after the existing kernels.

    Raises:
        QtoolError: it is no kernel, what it states is of another type, or there is no such scheme
            or layout.
    """
    from qtool.layouts import LAYOUTS
    from qtool.runtime.dispatch import KERNELS, Kernel
    from qtool.schemes import SCHEMES

    _require_instance(kernel, Kernel)
    # the other attributes have defaults, and types that load with the kernels
    kinds = {
        "name": str,
        "precision": str,
        "capabilities": frozenset[tuple[int, int]],
        "multiply": Callable,
    }
    plugins.require_kinds(kernel, f"kernel {kernel.name}", kinds)
    plugins.find(SCHEMES, scheme, "scheme")
    plugins.find(LAYOUTS, layout, "layout")
    there = KERNELS.get((scheme, layout), ())
    kept = tuple(kernel if plugins.same(other, kernel) else other for other in there)
    KERNELS[scheme, layout] = kept if kernel in kept else (*kept, kernel)


def register_family(family: "Family") -> None:
    """Let models whose ``model_type`` is one of the family's be read.

    Raises:
        QtoolError: one of its model types is covered already.
    """
    from qtool import models

    models.register_family(family)


def register_method(method: "type[Transform] | type[Rounding]") -> None:
    """Let recipes name ``method`` under ``transforms`` or ``rounding``, whichever it is.

    Raises:
        QtoolError: the name is taken, or it is neither, or lacks an attribute or a function or has
            one of another type, or declares an option that no recipe could give.
    """
    from qtool.calibration import ROUNDINGS, TRANSFORMS
    from qtool.calibration.method import Rounding, Transform
    from qtool.calibration.options import require_options

    _require_subclass(method, Transform, Rounding)
    _require_declared(method, Transform if issubclass(method, Transform) else Rounding)
    require_options(method)
    if issubclass(method, Transform):
        own = _overridden(method, Transform, "embedding", "head")
        if own and not _overridden(method, Transform, "rewrites_embedding"):
            raise QtoolError(
                f"{method.__name__} defines {' and '.join(own)}, but not"
                " rewrites_embedding, by which a head that is tied to the embedding is stored apart"
            )
        plugins.add(TRANSFORMS, method.name, method, "transform")
    else:
        plugins.add(ROUNDINGS, method.name, method, "rounding")


def register_export(target: "ExportFormat") -> None:
    """Let ``export --format NAME`` write ``target``.

    Raises:
        QtoolError: it is no export format, lacks an attribute or has one of another type, has an
            invalid tile, or the name is taken.
    """
    from qtool.exchange.export_format import ExportFormat
    from qtool.exchange.export_formats import EXPORT_FORMATS

    _require_instance(target, ExportFormat)
    _require_declared(target, ExportFormat)
    _require_tile(target)
    plugins.add(EXPORT_FORMATS, target.name, target, "format")


def _require_instance(given: Any, kind: type) -> None:
    if not isinstance(given, kind):
        raise QtoolError(f"{given!r} is no instance of {kind.__name__}")


def _require_subclass(given: Any, *bases: type) -> None:
    if not (isinstance(given, type) and issubclass(given, bases)):
        kinds = " or ".join(base.__name__ for base in bases)
        raise QtoolError(f"{given!r} is no subclass of {kinds}")


def _require_declared(given: Any, base: type) -> None:
    """Check that ``given``, a class or an object, has what its ``base`` declares.

    These are the functions and the annotated attributes, of a class the ``ClassVar`` ones.

    Raises:
        QtoolError: naming those that it lacks, or one of another type and its value.
    """
    kind = given if isinstance(given, type) else type(given)
    kinds = {
        name: get_args(hint)[0] if get_origin(hint) is ClassVar else hint
        for name, hint in get_type_hints(base).items()
        if given is not kind or get_origin(hint) is ClassVar
    }
    if missing := [name for name in kinds if not hasattr(given, name)]:
        raise QtoolError(f"{kind.__name__} has no {', '.join(missing)}")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise QtoolError(f"{kind.__name__} does not define {', '.join(missing)}")
    functions = [name for name, _ in getmembers(base, isfunction)]
    plugins.require_kinds(given, kind.__name__, dict.fromkeys(functions, Callable) | kinds)


def _require_scheme(scheme: "type[Scheme]") -> None:
    """Check that ``scheme`` has all that a scheme declares, with values that can be.

    Raises:
        QtoolError: naming what it lacks, or an attribute that is not as expected.
    """
    from qtool.schemes import Scheme

    _require_subclass(scheme, Scheme)
    _require_declared(scheme, Scheme)
    if not 1 <= scheme.code_bits <= 8:
        raise _unexpected(scheme, "code_bits", "a whole number of 1 to 8")
    if any(size is not None and size < 1 for size in scheme.group_sizes):
        raise _unexpected(scheme, "group_sizes", "a tuple of positive whole numbers and None")
    if (default := scheme.default_group_size) not in scheme.group_sizes:
        raise _unexpected(
            scheme, "group_sizes", f"a tuple that holds default_group_size, {default!r},"
        )
    bounds = "clip_bounds", "with_clip_bounds"
    if len(own := _overridden(scheme, Scheme, *bounds)) == 1:
        raise QtoolError(
            f"{scheme.__name__} defines {own[0]} alone; one is the inverse of the other:"
            f" {', '.join(bounds)}"
        )
    for size in scheme.group_sizes:
        _require_declared(scheme(size), Scheme)


def _require_tile(given: "Layout | ExportFormat") -> None:
    if min(given.tile) < 1:
        raise _unexpected(given, "tile", "a pair of positive whole numbers")


def _overridden(given: type, base: type, *names: str) -> list[str]:
    """Those of ``names`` that the class ``given`` does not have from its ``base``."""
    return [name for name in names if getattr(given, name) is not getattr(base, name)]


def _unexpected(given: Any, attribute: str, expected: str) -> QtoolError:
    """The refusal of the value of an attribute of ``given``, a class or an object."""
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    found = getattr(given, attribute)
    return QtoolError(f"{name}: {attribute} is {found!r}; {expected} is expected")


def _plain_recipe(scheme: "type[Scheme]", layout: str | None) -> dict[str, Any]:
    from qtool.calibration.rounding.scales import require_float_scale

    size, variants = scheme.default_group_size, {"fast": {"rounding": "rtn"}}
    with suppress(QtoolError):  # gptq takes no scheme of several scales
        require_float_scale(scheme())
        variants["paper"] = {"rounding": "gptq"}
    rule = {"match": ".*", "scheme": scheme.name, "group_size": size or "channel"}
    return {
        "scheme": scheme.name,
        "about": (scheme.__doc__ or "").strip().partition("\n")[0].rstrip("."),
        "layers": [rule if layout is None else rule | {"layout": layout}],
        "variants": variants,
    }
