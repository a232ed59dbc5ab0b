"""What a model family is: a declaration of where its linears are and what may be folded into what.

Nothing here runs a model or knows of quantization. A family is data; the transforms and the
pipeline read it. Names are module paths: absolute for the parts of the model, relative to the
block for the parts of a block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Fold(Enum):
    """How a per-channel factor on a group's input may be folded into what produces it."""

    NORM = "norm"  # the input is a norm's output: fold into its weight (and bias)
    HEADS = "heads"  # the input is attention's output: fold into v's rows, shared by the query heads of a kv head
    PRODUCT = "product"  # the input is act(gate) * up: fold into up's rows
    NONE = "none"  # a nonlinearity lies between: nothing may be folded


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a block that read the same input.

    Args:
        linears: their names within the block.
        source: the module that makes their input: a norm, or the linear whose rows it follows.
        fold: how a factor on the input folds into ``source``.
        writes_residual: the outputs are added to the residual stream (o_proj, down_proj).
    """

    linears: tuple[str, ...]
    source: str
    fold: Fold
    writes_residual: bool = False

    @property
    def reads_residual(self) -> bool:
        """The input is a norm of the residual stream."""
        return self.fold is Fold.NORM


@dataclass(frozen=True)
class Attention:
    """The attention linears of a block and, where the family has them, the norms on q and k."""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str | None = None
    k_norm: str | None = None


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: what messages call it.
        model_types: the ``model_type`` values of config.json it covers.
        groups: the linears of a block, in the order data flows through them.
        attention: the attention of a block.
        tensors: every weight of a block and its shape in the words of :func:`dimensions`.
        biased: linears that always have a bias. biased_if: those that do when a config key is true.
    """

    name: str
    model_types: tuple[str, ...]
    groups: tuple[LinearGroup, ...]
    attention: Attention
    tensors: Mapping[str, str]
    biased: tuple[str, ...] = ()
    biased_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    def linears(self) -> Iterator[str]:
        """Names within a block of every linear that may be quantized."""
        for group in self.groups:
            yield from group.linears

    def group_of(self, linear: str) -> LinearGroup:
        """The group that ``linear`` belongs to."""
        return next(group for group in self.groups if linear in group.linears)

    def block_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of a block, by its name within the block, from config.json alone."""
        dims = dimensions(config)
        shapes = {name: tuple(dims[d] for d in shape.split()) for name, shape in self.tensors.items()}
        biased = set(self.biased)
        for key, linears in self.biased_if.items():
            biased.update(linears if getattr(config, key, False) else ())
        return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in self.linears() if name in biased}


def dimensions(config: Any) -> dict[str, int]:
    """The sizes shapes are declared in: hidden, q, kv, dim (a head), inter, vocab."""
    heads = Heads.of(config)
    return {
        "hidden": config.hidden_size,
        "q": heads.query * heads.dim,
        "kv": heads.kv * heads.dim,
        "dim": heads.dim,
        "inter": config.intermediate_size,
        "vocab": config.vocab_size,
    }


@dataclass(frozen=True)
class Heads:
    """Attention geometry: query heads, kv heads, channels a head."""

    query: int
    kv: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """Read it from a transformers config (or anything with the same attributes)."""
        query = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or query
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return cls(query, kv, dim)
