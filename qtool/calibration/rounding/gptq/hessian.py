"""The second moments of a linear's input, accumulated over batches of any length.

``H = 2 X^T X`` of the inputs as the quantized linear sees them, and, where an input ``X_fp`` of the
float block is at hand, ``D = 2 (X_fp - X)^T X``. Both are sums over batches, in the order of the
batches whatever rank has which.

Legend: M tokens, N output channels, K input channels.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.calibration.rounding.gptq.tensor_cores import precise_matmul
from qtool.calibration.timing import stage
from qtool.distributed import ranks
from qtool.errors import QtoolError

#: bytes of a Hessian above which torch's cache is emptied first: 70B's down (28672 channels) had 3
#: GB reserved in vain
LARGE = 1 << 30


class Hessian:
    """``h [K, K]`` and, with ``drift``, ``d [K, K]``, float32; both are there after
    :meth:`complete`.

    On a GPU ``h`` is summed as the panels that reach its upper triangle, one behind the other.
    """

    h: Tensor
    d: Tensor | None = None

    def __init__(self, k: int, device: torch.device, drift: bool = False) -> None:
        self.panels = parts(k, device)
        sizes = [
            sum(rows.stop * (columns.stop - columns.start) for rows, columns in self.panels),
            k * k,
        ]
        self._sums = [ranks.OrderedSum(size, device, room=k * k) for size in sizes[: 1 + drift]]
        self.tokens = 0

    def add(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Count the inputs ``x [M, K]`` and, for the same tokens, the float block's ``reference [M,
        K]``.
        """
        h, *drift = self._sums
        with stage("Hessian"):
            for (rows, columns), panel in self._by_panel(h.tensor):
                add_product(panel, x[:, rows], x[:, columns])
            if drift and reference is not None:
                add_product(drift[0].tensor.view(x.shape[1], -1), reference.to(x.dtype) - x, x)
        self.tokens += len(x)

    def _by_panel(self, total: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Rows and columns of each panel, and its part of the sum."""
        start = 0
        for rows, columns in self.panels:
            stop = start + rows.stop * (columns.stop - columns.start)
            yield (rows, columns), total[start:stop].view(rows.stop, -1)
            start = stop

    def step(self) -> None:
        """After each batch: what the ranks counted in it is added up."""
        for part in self._sums:
            part.step()

    def complete(self) -> "Hessian":
        """Itself, whole on every rank: call it once, after the last :meth:`step`."""
        k, (total, *drift) = self.panels[-1][0].stop, (part.result() for part in self._sums)
        memory, self._sums = self._sums[0].memory, []
        if len(self.panels) == 1:
            self.h = total.view(k, k)
        # in the memory of the panels if that has room: a hole of their size would stay in torch's
        # cache
        else:
            fits = len(memory) == k * k
            self.h, total = (
                (memory.view(k, k), total.clone()) if fits else (total.new_empty(k, k), total)
            )
            for (rows, columns), panel in self._by_panel(total):
                self.h[rows, columns], self.h[columns, rows] = panel, panel.T
        self.d = drift[0].view(k, k) if drift else None
        self.tokens = sum(ranks.all_gather(self.tokens))
        return self

    def power(self, weight: Tensor) -> Tensor:
        """``2 ||X w_n||^2 [N]`` of the rows of ``weight [N, K]``: exact also where its products
        with X cancel.
        """
        if not weight.is_cuda:
            return (weight @ self.h).mul_(weight).sum(1)
        total = weight.new_zeros(len(weight))
        for rows, columns in panels(weight.shape[1]):  # what lies above the diagonal counts twice
            panel = self.h[rows, columns].clone()
            panel[: columns.start] *= 2
            total += precise_matmul(weight[:, rows], panel).mul_(weight[:, columns]).sum(1)
        return total


def relative_error(lost: Tensor, power: Tensor) -> Tensor:
    """``||X (W - V)^T|| / ||X W^T||``, ``[]``, by :meth:`Hessian.power` of ``W - V`` and of W."""
    return (lost.sum() / power.sum().clamp_min(torch.finfo(torch.float32).tiny)).clamp_min(0).sqrt()


def on_tensor_cores(x: Tensor) -> bool:
    """Whether products of ``x`` run on tensor cores that add in float32."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def parts(k: int, device: torch.device) -> list[tuple[slice, slice]]:
    """Rows and columns of what is summed of ``[K, K]``: the panels on a GPU, else one that is all
    of it.
    """
    return list(panels(k)) if device.type == "cuda" else [(slice(0, k), slice(0, k))]


def panels(k: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of up to 8 panels that cover the upper triangle of ``[K, K]``: all rows
    above, some columns.
    """
    width = max(512, -(-k // 8))
    for start in range(0, k, width):
        stop = min(start + width, k)
        yield slice(0, stop), slice(start, stop)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += 2 a^T b`` in place; 16-bit operands are multiplied on tensor cores and added in
    float32.
    """
    if on_tensor_cores(a):
        torch.addmm(total, a.T, b, out_dtype=torch.float32, alpha=2, out=total)  # type: ignore[call-overload]
    else:
        total.add_(2 * (a.T.float() @ b.float()))


class Factor:
    """``H + damping mean(diag H) I = R R^T``, R upper triangular, damping raised x10 until Cholesky
    succeeds.

    A channel that was never active (``H_kk = 0``) gets the diagonal 1: its weights are rounded to
    nearest.

    Args:
        hessian: ``H [K, K]``. order: of its columns ``[K]``; None as they lie.

    Attributes:
        damping: the share of the mean diagonal that was added.

    Raises:
        QtoolError: NaN or Inf in ``H``, which no damping mends.
    """

    def __init__(self, hessian: Tensor, damping: float, order: Tensor | None = None) -> None:
        if (
            hessian.is_cuda and hessian.nbytes > LARGE
        ):  # for two more of its size no hole is large enough
            torch.cuda.empty_cache()
        #: the damped Hessian, last column first: what has a lower factor where it itself has an
        #: upper one
        self._reversed = (
            hessian.flip(0, 1) if order is None else hessian[order.flip(0)][:, order.flip(0)]
        )
        diagonal = self._reversed.diagonal()
        dead = diagonal == 0
        mean = float(diagonal.mean())
        if not math.isfinite(mean):
            raise QtoolError("gptq: NaN or Inf in the inputs of a linear on the calibration text")
        diagonal[dead] = mean or 1.0
        added = 0.0
        self.damping = damping
        while True:
            diagonal += self.damping * mean - added
            added = self.damping * mean
            self._lower, failed = torch.linalg.cholesky_ex(self._reversed)
            if not int(failed):
                return
            self.damping = max(self.damping * 10, 1e-6)

    @property
    def h(self) -> Tensor:
        """The damped Hessian ``[K, K]``."""
        return self._reversed.flip(0, 1)

    def forget(self) -> None:
        """Let the damped Hessian go: two more of its size are alive while the feedback is made."""
        self._reversed = self._reversed.new_empty(0)

    @property
    def feedback(self) -> Tensor:
        """``R diag(R)^-1 - I [K, K]``, strictly upper: the feedback of GPTQ."""
        upper = self._lower.flip(0, 1)
        return upper.div_(upper.diagonal().clone()).fill_diagonal_(0)

    @property
    def cost(self) -> Tensor:
        """``diag(R)^2 [K]``: what an error in column k costs once all later columns have made up
        for it.
        """
        return self._lower.diagonal().flip(0).square()

    def solve(self, right: Tensor) -> Tensor:
        """``right H^-1`` for ``right [N, K]``."""
        return torch.cholesky_solve(right.T.flip(0), self._lower).flip(0).T
