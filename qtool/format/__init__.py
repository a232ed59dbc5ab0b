"""The native format of a packed linear and of a checkpoint.

The plan's sizes, the writer, the loader, ``verify``, the exports and the serving plugin all use
this one description. It is plain data and holds no model.
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
from qtool.format.linear import SLAB_ROWS, LinearFormat, same_bytes

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
    "same_bytes",
]
