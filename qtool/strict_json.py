"""JSON as every reader takes it: a number that is infinite or NaN, which JSON lacks, is null.

transformers writes such a number as an object instead, which :func:`number` reads.
"""

import json
import math
from typing import Any


def strict_json(value: Any) -> str:
    """``value`` as indented JSON without the tokens NaN and Infinity."""
    return json.dumps(json_safe(value), indent=2, allow_nan=False)


def number(found: dict[str, Any]) -> Any:
    """The number that transformers writes as ``{"__float__": "Infinity"}``; else ``found``."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def json_safe(value: Any) -> Any:
    """``value`` with None in place of infinite and NaN numbers, at any depth.

    >>> json_safe({"error": (float("inf"), [0.5])})
    {'error': [None, [0.5]]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(entry) for key, entry in value.items()}
    return [json_safe(entry) for entry in value] if isinstance(value, list | tuple) else value
