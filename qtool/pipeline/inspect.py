"""Lists what a checkpoint stores: scheme, layout and bytes of each linear.

Only headers are read, and of w4ax-fmpq the maps of 8-bit blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from qtool.format import native_format
from qtool.format.stored_linears import linear_shape, packed_names
from qtool.io.safetensors import Entry
from qtool.io.source import Checkpoint
from qtool.models.architecture import dtype_name
from qtool.schemes.fmpq_blocks import w4a4_share
from qtool.table import render


@dataclass(frozen=True)
class Row:
    """A packed linear, or a tensor that belongs to none.

    Attributes:
        name: name of the linear's module, or of the tensor.
        scheme: scheme of the linear, or dtype of the tensor.
        layout: layout of the linear; empty for a tensor.
        shape: N and K of the linear, or the tensor's shape.
        weights: number of weights.
        nbytes: bytes of all stored tensors of the linear but a bias.
        eight_bit: blocks of 128 input channels with 8-bit activations (w4ax-fmpq); else None.
    """

    name: str
    scheme: str
    layout: str
    shape: tuple[int, ...]
    weights: int
    nbytes: int
    eight_bit: Tensor | None = None

    @property
    def w4a4_share(self) -> float | None:
        """Share of the layer's GEMM work in W4A4; None if the scheme has no such blocks."""
        return None if self.eight_bit is None else w4a4_share([(self.eight_bit, self.shape[0])])

    @property
    def bits(self) -> float:
        """Stored bits a weight."""
        return self.nbytes * 8 / self.weights if self.weights else 0.0  # 0: nothing is quantized


def inspect(directory: Path) -> list[Row]:
    """Rows of all packed linears, then of all other tensors, in file order.

    Raises:
        QtoolError: not a native checkpoint.
    """
    checkpoint = Checkpoint(directory)
    checkpoint_format = native_format(checkpoint.config)
    packed: dict[str, list[Entry]] = {name: [] for name in packed_names(checkpoint)}
    rows, others = [], []
    for name, entry in checkpoint.entries.items():
        linear, _, part = name.rpartition(".")
        if linear in packed and part != "bias":
            packed[linear].append(entry)
        else:
            dtype = dtype_name(entry.dtype)
            others.append(Row(name, dtype, "", entry.shape, prod(entry.shape), entry.nbytes))
    for name, parts in packed.items():
        linear_format, shape = checkpoint_format.of(name), linear_shape(checkpoint, name)
        nbytes = sum(entry.nbytes for entry in parts)
        scheme = linear_format.scheme if linear_format else "?"
        layout = linear_format.layout if linear_format else "?"
        blocks = checkpoint.read(f"{name}.eight_bit") if f"{name}.eight_bit" in checkpoint else None
        rows.append(Row(name, scheme, layout, shape, prod(shape), nbytes, blocks))
    return rows + others


def total(name: str, rows: Iterable[Row]) -> Row:
    """The sum of ``rows``."""
    rows = list(rows)
    return Row(name, "", "", (), sum(r.weights for r in rows), sum(r.nbytes for r in rows))


def as_text(rows: list[Row]) -> str:
    """A table of the packed linears, with their total and a total of all other tensors."""
    packed, others = [r for r in rows if r.layout], [r for r in rows if not r.layout]
    table = [*packed, total("all packed linears", packed), total("everything else", others)]
    mixed = [(r.eight_bit, r.shape[0]) for r in packed if r.eight_bit is not None]
    header = ["name", "shape", "scheme", "layout", "MB", "bits a weight"]
    header += ["in W4A4"] if mixed else []
    cells = [_cells(row) for row in table]
    text = render(header, [(*row, *[""] * (len(header) - len(row))) for row in cells])
    return text + (f"\n{w4a4_share(mixed):.1%} of the model's GEMM work in W4A4" if mixed else "")


def _cells(row: Row) -> list[str]:
    shape, share = " x ".join(map(str, row.shape)), row.w4a4_share
    cells = [row.name, shape, row.scheme, row.layout, f"{row.nbytes / 1e6:.3f}", f"{row.bits:.3f}"]
    return cells if share is None else [*cells, f"{share:.1%}"]


def as_dicts(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as plain data, for ``--json``."""
    return [
        {k: v for k, v in vars(row).items() if k != "eight_bit"}
        | {"bits_per_weight": row.bits, "w4a4_share": row.w4a4_share}
        for row in rows
    ]
