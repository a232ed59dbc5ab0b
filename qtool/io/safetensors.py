"""Reads and writes safetensors files as streams, and trusts nothing that it reads.

The library's own reader maps files into memory, which counts as resident, and its writer needs all
tensors at once; models larger than RAM allow neither. The format is: 8 bytes little-endian header
length, a JSON header of ``{name: {dtype, shape, data_offsets}}``, then the bytes of the tensors
without gaps.
"""

import errno
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from qtool.errors import (
    Interrupted,
    NoSpace,
    NotDownloaded,
    QtoolError,
    described,
    refuse_pipe,
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
#: the beginning of a pointer file of Git LFS
LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Within:
    """A tensor inside a stored matrix or vector of ``shape``: its rows ``order``, in that order.

    If the matrix is ``transposed``, its rows are columns in the file.
    """

    shape: tuple[int, ...]
    order: Sequence[int]
    transposed: bool = False


@dataclass(frozen=True)
class Computed(ABC):
    """A tensor that no file holds: it is computed from stored tensors whenever it is read.

    Attributes:
        operands: the tensors from which it is computed. A stack has stacks as operands.
    """

    operands: "tuple[Entry, ...]"

    @abstractmethod
    def read(self, rows: slice, *, transposed: bool = False) -> Tensor:
        """The ``rows`` of the tensor, or of its transpose; no other rows are computed."""

    def matrix(self, number: int) -> Self:
        """Matrix ``number`` of a stack."""
        return replace(self, operands=tuple(entry.matrix(number) for entry in self.operands))


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its position, dtype and shape, and the stored tensor it is part of.

    With ``parts`` it consists of these, one row after another, and has no position itself, as a
    ``computed`` tensor has none.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    within: Within | None = None
    parts: "tuple[Entry, ...]" = ()
    computed: Computed | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def matrix(self, number: int) -> "Entry":
        """Matrix (or vector) ``number`` of a stack along dimension 0."""
        one = replace(self, shape=self.shape[1:])
        if self.computed is not None:
            return replace(one, computed=self.computed.matrix(number))
        if self.parts or self.within:
            return self.flat().rows(range(number * self.shape[1], (number + 1) * self.shape[1]))
        return replace(one, start=self.start + number * one.nbytes)

    def flat(self) -> "Entry":
        """The rows of a stack's matrices (or the numbers of its vectors), one after another."""
        flat = replace(self, shape=(prod(self.shape[:2]), *self.shape[2:]))
        if self.computed is None:
            return flat
        return replace(flat, parts=tuple(map(self.matrix, range(self.shape[0]))), computed=None)

    def rows(self, order: Sequence[int]) -> "Entry":
        """These rows, in this order."""
        some = replace(self, shape=(len(order), *self.shape[1:]))
        if not self.parts:
            within = self.within or Within(self.shape, range(self.shape[0]))
            if isinstance(order, range) and order.step > 0:  # an expert has thousands of rows
                picked = within.order[order.start : order.stop : order.step]
            else:
                picked = _compact([within.order[row] for row in order])
            stored = not (self.within or self.computed)
            if stored and isinstance(picked, range) and picked.step == 1:
                row = prod(self.shape[1:]) * self.dtype.itemsize
                return replace(some, start=self.start + picked.start * row)
            return replace(some, within=replace(within, order=picked))
        ends = list(accumulate(part.shape[0] for part in self.parts))
        found = []
        for place, run in groupby(order, key=lambda row: bisect_right(ends, row)):
            part = self.parts[place]
            own = [row - ends[place] + part.shape[0] for row in run]
            found.append(part if own == [*range(part.shape[0])] else part.rows(own))
        return found[0] if len(found) == 1 else replace(some, parts=tuple(found))

    def transposed(self) -> "Entry":
        """The transpose of a whole matrix; a tensor of other dimensions stays as it is."""
        if len(self.shape) != 2:
            return self
        assert not (self.parts or self.within), "a transpose of some rows is not expressed"
        within = Within(self.shape, range(self.shape[1]), transposed=True)
        return replace(self, shape=self.shape[::-1], within=within)


def _compact(numbers: list[int]) -> Sequence[int]:
    """``numbers`` as an immutable sequence: a range if they form one."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    short = range(numbers[0], numbers[0] + step * len(numbers), step) if numbers and step else ()
    return short if list(short) == numbers else tuple(numbers)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, after a check that header and length agree.

    Raises:
        NotDownloaded: the file is missing or a pointer of Git LFS.
        QtoolError: it is no file, truncated, not safetensors, has an unknown dtype, or overlapping
            or out-of-range data.
    """
    header, data, size = _stored_header(path)
    entries = {name: _entry(path, name, spec, data) for name, spec in header.items()}
    end = data
    for start, stop in sorted((e.start, e.start + e.nbytes) for e in entries.values()):
        if start != end:
            raise QtoolError(f"{path.name}: tensors overlap or leave a gap at byte {end}")
        end = stop
    if end != size:
        raise QtoolError(
            f"{path.name}: {size} bytes found, {end} expected by its header; the file is damaged"
        )
    return entries


def _stored_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header without metadata, the position of the data after it, and the file's size."""
    try:
        refuse_pipe(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                file.seek(0)
                if file.read(len(LFS)) == LFS:
                    raise NotDownloaded(
                        f"{path.name}: a pointer of Git LFS, `git lfs pull` gets it"
                    )
                raise QtoolError(
                    f"{path.name}: not a safetensors file, or truncated ({size} bytes)"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise NotDownloaded(f"{path} is missing") from None
    except OSError as error:
        raise QtoolError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise QtoolError(f"{path.name}: the safetensors header is not valid JSON") from None
    if not isinstance(header, dict):
        raise QtoolError(f"{path.name}: the safetensors header is no JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _entry(path: Path, name: str, spec: Any, base: int) -> Entry:
    try:
        dtype, shape, (start, stop) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
        if any(type(number) is not int for number in (*shape, start, stop)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise QtoolError(f"{path.name}: the header entry of {name!r} is damaged") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise QtoolError(
            f"{path.name}: tensor {name!r} has dtype {dtype}; known: {', '.join(DTYPES)}"
        )
    entry = Entry(path, DTYPES[dtype], shape, base + start)
    if stop - start != entry.nbytes or start < 0 or min(shape, default=0) < 0:
        raise QtoolError(
            f"{path.name}: tensor {name!r} of shape {shape} does not fit its {stop - start} bytes"
        )
    return entry


def read(entry: Entry, rows: slice | None = None, *, pinned: bool = False) -> Tensor:
    """The tensor of ``entry``, or its ``rows`` along dimension 0, on the CPU.

    ``pinned`` memory copies fast to a GPU.

    Raises:
        Interrupted: the file cannot be read now.
        QtoolError: the file is shorter than it was.
    """
    if entry.parts or entry.within or entry.computed:
        made = _made(entry, slice(None) if rows is None else rows)
        return made.pin_memory() if pinned else made
    shape, offset, step = entry.shape, entry.start, 1
    if rows is not None:
        start, stop, step = rows.indices(shape[0])
        stride = prod(shape[1:]) * entry.dtype.itemsize
        shape, offset = (stop - start, *shape[1:]), offset + start * stride
    nbytes = prod(shape) * entry.dtype.itemsize
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    view = data.numpy().data
    try:
        with entry.path.open("rb", buffering=0) as file:
            done = 0
            while done < len(view):
                got = os.preadv(file.fileno(), [view[done : done + (1 << 30)]], offset + done)
                if not got:
                    raise QtoolError(
                        f"{entry.path.name}: the file ended early; it changed while it was read"
                    )
                done += got
    except OSError as error:
        raise Interrupted(f"{entry.path} cannot be read: {error.strerror}") from error
    found = data.view(entry.dtype).reshape(shape)
    return found if step == 1 else found[::step]


def _made(entry: Entry, rows: slice) -> Tensor:
    """The ``rows`` of a tensor that no file holds in this form."""
    if entry.parts:
        return torch.cat([read(part) for part in entry.parts]).reshape(entry.shape)[rows]
    if (within := entry.within) is None:
        assert entry.computed is not None
        return entry.computed.read(rows)
    stored, order = replace(entry, shape=within.shape, within=None), within.order[rows]
    if not isinstance(order, range) or order.step < 0:
        first, last = min(order, default=0), max(order, default=-1)
        stored = stored.transposed() if within.transposed else stored
        return read(stored, slice(first, last + 1))[[row - first for row in order]]
    wanted = slice(order.start, order.stop, order.step)
    if not within.transposed:
        return read(stored, wanted).contiguous()
    if stored.computed is not None:
        return stored.computed.read(wanted, transposed=True)
    return read(stored).T[wanted].contiguous()


def write(
    path: Path,
    specs: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    sync: bool = True,
) -> str:
    """Write a file as a stream, atomically; returns its sha256.

    Args:
        specs: every tensor in file order; only shape and dtype are used (``meta`` is fine).
        tensors: ``(name, rows)`` in that order; a tensor may be given in several pieces along
            dimension 0.
        sync: wait until the bytes are on the disk.

    Raises:
        NoSpace: the disk is full.
        QtoolError: the pieces do not match the specs.
    """
    digest, header = hashlib.sha256(), _header(specs)
    expected = len(header) + sum(spec.nbytes for spec in specs.values())
    content: Iterator[bytes | memoryview] = chain([header], _pieces(path, specs, tensors))

    def put(file: BinaryIO) -> None:
        for data in content:
            digest.update(data)
            file.write(data)
            del data  # it would be held while the next one is computed
        if file.tell() != expected:
            raise QtoolError(f"{path.name}: {file.tell()} bytes written, {expected} declared")

    write_atomic(path, put, sync=sync)
    return digest.hexdigest()


def _header(specs: Mapping[str, Tensor]) -> bytes:
    """The header of a file that holds tensors like ``specs``, preceded by its length."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        if spec.dtype not in NAMES:  # of a plugin's scheme, layout or format
            raise QtoolError(
                f"{name}: {spec.dtype} cannot be stored; accepted: {', '.join(map(str, NAMES))}"
            )
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(
    path: Path, specs: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[memoryview]:
    """The bytes of ``tensors``, after a check that they follow one another as ``specs`` do."""
    order, current, left = iter(specs), "", 0
    for name, piece in tensors:
        if not left:
            current = next(order, "")
            left = specs[current].nbytes if current else 0
        data = piece.detach().contiguous().cpu()
        if name != current or data.dtype != specs[name].dtype or data.nbytes > left:
            declared = f"{current}, {described(specs[current])}," if current else "no tensor"
            raise QtoolError(
                f"{path.name}: {name}, {described(piece)}, was given where {declared} was declared"
            )
        left -= data.nbytes
        yield data.reshape(-1).view(torch.uint8).numpy().data
        del piece, data


def write_atomic(path: Path, put: Callable[[BinaryIO], Any], *, sync: bool = True) -> None:
    """Write ``path`` through a temporary file of this process, renamed when it is complete.

    Args:
        sync: wait until the bytes are on the disk. Without it the file outlives the process, but
            not a loss of power.
    """
    temporary = _temporary(path)
    try:
        with space_for(path), temporary.open("wb") as file:
            put(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def copy(source: Path, path: Path) -> None:
    """Copy the file ``source`` to ``path``, atomically."""
    with source.open("rb") as file:
        write_atomic(path, lambda copied: shutil.copyfileobj(file, copied))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


@contextmanager
def space_for(path: Path) -> Iterator[None]:
    """Raise a clear error if the disk is full while ``path`` is written.

    Raises:
        NoSpace: the disk is full.
        OSError: any other error of the system; it names a file.
    """
    try:
        yield
    except OSError as error:
        # NumPy's tofile, by which the gguf package writes, says only "9 requested and 4 written"
        of_numpy = error.errno is None and "requested and" in str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or of_numpy:
            raise NoSpace(
                f"no space left on the disk that holds {path.parent} (writing {path.name})"
            ) from error
        # a failed write has no file name, and the temporary file's name means nothing to a user
        if error.errno and error.filename in (None, str(_temporary(path))):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n", sync=sync)


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write ``text`` in UTF-8, atomically; bytes of a file name outside UTF-8 become ``?``."""
    write_atomic(path, lambda file: file.write(text.encode(errors="replace")), sync=sync)
