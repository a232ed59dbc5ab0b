"""One decoder block on a device: its exact weights, and what methods decide about it.

On a GPU the module computes in 16 bits; its exact weights, which methods change, are also kept in
float32.

A method (smooth, clip, gptq, ...) gets a :class:`Block` and the block's inputs, changes the weights
in place or notes a decision (clip ratios, an input permutation), and returns. It knows schemes only
through their protocol, and names of linears only through the family. :mod:`.forwards` runs the
block.

Legend: H hidden size, N x K a linear's weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from qtool.calibration.kv.block_cache import BlockCache
from qtool.calibration.rounding.rounded import Rounded, SimulatedLinear, stacked
from qtool.calibration.stacking import by_kind, packed_in_turn
from qtool.errors import QtoolError, suggest
from qtool.models.family import Family
from qtool.models.parts import Attention, Heads
from qtool.models.skeleton import CACHE_ARGUMENTS
from qtool.schemes.arithmetic.online_hadamard import rotate, rotate_input
from qtool.schemes.base import ClipRatio, Params, Scheme

if TYPE_CHECKING:
    from qtool.calibration.kept_outputs import KeptOutputs
    from qtool.calibration.reference import Reference


@dataclass
class Block:
    """One block with its weights (float) on a device.

    Attributes:
        index: its number in the model.
        config: the settings of the model (:meth:`~qtool.models.family.Family.settings`).
        schemes: the scheme of each linear to quantize; a linear that is absent stays as it is.
        clips: ``(clip, group_clip)`` chosen for a linear, as ``Scheme.fit`` takes them.
        permutations: input-channel order ``[K]`` of a linear, if the module that makes its input
            cannot store that order: the columns are stored in it, and the input is gathered at run
            time.
        rotated: linears whose inputs are rotated at run time, after they are gathered.
        to_rotate: linears that are in ``rotated`` in the end, also before that transform has run.
        notes: what methods report (errors, choices), written to qtool.json.
        exact: float32 tensors by parameter name, of which the module holds 16-bit copies
            (:meth:`update_module`); empty if the module's own tensors are the exact ones.
        full_kv: arguments for :func:`.forwards.run` that keep keys and values in full precision,
            if the run quantizes them.
        reference: what the float model computes in this block, if the run follows it.
        sensitivity: ``F [H, H]`` float32, if the rounding weighs outputs: ``z F`` of normal z has
            the second moments of the gradients of the logits with respect to the block's output.
        kept_outputs: outputs of the attention that later forwards of the same batches take.
        budget: bytes that may be allocated on the device.
    """

    index: int
    module: nn.Module
    family: Family
    config: Any
    schemes: dict[str, Scheme]
    clips: dict[str, tuple[ClipRatio, ClipRatio]] = field(default_factory=dict)
    permutations: dict[str, Tensor] = field(default_factory=dict)
    rotated: set[str] = field(default_factory=set)
    to_rotate: set[str] = field(default_factory=set)
    notes: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Tensor] = field(default_factory=dict)
    full_kv: dict[str, Any] = field(default_factory=dict)
    reference: "Reference | None" = None
    sensitivity: Tensor | None = None
    kept_outputs: "KeptOutputs | None" = None
    budget: float = inf
    #: for each exact tensor, the version of it that the module has a copy of
    _copied: dict[str, int] = field(default_factory=dict, init=False)

    @property
    def heads(self) -> Heads:
        return Heads.of(self.config)

    @property
    def attention(self) -> Attention:
        """The block's attention, for methods that the family does not refuse."""
        assert self.family.attention is not None
        return self.family.attention

    def with_cache(self, cache: Any) -> dict[str, Any]:
        """The argument for :func:`.forwards.run` that puts ``cache`` in place of the KV cache.

        Raises:
            QtoolError: the block has no argument of the name that the family says.
        """
        cached = self.family.kv_cache
        assert cached is not None
        name, taken = cached.argument, signature(self.module.forward).parameters
        if name not in taken and name not in CACHE_ARGUMENTS:  # some take it in **kwargs
            raise QtoolError(
                f"family {self.family.name}: KVCache.argument is {name!r}, and the arguments of a"
                f" block are {', '.join(taken)}"
            )
        return {name: BlockCache(cache, cached.heads(self.config)[0])}

    def get(self, name: str) -> nn.Module:
        """The submodule ``name`` (a linear, a norm).

        Raises:
            QtoolError: the block has none of that name.
        """
        try:
            return self.module.get_submodule(name)
        except AttributeError as error:
            known = [known for known, _ in self.module.named_modules() if known]
            raise QtoolError(
                f"{name!r}: no module of block {self.index}: {suggest(name, known)}"
            ) from error

    def weight(self, name: str) -> Tensor:
        """The weight of submodule ``name``, detached.

        Change it in place, unless ``name`` is a part of a fused linear, which may be a copy.

        Raises:
            QtoolError: the block has no such module, or the module has no weight.
        """
        owner, rows = self._rows(name)
        if (weight := self._exact(owner, "weight")) is None:
            raise QtoolError(f"{name!r}: a module of block {self.index} without a weight")
        return weight[rows]

    def shape(self, name: str) -> tuple[int, int]:
        """N and K of linear ``name``."""
        n, k = self.weight(name).shape
        return n, k

    def bias(self, name: str) -> Tensor | None:
        """The bias of submodule ``name``, or of a part of one, detached; None where it has none."""
        owner, rows = self._rows(name)
        bias = self._exact(owner, "bias")
        return None if bias is None else bias[rows]

    def change_rows(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the rows ``[n, K]`` of a linear's weight, and to its bias ``[n]``.

        ``name`` may be a part of a fused linear.
        """
        owner, rows = self._rows(name)
        for tensor in (self.weight(owner), self.bias(owner)):
            if tensor is not None:
                tensor[rows] = change(tensor[rows]).to(tensor.dtype)

    def parameters(self) -> dict[str, Tensor]:
        """All stored tensors by name, detached; the exact ones where the module has copies."""
        own = dict(self.module.named_parameters())
        kept = self.module.state_dict().keys() | own.keys()
        stored = {**own, **dict(self.module.named_buffers())}
        return {n: self.exact.get(n, t.detach()) for n, t in stored.items() if n in kept}

    def update_module(self) -> None:
        """Copy changed exact tensors into the module, except weights of rounded linears."""
        for name, exact in self.exact.items():
            if self._copied.get(name) != exact._version:
                owner, _, part = name.rpartition(".")
                if part != "weight" or not isinstance(self.get(owner), SimulatedLinear):
                    getattr(self.get(owner), part).data.copy_(exact)
                self._copied[name] = exact._version

    def _exact(self, owner: str, part: str) -> Tensor | None:
        if (exact := self.exact.get(f"{owner}.{part}")) is not None:
            return exact
        own = getattr(self.get(owner), part, None)
        return None if own is None else own.detach()

    def _rows(self, name: str) -> tuple[str, slice | list[int]]:
        owner = self.family.owner(name)
        return owner, slice(None) if owner == name else self.family.rows(name, self.config)

    def scale_norm(self, name: str, factor: Tensor) -> None:
        """Multiply the outputs of norm ``name`` by ``factor [H]``, in place."""
        weight, bias, offset = self.weight(name), self.bias(name), self.family.norm_offset
        weight.copy_((weight.double() + offset) * factor.double() - offset)
        if bias is not None:
            bias.copy_(bias.double() * factor.double())

    def fit(self, name: str) -> Params:
        """Parameters of linear ``name`` by its scheme and the clip chosen for it.

        The weight is not checked for NaN and Inf.
        """
        clip, group_clip = self.clips.get(name, (1.0, 1.0))
        return self.schemes[name].fit(
            self.weight(name), clip=clip, group_clip=group_clip, finite=True
        )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def permute(self, name: str, order: Tensor) -> None:
        """Reorder the input channels of linear ``name``.

        The columns are reordered now, the input in each forward.
        """
        if name in self.rotated:
            raise QtoolError(f"{name}: its inputs are rotated already; gathering comes first")
        weight = self.weight(name)
        channels = torch.arange(weight.shape[1], device=order.device)
        if not torch.equal(order.sort().values, channels.to(order.dtype)):
            raise QtoolError(
                f"{name}: its input order is no permutation of {len(channels)} channels"
            )
        weight.copy_(weight[:, order])
        earlier = self.permutations.get(name)
        self.permutations[name] = order if earlier is None else earlier[order]
        self.get(name).register_forward_pre_hook(
            lambda _, inputs: (inputs[0].index_select(-1, order),)
        )

    def rotate_inputs(self, name: str) -> None:
        """Rotate the input channels of linear ``name``.

        The columns are rotated now, the input in each forward
        (:mod:`qtool.schemes.arithmetic.online_hadamard`).
        """
        if name in self.rotated:
            raise QtoolError(f"{name}: its inputs are rotated already; once is all that is stored")
        weight = self.weight(name)
        weight.copy_(rotate(weight))
        self.rotated.add(name)
        self.get(name).register_forward_pre_hook(rotate_input)

    def install(self, rounded: Mapping[str, Rounded]) -> None:
        """Replace these linears by simulations of their quantized ones, for all later forwards."""
        for same in by_kind(self, rounded):
            n, k = rounded[same[0]].codes.shape
            for names in packed_in_turn(same, n, k, rounded[same[0]].codes.is_cuda):
                scheme = self.schemes[names[0]]
                linears = [cast(nn.Linear, self.get(name)) for name in names]
                weights = scheme.dequantize(*stacked(scheme, [rounded[name] for name in names]))
                weights = weights.to(linears[0].weight.dtype).unflatten(0, (-1, n))
                for name, linear, weight in zip(names, linears, weights, strict=True):
                    order, own_scheme = self.permutations.get(name), self.schemes[name]
                    own = SimulatedLinear(
                        linear, own_scheme, rounded[name], weight, order, name in self.rotated
                    )
                    self.module.set_submodule(name, own)
