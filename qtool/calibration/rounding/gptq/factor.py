"""The Cholesky factor of a damped Hessian, which GPTQ's feedback and target are made of.

Matrices that are too large for the library's own factorization are factored by blocks, and
triangular ones are inverted by blocks, so that most of the work is matrix products.

Legend: N output channels, K input channels.
"""

import math

import torch
from torch import Tensor

from qtool.calibration.precision import product
from qtool.errors import QtoolError

#: share of the mean diagonal that makes any sum of squares positive definite despite rounding
MOST_DAMPING = 1e6
#: bytes of a Hessian above which torch's cache is emptied before two more of its size are made
LARGE = 1 << 30
#: most columns of a matrix that is factored as a whole: 31 bits count its elements
WHOLE = 46340
#: columns of a block of a larger one
BLOCK = 8192
#: most columns of a triangular matrix that is inverted as a whole
CORNER = 2048


class Factor:
    """``H + damping mean(diag H) I = R R^T``, R upper triangular.

    The damping is raised x10 until Cholesky succeeds. A channel that was never active (``H_kk =
    0``) first gets the mean of the diagonal (1 if that is 0), so that its weights are rounded to
    nearest and do not change other columns.

    Args:
        hessian: ``H [K, K]``.
        order: the columns ``[K]`` in the order in which they are visited; None for their own order.

    Attributes:
        damping: the share of the mean diagonal that was added.

    Raises:
        QtoolError: NaN in ``H``, a sum beyond the range of float32, or an H that no damping makes
            positive definite because it is no sum of squares.
    """

    def __init__(self, hessian: Tensor, damping: float, order: Tensor | None = None) -> None:
        if hessian.is_cuda and hessian.nbytes > LARGE:
            torch.cuda.empty_cache()  # no free cached block holds two more matrices of its size
        #: the damped Hessian with rows and columns reversed: its lower Cholesky factor, reversed
        #: too, is R
        self._reversed = (
            hessian.flip(0, 1) if order is None else hessian[order.flip(0)][:, order.flip(0)]
        )
        diagonal = self._reversed.diagonal()
        dead = diagonal == 0
        mean = float(diagonal.mean())
        if not math.isfinite(mean + float(hessian.sum(dtype=torch.float64))):
            raise QtoolError(
                "gptq: the squares of a linear's inputs on the calibration text, added up, are NaN "
                "or beyond float32's range"
            )
        diagonal[dead] = mean or 1.0
        added = 0.0
        self.damping = damping
        while True:
            diagonal += self.damping * mean - added
            added = self.damping * mean
            if (lower := cholesky(self._reversed)) is not None:
                self._lower = lower
                return
            if self.damping > MOST_DAMPING:
                raise QtoolError("gptq: the Hessian is not positive semi-definite, as 2 X^T X is")
            self.damping = max(self.damping * 10, 1e-6)

    @property
    def h(self) -> Tensor:
        """The damped Hessian ``[K, K]``."""
        return self._reversed.flip(0, 1)

    def free_damped(self) -> None:
        """Free the damped Hessian, since the feedback takes two more matrices of its size."""
        self._reversed = self._reversed.new_empty(0)

    @property
    def feedback(self) -> Tensor:
        """``R diag(R)^-1 - I [K, K]``, strictly upper: the feedback of GPTQ."""
        upper = self._lower.flip(0, 1)
        return upper.div_(upper.diagonal().clone()).fill_diagonal_(0)

    @property
    def cost(self) -> Tensor:
        """``diag(R)^2 [K]``: cost of an error in column k after later columns make up for it."""
        return self._lower.diagonal().flip(0).square()

    def solve(self, right: Tensor) -> Tensor:
        """``right H^-1`` for ``right [N, K]``.

        The factor is inverted once for all rows. Solving triangular systems instead, for as few
        rows at a time as :func:`~qtool.calibration.precision.product` takes, is slower on a GPU.
        """
        inverse = inverse_lower(self._lower)
        return product(product(right.flip(1), inverse.mT), inverse).flip(1)


def cholesky(matrix: Tensor) -> Tensor | None:
    """The lower factor of ``matrix [K, K]``, or None if it is not positive definite.

    The library factors a matrix of up to :data:`WHOLE` columns as a whole. A larger one is factored
    by blocks of :data:`BLOCK` columns in a copy, which takes ``K x BLOCK`` numbers besides the
    matrix and its factor.
    """
    if len(matrix) <= WHOLE:
        lower, failed = torch.linalg.cholesky_ex(matrix)
        return None if int(failed) else lower
    lower, k = matrix.clone(), len(matrix)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        own = slice(start, stop)
        corner, failed = torch.linalg.cholesky_ex(lower[own, own])
        if int(failed):
            return None
        lower[own, own], lower[own, stop:] = corner, 0
        below = lower[stop:, own]  # L_21 L_11^T = A_21
        below.copy_(torch.linalg.solve_triangular(corner.mT, below, upper=True, left=False))
        for first in range(stop, k, BLOCK):  # A_22 - L_21 L_21^T, down from its diagonal
            columns = slice(first, min(first + BLOCK, k))
            part = lower[columns, own]
            lower[first:, columns].addmm_(lower[first:, own], part.mT, alpha=-1)
    return lower


def inverse_lower(lower: Tensor) -> Tensor:
    """``L^-1 [K, K]`` of a lower triangular ``L``.

    It is computed by halves, so that most of the work is matrix products: ``[[A, 0], [B, C]]`` has
    the inverse ``[[A^-1, 0], [-C^-1 B A^-1, C^-1]]``.
    """
    k = len(lower)
    if k <= CORNER:
        one = torch.eye(k, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, one, upper=False)
    half, found = k // 2, torch.zeros_like(lower)
    found[:half, :half] = first = inverse_lower(lower[:half, :half])
    found[half:, half:] = second = inverse_lower(lower[half:, half:])
    found[half:, :half] = -product(second, product(lower[half:, :half], first))
    return found
