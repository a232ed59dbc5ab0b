"""The second moments of a linear's input, accumulated over batches of any length.

``H = 2 X^T X`` of the inputs as the quantized linear sees them, and, where an input ``X_fp`` of
the float block is at hand, ``D = 2 (X_fp - X)^T X``. Both are sums: batches and ranks add up.

Legend: M tokens, N output channels, K input channels.
"""

import torch
from torch import Tensor


class Hessian:
    """``h [K, K]`` and, with ``drift``, ``d [K, K]``; float32."""

    def __init__(self, k: int, device: torch.device, drift: bool = False) -> None:
        self.h = torch.zeros(k, k, device=device)
        self.d = torch.zeros(k, k, device=device) if drift else None
        self.tokens = 0

    def add(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Count the inputs ``x [M, K]`` and, for the same tokens, the float block's ``reference [M, K]``."""
        self.h += 2 * gram(x, x)
        if self.d is not None and reference is not None:
            self.d += 2 * gram(reference.to(x.dtype) - x, x)
        self.tokens += len(x)

    def error(self, weight: Tensor, rounded: Tensor) -> float:
        """``||X (W - V)^T|| / ||X W^T||`` of ``weight`` and ``rounded [N, K]``: the relative output error."""
        difference = weight - rounded
        lost, all_ = (difference @ self.h * difference).sum(), (weight @ self.h * weight).sum()
        return float((lost / all_.clamp_min(torch.finfo(torch.float32).tiny)).clamp_min(0).sqrt())


def gram(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b [K, K]`` in float32: on CUDA the tensor cores multiply 16-bit inputs and add in float32."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a.T, b, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return]
    return a.T.float() @ b.float()


class Factor:
    """``H + damping mean(diag H) I = R R^T``, R upper triangular, damping raised x10 until Cholesky succeeds.

    A channel that was never active (``H_kk = 0``) gets the diagonal 1: its weights are rounded to nearest.

    Attributes:
        h: the damped Hessian ``[K, K]``; the argument is changed in place.
        damping: the share of the mean diagonal that was added.
    """

    def __init__(self, hessian: Tensor, damping: float) -> None:
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        mean = float(diagonal.mean())
        diagonal[dead] = mean or 1.0
        added = 0.0
        self.h, self.damping = hessian, damping
        while True:
            diagonal += self.damping * mean - added
            added = self.damping * mean
            self._lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
            if not int(failed):
                return
            self.damping = max(self.damping * 10, 1e-6)

    @property
    def feedback(self) -> Tensor:
        """``R diag(R)^-1 - I [K, K]``, strictly upper: the feedback of GPTQ."""
        upper = self._lower.flip(0, 1)
        return (upper / upper.diagonal()).fill_diagonal_(0)

    @property
    def cost(self) -> Tensor:
        """``diag(R)^2 [K]``: what an error in column k costs once all later columns have made up for it."""
        return self._lower.diagonal().flip(0).square()

    def solve(self, right: Tensor) -> Tensor:
        """``right H^-1`` for ``right [N, K]``."""
        return torch.cholesky_solve(right.T.flip(0), self._lower).flip(0).T
