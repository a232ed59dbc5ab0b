"""The parts of a family: linears that read one input, the attention, the experts, the heads.

Names are module paths within the block. A name may also stand for some rows of a fused linear.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from qtool.models.cache_argument import CACHE


class Fold(Enum):
    """How a per-channel factor on a group's input may be folded into the module that makes it."""

    #: the input is a norm's output: fold into its weight (and bias)
    NORM = "norm"
    #: the input is attention's output: fold into v's rows, shared by the query heads of a kv head
    HEADS = "heads"
    #: the input is act(gate) * up, or relu(up): fold into up's rows
    PRODUCT = "product"
    #: the input is act(up): up's rows take an order, but no factor
    ACTIVATION = "activation"
    #: nothing may be folded
    NONE = "none"


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a block that read the same input.

    Args:
        linears: names of the linears within the block.
        source: the module that makes their input: a norm, or the linear whose rows it follows.
        fold: how a factor on the input folds into ``source``.
        writes_residual: the outputs are added to the residual stream (o_proj, down_proj).
        multiplier: number by which the outputs are multiplied before they are added, beside a gate
            for each token.
        gate: the linear whose rows are in the order of the rows of ``source``, because the outputs
            of the two are multiplied.
        routed: a router decides which tokens the linears see; they belong to an expert.
        ordered: an order of the input can be folded into ``source`` and ``gate``, as a factor can;
            False if something else acts on each channel, such as a gate on attention's output.
    """

    linears: tuple[str, ...]
    source: str
    fold: Fold
    writes_residual: bool = False
    multiplier: float = 1.0
    gate: str | None = None
    routed: bool = False
    ordered: bool = True

    @property
    def reads_residual(self) -> bool:
        """Whether the input is a norm of the residual stream."""
        return self.fold is Fold.NORM

    def renamed(self, named: Callable[[str], str]) -> "LinearGroup":
        """The group with ``named(name)`` in place of every name."""
        return replace(
            self,
            linears=tuple(map(named, self.linears)),
            source=named(self.source),
            gate=self.gate and named(self.gate),
        )

    def of_expert(self, number: int) -> "LinearGroup":
        """The group with expert ``number`` in place of ``*``."""
        return replace(self.renamed(lambda name: of_expert(name, number)), routed=True)


@dataclass(frozen=True)
class Attention:
    """The attention linears of a block and, where the family has them, the norms on q and k.

    Args:
        rotary: positions turn queries and keys (RoPE), so that channels i and i + D/2 belong
            together.
        neighbours: RoPE turns channels 2i and 2i + 1 together instead.
        partial: RoPE turns the share of a head's channels that config.json names in
            ``partial_rotary_factor``; False: all of them, whatever is named there.
        turned: the number of channels of a head that RoPE turns, as a run of the model showed it;
            None: ``partial`` says it.
    """

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str | None = None
    k_norm: str | None = None
    rotary: bool = True
    neighbours: bool = False
    partial: bool = False
    turned: int | None = None

    def rotary_dim(self, config: Any) -> int:
        """The number of channels of a head that RoPE turns, where it does: the first ones."""
        if self.turned is not None:
            return self.turned
        dim, scaling = Heads.of(config).dim, getattr(config, "rope_parameters", None) or {}
        if not self.partial:
            return dim
        factor = scaling.get("partial_rotary_factor") or getattr(
            config, "partial_rotary_factor", None
        )
        return int(dim * (factor or 1.0))


@dataclass(frozen=True)
class KVCache:
    """Where a block gives its keys (after RoPE) and values, both ``[B, H, T, D]``, to a cache.

    Args:
        module: the module that gives them, under whose name a checkpoint has the cache's tensors;
            empty: the block itself.
        argument: the block's argument for the cache.
        shape: H and D; None: those of config.json.
        q_norm: norm of the queries, with one weight ``[D]`` for all heads, whose output goes
            through RoPE into attention alone; None if there is none, and where the family has an
            :class:`Attention`, which names it.
        k_norm: such a norm of the keys; a block has both or none.
        rotary: the number of channels of a head that RoPE turns behind these norms: the first ones,
            channels i and i + rotary / 2 together.
    """

    module: str = "self_attn"
    argument: str = CACHE
    shape: tuple[int, int] | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    rotary: int = 0

    def tensor(self, name: str) -> str:
        """The name within the block of the cache's tensor ``name``."""
        return f"{self.module}.{name}" if self.module else name

    def heads(self, config: Any) -> tuple[int, int]:
        """H and D."""
        if self.shape:
            return self.shape
        heads = Heads.of(config)
        return heads.kv, heads.dim


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture (``*`` in names), and the names of the linears within one.

    Args:
        moe: the module that holds router and experts, as checkpoints call it; "" for the block.
        attribute: transformers' name of that module.
        transposed: transformers' stacks hold inputs before outputs.
        interleaved: rows of gate and up alternate in transformers' stacks.
        stacked: published checkpoints hold the stacks, not each expert.
    """

    moe: str = "mlp"
    attribute: str = "mlp"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False
    stacked: bool = False

    @property
    def roles(self) -> dict[str, str]:
        """The names of an expert's linears by role."""
        found = {"gate": self.gate, "up": self.up, "down": self.down}
        return {role: name for role, name in found.items() if name}


@dataclass(frozen=True)
class Heads:
    """Attention geometry: query heads, kv heads, channels per head."""

    query: int
    kv: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """The heads of a transformers config (or anything with the same attributes)."""
        query = config.num_attention_heads
        if getattr(config, "model_type", "") == "opt":  # other sizes in its config.json are unused
            return cls(query, query, config.hidden_size // query)
        kv = (
            getattr(config, "num_key_value_heads", None)
            or getattr(config, "num_kv_heads", None)
            or query
        )
        if getattr(config, "multi_query", False) and not getattr(
            config, "new_decoder_architecture", False
        ):
            kv = 1  # Falcon 7B, whose num_kv_heads says otherwise
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return cls(query, kv, dim)


@dataclass(frozen=True)
class RowsOf:
    """The rows ``rows`` of the tensor ``name`` on disk, in this order; None: all of them.

    Rows of a stack of ``matrices`` are counted one matrix after another. If it is ``transposed``,
    the file holds these rows as columns.
    """

    name: str
    count: int
    rows: tuple[int, ...] | None
    matrices: int
    transposed: bool


def of_expert(name: str, number: int) -> str:
    """``name`` with expert ``number`` in place of ``*``."""
    return name.replace("*", str(number))
