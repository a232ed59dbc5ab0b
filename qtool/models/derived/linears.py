"""The linears of a block to quantize, in groups that read one input; why others are not."""

from typing import Any

from torch import nn

from qtool.models.derived.facts import STREAM
from qtool.models.derived.recorded_block import RecordedBlock
from qtool.models.derived.trace import Read

#: linears with fewer rows fit no kernel's tile
NARROWEST = 64
#: a linear with fewer rows than the hidden size divided by this is too small to matter
SMALL_SHARE = 16


def groups_of(
    block: RecordedBlock, unquantized: dict[str, str]
) -> list[tuple[tuple[str, ...], Read]]:
    """Names of linears that read one input, and one of their reads, in order.

    Linears that stay in 16 bits are added to ``unquantized``, with the reason.
    """
    found: dict[Any, list[Read]] = {}
    for read in [*block.reads, *block.experts.values()]:
        found.setdefault((read.value_id, read.weight in block.experts), []).append(read)
    called = {read.weight for read in block.reads}
    groups: list[tuple[tuple[str, ...], Read]] = []
    for name, module in block.model.modules.items():
        full = f"{name}.weight"
        if name.startswith(block.prefix) and isinstance(module, nn.Linear) and full not in called:
            unquantized[block.short(name)] = "the forward does not call it"
    for reads in found.values():
        own = [name for read in reads for name in _quantized(block, read, unquantized)]
        linears = tuple(dict.fromkeys(own))
        if linears:
            groups.append((linears, reads[0]))
        if reads[0].weight in block.experts:
            groups.append(((block.expert_names(reads[0].weight)["down"],), reads[0]))
    order = {name: i for i, name in enumerate(block.model.trace.called)}
    return sorted(groups, key=lambda g: order.get(_first_called(block, g[0][0]), len(order)))


def _quantized(block: RecordedBlock, read: Read, unquantized: dict[str, str]) -> list[str]:
    """The linear of ``read`` if it is quantized, or gate and up of a stack of experts.

    A linear that stays in 16 bits is added to ``unquantized``, with the reason.
    """
    if read.weight in block.experts:
        names = block.expert_names(read.weight)
        return [name for role, name in names.items() if role != "down"]
    if why := why_unquantized(block, read):
        unquantized[block.short(read.weight)] = why
        return []
    return [block.short(read.weight)]


def why_unquantized(block: RecordedBlock, read: Read) -> str:
    """Why the linear of ``read`` stays in 16 bits; empty if it is quantized."""
    linear = block.linear(read.weight)
    routed = {r.value_id for r in block.experts.values()}
    rows = block.model.state[read.weight][0]
    if read.value_id in routed and rows == block.model.sizes["experts"](None):
        return "a router"
    if linear is None:
        return f"{type(block.model.modules.get(read.module)).__name__} is no plain linear"
    if read.weight in block.model.trace.changed:
        return "the model's forward changes its weight"
    if read.weight in block.model.trace.asked or not read.transposed:
        return "its weight is read outside its own forward"
    n, k = linear.weight.shape
    if n < NARROWEST:
        return f"{n} rows, narrower than a tile of {NARROWEST}"
    if n < block.model.hidden // SMALL_SHARE and read.weight not in block.attended:
        return f"{n} rows, which weigh little of a hidden size of {block.model.hidden}"
    if k % NARROWEST:
        return f"{k} inputs, which groups of {NARROWEST} do not divide"
    if _absorbed(block, read):
        return "engines multiply it into the attention over latents"
    return ""


def _absorbed(block: RecordedBlock, read: Read) -> bool:
    """Whether the linear makes keys and values of a normed latent (MLA)."""
    latents = {n.name for n in block.norms if STREAM not in n.facts}
    of_latent = any(p in latents for p in read.facts)
    return of_latent and any(
        read.weight in call.k and read.weight in call.v for call in block.model.trace.attentions
    )


def _first_called(block: RecordedBlock, linear: str) -> str:
    return block.prefix + linear.partition(".*")[0]
