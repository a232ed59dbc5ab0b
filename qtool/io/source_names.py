"""Gives the tensors of a source the names that its family declares.

Other names and forms that occur; none of them costs a copy:

- the head alone, where embedding and head are tied: it is the embedding;
- names without ``model.`` (``transformer.``), as the bare decoder's own ``save_pretrained`` writes
  them;
- ``experts.gate_up_proj [E, 2 I, H]`` and ``experts.down_proj [E, H, I]``, transformers 5's own
  form of a mixture: each expert's gate, up and down are rows of the stacks;
- ``mlp.gate`` of a Mixtral beside such stacks: ``block_sparse_moe.gate``.
"""

from dataclasses import replace

from qtool.errors import QtoolError
from qtool.io.safetensors import Entry
from qtool.io.source import Checkpoint
from qtool.models.architecture import Architecture
from qtool.models.parts import Experts


def adopt(source: Checkpoint, model: Architecture) -> None:
    """Give the entries of ``source`` the names that the family of ``model`` declares, in place.

    Raises:
        QtoolError: stacked experts of another shape than config.json says.
    """
    family, entries = model.family, source.entries
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    prefix, _, bare = embedding.partition(".")
    if embedding not in entries and bare in entries:
        source.entries = entries = {
            n if n == head else f"{prefix}.{n}": entry for n, entry in entries.items()
        }
    if model.tied and embedding not in entries and head in entries:
        entries[embedding] = entries.pop(head)
    if names := family.experts:
        for block in range(model.blocks):
            _adopt_experts(
                entries, model.full(block, names.attribute), model.full(block, names.moe), names
            )


def _adopt_experts(entries: dict[str, Entry], attribute: str, moe: str, names: Experts) -> None:
    """Give one block's stacked experts, if it has them, one entry a linear.

    What lies beside them gets its name on disk.
    """
    stacks = f"{attribute}.experts.gate_up_proj", f"{attribute}.experts.down_proj"
    if not all(name in entries for name in stacks):
        return
    gate_up, down = (entries.pop(name) for name in stacks)
    if (
        len(gate_up.shape) != 3
        or len(down.shape) != 3
        or gate_up.shape[::2] != down.shape[:2]
        or gate_up.shape[1] % 2
    ):
        raise QtoolError(
            f"{attribute}.experts: stacked weights {list(gate_up.shape)} and {list(down.shape)} "
            "found; [experts, 2 * width, hidden] and [experts, hidden, width] are expected"
        )
    for number, (both, back) in enumerate(zip(_parts(gate_up), _parts(down), strict=True)):
        gate, up = _halves(both)
        for name, entry in ((names.gate, gate), (names.up, up), (names.down, back)):
            entries[f"{moe}.experts.{number}.{name}.weight"] = entry
    if moe != attribute:
        for name in [name for name in entries if name.startswith(f"{attribute}.")]:
            entries[moe + name.removeprefix(attribute)] = entries.pop(name)


def _parts(stack: Entry) -> list[Entry]:
    """The matrices of a stack ``[E, N, K]``."""
    one = replace(stack, shape=stack.shape[1:])
    return [
        replace(one, start=stack.start + number * one.nbytes) for number in range(stack.shape[0])
    ]


def _halves(both: Entry) -> tuple[Entry, Entry]:
    """The upper and lower half of the rows of a matrix."""
    rows, columns = both.shape
    upper = replace(both, shape=(rows // 2, columns))
    return upper, replace(upper, start=both.start + upper.nbytes)
