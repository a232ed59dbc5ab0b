"""Tokens for experts that a router hardly ever chooses, in statistics alone.

A Hessian or a range of three tokens fits these three. An expert to which fewer than
``min_expert_tokens`` of all calibration tokens are routed therefore also observes those of the
others for which the router gives it the highest probability, by the routing of the float model. The
block's output, and with it the next block's input, does not depend on them.

Legend: B sequences in a batch, S tokens of each, T = B S, E experts, m candidates of a batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe
from qtool.distributed import ranks
from qtool.models.experts import SeparateExperts, is_routed

#: the note of a block: tokens of each expert, routed and added
NOTE = "expert tokens"


@torch.no_grad()
def add_tokens(
    block: Block, batches: Sequence[Batch], float_batches: Sequence[Batch], least: int
) -> None:
    """Set ``more`` of ``batches`` so that each expert of ``block`` observes ``least`` tokens.

    Experts that are told no routing get tokens that are scaled by it, and none beside them.

    Args:
        block: still in full precision.
        float_batches: what enters it in the float model, for the tokens of each of ``batches``.
    """
    for batch in batches:
        batch.more = None
    for stack, experts in block.module.named_modules():
        if not isinstance(experts, SeparateExperts) or not is_routed(experts.stacked):
            continue
        if router := router_of(block, stack):
            seen = [candidates(block, batch, stack, router, least) for batch in float_batches]
            of_all = ranks.all_gather_batches([(routed, best) for routed, best, _ in seen])
            routed = torch.stack([counts for counts, _ in of_all]).sum(0)  # [E]
            wanted = chosen([best for _, best in of_all], (least - routed).clamp_min(0))
            added = torch.stack([some.sum(0) for some in wanted]).sum(0)
            for batch, (_, _, places), some in zip(
                batches, seen, ranks.local_items(wanted), strict=True
            ):
                if some.any():
                    sequences, length = batch.shape
                    more = torch.zeros(sequences * length, len(experts), dtype=torch.bool)
                    batch.more = more.scatter_(0, places, some).view(sequences, length, -1)
            block.notes[NOTE] = {
                f"{stack}.{number}": {"routed": here, "added": more}
                for number, (here, more) in enumerate(
                    zip(routed.tolist(), added.tolist(), strict=True)
                )
            }


def router_of(block: Block, stack: str) -> str | None:
    """The module beside the experts ``stack`` that has a row for each of them; None if unsure."""
    moe, experts = stack.rpartition(".")[0], block.get(stack)
    others = {*block.family.linears(), stack}
    found = [
        name
        for name, module in block.get(moe).named_modules(prefix=moe)
        if name not in others
        and not name.startswith(f"{stack}.")
        and isinstance(weight := getattr(module, "weight", None), Tensor)
        and weight.dim() == 2
        and len(weight) == len(experts)  # type: ignore[arg-type]
    ]
    return found[0] if len(found) == 1 else None


def candidates(
    block: Block, batch: Batch, stack: str, router: str, least: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What an expert might see of ``batch``, on the CPU.

    Returns:
        Tokens routed to each expert ``[E]``; the highest probabilities among the others
        ``[m, E]``, below 0 where there is none; their tokens ``[m, E]``.
    """
    inputs: list[Tensor] = []
    chosen: list[Tensor] = []
    experts, module = block.get(stack), block.get(router)
    hook = experts.register_forward_pre_hook(lambda _, given: chosen.extend(given[1:2]))
    try:
        observe(block, [batch], {router: inputs.append, stack: lambda _: None})
    finally:
        hook.remove()
    bias = getattr(module, "bias", None)
    logits = torch.cat(inputs).float() @ module.weight.float().T  # type: ignore[operator, union-attr]
    probability = (logits if bias is None else logits + bias.float()).softmax(1)  # [T, E]
    count = probability.shape[1]
    index = torch.cat(chosen).clamp_max(count)  # one that does nothing has a higher number
    routed = index.new_zeros(len(index), count + 1, dtype=torch.bool)
    routed = routed.scatter_(1, index, True)[:, :count]
    best, places = probability.masked_fill_(routed, -1).topk(min(least, len(index)), 0)
    return routed.sum(0).cpu(), best.cpu(), places.cpu()


def chosen(best: Sequence[Tensor], wanted: Tensor) -> list[Tensor]:
    """Which of the candidates ``best [m, E]`` of each batch are the ``wanted [E]`` highest of all.

    Of equal ones the first is taken.
    """
    whole = torch.cat(list(best))
    order = whole.argsort(stable=True, dim=0, descending=True)
    rank = torch.arange(len(order))[:, None].expand_as(order)
    place = torch.empty_like(order).scatter_(0, order, rank)
    return list(((place < wanted) & (whole >= 0)).split([len(some) for some in best]))
