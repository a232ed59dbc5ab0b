"""Splits stacked experts into linears with checkpoints' names.

transformers stacks the experts of a block into two 3-D parameters. Here they are linears again,
which can be observed, rounded and replaced one by one, and whose tensors have the form that they
have on disk. Attributes of the stack's class (transformers' ``use_experts_implementation``) say how
the linears lie in it: transposed or not, gate and up one after the other or interleaved, with
biases or not, with a gate or not.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qtool.models import family_of
from qtool.models.grouped import as_read, grouped_linear, segments
from qtool.models.parts import Experts


@dataclass(frozen=True)
class Form:
    """How a class stacks its experts.

    Attributes:
        gate: gate and up are one stack ``gate_up_proj``; else there is only ``up_proj``.
        bias: the linears have biases.
        transposed: the stacks are ``[E, K, N]``, inputs before outputs.
        interleaved: rows of gate and up lie in turn; else one after the other.
    """

    gate: bool
    bias: bool
    transposed: bool
    interleaved: bool

    @classmethod
    def of(cls, stacked: Any) -> "Form":
        """The form that the class of ``stacked`` states, or that was found by running it."""
        if not is_routed(stacked):
            return cls(gate=True, bias=False, transposed=True, interleaved=False)
        return cls(
            gate=getattr(stacked, "has_gate", True),
            bias=getattr(stacked, "has_bias", False),
            transposed=getattr(stacked, "is_transposed", False),
            interleaved=not getattr(stacked, "is_concatenated", True),
        )


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds stacked experts in a form that this module knows."""
    activates = hasattr(module, "act_fn") or hasattr(module, "_apply_gate")
    if getattr(module, "has_post_expert_norm", False) or not activates:
        return False
    form = Form.of(module)
    parameters = dict(module.named_parameters(recurse=False))
    first = parameters.pop("gate_up_proj" if form.gate else "up_proj", None)
    down = parameters.pop("down_proj", None)
    biases = {"gate_up_proj_bias", "up_proj_bias", "down_proj_bias"} if form.bias else set()
    if first is None or down is None or not parameters.keys() <= biases:
        return False
    if not first.dim() == down.dim() == 3 or len(first) != len(down):
        return False
    (rows, hidden), (out, width) = (
        (t.shape[2], t.shape[1]) if form.transposed else (t.shape[1], t.shape[2])
        for t in (first, down)
    )
    fits = hidden == out and rows == width * (2 if form.gate else 1)
    return fits and (is_routed(module) or _multiplies_sorted(module))


def is_routed(stacked: Any) -> bool:
    """Whether ``stacked`` is given the experts that a token goes to.

    Otherwise it is given all tokens, scaled, once for each expert, expert after expert (Llama 4).
    """
    return len(inspect.signature(type(stacked).forward).parameters) != 2  # hidden states alone


@torch.no_grad()
def _multiplies_sorted(stacked: Any) -> bool:
    """Whether a stack that is given no routing computes :func:`gated` MLPs, gate before up.

    It is run on a few numbers, with small sizes in place of its own.
    """
    if (known := _SORTED.get(type(stacked))) is not None:
        return known
    count, width, hidden = stacked.down_proj.shape
    sizes = {count: 3, width: 4, hidden: 4 if width == hidden else 8}
    small = copy.copy(stacked)
    small.__dict__ |= {
        name: sizes[value]
        for name, value in vars(stacked).items()
        if type(value) is int and value in sizes
    }
    generator = torch.Generator().manual_seed(0)
    e, i, h = (sizes[size] for size in (count, width, hidden))
    first, down, x = (
        torch.randn(shape, generator=generator) for shape in ((e, h, 2 * i), (e, i, h), (e, 2, h))
    )
    small._parameters = {"gate_up_proj": nn.Parameter(first), "down_proj": nn.Parameter(down)}
    gate, up = torch.bmm(x, first).chunk(2, -1)
    try:
        found = small(x.flatten(0, 1))
        same = torch.allclose(
            found, torch.bmm(stacked.act_fn(gate) * up, down).flatten(0, 1), rtol=1e-4, atol=1e-4
        )
    except (AttributeError, TypeError, RuntimeError):
        same = False
    _SORTED[type(stacked)] = same
    return same


#: results of :func:`_multiplies_sorted` by class
_SORTED: dict[type, bool] = {}


def expert_shapes(stacked: Any) -> dict[str, tuple[int, int]]:
    """The shapes of an expert's weights by role: ``gate``, if there is one, ``up``, ``down``."""
    form, (n, k) = Form.of(stacked), stacked.down_proj.shape[1:]
    hidden, width = (k, n) if form.transposed else (n, k)
    gate = {"gate": (width, hidden)} if form.gate else {}
    return gate | {"up": (width, hidden), "down": (hidden, width)}


