"""The unit of work: one decoder block on a device, its inputs, and what methods decide about it.

On a GPU the module computes in 16 bits; the exact weights that methods change lie beside it in float32.

A method (smooth, clip, gptq, ...) gets a :class:`Block` and the block's inputs, changes the
weights in place or notes a decision (clip ratios, an input permutation), and returns. It knows
schemes only through their protocol and names of linears only through the family.

Legend: B sequences in a batch, S tokens, H hidden size, N x K a linear's weight.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch, to_device
from qtool.calibration.rounded import Rounded, SimulatedLinear
from qtool.calibration.stages import stage
from qtool.errors import QtoolError
from qtool.models.family import Family
from qtool.models.parts import Heads, OncePerHead
from qtool.schemes.base import Clip, Params, Scheme

if TYPE_CHECKING:  # transformers takes seconds to import; `plan` needs none of it
    from transformers import PretrainedConfig


@dataclass
class Block:
    """One block with its weights (float) on a device.

    Attributes:
        index: its number in the model.
        schemes: the scheme of each linear to quantize; a linear that is absent stays as it is.
        clips: ``(clip, group_clip)`` chosen for a linear, see ``Scheme.fit``.
        permutations: input-channel order ``[K]`` of a linear whose producer could not take it;
            the stored columns are in that order and the input is gathered at run time.
        notes: what methods report (errors, choices), written to qtool.json.
        exact: float32 tensors by parameter name where the module holds a 16-bit copy, which follows them; empty where
            the module's own are the exact ones.
        full_kv: arguments of a run that keep keys and values in full precision, where they are quantized.
        reference: what the float model computes at this place, where the run follows it.
    """

    index: int
    module: nn.Module
    family: Family
    config: "PretrainedConfig"
    schemes: dict[str, Scheme]
    clips: dict[str, tuple[Clip, Clip]] = field(default_factory=dict)
    permutations: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Tensor] = field(default_factory=dict)
    full_kv: dict[str, Any] = field(default_factory=dict)
    reference: "Reference | None" = None
    _copied: dict[str, int] = field(default_factory=dict, init=False)  # the version of an exact tensor the module has

    @property
    def heads(self) -> Heads:
        return Heads.of(self.config)

    def with_cache(self, cache: Any) -> dict[str, Any]:
        """The argument of :meth:`run`, or of the attention, that puts ``cache`` where the KV cache is."""
        return {self.family.attention.cache: OncePerHead(cache, self.heads.kv)}

    def get(self, name: str) -> nn.Module:
        """The submodule ``name`` (a linear, a norm)."""
        return self.module.get_submodule(name)

    def weight(self, name: str) -> Tensor:
        """The weight of submodule ``name``, detached: change it in place. Of a part of a fused linear: to read."""
        owner, rows = self._rows(name)
        weight = self._exact(owner, "weight")
        assert weight is not None
        return weight[rows]

    def bias(self, name: str) -> Tensor | None:
        """The bias of submodule ``name``, or of a part of one, detached; None where it has none."""
        owner, rows = self._rows(name)
        bias = self._exact(owner, "bias")
        return None if bias is None else bias[rows]

    def change_rows(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Rows ``[n, K]`` of a linear (or of a part of a fused one) and its bias ``[n]`` become ``change`` of them."""
        owner, rows = self._rows(name)
        for tensor in (self.weight(owner), self.bias(owner)):
            if tensor is not None:
                tensor[rows] = change(tensor[rows]).to(tensor.dtype)

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name, detached, the exact one where there are two."""
        return {name: self.exact.get(name, p.detach()) for name, p in self.module.named_parameters()}

    def forget(self, name: str) -> None:
        """Linear ``name`` has been rounded and is installed: its exact weight is needed no more."""
        self.exact.pop(f"{name}.weight", None)

    def follow(self) -> None:
        """Copy exact tensors that were changed into the module. What was installed in their place stays."""
        for name, exact in self.exact.items():
            if self._copied.get(name) != exact._version:
                owner, _, part = name.rpartition(".")
                if not isinstance(self.get(owner), SimulatedLinear):
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
        """Parameters of linear ``name`` by its scheme and the clip chosen for it; its weight is taken to be finite."""
        clip, group_clip = self.clips.get(name, (1.0, 1.0))
        scheme = self.schemes[name]
        return scheme.fit_range(*scheme.range(self.weight(name), finite=True), clip=clip, group_clip=group_clip)

    @torch.no_grad()
    def run(self, batch: Batch, **extra: Any) -> Tensor:
        """The block's output ``[B, S, H]`` for one batch; ``extra`` arguments reach the block.

        A batch that the device's memory cannot take is run in halves, and that is noted.

        Raises:
            QtoolError: if one sequence alone does not fit.
        """
        if (out := self._attempt(batch, **extra)) is not None:
            return out
        return torch.cat([self.run(half, **extra) for half in batch.halves()])

    def _attempt(self, batch: Batch, **extra: Any) -> Tensor | None:
        """:meth:`run` of all sequences at once; None where they do not fit, but some may."""
        try:
            with stage("forward"):
                return self.forward(batch, **extra)
        except torch.OutOfMemoryError:
            if len(batch.hidden) == 1:
                tokens = batch.hidden.shape[1]
                raise QtoolError(
                    f"block {self.index}: one sequence of {tokens} tokens does not fit the memory of {self.device}; "
                    "use a shorter --seqlen"
                ) from None
        self.notes["batches halved for lack of memory"] = self.notes.get("batches halved for lack of memory", 0) + 1
        torch.cuda.empty_cache()
        return None

    def forward(self, batch: Batch, **extra: Any) -> Tensor:
        """:meth:`run` with gradients, for methods that learn."""
        kwargs = to_device(batch.kwargs[self.index], self.device)
        self.follow()
        out = self.module(batch.hidden.to(self.device, non_blocking=True), **(kwargs | extra))
        return out[0] if isinstance(out, tuple) else out

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @torch.no_grad()
    def observe(self, batches: Sequence[Batch], observers: dict[str, Callable[[Tensor], None]]) -> None:
        """Run all batches; each observer gets its linear's input ``[tokens, K]``, batch by batch.

        A run ends where the last of the linears is reached.
        """
        for batch in batches:
            self._observe(batch, observers)

    def _observe(self, batch: Batch, observers: dict[str, Callable[[Tensor], None]], **extra: Any) -> None:
        seen: set[str] = set()

        def once(name: str, observer: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
            def see(x: Tensor) -> None:
                observer(x)
                seen.add(name)
                if len(seen) == len(observers):
                    raise _Reached

            return see

        fits = True
        with observing(self.module, {name: once(name, o) for name, o in observers.items()}), suppress(_Reached):
            fits = self._attempt(batch, **extra) is not None
        if not fits:  # what was seen before the memory ended is not seen again
            for half in batch.halves():
                self._observe(half, {name: o for name, o in observers.items() if name not in seen}, **extra)

    @torch.no_grad()
    def inputs(self, batch: Batch, name: str, **extra: Any) -> Tensor | None:
        """The input ``[tokens, K]`` of submodule ``name`` for one batch; None if it was not called.

        The block runs no further than that submodule; ``extra`` arguments reach it.
        """
        seen: list[Tensor] = []
        self._observe(batch, {name: seen.append}, **extra)
        return torch.cat(seen) if len(seen) > 1 else next(iter(seen), None)

    @torch.no_grad()
    def propagate(self, batches: Sequence[Batch]) -> None:
        """Replace every batch's hidden states by the block's output, in place.

        Raises:
            QtoolError: NaN or Inf in it, of which no later block could make anything.
        """
        finite = []
        for batch in batches:
            out = self.run(batch)
            finite.append(torch.isfinite(out).all())
            batch.keep(out)
            dtype = str(out.dtype).removeprefix("torch.")
            del out  # the next run needs its room
        if finite and not torch.stack(finite).all():  # a GPU is waited for once
            hint = "; it overflows in this model, convert it to bfloat16 first" if dtype == "float16" else ""
            raise QtoolError(f"block {self.index}: NaN or Inf in its output on the calibration text, in {dtype}{hint}")

    def permute(self, name: str, order: Tensor) -> None:
        """Reorder the input channels of linear ``name``: its columns at once, its input as it arrives."""
        weight = self.weight(name)
        weight.copy_(weight[:, order])
        earlier = self.permutations.get(name)
        self.permutations[name] = order if earlier is None else earlier[order]
        self.get(name).register_forward_pre_hook(lambda _, inputs: (inputs[0][..., order],))

    def install(self, name: str, rounded: Rounded) -> None:
        """From now on linear ``name`` computes what the quantized one will."""
        linear = self.get(name)
        quantized = SimulatedLinear(linear, self.schemes[name], rounded, self.permutations.get(name))  # type: ignore[arg-type]
        parent, _, attribute = name.rpartition(".")
        setattr(self.module.get_submodule(parent), attribute, quantized)


@dataclass
class Reference:
    """The float model beside the quantized path: a block that stays float, and what enters it there.

    Attributes:
        block: transformed like the one to be rounded.
        batches: float inputs by the ``id`` of the batch that takes the quantized path; a batch that is absent stands
            for itself.
    """

    block: Block
    batches: dict[int, Batch] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Block, batches: dict[int, Batch] | None = None) -> "Reference":
        """A copy of ``block`` as it is now."""
        block.follow()
        return cls(replace(block, module=copy.deepcopy(block.module), exact={}, reference=None), batches or {})

    def inputs(self, batch: Batch, name: str) -> Tensor | None:
        """The float input ``[tokens, K]`` of submodule ``name`` for the tokens of ``batch``."""
        return self.block.inputs(self.batches.get(id(batch), batch), name, **self.block.full_kv)


class _Reached(Exception):
    """A forward that has shown what it was run for."""


@contextmanager
def observing(module: nn.Module, observers: dict[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """Call each observer with the input ``[tokens, K]`` of its submodule while the block runs."""

    def hook(observer: Callable[[Tensor], None]) -> Callable[..., None]:
        return lambda _, inputs: observer(inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [module.get_submodule(name).register_forward_pre_hook(hook(o)) for name, o in observers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
