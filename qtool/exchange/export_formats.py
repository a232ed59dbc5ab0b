"""The table of export formats, by name."""

from qtool import plugins
from qtool.exchange.export_format import ExportFormat
from qtool.exchange.formats.awq import Awq
from qtool.exchange.formats.compressed_tensors import COMPRESSED_TENSORS
from qtool.exchange.formats.gguf import Gguf
from qtool.exchange.formats.gptq import Gptq
from qtool.exchange.formats.marlin import MARLIN_FILES
from qtool.exchange.formats.qqq import Qqq
from qtool.exchange.formats.qserve import QServe

EXPORT_FORMATS: dict[str, ExportFormat] = {
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
        Gguf(),
    )
}


def get(name: str) -> ExportFormat:
    """The export format ``name``.

    Raises:
        QtoolError: an unknown format.
    """
    return plugins.find(EXPORT_FORMATS, name, "format")