def gated(stacked: Any, gate: Tensor | None, up: Tensor) -> Tensor:
    """The input of down, ``[T, I]`` each, by the stack's own function."""
    if gate is None:
        return stacked.act_fn(up)
    if (own := own_gate(stacked)) is None:
        return stacked.act_fn(gate) * up
    if Form.of(stacked).interleaved:
        return own(torch.stack([gate, up], -1).flatten(-2))
    return own(torch.cat([gate, up], -1))


def own_gate(stacked: Any) -> Callable[[Tensor], Tensor] | None:
    """The stack's function of gate and up; None for the common one, ``act_fn(gate) * up``."""
    gate = getattr(stacked, "_apply_gate", None)
    return None if gate is None or gate.__name__ == "_default_apply_gate" else gate


def expert_tensors(stacked: Any) -> list[dict[str, Tensor]]:
    """Weights and biases of each expert's linears, by role: views of the stack."""
    form = Form.of(stacked)
    first = stacked.gate_up_proj if form.gate else stacked.up_proj
    first, down = first.detach(), stacked.down_proj.detach()
    if form.transposed:
        first, down = first.mT, down.mT
    tensors = _by_role(form, first, "weight") | {"down.weight": down}
    if form.bias:
        bias = stacked.gate_up_proj_bias if form.gate else stacked.up_proj_bias
        tensors |= _by_role(form, bias.detach(), "bias")
        tensors["down.bias"] = stacked.down_proj_bias.detach()
    return [{name: stack[e] for name, stack in tensors.items()} for e in range(len(down))]


def _by_role(form: Form, first: Tensor, part: str) -> dict[str, Tensor]:
    """The tensors of gate and up in ``first [E, 2I, ...]``, or of up alone."""
    if not form.gate:
        return {f"up.{part}": first}
    if form.interleaved:
        gate, up = first[:, ::2], first[:, 1::2]
    else:
        gate, up = first.chunk(2, 1)
    return {f"gate.{part}": gate, f"up.{part}": up}


