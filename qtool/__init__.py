"""qtool: an offline quantization toolkit and checkpoint converter for large language models.

After ``import qtool``, transformers' ``from_pretrained`` loads qtool checkpoints.
"""

from typing import Any

from qtool.registration import register

__version__ = "0.1.0"
__all__ = ["load", "load_as_export", "load_tokenizer"]

register()


def __getattr__(name: str) -> Any:
    """``qtool.load`` without paying for transformers at ``import qtool``."""
    if name in __all__:
        from importlib import import_module

        module = "qtool.exchange.as_export" if name == "load_as_export" else "qtool.runtime.load"
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'qtool' has no attribute {name!r}")
