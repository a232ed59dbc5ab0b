"""Values that blocks hand on beside the hidden states, as one forward of the model shows.

They are followed if a block is given the very tensors that the block before returned after its
hidden states, or the mapping of tuples that blocks write to, and the first block is given neither.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from qtool.models.derived.facts import STREAM, Facts
from qtool.models.derived.recorder import Recorder, tensors_in

#: prefix of the producer of handed-on values, before the argument that takes them
PASSED = "earlier blocks: "


class Passing:
    """Follows the values that blocks of the module list ``blocks`` hand on.

    Attributes:
        places: arguments that take them, in the form of :attr:`~qtool.models.family.Family.passes`.
        handed: for each such argument, the largest value that a block was given.
        impure: why arguments depend on earlier blocks in another way, if some do.
    """

    def __init__(self, recorder: Recorder, blocks: str) -> None:
        self.recorder, self.own = recorder, (STREAM, PASSED, f"{blocks}.")
        self.places: dict[str, int] = {}
        self.handed: dict[str, list[Tensor]] = {}
        self.impure = ""
        self._start: set[str] | None = None  # arguments of the first block that hold tensors
        self._arguments: Mapping[str, Any] = {}  # of the running block
        self._before: list[Tensor] = []  # the tensors in them when it began
        self._returned: tuple[Any, ...] = ()
        self._left: dict[str, list[int]] = {}  # the tensors in mappings after a block
        self._facts: dict[int, Facts] = {}

    def enter(self, arguments: Mapping[str, Any]) -> bool:
        """Begin a block that is given ``arguments`` beside the hidden states.

        Returns:
            whether earlier blocks made any of them.
        """
        given = {name: list(tensors_in(value)) for name, value in arguments.items()}
        if self._start is None:
            self._start = {name for name, tensors in given.items() if tensors}
        taken = {
            name: made
            for name, tensors in given.items()
            if (made := [t for t in tensors if self._of_blocks(t)])
        }
        for name, made in taken.items():
            value = arguments[name]
            returned = enumerate(self._returned if isinstance(value, Tensor) else ())
            place = next((i for i, other in returned if other is value), 0)
            followed = place or self._left.get(name) == list(map(id, given[name]))
            if not followed or name in self._start or self.places.setdefault(name, place) != place:
                self.impure = f"{name} is made of earlier blocks, in a way that is not followed"
                continue
            self.handed[name] = max(self.handed.get(name, []), given[name], key=_numbers)
            for tensor in made:
                self.recorder.escape(self._facts.get(id(tensor), {}), "handed on")
                self.recorder.produce(PASSED + name, tensor)
        self._arguments = arguments
        self._before = [tensor for tensors in given.values() for tensor in tensors]
        return bool(taken)

    def leave(self, returned: tuple[Any, ...]) -> None:
        """End a block that returned ``returned``."""
        found = self._arguments.items()
        mappings = {name: list(tensors_in(value)) for name, value in found if _is_mapping(value)}
        self._left = {name: list(map(id, tensors)) for name, tensors in mappings.items()}
        self._returned, before = returned, set(map(id, self._before))
        written = [t for ts in mappings.values() for t in ts if id(t) not in before]
        for tensor in (*tensors_in(returned[1:]), *written):
            facts = self.recorder.of(tensor)
            self._facts[id(tensor)] = {p: f for p, f in facts.items() if not p.startswith(PASSED)}
            self.recorder.produce(PASSED, tensor)

    def _of_blocks(self, tensor: Tensor) -> bool:
        """Whether a block made ``tensor``."""
        return any(producer.startswith(self.own) for producer in self.recorder.of(tensor))


def _numbers(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _is_mapping(value: Any) -> bool:
    """Whether ``value`` holds tensors as transformers' ``KVSharingDict`` does."""
    return isinstance(value, Mapping) and all(isinstance(v, tuple) for v in value.values())
