"""Collectives of one run in several processes, started by ``torchrun`` or ``accelerate launch``.

Calibration batch i belongs to rank ``i mod R``. Sums over batches are added in the order of the
batches, and all else is computed as a single process would, so the result does not depend on R. A
process alone is rank 0 of 1, and nothing here then costs anything.

Legend: R ranks.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from qtool.distributed import serialization, watch
from qtool.errors import Interrupted, QtoolError
from qtool.units import whole_number

T = TypeVar("T")
S = TypeVar("S")

#: timeout of a collective; a dead rank is found much earlier (:mod:`qtool.distributed.watch`)
TIMEOUT = timedelta(hours=2)
#: torch 2.13 renamed this function, and the old name warns
_all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


@dataclass
class World:
    """This process among all ranks; ``device`` runs the collectives of tensors."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"


_world = World()


def rank() -> int:
    """The number of this process, from 0."""
    return _world.rank


def size() -> int:
    """The number of processes."""
    return _world.size


def local_size() -> int:
    """The number of processes on this machine by the launcher, or of all if it does not say."""
    local = whole_number(os.environ.get("LOCAL_WORLD_SIZE", ""))
    return min(_world.size, local or _world.size)


def log(line: str) -> None:
    """Log a line for the user, once for all ranks."""
    if _world.rank == 0:
        logging.getLogger("qtool").warning(line)


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Join the ranks that the launcher started; yields this rank's device.

    It is the current device while the context is open. ``cuda`` becomes the current GPU, or
    cuda:LOCAL_RANK if there are several ranks.

    Raises:
        QtoolError: the ranks cannot share the device, or no launcher started them.
    """
    global _world
    if watch.is_alone():
        with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
            # "cuda" is the caller's current GPU, but in every other thread it would be GPU 0
            yield f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
        return
    try:
        device = _own_device(device)
        store, number, count = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    except ValueError as error:  # a variable is missing, or is no number
        raise QtoolError(
            f"WORLD_SIZE is set, but not what a launcher sets with it ({error}): start the ranks "
            "with torchrun, or unset it"
        ) from None
    watch.begin(store.clone(), number, count)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(torch.device(device))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    _world = World(number, count, device)
    yield device  # after an error the process ends without cleanup: a collective may be running
    barrier()
    watch.end()
    _world = World()
    dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """While open, this process is rank 0 of 1, for work that one rank does for all."""
    global _world
    world, _world = _world, World()
    try:
        yield
    finally:
        _world = world


def _own_device(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device != "cuda":
        raise QtoolError(f"--device {device}: several ranks have a GPU each, pass --device cuda")
    if local >= there:
        raise QtoolError(
            f"--device cuda: rank {local} of this machine has no GPU, it has {there}; start "
            "fewer ranks"
        )
    return f"cuda:{local}"


def local_items(items: Sequence[T]) -> list[T]:
    """The items of this rank: every R-th one."""
    return list(items[_world.rank :: _world.size])


def all_gather_batches(own: Sequence[T]) -> list[T]:
    """Values of the ranks' batches, in the order of all batches."""
    if _world.size == 1:
        return list(own)
    return interleave(all_gather(list(own)))


