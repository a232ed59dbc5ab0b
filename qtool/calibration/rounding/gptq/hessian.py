"""The second moments of a linear's input, accumulated over batches of any length.

``H = 2 X^T X`` is of the inputs X as the quantized linear sees them. If the inputs ``X_fp`` of the
float block are known, there is ``D = 2 (X_fp - X)^T X`` too, or for a linear that writes to the
residual stream ``S = 2 Y^T X``, where Y is what its outputs lack. Batches are always added up in
their own order, whichever rank computes them.

Legend: M tokens, N output channels, K input channels, H hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.calibration.precision import precise_matmul
from qtool.calibration.timing import phase
from qtool.distributed import ranks


class Hessian:
    """The sums ``h [K, K]`` and, with ``drift``, ``d [K, K]``, float32, after :meth:`complete`.

    With ``hidden`` above 0 it has ``s [hidden, K]`` too. Only the panels of ``h`` that cover its
    upper triangle are summed; they are stored one after the other.
    """

    h: Tensor
    d: Tensor | None = None
    s: Tensor | None = None

    def __init__(self, k: int, device: torch.device, drift: bool = False, hidden: int = 0) -> None:
        self.panels = list(panels(k))
        self._sums = {"h": ranks.OrderedSum(summed_elements(k), device, room=k * k)}
        for name, size in {"d": k * k * drift, "s": hidden * k}.items():
            if size:
                self._sums[name] = ranks.OrderedSum(size, device)
        self.tokens = 0

    @classmethod
    def of(cls, h: Tensor) -> "Hessian":
        """An object that holds the complete sum ``h [K, K]``."""
        made = cls.__new__(cls)
        made.h, made.tokens = h, 0
        return made

    def add(
        self,
        x: Tensor,
        reference: Tensor | None = None,
        lacking: Tensor | None = None,
        share: Tensor | None = None,
    ) -> None:
        """Add inputs ``x [M, K]``.

        Args:
            reference: the float block's inputs ``[M, K]``.
            lacking: Y ``[M, H]``.
            share: factor ``[M, 1]`` by which each token is multiplied in the sums; None: 1.
        """
        with phase("Hessian"):
            factor = None if share is None else share.to(x.dtype)
            # a share is on both sides of each product, since float16 lacks small squares
            scaled = x if factor is None else x * factor
            for (rows, columns), panel in self._by_panel(self._sums["h"].tensor):
                add_product(panel, scaled[:, rows], scaled[:, columns])
            if reference is not None:
                error = reference.to(x.dtype) - x
                error = error if factor is None else error.mul_(factor)
                add_product(self._sums["d"].tensor.view(-1, x.shape[1]), error, scaled)
            if lacking is not None:
                error = lacking if factor is None else lacking * factor
                total = self._sums["s"].tensor.view(-1, x.shape[1])
                add_product(total, error.to(x.dtype), scaled)
        self.tokens += len(x)

    def _by_panel(self, total: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Rows and columns of each panel, and its part of the sum."""
        start = 0
        for rows, columns in self.panels:
            stop = start + rows.stop * (columns.stop - columns.start)
            yield (rows, columns), total[start:stop].view(rows.stop, -1)
            start = stop

    def step(self) -> None:
        """Add the ranks' sums over one batch to the totals; call it after each batch."""
        for part in self._sums.values():
            part.step()

    def complete(self) -> "Hessian":
        """The same object with whole sums on all ranks; call it once, after the last batch."""
        k = self.panels[-1][0].stop
        results = {name: part.result() for name, part in self._sums.items()}
        total, memory, self._sums = results.pop("h"), self._sums["h"].memory, {}
        self.h = total.view(k, k) if len(self.panels) == 1 else self._whole(total, memory)
        for name, result in results.items():
            setattr(self, name, result.view(-1, k))
        self.tokens = sum(ranks.all_gather(self.tokens))
        return self

    def _whole(self, total: Tensor, memory: Tensor) -> Tensor:
        """``H [K, K]`` from its panels, in their ``memory`` if that has room.

        If that memory were freed, it would stay a hole in torch's cache.
        """
        k = self.panels[-1][0].stop
        if len(memory) == k * k:
            whole, total = memory.view(k, k), total.clone()
        else:
            whole = total.new_empty(k, k)
        for (rows, columns), panel in self._by_panel(total):
            whole[rows, columns], whole[columns, rows] = panel, panel.T
        return whole

    def power(self, weight: Tensor) -> Tensor:
        """``2 ||X w_n||^2 [N]`` of the rows of ``weight [N, K]``.

        It is precise even where the products with X nearly cancel.
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
    """``||X (W - V)^T|| / ||X W^T||``, ``[]``, by :meth:`Hessian.power` of ``W - V`` and of W.

    It is 0 if W gives no output.
    """
    whole = power.sum()
    return torch.where(whole > 0, lost.sum() / whole, 0.0).clamp_min(0).sqrt()


def panels(k: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of up to 8 panels that cover the upper triangle of ``[K, K]``.

    A panel has some columns, and all rows down to the last one of those columns' diagonal.
    """
    width = max(512, -(-k // 8))
    for start in range(0, k, width):
        stop = min(start + width, k)
        yield slice(0, stop), slice(start, stop)


def summed_elements(k: int) -> int:
    """The number of elements of ``H [K, K]`` that are summed: those of its :func:`panels`."""
    return sum(rows.stop * (columns.stop - columns.start) for rows, columns in panels(k))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += 2 a^T b`` in place; tensor cores multiply 16-bit operands and add in float32."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a.T, b, out_dtype=torch.float32, alpha=2, out=total)
    else:
        total.add_(2 * (a.T.float() @ b.float()))
