"""Splits stacked experts into linears with checkpoints' names.

transformers stacks the experts of a block into two 3-D parameters. Here they are linears again,
which can be observed, rounded and replaced one by one, and whose tensors load as they lie on disk.
What the class of the stack says of itself (transformers' ``use_experts_implementation``) says how
they lie in it: transposed or not, gate and up one after the other or interleaved, with biases or
not, with a gate or not.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.parts import Experts
from qtool.models.trace import Facts, Kind, Recorder

#: names of an expert's linears where a checkpoint stacks them
LEAVES = "gate_proj", "up_proj", "down_proj"


@dataclass(frozen=True)
class Form:
    """How a class stacks its experts; what it does not say is as in the first versions."""

    gate: bool
    bias: bool
    transposed: bool
    interleaved: bool

    @classmethod
    def of(cls, stacked: Any) -> "Form":
        """What the class of ``stacked`` says of itself."""
        return cls(
            gate=getattr(stacked, "has_gate", True),
            bias=getattr(stacked, "has_bias", False),
            transposed=getattr(stacked, "is_transposed", False),
            interleaved=not getattr(stacked, "is_concatenated", True),
        )


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds stacked experts in a form that is known here."""
    if getattr(module, "has_post_expert_norm", False) or not hasattr(module, "act_fn") | hasattr(
        module, "_apply_gate"
    ):
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
    routed = len(inspect.signature(type(module).forward).parameters) != 2  # hidden states alone
    return routed and hidden == out and rows == width * (2 if form.gate else 1)


def expert_parts(stacked: Any) -> list[tuple[str, tuple[int, int], bool]]:
    """Role (``gate``, ``up``, ``down``), shape and whether there is a bias, of each linear."""
    n, k = stacked.down_proj.shape[1:]
    hidden, width = (k, n) if Form.of(stacked).transposed else (n, k)
    roles = ["gate", "up"] if Form.of(stacked).gate else ["up"]
    first = [(role, (width, hidden), Form.of(stacked).bias) for role in roles]
    return [*first, ("down", (hidden, width), Form.of(stacked).bias)]


def leaf_names(model: Any) -> dict[str, tuple[str | None, str, str, bool]]:
    """Names of gate, up and down of each stack of experts, as checkpoints have them.

    And whether checkpoints have the stack itself. transformers' own list of conversions says from
    which names a stack is made.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    stacks = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not stacks:
        return {}
    converters = [c for c in get_model_conversion_mapping(model) if hasattr(c, "operations")]

    def leaves(name: str, part: str) -> list[str]:
        for converter in converters:
            made = any(re.search(t, f"{name}.{part}") for t in converter.target_patterns)
            names = [str(s).split(".") for s in converter.source_patterns]
            if made and all("*" in parts and parts[-1] == "weight" for parts in names):
                return [parts[-2] for parts in names]
        return []

    found: dict[str, tuple[str | None, str, str, bool]] = {}
    for name, stack in stacks.items():
        gate, up, down = LEAVES
        if Form.of(stack).gate and len(pair := leaves(name, "gate_up_proj")) == 2:
            gate, up = pair
        if not Form.of(stack).gate and (single := leaves(name, "up_proj")):
            up = single[0]
        single = leaves(name, "down_proj")
        down = single[0] if single else down
        found[name] = (gate if Form.of(stack).gate else None), up, down, not single
    return found


def disk_names(
    model: Any, numbers: set[int], blocks: str
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Names on disk of tensors and stacks of experts that are called otherwise in ``model``.

    And of those that are several on disk, with their rows: they follow one another. Only of the
    blocks ``numbers``.

    Raises:
        QtoolError: a tensor is made of others in another way.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        return {}, {}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(f"{blocks}.")
        or int(name[len(blocks) + 1 :].partition(".")[0]) in numbers
    }
    owners = {id(tensor): name for name, tensor in state.items()}
    found = {}
    for disk, tensor in revert_weight_conversion(model, dict(state)).items():
        if (own := owners.get(id(tensor))) is not None:
            found[own] = disk
    made = [name for name in state if name not in found]
    for name, module in model.named_modules():
        if is_experts(module) and any(n.startswith(f"{name}.") for n in made):
            stacks = {n: state[n] for n in made if n.startswith(f"{name}.")}
            made = [n for n in made if n not in stacks]
            for disk in revert_weight_conversion(model, stacks):
                if ".0." in disk and (base := disk.rpartition(".0.")[0]).rpartition(".")[2]:
                    found.setdefault(name, base)
            if name not in found:
                raise QtoolError(f"{name}: transformers computes its stacks when it loads them")
    joined = {}
    for name in made:
        parts = revert_weight_conversion(model, {name: state[name]})
        rows = sum(part.shape[0] for part in parts.values())
        same = {part.shape[1:] for part in parts.values()} == {state[name].shape[1:]}
        if not (same and rows == state[name].shape[0] and _follow(model, name)):
            raise QtoolError(f"{name}: transformers computes it from {min(parts)} when it loads it")
        joined[name] = {part: tensor.shape[0] for part, tensor in parts.items()}
    return {own: disk for own, disk in found.items() if own != disk}, joined


def _follow(model: Any, name: str) -> bool:
    """Whether transformers makes ``name`` of tensors that follow one another along dimension 0."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for converter in get_model_conversion_mapping(model, add_legacy=False):
        if any(re.search(pattern, name) for pattern in converter.target_patterns):
            operations = getattr(converter, "operations", ())
            if operations:
                return [(type(o).__name__, o.dim) for o in operations] == [("Concatenate", 0)]
    return False


