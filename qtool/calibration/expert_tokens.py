"""Adds tokens for experts that a router hardly ever chooses, to statistics only.

A Hessian or a range of three tokens fits only these three. If fewer than ``min_expert_tokens`` of
all calibration tokens are routed to an expert, it also observes the other tokens to which the
router of the float model gives the highest probability for this expert. The block's output, and so
the next block's input, does not depend on them.

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

#: the key of a block's note on the tokens of each expert, routed and added
NOTE = "expert tokens"


@torch.no_grad()
def add_tokens(
    block: Block, batches: Sequence[Batch], float_batches: Sequence[Batch], least: int
) -> None:
    """Set ``added_tokens`` of ``batches`` so that each expert observes ``least`` tokens.

    Experts that do not get the routing as an argument get no more tokens, since their inputs are
    scaled by it.

    Args:
        block: the block in full precision, and in the channels of the batches.
        float_batches: the block's inputs in the float model, for the tokens of ``batches``.
    """
    for batch in batches:
        batch.added_tokens = None
    for stack, experts in block.module.named_modules():
        if not isinstance(experts, SeparateExperts) or not is_routed(experts.stacked):
            continue
        if router := router_of(block, stack):
            seen = [candidates(block, batch, stack, router, least) for batch in float_batches]
            of_all = ranks.all_gather_batches([(routed, best) for routed, best, _ in seen])
            routed = torch.stack([counts for counts, _ in of_all]).sum(0)  # [E]
            masks = highest([best for _, best in of_all], (least - routed).clamp_min(0))
            for batch, (_, _, tokens), mask in zip(
                batches, seen, ranks.local_items(masks), strict=True
            ):
                if mask.any():
                    sequences, length = batch.shape
                    chosen = torch.zeros(sequences * length, len(experts), dtype=torch.bool)
                    chosen.scatter_(0, tokens, mask)
                    batch.added_tokens = chosen.view(sequences, length, -1)
            counts = routed.tolist(), torch.stack([mask.sum(0) for mask in masks]).sum(0).tolist()
            block.notes[NOTE] = {
                f"{stack}.{number}": {"routed": own, "added": added}
                for number, (own, added) in enumerate(zip(*counts, strict=True))
            }


def router_of(block: Block, stack: str) -> str | None:
    """The router of the experts ``stack``: it has a row for each of them; None if unsure."""
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
    """The tokens of ``batch`` that each expert might observe, on the CPU.

    Returns:
        The number of tokens routed to each expert ``[E]``; the highest probabilities among the
        other tokens ``[m, E]``, below 0 if there is no token; the tokens ``[m, E]``.
    """
    inputs: list[Tensor] = []
    chosen: list[Tensor] = []  # the numbers of each token's experts
    experts, module = block.get(stack), block.get(router)
    hook = experts.register_forward_pre_hook(lambda _, given: chosen.extend(given[1:2]))
    try:
        observe(block, [batch], {router: inputs.append, stack: lambda _: None})
    finally:
        hook.remove()
    bias = getattr(module, "bias", None)
    if not inputs:  # LongCat's router reads the weight of a linear that it does not call
        observe(block, [batch], {router.rpartition(".")[0]: inputs.append})
    logits = torch.cat(inputs).float() @ module.weight.float().T  # type: ignore[operator]
    probability = (logits if bias is None else logits + bias.float()).softmax(1)  # [T, E]
    count = probability.shape[1]
    index = torch.cat(chosen).clamp_max(count)  # experts that do nothing have higher numbers
    routed = index.new_zeros(len(index), count + 1, dtype=torch.bool)
    routed = routed.scatter_(1, index, True)[:, :count]
    best, tokens = probability.masked_fill_(routed, -1).topk(min(least, len(index)), 0)
    return routed.sum(0).cpu(), best.cpu(), tokens.cpu()


def highest(best: Sequence[Tensor], wanted: Tensor) -> list[Tensor]:
    """Masks of the candidates ``best [m, E]`` that are among the ``wanted [E]`` highest of all.

    There is a mask for each batch. The first of equal candidates is taken.
    """
    whole = torch.cat(list(best))
    order = whole.argsort(stable=True, dim=0, descending=True)
    rank = torch.arange(len(order))[:, None].expand_as(order)
    place = torch.empty_like(order).scatter_(0, order, rank)
    return list(((place < wanted) & (whole >= 0)).split([len(some) for some in best]))
