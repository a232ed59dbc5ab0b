"""The protocol of a quantization scheme: a small pure object over tensors.

Legend: N output channels, K input channels, M tokens, g group size, G = K / g groups.

A scheme turns a weight ``[N, K]`` into integer *codes* and *parameters* (scales, zero points) and
says what they mean. It works on any device, on ``meta`` too, so that ``qtool plan`` gets every
stored shape and byte from the same code that quantizes.

Every scheme is, per group, an affine grid ``value = step * code + offset`` over a range of legal
codes. GPTQ, clipping and distillation see only that :class:`~qtool.schemes.arithmetic.grid.Grid`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qtool.errors import CheckFailed, QtoolError
from qtool.schemes.arithmetic import range_triton
from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.arithmetic.grid import Grid
from qtool.schemes.arithmetic.launch_triton import triton_runs_on
from qtool.units import group_size_text

Params = dict[str, Tensor]
#: the factor of a range; one below 0 gives a scale below 0 (:attr:`Scheme.negative_scales`)
ClipRatio = Tensor | float
GroupSize = int | Literal["default"] | None

#: elements of a row slab on CPU: its float32 copy stays in the core's cache through all passes
SLAB = 1 << 17


class Scheme(ABC):
    """One quantization scheme at one group size.

    Every scheme defines the first attributes, which have no value here, and five methods:
    :meth:`fit_range`, which turns the range of each group into parameters, :meth:`grid`,
    :meth:`round_groups`, :meth:`dequantize` and :meth:`matmul`. It may override the attributes and
    methods after these, up to :meth:`check_range`. The rest, from :attr:`code_dtype` on, is for
    callers and the same for all schemes.

    Args:
        group_size: input channels that share one group of parameters; ``None`` means all K
            (one group per output channel); ``"default"`` is the paper's.
        scale_dtype: dtype the scales are stored in; codes are computed with the stored value.
    """

    # --- every scheme defines ---

    #: its name in recipes, in checkpoints and on the command line
    name: ClassVar[str]
    #: bits of a code; a layout stores no others
    code_bits: ClassVar[int]
    #: whether codes are int8, from -2**(code_bits - 1) on, or uint8, from 0 on
    signed: ClassVar[bool]
    #: the group sizes that may be chosen, in input channels; None: the whole output channel
    group_sizes: ClassVar[tuple[int | None, ...]]
    #: one of :attr:`group_sizes`
    default_group_size: ClassVar[int | None]
    #: how inputs are quantized at run time
    activation: Activation

    # --- a scheme may override ---

    #: parameters whose first dimension is not N (shared by all output channels)
    shared_params: ClassVar[frozenset[str]] = frozenset()
    #: ``(2, 4)``: at most 2 of 4 consecutive inputs are not zero; ``None``: dense
    sparsity: ClassVar[tuple[int, int] | None] = None
    #: whether a scale below 0 is legal: codes reach one step further down than up, and the sign
    #: decides which tail of a group gets that step
    negative_scales: ClassVar[bool] = False
    #: the largest ratio that a clipping search tries; above 1 if rounding a scale to an integer may
    #: cut the range of a group by so much
    largest_clip: ClassVar[float] = 1.0

    def __init__(
        self, group_size: GroupSize = "default", scale_dtype: torch.dtype = torch.float32
    ) -> None:
        if group_size == "default":
            group_size = self.default_group_size
        if group_size not in self.group_sizes:
            found, *accepted = map(group_size_text, (group_size, *self.group_sizes))
            raise QtoolError(
                f"{self.name}: group size {found} is not supported; accepted: {', '.join(accepted)}"
            )
        self.group_size = group_size
        self.scale_dtype = scale_dtype

    # --- every scheme defines ---

    @abstractmethod
    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        """:meth:`fit` from the :meth:`range` of each group.

        A clipping search thus reads the weight only once.
        """

    @abstractmethod
    def grid(self, params: Params) -> Grid:
        """The affine grid that ``params`` span."""

    @abstractmethod
    def round_groups(self, groups: Tensor, params: Params) -> Tensor:
        """Codes (float32, integral) of ``groups [n, G, g]`` float32, which is left unchanged."""

    @abstractmethod
    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        """The exact weight ``[N, K]`` in float32 that the integers stand for."""

    @abstractmethod
    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        """``Y [M, N]`` float32 for ``x [M, K]``, by the scheme's own integer arithmetic.

        Sums are exact in int32. The result is that of the CUDA kernels, to the bit
        (:mod:`qtool.schemes.arithmetic.products`), except under 16-bit activations.
        """

    # --- a scheme may override ---

    def prune(self, weight: Tensor) -> Tensor:
        """``weight [n, K]`` with zeros where :attr:`sparsity` demands them."""
        return weight

    def clip_bounds(self, params: Params) -> Tensor | None:
        """Lowest and highest value of each group ``[2, N, G]``, in units of the float scale.

        None if one follows from the other (no zero point).
        """
        return None

    def with_clip_bounds(self, params: Params, bounds: Tensor) -> Params:
        """``params`` with the legal integers nearest to the real ``bounds [2, N, G]``.

        A scheme with one level, whose float scale is the step, gets another scale too: each bound
        can be moved alone. The inverse of :meth:`clip_bounds`; a scheme that has one has the other.
        """
        raise NotImplementedError(self.name)

    def fake_weight(self, weight: Tensor, params: Params) -> Tensor:
        """``weight [N, K]`` rounded to nearest and dequantized, float32, for searches."""
        return self.dequantize(self.quantize(weight, params), params)

    def weight_error(self, weight: Tensor, params: Params) -> Tensor:
        """:meth:`fake_weight` less ``weight``, float32 ``[N, K]``."""
        return self.fake_weight(weight, params).sub_(weight)

    def fake_activation(self, x: Tensor, params: Params) -> Tensor:
        """``x [..., K]`` quantized and dequantized as :meth:`matmul` would see it, same dtype."""
        return self.activation.fake(x)

    def check(self, codes: Tensor, params: Params) -> None:
        """Prove the scheme's overflow and range invariants on these tensors.

        Raises:
            CheckFailed: naming the invariant and the first group ``(n, group)`` where it breaks.
        """
        groups = self.groups(codes)
        low, high = groups.amin(-1).to(torch.int32), groups.amax(-1).to(torch.int32)
        least = -(2 ** (self.code_bits - 1)) if self.signed else 0
        fits = (low >= least) & (high < least + 2**self.code_bits)  # a layout keeps no other bits
        require(fits, f"codes of {self.code_bits} bits")
        self.check_range(low, high, params)

    def check_range(self, low: Tensor, high: Tensor, params: Params) -> None:
        """:meth:`check` from the smallest and largest code of each group, int32 ``[N, G]``.

        Products and sums are monotone in the code, so a group's two extremes speak for all of it.
        """
        grid = self.grid(params)
        step = grid.step
        legal, which = (step != 0, "not 0") if self.negative_scales else (step > 0, "above 0")
        require(torch.isfinite(step) & legal, f"scale finite and {which}")
        require((low >= grid.low) & (high <= grid.high), "codes within the legal bounds")

    # --- callers use ---

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype that holds one code per byte."""
        return torch.int8 if self.signed else torch.uint8

    @property
    def kind(self) -> tuple[type["Scheme"], int | None, torch.dtype]:
        """Equal for schemes whose weights of one shape can be stacked and processed as one."""
        return type(self), self.group_size, self.scale_dtype

    @property
    def coarse_inputs(self) -> bool:
        """Whether inputs have no more bits than weights, so that rounding costs them as much."""
        return self.activation.bits <= self.code_bits

    @property
    def has_zero_points(self) -> bool:
        """Whether a group's lowest and highest value can be chosen independently."""
        return type(self).clip_bounds is not Scheme.clip_bounds

    @property
    def input_quantizer(self) -> Activation | None:
        """The quantizer of :meth:`fake_activation`; None if that depends on the parameters."""
        plain = type(self).fake_activation is Scheme.fake_activation
        return self.activation if plain else None

    def groups(self, weight: Tensor) -> Tensor:
        """``weight [N, K]`` as ``[N, G, g]``.

        Raises:
            QtoolError: if K is not a multiple of the group size.
        """
        n, k = weight.shape
        self.require_groups(k, k)
        size = self.group_size or k
        return weight.reshape(n, k // size, size)

    def require_groups(self, k: int, common: int) -> None:
        """Check that ``k`` input channels are whole groups, for sparsity too.

        Args:
            common: a divisor of k; the error proposes group sizes that divide it.

        Raises:
            QtoolError: if they are not.
        """
        if self.sparsity and k % self.sparsity[1]:
            raise QtoolError(
                f"{self.name}: {k} input channels are not divisible by {self.sparsity[1]}"
            )
        size = self.group_size or k
        if not k or k % size:
            fits = [
                group_size_text(g) for g in self.group_sizes if k and common % (g or common) == 0
            ]
            others = (
                f"sizes that do: {', '.join(fits)}" if fits else "none of its sizes divides them"
            )
            raise QtoolError(
                f"{self.name}: {k} input channels are not divisible by group size {size} ({others})"
            )

    @torch.no_grad()
    def range(self, weight: Tensor, *, finite: bool = False) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of each group, float32 ``[N, G]``: all that fitting needs.

        Args:
            finite: the weight is known to hold no NaN or Inf, so no check waits for the GPU.

        Raises:
            QtoolError: for NaN or Inf weights, or K not divisible by the group size.
        """
        if self.sparsity is None and triton_runs_on(weight):
            low, high = range_triton.group_range(self.groups(weight))
        else:
            shape = self.groups(weight).shape[:2]
            low, high = torch.empty(2, *shape, dtype=torch.float32, device=weight.device)
            for rows in slabs(weight):
                groups = self.groups(self.prune(weight[rows].float()))
                low[rows], high[rows] = groups.amin(-1), groups.amax(-1)  # both keep a NaN
        if not finite:
            require_finite(low, high, self.name)
        return low, high

    def fit(
        self,
        weight: Tensor,
        *,
        clip: ClipRatio = 1.0,
        group_clip: ClipRatio = 1.0,
        finite: bool = False,
    ) -> Params:
        """Parameters for ``weight [N, K]``.

        Args:
            clip: shrinks the range of the output channel (level 1), a number or ``[N]``.
            group_clip: shrinks the range of each group (level 2, or the only one), a number or
                ``[N, G]``. A scheme with one level uses ``clip * group_clip``.
            finite: as :meth:`range` takes it.

        Raises:
            QtoolError: for NaN or Inf weights, or K not divisible by the group size.
        """
        ranges = self.range(weight, finite=finite)
        return self.fit_range(*ranges, clip=clip, group_clip=group_clip)

    @torch.no_grad()
    def quantize(self, weight: Tensor, params: Params) -> Tensor:
        """Round-to-nearest codes ``[N, K]`` of ``weight [N, K]``, as the paper rounds."""
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for rows in slabs(weight):
            groups = self.groups(self.prune(weight[rows].float()))
            codes[rows] = self.round_groups(groups, self.rows_of(params, rows)).flatten(1)
        return codes.view(self.code_dtype)

    def rows_of(self, params: Params, rows: slice | Tensor) -> Params:
        """The parameters of some output channels; those that all channels share stay whole."""
        return {name: t if name in self.shared_params else t[rows] for name, t in params.items()}

    def stacked_params(self, parts: Sequence[Params]) -> Params:
        """The parameters of weights whose output channels come one after another.

        Parameters that all channels share are taken from the first weight.
        """
        if len(parts) == 1:
            return dict(parts[0])
        return {
            name: t if name in self.shared_params else torch.cat([part[name] for part in parts])
            for name, t in parts[0].items()
        }

    def split_params(self, params: Params, count: int) -> list[Params]:
        """The inverse of :meth:`stacked_params` for ``count`` weights of one shape."""
        by_part = {
            name: [t] * count if name in self.shared_params else t.unflatten(0, (count, -1))
            for name, t in params.items()
        }
        return [{name: t[i] for name, t in by_part.items()} for i in range(count)]


def slabs(weight: Tensor) -> Iterator[slice]:
    """Row slices of ``weight [N, K]`` that fit a CPU's cache; all rows at once elsewhere."""
    rows = weight.shape[0]
    step = max(1, SLAB // weight.shape[1]) if weight.device.type == "cpu" else max(1, rows)
    return (slice(start, start + step) for start in range(0, rows, step))


def require_finite(low: Tensor, high: Tensor, name: str) -> None:
    """Refuse NaN and Inf in the range of each group; ``meta`` tensors have nothing to refuse."""
    if low.is_meta:
        return
    bad = ~(torch.isfinite(low) & torch.isfinite(high))
    if bad.any():
        row, group = (int(i) for i in bad.nonzero()[0])
        raise QtoolError(
            f"{name}: the weight holds NaN or Inf, first in output channel {row}, group {group}"
            f" (such groups: {int(bad.sum())}); only finite weights can be quantized"
        )


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale`` as the checkpoint stores it; never zero, so that dividing by it is safe.

    float16 keeps its subnormals: with 127 steps, a row below 0.0078 already has such a scale.
    """
    return scale.clamp(*scale_bounds(dtype)).to(dtype)


def scale_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest scale that ``dtype`` stores."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny, torch.finfo(dtype).max


def clip_ratio(clip: ClipRatio, group_clip: ClipRatio) -> ClipRatio:
    """``clip * group_clip`` for a one-level scheme, broadcastable to ``[N, G]``."""
    return (clip[:, None] if isinstance(clip, Tensor) and clip.dim() else clip) * group_clip


def require(holds: Tensor, invariant: str) -> None:
    """Raise :class:`CheckFailed` unless ``holds`` is true everywhere."""
    if not bool(holds.all()):
        where = tuple(int(i) for i in (~holds).nonzero()[0])
        raise CheckFailed(
            f"invariant {invariant} broken at {where}; such places: {int((~holds).sum())}"
        )
