"""The units of a method's work and memory, and the shape of a block for which they are counted.

A method states both (``Method.work``, ``Method.held_bytes``); ``qtool plan`` adds them up and
converts the work into seconds.

Legend: N x K a linear's weight.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from qtool.calibration.stacking import at_once, search_bytes
from qtool.models.family import Family
from qtool.models.parts import Heads, LinearGroup
from qtool.schemes.base import Scheme

#: forwards that take as long as a forward and a backward pass of a block without gradients of
#: weights: attention runs as plain products (:func:`.forwards.with_gradients`)
GRADIENTS = 6
#: ``(N, K)`` by the name of a linear
Shapes = Mapping[str, tuple[int, int]]


@dataclass
class Work:
    """The work of a method on one block, of a block, or of a whole run.

    Attributes:
        read_bytes: bytes read from files.
        write_bytes: bytes written to files.
        forward_flops: operations of forwards on tensor cores; a multiplication and an addition
            count as two.
        hessian_flops: operations of Hessians, on tensor cores too.
        learning_flops: operations of learning iterations, on tensor cores too.
        learning_weights: weights that learn, counted once an iteration, for the straight-through
            estimator, Adam and kernel launches outside of forwards.
        search_weights: weights quantized and dequantized, over all candidates of all searches.
        search_flops: operations of the outputs by which candidates are compared.
        search_tries: candidates, counted once for each stack of linears on which they are tried: a
            try takes some fifty kernel launches, whatever its size.
        rounding_flops: float32 operations of factors, sweeps and errors.
        rounding_weights: weights processed by the rounding's own search.
        rounding_panels: panels of columns, swept one after another; they count kernel launches.
        packed_weights: weights packed, and unpacked again to compute the next block's inputs.
    """

    read_bytes: float = 0
    write_bytes: float = 0
    forward_flops: float = 0
    hessian_flops: float = 0
    learning_flops: float = 0
    learning_weights: float = 0
    search_weights: float = 0
    search_flops: float = 0
    search_tries: float = 0
    rounding_flops: float = 0
    rounding_weights: float = 0
    rounding_panels: float = 0
    packed_weights: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __mul__(self, times: float) -> "Work":
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(self)})


@dataclass(frozen=True)
class BlockShape:
    """A block and its calibration text in numbers.

    Attributes:
        family: the family, with this block's linears.
        config: the model's config, with the sizes of its attention and experts.
        linears: ``(N, K)`` of every linear.
        quantized: ``(N, K)`` of the linears that are rounded.
        schemes: the schemes of the linears that are rounded.
        samples: calibration sequences.
        seqlen: tokens of a sequence.
        itemsize: bytes of a number in a forward.
        differentiated: gradients of the residual stream are found before the first block.
    """

    family: Family
    config: Any
    linears: Shapes
    quantized: Shapes
    schemes: Mapping[str, Scheme]
    samples: int
    seqlen: int
    itemsize: int
    differentiated: bool

    @property
    def pruned(self) -> set[str]:
        """Names of the linears that are pruned."""
        return {name for name, scheme in self.schemes.items() if scheme.sparsity}

    @property
    def tokens(self) -> int:
        return self.samples * self.seqlen

    @property
    def weights(self) -> int:
        """Elements of all weights that are rounded."""
        return sum(map(prod, self.quantized.values()))

    @property
    def largest(self) -> int:
        """Elements of the largest weight that is rounded."""
        return max(map(prod, self.quantized.values()), default=0)

    def stacked(self, groups: Iterable[LinearGroup]) -> list[tuple[int, int]]:
        """``(N, K)`` of the stacked quantized linears of each group that has any."""
        return stacked(self.quantized, groups)

    def searched(self, groups: Iterable[LinearGroup], tokens: int) -> tuple[int, int]:
        """The number of turns, and bytes of the largest, of a search on ``tokens`` on a GPU.

        The linears of ``groups`` that have one shape share a turn if they fit its memory.
        """
        names = [name for group in groups for name in group.linears if name in self.quantized]
        turns = held = 0
        for shape, count in Counter(self.quantized[name] for name in names).items():
            nbytes = search_bytes(*shape, tokens)
            most = at_once(nbytes, on_gpu=True)
            turns, held = turns + -(-count // most), max(held, min(count, most) * nbytes)
        return turns, held

    @property
    def exact_bytes(self) -> int:
        """Bytes of the exact float32 weights that methods change."""
        return 4 * self.weights

    def forward_flops(self) -> float:
        """Operations of one pass of all tokens through the block."""
        return self.linear_flops(self.linears) + self.attention_flops()

    def partial_forward_flops(self) -> float:
        """Operations of a pass that ends at the input of the last linears.

        In a mixture of experts the last linears are the experts'; a shared expert is assumed to
        come before them.
        """
        routed = [group for group in self.family.groups if group.routed]
        last = [g for g in routed if g.fold is routed[-1].fold] or self.family.groups[-1:]
        return self.forward_flops() - sum(self.linear_flops(group.linears) for group in last)

    def linear_flops(self, names: Iterable[str]) -> float:
        """Operations of the linears ``names``, on the tokens that each sees."""
        return 2 * self.tokens * sum(prod(self.linears[name]) * self.share(name) for name in names)

    def attention_flops(self) -> float:
        """Operations of causal attention: half of each ``S x S`` matrix of scores and values."""
        heads = Heads.of(self.config)
        return 2 * self.tokens * self.seqlen * heads.query * heads.dim

    def share(self, name: str) -> float:
        """The share of the tokens that linear ``name`` sees."""
        if not self.family.group_of(name).routed:
            return 1.0
        return float(self.config.num_experts_per_tok / self.family.sizes["experts"](self.config))


def stacked(quantized: Shapes, groups: Iterable[LinearGroup]) -> list[tuple[int, int]]:
    """``(N, K)`` of the stacked quantized linears of each group that has any."""
    shapes = ([quantized[name] for name in g.linears if name in quantized] for g in groups)
    return [(sum(n for n, _ in found), found[0][1]) for found in shapes if found]
