"""qtool: an offline quantization toolkit and checkpoint converter for large language models.

The functions are those of :mod:`qtool.api`, and :mod:`qtool.register` adds to it from outside;
nothing heavy is imported before one of them runs. ``import qtool.transformers`` makes
transformers' own ``from_pretrained`` load native checkpoints.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtool.api import (
        evaluate,
        export,
        family,
        import_,
        inspect,
        load,
        load_tokenizer,
        plan,
        quantize,
        sensitivity,
        verify,
        write_report,
    )
    from qtool.errors import QtoolError
    from qtool.exchange.as_export import load_as_export
    from qtool.recipes import Recipe
    from qtool.register import (
        register_export,
        register_family,
        register_kernel,
        register_layout,
        register_method,
        register_recipe,
        register_scheme,
    )

__version__ = "0.1.0"
__all__ = [
    "QtoolError",
    "Recipe",
    "evaluate",
    "export",
    "family",
    "import_",
    "inspect",
    "load",
    "load_as_export",
    "load_tokenizer",
    "plan",
    "quantize",
    "register_export",
    "register_family",
    "register_kernel",
    "register_layout",
    "register_method",
    "register_recipe",
    "register_scheme",
    "sensitivity",
    "verify",
    "write_report",
]

#: where a public name comes from, if not from :mod:`qtool.api`
_ELSEWHERE = {
    "QtoolError": "qtool.errors",
    "Recipe": "qtool.recipes",
    "load_as_export": "qtool.exchange.as_export",
}


def __getattr__(name: str) -> Any:
    """A public name, or the module ``api``, imported when it is first used."""
    if name == "api":
        return import_module("qtool.api")
    if name not in __all__:
        raise AttributeError(f"module 'qtool' has no attribute {name!r}")
    room = "qtool.register" if name.startswith("register_") else "qtool.api"
    return getattr(import_module(_ELSEWHERE.get(name, room)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
