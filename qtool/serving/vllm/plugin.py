"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each process."""

from qtool.errors import QtoolError
from qtool.format import QUANT_METHOD

#: the first vLLM whose interfaces the plugin is written for
OLDEST = (0, 26)


def register() -> None:
    """Make ``quant_method: qtool`` known to vLLM. Idempotent; touches no GPU.

    Raises:
        QtoolError: for a vLLM older than :data:`OLDEST`.
    """
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    found = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise QtoolError(
            f"vLLM {vllm.__version__} is installed; the qtool plugin needs {oldest} or newer"
        )

    from qtool.serving.vllm.config import QtoolConfig

    register_quantization_config(QUANT_METHOD)(QtoolConfig)
