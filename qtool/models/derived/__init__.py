"""A family derived from config.json alone, by one forward of transformers' own model.

No weight is read. :mod:`.build` makes the model without memory, :mod:`.forward` runs it once on
random activations (:mod:`.numbers`), :mod:`.calls` follows the calls of its modules and
:mod:`.recorder` the channels. The record is a :class:`.recorded_model.RecordedModel` with its
:class:`.recorded_block.RecordedBlock`. From it :mod:`.linears`, :mod:`.folds`, :mod:`.attention`
and :mod:`.stream` prove the statements of :mod:`.block_family`; :mod:`.whole` puts the blocks
together. A statement that is not proved is left out: ``unquantized`` of
:class:`~qtool.models.family.Family` says why a linear stays in 16 bits, ``refuses`` and
``fixed_stream`` say why a transform is left out.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from qtool.errors import QtoolError
from qtool.models.derived.build import build
from qtool.models.derived.forward import record
from qtool.models.derived.recorded_model import RecordedModel
from qtool.models.derived.whole import whole_family
from qtool.models.family import Family
from qtool.models.torch_defaults import torch_defaults


def derive(config: Mapping[str, Any]) -> Family:
    """The family of the model of a config.json, at its sizes.

    Raises:
        QtoolError: transformers cannot build it, or its forward has no blocks that can be followed.
    """
    return _derived(_text(config))


def built(config: Mapping[str, Any]) -> Any:
    """transformers' model of a config.json, without numbers.

    Raises:
        QtoolError: transformers cannot build it.
    """
    with torch_defaults():
        return build(json.loads(_text(config), object_hook=_number))


def _text(config: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "_name_or_path")}
    return json.dumps(plain, sort_keys=True, default=str)


@lru_cache(maxsize=8)
def _derived(config: str) -> Family:
    try:
        with torch_defaults():
            return whole_family(RecordedModel(record(built(json.loads(config)))))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise QtoolError(f"its structure is not understood ({error})") from error


def _number(found: dict[str, Any]) -> Any:
    """The number that transformers writes as ``{"__float__": "Infinity"}``."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found