def interleave(lists: Sequence[Sequence[T]]) -> list[T]:
    """The lists of all ranks, from :func:`all_gather`, as one list in the order of all batches."""
    return [lists[i % len(lists)][i // len(lists)] for i in range(sum(map(len, lists)))]


def lockstep(own: Sequence[T], count: int | None = None) -> Iterator[T | None]:
    """This rank's own items, then None until all ranks have had the same number of turns.

    ``count`` is the number of items of all ranks, if it is known.
    """
    turns = max(all_gather(len(own))) if count is None else -(-count // _world.size)
    yield from own
    yield from [None] * (turns - len(own))


def all_gather(value: T) -> list[T]:
    """``value`` of each rank, by rank; tensors in it are sent from device to device."""
    if _world.size == 1:
        return [value]
    blob, tensors = serialization.split_tensors(value)
    found: list[Any] = [None] * _world.size
    with _collective():
        dist.all_gather_object(found, (blob, serialization.specs_of(tensors)))
    own = serialization.pack(tensors, _world.device)
    buffers = _exchange(own, [serialization.size(specs) for _, specs in found])
    return [
        value if owner == _world.rank else serialization.join_tensors(its_blob, specs, buffer)
        for owner, ((its_blob, specs), buffer) in enumerate(zip(found, buffers, strict=True))
    ]


def _exchange(own: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The bytes ``own`` of each rank, by rank; ``sizes`` are their numbers."""
    if len(set(sizes)) == 1 and sizes[0]:  # as NCCL's all-gather wants
        whole = own.new_empty(len(sizes), len(own))
        with _collective():
            _all_gather_flat(whole.view(-1), own)
        return whole.unbind()
    buffers = [
        own if owner == _world.rank else own.new_empty(size) for owner, size in enumerate(sizes)
    ]
    for owner, buffer in enumerate(buffers):
        if len(buffer):
            with _collective():
                dist.broadcast(buffer, owner)
    return buffers


def barrier() -> None:
    """Wait until all ranks have called this function."""
    all_gather(None)


def broadcast(value: T) -> T:
    """The value of rank 0."""
    return all_gather(value if _world.rank == 0 else None)[0]  # type: ignore[return-value]


def map_items(
    function: Callable[[T], S], items: Sequence[T], cost: Callable[[T], float] = lambda _: 1.0
) -> list[S]:
    """``function`` of all items, each computed by one rank and sent to all.

    The most expensive items are assigned first.
    """
    return map_groups(lambda own: [function(item) for item in own], items, cost)


def map_groups(
    function: Callable[[Sequence[T]], Sequence[S]],
    items: Sequence[T],
    cost: Callable[[T], float],
) -> list[S]:
    """:func:`map_items` for a ``function`` that takes all items of a rank at once."""
    if _world.size == 1:
        return list(function(items))
    owners, loads = [0] * len(items), [0.0] * _world.size
    for i in sorted(range(len(items)), key=lambda i: -cost(items[i])):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += cost(items[i])
    mine = [i for i, owner in enumerate(owners) if owner == _world.rank]
    own = dict(zip(mine, function([items[i] for i in mine]), strict=True))
    results: dict[int, S] = {}
    for part in all_gather(own):
        results |= part
    return [results[i] for i in range(len(items))]


def map_scalars(function: Callable[[T], Tensor], items: Sequence[T]) -> Tensor:
    """:func:`map_items` for numbers ``[]`` float64 on the device, in one exchange.

    No process waits for the result.
    """
    own = [function(item) for item in local_items(items)]
    if _world.size == 1:
        return torch.stack(own)
    found = torch.zeros(len(items), dtype=torch.float64, device=_world.device)
    if own:
        found[_world.rank :: _world.size] = torch.stack(own)
    all_reduce(found)  # each sum is a number plus zeros, hence exact
    return found


def local_rows(count: int, unit: int = 1) -> slice:
    """This rank's share of ``count`` rows, in whole units if there are enough for all ranks."""
    if count < unit * _world.size:
        unit = 1
    units, number, size = -(-count // unit), _world.rank, _world.size
    return slice(unit * (units * number // size), min(count, unit * (units * (number + 1) // size)))


def all_reduce(tensor: Tensor) -> None:
    """Add ``tensor`` up over the ranks, in place.

    The sum is the same on all ranks; its last bits depend on their number.
    """
    if _world.size > 1:
        with _collective():
            dist.all_reduce(tensor)


class OrderedSum:
    """A sum over batches in the order of the batches, whichever rank has which batch.

    The terms of the last batch are sent while the next batch is computed.

    Args:
        room: number of elements that :attr:`memory` holds if one rank sums alone.
    """

    def __init__(self, count: int, device: torch.device, room: int = 0) -> None:
        self._count, share = count, -(-count // _world.size)
        self._term = torch.zeros(
            max(count, room) if _world.size == 1 else _world.size * share, device=device
        )
        self._own = torch.zeros(share, device=device) if _world.size > 1 else None
        #: the running exchange, and the tensors that it sends and receives
        self._sent: tuple[Any, Tensor, Tensor] | None = None

    @property
    def tensor(self) -> Tensor:
        """The term ``[count]`` of the current batch, to be added to before :meth:`step`.

        With several ranks it is another tensor, of zeros, after :meth:`step`.
        """
        return self._term[: self._count]

    @property
    def memory(self) -> Tensor:
        """The whole tensor; :attr:`tensor` is its beginning."""
        return self._term

    def step(self) -> None:
        """End a batch: each rank adds the terms of all ranks, in order, to its share of the sum."""
        if self._own is None:
            return
        spare = self._settle()
        terms = self._own.new_empty(_world.size, len(self._own))
        with _collective():
            work = dist.all_to_all_single(terms.view(-1), self._term, async_op=True)
        self._sent = work, self._term, terms
        self._term = torch.zeros_like(self._term) if spare is None else spare.zero_()

    def _settle(self) -> Tensor | None:
        """Add the terms of the running exchange; returns the tensor that was sent."""
        if self._sent is None or self._own is None:
            return None
        work, sent, terms = self._sent
        self._sent = None
        with _collective():
            work.wait()
        for term in terms:
            self._own += term
        return sent

    def result(self) -> Tensor:
        """The sum; to be called after the last batch."""
        if self._own is not None:
            self._settle()
            with _collective():
                _all_gather_flat(self._term, self._own)
            self._own = None
        return self.tensor


@contextmanager
def _collective() -> Iterator[None]:
    """Run a collective; if a rank is lost, raise an error that says so."""
    try:
        yield
    except RuntimeError as error:
        time.sleep(watch.SILENCE + 5)  # the watch ends this process once it knows the lost rank
        raise Interrupted(f"the ranks lost each other: {error}") from error
