"""Which linears of a model are packed, and how engines join and split them."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, LinearFormat
from qtool.models import Family, Heads, family_of
from qtool.models.joined import joined_in_block

#: models whose rows of q, k and v vLLM reorders by head when it loads them, and whether it takes
#: the first dimension of every stored tensor for the rows
REORDERED = {"bloom": True, "falcon": False, "gpt_neox": True}
#: models whose router weighs the inputs of experts
WEIGHS_INPUTS = ("llama4", "llama4_text")
#: SiLU in a config.json, which may name no activation
SILU = ("silu", "swish", None)


class PackedLinears:
    """The linears of a model that its ``quantization_config`` stores packed.

    A rule's pattern may match modules that are never quantized (routers, vision towers, heads of
    speculative decoding): only linears that the model's family names are packed.

    Args:
        config: config.json of the model, as a mapping; of a multimodal model the whole file.
    """

    def __init__(self, config: Mapping[str, Any], checkpoint_format: CheckpointFormat) -> None:
        self.format = checkpoint_format
        self.family = family_of(config).named_as(dict(checkpoint_format.tower_names))
        self.settings = self.family.settings(config)

    def of(self, name: str) -> LinearFormat | None:
        """The format of the linear ``name`` of the checkpoint, None if it has 16 bits."""
        block, within = self.family.place(name)
        if block is None or block >= len(self._linears) or within not in self._linears[block]:
            return None
        return self.format.of(name)

    def joined(self, layer: str, names: list[str]) -> LinearFormat | None:
        """The one format of the linears ``names`` that an engine joins in ``layer``.

        Raises:
            QtoolError: if they differ.
        """
        formats = {name: self.of(name) for name in names}
        first = formats[names[0]]
        for name, other in formats.items():
            if other != first:
                raise QtoolError(
                    f"{layer}: the engine joins {names[0]} ({_words(first)}) and {name} "
                    f"({_words(other)}); they must have one scheme, group size and layout, and "
                    "inputs rotated alike"
                )
        return first

    def permuted(self, layer: str, names: list[str]) -> bool:
        """Whether the linears of a joined layer store input permutations.

        Raises:
            QtoolError: if some do and others do not.
        """
        found = {self.format.is_permuted(name) for name in names}
        if len(found) > 1:
            raise QtoolError(f"{layer}: some of its linears have an input permutation, others none")
        return found.pop()

    def experts(
        self, layer: str, gate_up: list[str], down: list[str]
    ) -> tuple[LinearFormat, LinearFormat] | None:
        """The formats of the two stacks that an engine makes of a block's experts; None: 16 bits.

        Raises:
            QtoolError: if linears of a stack differ, only one stack is packed, inputs are permuted,
                or inputs of gate and up are rotated.
        """
        first, second = self.joined(layer, gate_up), self.joined(layer, down)
        if first is None and second is None:
            return None
        if first is None or second is None:
            raise QtoolError(
                f"{layer}: some linears of its experts are packed, others have 16 bits"
            )
        if self.permuted(layer, gate_up) or self.permuted(layer, down):
            raise QtoolError(
                f"{layer}: experts with input permutations are not served; quantize without "
                "reordering"
            )
        if first.rotated:
            raise QtoolError(
                f"{layer}: experts are served with rotated inputs of down alone; quantize without "
                "rotating those of gate and up"
            )
        return first, second

    def require_joined(self) -> None:
        """Refuse linears that engines run as one and that are not stored alike.

        Raises:
            QtoolError: as an engine would, for the first layer that it joins, reorders by head or
                has in 16 bits.
        """
        self.refuse_mamba_1()
        for block, family in enumerate(self.family.of_blocks(self.settings)):
            prefix = f"{self.family.blocks}.{block}."
            for module, parts in joined_in_block(family).items():
                names = [prefix + part for part in parts]
                if self.joined(prefix + module, names):
                    self.permuted(prefix + module, names)
            if self.settings.model_type in REORDERED:
                for linear in family.fused:
                    self.require_heads(prefix + linear)
            self._require_experts(prefix, family)

    def _require_experts(self, prefix: str, block: Family) -> None:
        """Refuse packed experts of a block that no engine computes or stacks."""
        experts, gate_up, down = self.family.experts, list[str](), list[str]()
        for linear in chain(*(group.linears for group in block.groups if group.routed)):
            stack = down if experts and linear.endswith(f".{experts.down}") else gate_up
            stack.append(prefix + linear)
        if not (experts and gate_up and down):
            return
        layer, settings = down[0].rsplit(".", 2)[0], self.settings
        if self.experts(layer, gate_up, down):
            common = experts.gate is not None and settings.model_type not in WEIGHS_INPUTS
            common &= getattr(settings, "hidden_act", None) in SILU
            require_computed(layer, getattr(settings, "swiglu_limit", None), common=common)

    def require_heads(self, name: str) -> None:
        """Refuse the linear ``name`` if its rows lie by head and cannot be reordered as stored.

        Raises:
            QtoolError: naming it and its layout.
        """
        (family, within), found = self.place(name), self.of(name)
        if found is None or not family.fused_by_head or within not in family.fused:
            return
        n, k = self.shape(name)
        here, taller = found.tensors(n, k), found.tensors(2 * n, k)
        by_row = all(len(taller[part]) != len(tensor) for part, tensor in here.items())
        head, first = Heads.of(self.settings).dim, REORDERED.get(self.settings.model_type)
        if head % found.layout_object.tile[0] or (first and not by_row):
            raise QtoolError(
                f"{name}: the engine reorders its rows head by head, {head} of them, which layout "
                f"{found.layout} does not allow; quantize it in another layout, or leave it in 16 "
                "bits"
            )

    def refuse_mamba_1(self) -> None:
        """Refuse packed linears in mixers of Mamba 1, which vLLM has in 16 bits alone.

        Raises:
            QtoolError: naming the first one.
        """
        for name in self.formats():
            family, within = self.place(name)
            mixer = within.rpartition(".")[0]
            if f"{mixer}.dt_proj" in family.unquantized:  # Mamba 2 has none
                raise QtoolError(
                    f"{name}: vLLM has the mixers of Mamba 1 in 16 bits alone; quantize with a "
                    "rule that leaves them so"
                )

    @cached_property
    def families(self) -> frozenset[Family]:
        """The families of single blocks."""
        return frozenset(self.family.of_blocks(self.settings))

    def formats(self) -> dict[str, LinearFormat]:
        """The formats of all packed linears, by their full names."""
        return {name: found for name in self.linears() if (found := self.format.of(name))}

    def linears(self) -> Iterator[str]:
        """Full names of all linears of the blocks, in 16 bits or packed."""
        return self.family.all_linears(self.settings)

    def shape(self, name: str) -> tuple[int, int]:
        """``(N, K)`` of the linear ``name``."""
        return self.family.linear_shape(name, self.settings)

    def place(self, name: str) -> tuple[Family, str]:
        """The family of the block that the linear ``name`` is in, and its name within the block."""
        block, within = self.family.place(name)
        return self.family.at(self.settings, block or 0), within

    def share(self, name: str, ranks: int) -> tuple[tuple[int, ...], int, int]:
        """The share that one of ``ranks`` GPUs has of the linear ``name``.

        Returns:
            Output channels of each linear that is joined in it, input channels, and the number of
            ranks among which the input channels are cut.

        Raises:
            QtoolError: naming the channels or heads that do not divide.
        """
        (family, within), (n, k) = self.place(name), self.shape(name)
        split = family.tensor_parallel(self.settings, ranks)
        rows, columns = split[within]
        parts = {within: n}
        if within in family.fused and not family.fused_by_head:
            sizes = {part: family.rows(part, self.settings) for part in family.fused[within]}
            parts = {part: s.stop - s.start for part, s in sizes.items() if isinstance(s, slice)}
        attention = family.attention
        kv = {attention.k, attention.v} if attention else set()
        heads = Heads.of(self.settings).kv
        cuts = {part: min(ranks, heads) if part in kv else rows for part in parts}
        if k % columns or any(size % cuts[part] for part, size in parts.items()):
            raise QtoolError(
                f"{name}: a weight [{n}, {k}] cannot be split over {ranks} GPUs; use a smaller "
                "tensor-parallel size"
            )
        return tuple(size // cuts[part] for part, size in parts.items()), k // columns, columns

    @cached_property
    def _linears(self) -> list[dict[str, None]]:
        """The linears of each block, in the family's order."""
        linears = {own: dict.fromkeys(own.linears()) for own in self.families}
        return [linears[own] for own in self.family.of_blocks(self.settings)]


def require_computed(layer: str, limit: float | None, *, common: bool) -> None:
    """Refuse packed experts that engines do not compute.

    Args:
        limit: the value at which gate and up are clamped; None if they are not.
        common: the experts are ``SiLU(gate) * up``, and their outputs are weighted.

    Raises:
        QtoolError: naming the layer of experts.
    """
    if not common:
        raise QtoolError(
            f"{layer}: only experts that are SiLU(gate) * up, weighted at their outputs, are served"
        )
    if limit is not None:
        raise QtoolError(
            f"{layer}: experts whose gate and up are clamped, at {limit}, are not served"
        )


def _words(linear_format: LinearFormat | None) -> str:
    if linear_format is None:
        return "16 bits"
    size = linear_format.group_size or "channel"
    rotated = ", rotated inputs" * linear_format.rotated
    return f"{linear_format.scheme}, group {size}, {linear_format.layout}{rotated}"
