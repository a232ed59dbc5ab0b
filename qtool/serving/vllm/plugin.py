"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each process."""

from packaging.version import InvalidVersion, Version

from qtool.errors import QtoolError
from qtool.format import QUANT_METHOD

#: the first vLLM whose interfaces the plugin is written for
OLDEST = (0, 26)


def register() -> None:
    """Make ``quant_method: qtool`` known to vLLM. Idempotent; touches no GPU.

    Raises:
        QtoolError: for a vLLM older than :data:`OLDEST`, or without a version.
    """
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    if _release(vllm.__version__) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise QtoolError(
            f"vLLM {vllm.__version__} is installed; the qtool plugin needs {oldest} or newer"
        )

    from qtool.serving.vllm.config import QtoolConfig

    register_quantization_config(QUANT_METHOD)(QtoolConfig)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a candidate or a build; empty if it has none.

    A candidate of 0.26 has the interfaces of 0.26, unlike what comparing versions would say.
    """
    try:
        return Version(version).release
    except InvalidVersion:
        return ()
