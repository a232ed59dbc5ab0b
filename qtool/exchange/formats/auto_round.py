"""AutoRound checkpoints: GPTQ's or AWQ's tensors under a config of their own.

The config has ``quant_method: auto-round`` and says in ``packing_format`` which of the two packings
the tensors have. About half of the scales are negative.
"""

from collections.abc import Callable
from dataclasses import replace

from qtool.errors import QtoolError
from qtool.exchange.formats import awq, gptq
from qtool.exchange.import_format import Config, ImportFormat, require_setting

#: formats by packing_format; auto_gptq stores zero points minus 1, the others unchanged
PACKINGS: dict[str, Callable[[Config], ImportFormat]] = {
    "auto_round:auto_gptq": gptq.import_format,
    "auto_round:auto_awq": awq.import_format,
    "auto_round:gptqmodel": lambda config: gptq.import_format(
        {**config, "checkpoint_format": "gptq_v2"}
    ),
}


def import_format(config: Config) -> ImportFormat:
    """The format of an AutoRound checkpoint's linears.

    Raises:
        QtoolError: a packing, a width or activations that cannot be imported.
    """
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    kind = {"data_type": config.get("data_type", "int")}
    require_setting(kind, "data_type", "int", "AutoRound", "only integers are read")
    if int(config.get("act_bits") or 16) < 16:
        raise QtoolError(
            f"AutoRound with act_bits={config['act_bits']}: w4a16's activations are not quantized"
        )
    for name, settings in (config.get("extra_config") or {}).items():
        if int(settings.get("bits", 16)) < 16:
            raise QtoolError(
                f"AutoRound with settings of its own for {name} (extra_config) cannot be imported"
            )
    if packing not in PACKINGS:
        raise QtoolError(
            f"AutoRound packing_format {packing!r} cannot be imported; known: {', '.join(PACKINGS)}"
        )
    return replace(PACKINGS[packing](config), name=f"AutoRound ({packing})")
