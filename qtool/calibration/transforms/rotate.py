"""Rotation spreads outliers of the residual stream and of the value heads over all channels.

QuaRot (Ashkboos et al., 2024), APEX4 3.1, QServe B.2.1 (the residual stream alone). With the
randomized Hadamard ``Q [H, H]`` and the Hadamard ``P [D, D] = H / sqrt(D)`` of a head, or matrices
learned from these:

    residual stream   x <- x Q:   embedding <- E Q,  readers W <- W Q,  writers W <- Q^T W, b <- b Q
    values            v <- v P:   W_v <- P^T W_v, b_v <- b_v P    (a head's rows)
                                  W_o <- W_o P                    (its columns)

Before, each value channel is scaled so that its row of W_v has the mean square of its column of
W_o, of the largest one if several query heads read it (:func:`.value_heads.balance`), which the
papers do not do.

All of it is folded offline; nothing is added at run time. RMSNorm (its weight fused before)
commutes with any rotation. LayerNorm commutes with a rotation that keeps the all-ones vector, since
the mean over channels is the component along it. A model with LayerNorm gets the rotation reflected
so that ``ones Q = ones``; no mean subtraction has to be folded, and LayerNorm and the checkpoint's
architecture stay the same. A bias that stayed in a norm is rotated with its channels. A norm whose
output is added to the residual stream (Gemma 2) commutes with no rotation, since its weight cannot
be moved into a linear. What else than text enters the residual stream of a multimodal model is
rotated as the embedding is (:attr:`.Family.entering`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.forwards import propagate
from qtool.calibration.method import LEARNING_SEQUENCES, Norm, Transform
from qtool.calibration.transforms import value_heads
from qtool.calibration.transforms.hadamard import Hadamard, rotation
from qtool.calibration.transforms.learned_rotation import (
    STEP_TRIES,
    TOKENS,
    Dense,
    GroupedRows,
    learn,
    step_flops,
    unit_inputs,
    unit_rows,
)
from qtool.calibration.transforms.pruned_rotation import Readers, learn_to_prune, readers_of
from qtool.errors import QtoolError
from qtool.models.family import Family

#: the most bytes of weights, in 16 bits, from which the rotation of the residual stream is learned;
#: if its readers have more, only every n-th row and every n-th token of their inputs is used
MOST_ROW_BYTES = 5 << 30


@dataclass(kw_only=True)
class Rotate(Transform):
    """Rotate the residual stream and the value heads.

    Args:
        seed: seed of the random signs of the residual rotation.
        learn_steps: number of steps in which the residual rotation is learned from the weights that
            read the residual stream, and from their inputs if these have no more bits than the
            weights. It starts from the Hadamard (:mod:`.learned_rotation`), or, if these weights
            are pruned, from the identity, so that pruning leaves out little
            (:mod:`.pruned_rotation`). The rotations of the value heads are learned from W_o, block
            by block and in half the steps. 0 learns nothing.
        residual: rotate the residual stream (needs the norms fused).
        heads: rotate each value head.
        keeps_mean: rotate around the all-ones vector; always true for models with LayerNorm.
    """

    seed: int = 0
    learn_steps: int = 0
    residual: bool = True
    heads: bool = True
    keeps_mean: bool = False

    name = "rotate"
    needs_data = False
    _learned = None
    requires: ClassVar[dict[str, str]] = {
        "norm-fusion": "a norm's weight must be in the linears before they rotate"
    }

    @property
    def rewrites_embedding(self) -> bool:
        return self.residual

    def prepare(self, family: Family, config: Any) -> None:
        super().prepare(family, config)
        self.keeps_mean = self.keeps_mean or family.layer_norm
        if self.residual and family.why_fixed:
            raise QtoolError(
                f"rotate: the residual stream of {family.name} models cannot be rotated: "
                f"{family.why_fixed}; set {{rotate: {{residual: false}}}}"
            )

    @property
    def learns(self) -> bool:
        return self.residual and self.learn_steps > 0

    @property
    def head_steps(self) -> int:
        """The steps of a head's matrix: it is small, and half the steps lose 3 % of the gain."""
        return -(-self.learn_steps // 2)

    def learn(self, blocks: Iterable[Block], batches: Sequence[Batch]) -> dict[str, Tensor]:
        rows: list[GroupedRows] = []
        inputs: list[GroupedRows] = []
        pruned: list[Readers] = []
        for block in blocks:
            sparse, dense = (residual_readers(block, pruned=which) for which in (True, False))
            every = sampling_step(block, sparse, dense)
            if sparse and block.index % every == 0:
                pruned += readers_of(block, batches, sparse)
            of_norms: dict[str, set[int]] = {}
            for name, norm in dense.items():
                scheme, weight = block.schemes[name], block.weight(name)
                values, hidden = unit_rows(weight[block.index % every :: every]), weight.shape[1]
                group = scheme.group_size or hidden
                rows.append(GroupedRows(values, group, scheme.has_zero_points))
                if scheme.coarse_inputs:
                    size = scheme.activation.group_size or hidden
                    of_norms.setdefault(norm, set()).add(size)
            for batch in batches:
                tokens = -(-TOKENS // (every * len(batches)))
                inputs += unit_inputs(block, batch, of_norms, tokens, block.family.layer_norm)
            propagate(block, batches)
        if pruned:
            found = learn_to_prune(pruned, self.learn_steps, self.keeps_mean)
            return {"rotation": found.cpu()}
        if not rows:
            return {}
        hidden = rows[0].values.shape[1]
        start = self.rotation(hidden)(torch.eye(hidden, dtype=torch.float64))
        found = learn(rows, start[None], self.learn_steps, inputs, self.keeps_mean)
        return {"rotation": found[0].cpu()}

    def load(self, learned: Mapping[str, Tensor]) -> None:
        if "rotation" in learned:
            self._learned = Dense(learned["rotation"])

    def work(self, block: BlockShape) -> Work:
        work = Work()
        if self.learns:
            hidden, layers = block.config.hidden_size, block.config.num_hidden_layers
            steps = self.learn_steps / layers
            seen = replace(block, samples=min(block.samples, LEARNING_SEQUENCES))
            # products with the inverse moments of the norms' outputs
            pruned = 4 * self._pruned_norms(block) * layers * float(hidden) ** 3
            work += Work(
                read_bytes=block.weights * block.itemsize,
                forward_flops=seen.forward_flops(),
                search_flops=steps * (step_flops(hidden) + pruned),
                search_tries=steps * STEP_TRIES,
            )
        if self._heads_learn(block):
            work += Work(
                search_flops=self.head_steps * value_heads.step_flops(block),
                search_tries=self.head_steps * STEP_TRIES,
            )
        return work

    def held_bytes(self, block: BlockShape) -> int:
        held = super().held_bytes(block)
        return held + (value_heads.learned_bytes(block) if self._heads_learn(block) else 0)

    def learning_bytes(self, block: BlockShape) -> int:
        """The exact weights, and the rows and inputs from which the rotation is learned."""
        hidden, layers = block.config.hidden_size, block.config.num_hidden_layers
        readers = [g for g in block.family.folds() if g.reads_residual]
        linears = (n for g in readers for n in g.linears if n in block.quantized)
        rows = 2 * sum(prod(block.quantized[n]) for n in linears) * layers
        rows += 4 * self._pruned_norms(block) * hidden**2 * layers
        norms = len({group.source for group in readers}) * layers
        inputs = 2 * norms * TOKENS * hidden
        return block.exact_bytes + int((rows + inputs) / max(1, -(-rows // MOST_ROW_BYTES)))

    def _pruned_norms(self, block: BlockShape) -> int:
        """The number of norms that are read by pruned weights."""
        readers = (g for g in block.family.folds() if g.reads_residual)
        return len(
            {group.source for group in readers if not block.pruned.isdisjoint(group.linears)}
        )

    def _heads_learn(self, block: BlockShape) -> bool:
        attention = block.family.attention
        learned = attention is not None and attention.o in block.quantized
        return learned and self.heads and self.learn_steps > 0

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        if self.residual:
            q = self.rotation(block.config.hidden_size)
            how = {"learned": self.learn_steps} if isinstance(q, Dense) else {"hadamard": q.block}
            block.notes["rotate"] = {"order": q.n} | how
            for group in block.family.folds():
                if group.reads_residual:
                    self._check_norm(block, group.source)
                    rotate_bias(block, group.source, q)
                for name in group.linears:
                    if group.reads_residual:
                        rotate_inputs(block, name, q)
                    if group.writes_residual:
                        rotate_outputs(block, name, q)
        if self.heads and block.family.attention is not None:
            value_heads.balance(block)
            of_head = value_heads.rotation_of(block, batches, self.head_steps)
            rotate_outputs(block, block.attention.v, of_head)
            rotate_inputs(block, block.attention.o, of_head)

    def embedding(self, rows: Tensor) -> Tensor:
        return self._rows(rows)

    def head(self, rows: Tensor, final_norm: Tensor) -> Tensor:
        return self._rows(rows)

    def final_norm(self, norm: Norm) -> Norm:
        return norm if norm.bias is None else replace(norm, bias=self._rows(norm.bias))

    def _rows(self, rows: Tensor) -> Tensor:
        if not self.residual:
            return rows
        return self.rotation(rows.shape[-1])(rows.double()).to(rows.dtype)

    def rotation(self, hidden: int) -> Hadamard | Dense:
        """The ``Q [H, H]`` of the residual stream."""
        return self._learned or rotation(hidden, seed=self.seed, keeps_ones=self.keeps_mean)

    def _check_norm(self, block: Block, name: str) -> None:
        norm = block.get(name)
        if not (block.weight(name) == 1 - block.family.norm_offset).all():
            raise QtoolError(
                f"rotate: {name} of block {block.index} still has a weight; norm-fusion must come "
                "first"
            )
        if isinstance(norm, nn.LayerNorm) and not self.keeps_mean:
            raise QtoolError(
                f"rotate: {name} of block {block.index} is a LayerNorm; set keeps_mean: true"
            )


def residual_readers(block: Block, *, pruned: bool) -> dict[str, str]:
    """The linears to quantize that read the residual stream, each with the norm that it reads.

    Those of sparse schemes if ``pruned``, else those of dense ones.
    """
    return {
        name: group.source
        for group in block.family.folds()
        for name in group.linears
        if group.reads_residual
        and name in block.schemes
        and bool(block.schemes[name].sparsity) == pruned
    }


def sampling_step(block: Block, sparse: Mapping[str, str], dense: Mapping[str, str]) -> int:
    """n if the rotation is learned from every n-th row, so that all fit :data:`MOST_ROW_BYTES`."""
    size = 2 * sum(block.weight(name).numel() for name in (*sparse, *dense))
    size += 4 * len(set(sparse.values())) * block.config.hidden_size**2
    return -(-size * block.config.num_hidden_layers // MOST_ROW_BYTES) or 1


def rotate_inputs(block: Block, name: str, q: Hadamard | Dense) -> None:
    """``W <- W Q`` on each ``n`` consecutive columns of ``W [N, K]``, in place."""
    weight = block.weight(name)
    weight.copy_(_by_parts(weight.double(), q))


def rotate_outputs(block: Block, name: str, q: Hadamard | Dense) -> None:
    """``W <- Q^T W`` on each ``n`` consecutive rows of ``W [N, K]`` and ``b <- b Q``, in place."""
    block.change_rows(name, lambda rows: _by_parts(rows.double().movedim(0, -1), q).movedim(-1, 0))


def rotate_bias(block: Block, name: str, q: Hadamard | Dense) -> None:
    """``b <- b Q`` of a norm that has one, in place."""
    if (bias := block.bias(name)) is not None:
        bias.copy_(_by_parts(bias.double(), q))


def _by_parts(x: Tensor, q: Hadamard | Dense) -> Tensor:
    # torch would multiply a transposed x row by row
    return q(x.contiguous().unflatten(-1, (-1, q.n))).flatten(-2)
