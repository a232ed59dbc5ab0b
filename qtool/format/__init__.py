"""The native format of a packed linear and of a checkpoint.

It is the one statement behind the plan's sizes, the writer, the loader, ``verify``, the exports and
the serving plugin. It is plain data with no model in it.
"""

from qtool.format.checkpoint import (
    NOTICE,
    QUANT_METHOD,
    WEIGHTS_FIELD,
    CheckpointFormat,
    Rule,
    native_format,
    of_any_expert,
)
from qtool.format.linear import SLAB_ROWS, LinearFormat

__all__ = [
    "NOTICE",
    "QUANT_METHOD",
    "SLAB_ROWS",
    "WEIGHTS_FIELD",
    "CheckpointFormat",
    "LinearFormat",
    "Rule",
    "native_format",
    "of_any_expert",
]
