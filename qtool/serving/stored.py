"""Which linears of a checkpoint are packed, and whether that is what the files hold."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, LinearFormat
from qtool.io.source import Checkpoint
from qtool.models import Family, Heads, family_of
from qtool.runtime.packed_kv import kv_tensors


class PackedLinears:
    """The linears of a model that its ``quantization_config`` stores packed.

    A rule's pattern may match modules that are never quantized (routers, vision towers, heads of
    speculative decoding): only the linears that the model's family names are.

    Args:
        config: config.json of the model, as a mapping; a multimodal model's whole one.
    """

    def __init__(self, config: Mapping[str, Any], checkpoint_format: CheckpointFormat) -> None:
        self.format = checkpoint_format
        self.family = family_of(config)
        self.settings = self.family.settings(config)

    def of(self, name: str) -> LinearFormat | None:
        """The format of the linear ``name`` (as in the checkpoint), None if it has 16 bits."""
        block, within = self._place(name)
        if (
            block is None
            or not 0 <= block < len(self._linears)
            or within not in self._linears[block]
        ):
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
                    f"({_words(other)}); they must have one scheme, group size and layout"
                )
        return first

    def permuted(self, layer: str, names: list[str]) -> bool:
        """Whether the linears of a joined layer store input permutations.

        Raises:
            QtoolError: if some do.
        """
        found = {self.format.is_permuted(name) for name in names}
        if len(found) > 1:
            raise QtoolError(f"{layer}: some of its linears have an input permutation, others none")
        return found.pop()

    def names(self) -> Iterator[str]:
        """Full names of all of them."""
        for block, linears in enumerate(self._linears):
            yield from (
                n for w in linears if self.format.of(n := f"{self.family.blocks}.{block}.{w}")
            )

    def shape(self, name: str) -> tuple[int, int]:
        """``(N, K)`` of the linear ``name``."""
        block, within = self._place(name)
        n, k = self._block(block or 0).shape(f"{within}.weight", self.settings)
        return n, k

    def share(self, name: str, ranks: int) -> tuple[tuple[int, ...], int, int]:
        """What one of ``ranks`` GPUs has of the linear ``name``.

        Returns:
            Output channels of each linear that is joined in it, input channels, and among how many
            ranks these are cut.

        Raises:
            QtoolError: what does not divide.
        """
        block, within = self._place(name)
        family, (n, k) = self._block(block or 0), self.shape(name)
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

    def _place(self, name: str) -> tuple[int | None, str]:
        prefix = f"{self.family.blocks}."
        block, _, within = name.removeprefix(prefix).partition(".")
        return (int(block) if name.startswith(prefix) and block.isdigit() else None), within

    def _block(self, block: int) -> Family:
        return self.family.at(self.settings, block)

    @cached_property
    def _linears(self) -> list[dict[str, None]]:
        """The linears of each block, in the family's order."""
        each: dict[Family, dict[str, None]] = {}  # blocks alike are the same object
        blocks = [self._block(block) for block in range(self.settings.num_hidden_layers)]
        return [each.setdefault(block, dict.fromkeys(block.linears())) for block in blocks]


def _words(linear_format: LinearFormat | None) -> str:
    if linear_format is None:
        return "16 bits"
    size = linear_format.group_size or "channel"
    return f"{linear_format.scheme}, group {size}, {linear_format.layout}"


def require_stored(checkpoint: Checkpoint, linears: PackedLinears) -> None:
    """Check names, shapes and dtypes of all that belongs to a packed linear, by headers alone.

    Raises:
        QtoolError: for the first tensor that is missing, left over, or not what the format
            declares.
    """
    expected: dict[str, tuple[Any, ...] | None] = {}
    for name in linears.names():
        linear_format = linears.of(name)
        assert linear_format is not None
        n, k = linears.shape(name)
        linear_format.require(name, n, k)
        for part, tensor in linear_format.tensors(n, k).items():
            expected[f"{name}.{part}"] = (tuple(tensor.shape), tensor.dtype)
        if linears.format.is_permuted(name):
            expected[f"{name}.permutation"] = None
        if f"{name}.bias" in checkpoint:
            expected[f"{name}.bias"] = None
    for full, declared in expected.items():
        entry = checkpoint.entry(full)
        found = (entry.shape, entry.dtype)
        if declared is not None and found != declared:
            raise QtoolError(
                f"{full}: {found[1]} {list(found[0])} found, "
                f"{declared[1]} {list(declared[0])} declared"
            )
    packed = set(linears.names())
    for full in checkpoint.entries:
        if full.rpartition(".")[0] in packed and full not in expected:
            raise QtoolError(f"{full}: stored, but the format of this linear has no such tensor")


def kv_names(linears: PackedLinears) -> tuple[str, ...]:
    """What a block stores for the quantized KV cache, by name within the block."""
    return tuple(kv_tensors(linears.format.kv, linears.family, Heads.of(linears.settings)))