class Expert(nn.Module):
    """The linears of one MLP of a stack, by the names of ``names``."""

    def __init__(self, names: Experts, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for role, name in names.roles.items():
            linear = linear_of(tensors[f"{role}.weight"], tensors.get(f"{role}.bias"))
            self.add_module(name, linear)


def linear_of(weight: Tensor, bias: Tensor | None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A linear of ``weight [N, K]`` and ``bias [N]``, which are not copied and get no gradients."""
    n, k = weight.shape
    linear = kind(k, n, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class SeparateExperts(nn.ModuleList):
    """Replaces transformers' stacked experts; made of views of their weights.

    Tokens are sorted by expert once. On a GPU the linears of one role are then one product
    (:func:`~qtool.models.grouped.grouped_linear`). On a CPU the experts run one after another,
    because an expert's tokens stay in the cache, except if inputs are observed, which ends a
    forward early.

    Attributes:
        observers: functions by the name of a linear within an expert. Each is given the inputs
            ``[P, K]`` of all experts, sorted by expert and rotated by pre-hooks, and their counts
            ``[E]``.
        added_tokens: bool ``[T, E]`` or None, tokens that observers see for an expert beyond those
            that are routed to it. The output does not depend on them.
        grouped: function of tokens, their experts and weights that computes all packed experts at
            once, or returns None if it cannot (:mod:`qtool.runtime.experts`).
    """

    def __init__(self, stacked: Any, names: Experts) -> None:
        super().__init__(Expert(names, tensors) for tensors in expert_tensors(stacked))
        self.roles = names.roles
        self.__dict__["stacked"] = stacked  # only its function is used
        self.observers: dict[str, Callable[[Tensor, Sequence[int]], None]] = {}
        self.added_tokens: Tensor | None = None
        self.grouped: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None

    def forward(self, hidden: Tensor, *routing: Tensor) -> Tensor:
        """Sum over the chosen experts, ``[T, H]`` for ``hidden [T, H]``.

        Args:
            routing: the experts of each token and their weights, ``[T, k]`` each. Without them
                ``hidden`` is ``[E T, H]``, all tokens for each expert, zeros for tokens that do not
                go to it, and the result has this form too.
        """
        if not routing:
            return self.of_scaled_copies(hidden)
        index, weights = routing
        watched = self.observers or self.added_tokens is not None
        if self.grouped is not None and not watched:
            found = self.grouped(hidden, index, weights)
            if found is not None:
                return found
        token, order, counts = self.sorted_pairs(index)
        out = torch.zeros_like(hidden)
        for rows, some, first in self.turns(hidden, counts):
            pairs = order[rows]
            each = self.of_some(hidden[token[pairs]], some, first)
            if self.added_tokens is not None:  # the pairs that were added have no weight
                routed = pairs < index.numel()
                pairs, each = pairs[routed], each[routed]
            weighted = each * weights.flatten()[pairs, None]
            if len(some) == 1:
                out.index_add_(0, token[pairs], weighted.to(out.dtype))
            else:  # a token occurs several times
                terms = weighted.new_zeros(index.numel(), out.shape[1])
                terms[pairs] = weighted
                out += terms.view(*index.shape, -1).sum(1).to(out.dtype)
        return out

    def of_scaled_copies(self, hidden: Tensor) -> Tensor:
        """:meth:`forward` without routing."""
        out, given = torch.zeros_like(hidden), hidden.any(1)
        x, counts = hidden[given], given.view(len(self), -1).sum(1).tolist()
        parts = [self.of_some(x[rows], some, e) for rows, some, e in self.turns(x, counts)]
        out[given] = torch.cat([x[:0], *parts]).to(out.dtype)
        return out

    def sorted_pairs(self, index: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """The pairs of a token and an expert in ``index [T, k]``, then those of added tokens.

        Returns:
            The token of each pair ``[P]``; the numbers of the pairs ``[P]``, sorted by expert; the
            number of pairs of each expert.
        """
        token = torch.arange(index.numel(), device=index.device) // index.shape[1]
        expert = index.flatten()
        if self.added_tokens is not None:
            added = self.added_tokens.nonzero().to(index.device)
            token, expert = torch.cat([token, added[:, 0]]), torch.cat([expert, added[:, 1]])
        # numbers beyond are experts that do nothing
        counts = torch.bincount(expert, minlength=len(self))[: len(self)].tolist()
        return token, expert.argsort(stable=True), counts

    def turns(
        self, hidden: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[slice, list[int], int]]:
        """Rows of the sorted tokens, counts and first number of experts that are computed at once.

        All experts are computed at once if inputs are observed, and on a GPU; but while operations
        are replaced, a GPU computes one by one, as a CPU does.
        """
        if self.observers or (hidden.is_cuda and not is_in_torch_dispatch_mode()):
            yield slice(0, sum(counts)), list(counts), 0
            return
        for number, (start, stop) in enumerate(pairwise([0, *accumulate(counts)])):
            if start < stop:
                yield slice(start, stop), [stop - start], number

    def of_some(self, x: Tensor, counts: Sequence[int], first: int) -> Tensor:
        """The outputs ``[P, H]`` of some experts, from number ``first`` on.

        ``x [P, H]`` is sorted by expert; ``counts`` are the tokens of each of them.
        """

        def product(role: str, x: Tensor, parts: Sequence[Tensor]) -> Tensor:
            linears = [getattr(self[first + i], self.roles[role]) for i in range(len(counts))]
            if (observer := self.observers.get(self.roles[role])) is not None:
                observer(as_read(linears, x, counts), counts)
            return grouped_linear(linears, x, parts)

        parts = segments(x, counts)
        gate = product("gate", x, parts) if "gate" in self.roles else None
        inner = gated(self.stacked, gate, product("up", x, parts))
        return product("down", inner, segments(inner, counts))


def expert_place(block: nn.Module, name: str) -> tuple[str, int] | None:
    """The name of ``block``'s linear ``name`` with ``*`` for the expert's number, and that number.

    None if ``name`` is no linear of separate experts.
    """
    found = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", name)
    if found is None or not isinstance(block.get_submodule(found[1]), SeparateExperts):
        return None
    return f"{found[1]}.*.{found[3]}", int(found[2])


def separate_experts(model: nn.Module) -> None:
    """Replace ``model``'s stacked experts in place; their names become the checkpoint's."""
    config: Any = model.config
    family = family_of(config)
    if (names := family.experts) is None:
        return
    for block in model.get_submodule(family.blocks):  # type: ignore[attr-defined]
        try:
            moe = block.get_submodule(names.attribute)
        except AttributeError:
            continue
        if not is_experts(getattr(moe, "experts", nn.Identity())):
            continue
        moe.experts = SeparateExperts(moe.experts, names)
        if names.moe != names.attribute:
            # forward uses the old name, the checkpoint its own
            delattr(block, names.attribute)
            block.add_module(names.moe, moe)
            block.__dict__[names.attribute] = moe
