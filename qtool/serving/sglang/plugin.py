"""The entry point ``sglang.srt.plugins``: SGLang calls :func:`register` in each process."""

from qtool.format import QUANT_METHOD


def register() -> None:
    """Make ``quant_method: qtool`` known to SGLang, which has a table but no function for it."""
    from sglang.srt.layers import linear, quantization

    from qtool.serving.sglang.config import QtoolConfig, QtoolLinearMethod

    quantization.QUANTIZATION_METHODS[QUANT_METHOD] = QtoolConfig
    if QtoolLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
        linear.WEIGHT_LOADER_V2_SUPPORTED.append(QtoolLinearMethod.__name__)
