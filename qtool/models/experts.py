"""Splits stacked experts into gated MLPs of three linears with checkpoints' names.

transformers stacks the experts of a block into two 3-D parameters. Here they are linears again,
which can be observed, rounded and replaced one by one, and whose tensors load as they lie on disk.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qtool.models import family_of
from qtool.models.parts import Experts


class Expert(nn.Module):
    """``down(act(gate(x)) * up(x))``, its linears by the names of ``names``."""

    def __init__(self, names: Experts, act: Any, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.names, self.act = names, act
        gate, up = gate_up.chunk(2)  # [I, H] each
        for name, weight in ((names.gate, gate), (names.up, up), (names.down, down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (
            getattr(self, name) for name in (self.names.gate, self.names.up, self.names.down)
        )
        product: Tensor = down(self.act(gate(x)) * up(x))
        return product


class SeparateExperts(nn.ModuleList):
    """Replaces transformers' stacked experts; made of views of their weights."""

    def __init__(self, stacked: Any, names: Experts) -> None:
        gate_up, down = (
            stacked.gate_up_proj.detach(),
            stacked.down_proj.detach(),
        )  # [E, 2I, H], [E, H, I]
        super().__init__(
            Expert(names, stacked.act_fn, *parts) for parts in zip(gate_up, down, strict=True)
        )

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over the chosen experts, ``[T, H]``: ``hidden [T, H]``, the other two ``[T, k]``."""
        out = torch.zeros_like(hidden)
        for number in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == number)
            weighted = self[number](hidden[token]) * top_k_weights[token, place, None]
            out.index_add_(0, token, weighted.to(out.dtype))
        return out


def separate_experts(model: nn.Module) -> None:
    """Replace ``model``'s stacked experts in place; their names become the checkpoint's."""
    config: Any = model.config
    family = family_of(config.get_text_config(decoder=True).model_type)
    if (names := family.experts) is None:
        return
    for block in model.get_submodule(family.blocks):  # type: ignore[attr-defined]
        moe = getattr(block, names.attribute)
        if hasattr(moe, "experts") and not isinstance(moe.experts, SeparateExperts):
            moe.experts = SeparateExperts(moe.experts, names)
            if (
                names.moe != names.attribute
            ):  # forward finds it under its old name, the checkpoint under its own
                delattr(block, names.attribute)
                block.add_module(names.moe, moe)
                block.__dict__[names.attribute] = moe
