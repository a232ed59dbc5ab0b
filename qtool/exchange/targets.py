"""Every format an export writes, by name."""

from qtool.errors import QtoolError, suggest
from qtool.exchange.awq import Awq
from qtool.exchange.compressed_tensors import COMPRESSED_TENSORS
from qtool.exchange.gptq import Gptq
from qtool.exchange.marlin import MARLIN_FILES
from qtool.exchange.qqq import Qqq
from qtool.exchange.qserve import QServe
from qtool.exchange.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *COMPRESSED_TENSORS,
        Gptq(
            "gptq", "gptq", "symmetric 4-bit weights, 16-bit activations: vLLM, SGLang, GPTQModel"
        ),
        Gptq(
            "gptq-v2",
            "gptq_v2",
            "the same, zero points stored as they are (GPTQModel's own format)",
        ),
        Awq(),
        *MARLIN_FILES,
        Qqq(),
        QServe(),
    )
}


def get(name: str) -> Target:
    """The target ``name``.

    Raises:
        QtoolError: an unknown format.
    """
    if name not in TARGETS:
        raise QtoolError(f"unknown format {name!r}: {suggest(name, TARGETS)}")
    return TARGETS[name]


def that_take(scheme: str, group_size: int | None) -> list[str]:
    """Names of the formats that can express ``scheme`` at ``group_size``."""
    return [
        name for name, target in TARGETS.items() if group_size in target.expressible.get(scheme, ())
    ]