def gate_facts(stacked: Any) -> tuple[Kind | None, Kind | None]:
    """How the input of down depends on up, and on gate if there is one; None: on no one channel."""
    size, recorder = 8, Recorder(nn.Module())
    up, gate = (torch.empty(2, size, device="meta") for _ in range(2))
    recorder.produce("up", up)
    recorder.produce("gate", gate)
    with torch.no_grad(), recorder:
        out = gated(stacked, gate if Form.of(stacked).gate else None, up)
    facts = recorder.of(out)
    expected = {"up", "gate"} if Form.of(stacked).gate else {"up"}
    if facts.keys() != expected or recorder.trace.escapes:
        return None, None
    return _kind(facts, "up"), _kind(facts, "gate")


def _kind(facts: Facts, name: str) -> Kind | None:
    fact = facts.get(name)
    if fact is None or fact.channels is None:
        return None
    in_order = bool((fact.channels == torch.arange(fact.channels.shape[-1])).all())
    return fact.kind if in_order else Kind.MIXED


def gated(stacked: Any, gate: Tensor | None, up: Tensor) -> Tensor:
    """The input of down, ``[T, I]`` each, by the stack's own function."""
    if gate is None:
        product: Tensor = stacked.act_fn(up)
        return product
    own = getattr(stacked, "_apply_gate", None)
    if own is None or own.__name__ == "_default_apply_gate":
        product = stacked.act_fn(gate) * up
    elif Form.of(stacked).interleaved:
        product = own(torch.stack([gate, up], -1).flatten(-2))
    else:
        product = own(torch.cat([gate, up], -1))
    return product


def expert_tensors(stacked: Any) -> list[dict[str, Tensor]]:
    """Weights and biases of each expert's linears, by role: views of the stack."""
    first = stacked.gate_up_proj if Form.of(stacked).gate else stacked.up_proj
    first, down = first.detach(), stacked.down_proj.detach()
    if Form.of(stacked).transposed:
        first, down = first.mT, down.mT
    tensors = _by_role(stacked, first, "weight") | {"down.weight": down}
    if Form.of(stacked).bias:
        bias = stacked.gate_up_proj_bias if Form.of(stacked).gate else stacked.up_proj_bias
        tensors |= _by_role(stacked, bias.detach(), "bias")
        tensors["down.bias"] = stacked.down_proj_bias.detach()
    return [{name: stack[e] for name, stack in tensors.items()} for e in range(len(down))]


def _by_role(stacked: Any, first: Tensor, part: str) -> dict[str, Tensor]:
    """Gate and up of ``[E, 2I, ...]``, or up alone."""
    if not Form.of(stacked).gate:
        return {f"up.{part}": first}
    if Form.of(stacked).interleaved:
        gate, up = first[:, ::2], first[:, 1::2]
    else:
        gate, up = first.chunk(2, 1)
    return {f"gate.{part}": gate, f"up.{part}": up}


class Expert(nn.Module):
    """One MLP of a stack, its linears by the names of ``names``."""

    def __init__(self, names: Experts, stacked: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = names
        self.__dict__["stacked"] = stacked  # its function, not its parameters
        for role, name in self._named():
            weight = tensors[f"{role}.weight"]
            bias = tensors.get(f"{role}.bias")
            n, k = weight.shape
            linear = nn.Linear(k, n, bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias, requires_grad=False)
            self.add_module(name, linear)

    def _named(self) -> list[tuple[str, str]]:
        roles = {"gate": self.names.gate, "up": self.names.up, "down": self.names.down}
        return [(role, name) for role, name in roles.items() if name]

    def forward(self, x: Tensor) -> Tensor:
        linears = {role: getattr(self, name) for role, name in self._named()}
        gate = linears["gate"](x) if "gate" in linears else None
        out: Tensor = linears["down"](gated(self.stacked, gate, linears["up"](x)))
        return out


class SeparateExperts(nn.ModuleList):
    """Replaces transformers' stacked experts; made of views of their weights."""

    def __init__(self, stacked: Any, names: Experts) -> None:
        super().__init__(Expert(names, stacked, tensors) for tensors in expert_tensors(stacked))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over the chosen experts, ``[T, H]``: ``hidden [T, H]``, the other two ``[T, k]``."""
        out = torch.zeros_like(hidden)
        for number in top_k_index.unique().tolist():
            if number >= len(self):  # an expert that does nothing
                continue
            token, place = torch.where(top_k_index == number)
            weighted = self[number](hidden[token]) * top_k_weights[token, place, None]
            out.index_add_(0, token, weighted.to(out.dtype))
        return out


def separate_experts(model: nn.Module) -> None:
    """Replace ``model``'s stacked experts in place; their names become the checkpoint's."""
    config: Any = model.config
    family = family_of(config)
    if (names := family.experts) is None:
        return
    for block in model.get_submodule(family.blocks):  # type: ignore[attr-defined]
        moe = block.get_submodule(names.attribute) if hasattr(block, names.attribute) else None
        if moe is None or not is_experts(getattr(moe, "experts", nn.Identity())):
            continue
        moe.experts = SeparateExperts(moe.experts, names)
        if names.moe != names.attribute:
            # forward finds it under its old name, the checkpoint under its own
            delattr(block, names.attribute)
            block.add_module(names.moe, moe)
            block.__dict__[names.attribute] = moe
