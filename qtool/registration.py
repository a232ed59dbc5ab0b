"""Register the quantizer with transformers when, and only when, its models are imported.

``import qtool`` must be enough for ``AutoModelForCausalLM.from_pretrained`` to know the format, yet
``qtool plan`` and ``-h`` must not pay seconds for importing transformers. So a finder waits for
``transformers.modeling_utils`` and imports :mod:`qtool.runtime.huggingface` right after it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AWAITED = "transformers.modeling_utils"


class _Then(Loader):
    """The module's own loader, and then ours."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        import_module("qtool.runtime.huggingface")


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec and spec.loader:
            spec.loader = _Then(spec.loader)
        return spec


def register() -> None:
    """Make transformers know qtool checkpoints: now if its models are imported, else once they are."""
    if AWAITED in sys.modules:
        import_module("qtool.runtime.huggingface")
    else:
        sys.meta_path.insert(0, _Finder())
