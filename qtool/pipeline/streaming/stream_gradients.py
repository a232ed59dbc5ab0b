"""How the logits depend on the residual stream after each block of the float model.

Random directions of the logits are taken back through the head, the final norm and all blocks, for
the tokens of a few calibration sequences. After block b the gradients g of the tokens have the
second moments ``S_b = sum_t g_t g_t^T / |g_t|^2``. What is kept of it is its Cholesky factor, in
the channels of the source: transforms that rewrite the stream rewrite its rows too.

One block is on the device at a time, first in order, then backwards. Logit scales and soft caps
are left out, since they change the sizes of the gradients alone, or nearly so.

Legend: V entries of the vocabulary, H hidden size, T tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import propagate, with_gradients
from qtool.errors import Interrupted, QtoolError, in_one_line
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.streaming.activations import Activations
from qtool.pipeline.streaming.built_blocks import BuiltBlocks
from qtool.pipeline.streaming.embedding_and_head import final_head

#: share of the mean of ``diag S`` added to it, so that it has a Cholesky factor; if that is not
#: enough, a hundred times as much
DAMPING = 1e-4
#: a token that is smaller in the stream than this share of the median's size counts as of that size
SMALLEST = 1e-3
#: a gradient this many times as long as the median token's is cut to that length on its way back
LONGEST = 16.0


class NoBackward(QtoolError):
    """A backward pass through the blocks fails."""


def stream_gradients(
    built: BuiltBlocks, place: Activations, text: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """The number of each block, from the last to the first, and ``F [H, H]`` after it.

    ``z F`` of normal z has the second moments of the gradients, up to a factor.

    Args:
        built: blocks without transforms, and the sequences.
        place: where the inputs of all blocks are kept meanwhile.
        text: the tokens of the calibration text.

    Raises:
        NoBackward: autograd cannot take a block, or the head reads something else than what the
            last block returns.
    """
    inputs = []
    for block in built.blocks():
        inputs.append([place.batch(b.tensors, b.kwargs, b.axis) for b in built.batches])
        propagate(block, built.batches)
    directions = _factor(_logit_moments(built.source, built.job, text, built.device))
    random = torch.Generator(built.device).manual_seed(0)
    layer_norm = built.job.family.layer_norm
    gradients = [
        _before_norm(batch.part(slice(i, i + 1)), directions, random, layer_norm=layer_norm)
        for batch in built.batches
        for i in range(batch.shape[0])
    ]
    for block in built.blocks(backwards=True):
        own = inputs.pop()
        yield block.index, _factor(_unit_moments(gradients))
        sequences = (batch.part(slice(i, i + 1)) for batch in own for i in range(batch.shape[0]))
        for number, (sequence, gradient) in enumerate(zip(sequences, gradients, strict=True)):
            gradients[number] = _limited(_backwards(block, sequence, gradient))


def _backwards(block: Block, sequence: Batch, gradient: Tensor) -> Tensor:
    """The gradient at the input of ``block`` of one at its output."""
    try:
        entering, leaving = with_gradients(block, sequence)
        (found,) = torch.autograd.grad(leaving, entering, gradient.to(leaving.dtype))
    except (torch.OutOfMemoryError, Interrupted):
        raise
    except (RuntimeError, QtoolError) as error:  # of the model's own code
        raise NoBackward(in_one_line(error)) from error
    return found.float().nan_to_num(0.0, 0.0, 0.0)


def _logit_moments(source: Checkpoint, job: Job, text: Tensor, device: torch.device) -> Tensor:
    """The second moments ``[H, H]`` of the gradients of a token's log-probability.

    They are ``W^T (diag p - p p^T) W`` of the head ``W [V, H]``, times the gain of the final norm.
    The share of each token in ``text`` stands for its probability p.
    """
    gain, head = final_head(source, job, device)
    counts = text.bincount().to(device).float()
    shares = counts / counts.sum()
    moments, mean, start = gain.new_zeros(len(gain), len(gain)), gain.new_zeros(len(gain)), 0
    for rows in head:
        share = shares[start : start + len(rows)]  # tokens after the last that occurs have none
        start, scaled = start + len(rows), rows[: len(share)] * gain
        moments += scaled.T @ (share[:, None] * scaled)
        mean += share @ scaled
    return moments - torch.outer(mean, mean)


def _before_norm(
    batch: Batch, directions: Tensor, random: torch.Generator, *, layer_norm: bool
) -> Tensor:
    """Gradients of random directions of the logits at the input of the final norm."""
    x = batch.hidden.to(directions.device).float()
    if x.shape[-1] != len(directions):
        raise NoBackward(
            f"the last one returns {x.shape[-1]} channels, and the head reads {len(directions)}"
        )
    drawn = torch.randn(x.shape, generator=random, device=x.device) @ directions
    if layer_norm:
        x, drawn = x - x.mean(-1, keepdim=True), drawn - drawn.mean(-1, keepdim=True)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    unit = x / size.clamp_min(1e-30)  # 0 where the padding token's embedding is
    across = drawn - (drawn * unit).sum(-1, keepdim=True) * unit
    return _limited(across / size.clamp_min(SMALLEST * size.median()))


def _limited(gradients: Tensor) -> Tensor:
    """``gradients`` over the median token's length, none longer than :data:`LONGEST`."""
    size = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
    median = size.median().clamp_min(1e-30)
    return gradients / torch.maximum(median, size / LONGEST)


def _unit_moments(gradients: Sequence[Tensor]) -> Tensor:
    """``sum_t g_t g_t^T / |g_t|^2 [H, H]`` of the tokens of all sequences."""
    hidden = gradients[0].shape[-1]
    moments = gradients[0].new_zeros(hidden, hidden)
    for sequence in gradients:
        unit = normalize(sequence.flatten(0, -2), dim=1, eps=1e-30)
        moments += unit.T @ unit
    return moments


def _factor(moments: Tensor) -> Tensor:
    """F, upper triangular: ``F^T F`` is ``moments [H, H]`` damped, with a mean diagonal of 1."""
    scaled = moments / moments.diagonal().mean().clamp_min(1e-30)
    scaled.diagonal().add_(DAMPING)
    lower, failed = torch.linalg.cholesky_ex(scaled)
    if int(failed):  # one direction or two have nearly all, and float32 sums are off by more
        scaled.diagonal().add_(100 * DAMPING)
        lower = torch.linalg.cholesky(scaled)
    return lower.T
