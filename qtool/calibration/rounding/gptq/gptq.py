"""GPTQ: second-order rounding of a weight, column by column.

Frantar et al. 2022 (arXiv 2210.17323), in the form of LDLQ (arXiv 2307.13304, theorem 6: the same
codes, one Cholesky and no inverse), with MARLIN's clipping search by group (section 3.5). For a
weight W and the inputs X that the quantized linear sees, after its own activation quantizer, with
the functions at the right:

    H = 2 X^T X + damping mean(diag H) I = R R^T        R upper triangular          Factor
    T = W + S H^-1                                                                  prepare
        S = residual W D,   D = 2 (X_fp - X)^T X
        S = 2 (residual (X_fp - X) W^T + stream (Z_fp - Z))^T X                     for a writer
    v_k = nearest(t_k + sum_{j<k} e_j M_jk)             M = R diag(R)^-1 - I        sweep
    then, ``rounds`` times:
        the float scales by least squares, the codes as they are                    refit
        v_k = nearest(t_k + sum_{j!=k} e_j M_jk)        M = H diag(H)^-1 - I        sweep

``e = t - v`` is the error of a column. The paper divides it by ``U_kk`` and subtracts it, times row
k of U, from the columns that are left, where ``H^-1 = U^T U``. Here ``U = R^-1`` is never made: the
targets stay as they are, and each column gets the errors of those before it through M.

T makes up for the error that is already in the input (after GPTAQ, arXiv 2504.02692): ``X_fp`` is
the float model's input, and ``X T^T`` comes nearest to ``X_fp W^T``. If the linear writes to the
residual stream Z, T also makes up for the error of that stream (LoaQ, arXiv 2509.06297): ``Z + X
T^T`` comes nearest to ``Z_fp + X_fp W^T``. Such a linear has no more rows than columns as a rule,
so that S itself is less work than D. Without ``X_fp``, T is W. The last step is coordinate descent:
each code is the best one given all the others.

All this takes the rows for independent. With the output side of the Hessian, G (YAQA, arXiv
2505.22988), they make up for each other's errors too: rows are rounded a chunk at a time, and T of
a chunk first moves by what the errors of earlier chunks call for (:mod:`.rows`).

The parameters of the groups are the scheme's own, fitted before the first column ("static groups"),
so that columns may be visited in the order of falling ``H_kk``. A 2:4 scheme is pruned first
(:mod:`.sparsegpt`). GPTQ and coordinate descent then round the weights that are left, which make up
for the errors of pruning and rounding together.

Problems of one shape (experts) are solved together, because a column is a few small operations that
take a GPU longer to launch than to compute. Each problem gets the codes that it gets alone, to the
bit.

Legend: E problems, N output channels, K input channels, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from qtool.calibration.outliers import OUTLIER_RATIO
from qtool.calibration.precision import ROWS, product
from qtool.calibration.rounding.gptq.clip_search import fit_groups
from qtool.calibration.rounding.gptq.columns import sweep
from qtool.calibration.rounding.gptq.factor import Factor
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.gptq.rows import row_chunks
from qtool.calibration.rounding.gptq.sparsegpt import prune
from qtool.calibration.rounding.scales import refit
from qtool.calibration.stacking import at_once, in_turn, stack, stacked_clips
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.schemes.base import ClipRatio, Grid, Params, Scheme

#: the range of the scales' dtype, divided by the largest target that is allowed: values of codes
#: and refitted scales may be larger than the target
HEADROOM = 16
#: rows whose scales are refitted at a time
REFITTED_ROWS = 8192


@dataclass(kw_only=True)
class GptqOptions:
    """GPTQ's options; all of them are recipe keys.

    Args:
        damping: share of the mean of ``diag H`` added to it; raised x10 until Cholesky succeeds.
            The paper's 0.01 follows the calibration text more closely than other texts like it.
        act_order: visit columns in the order of falling ``H_kk``.
        clip_steps: candidates of the clipping search by group, from 1 down to ``clip_least``; 1: no
            search. Where ``Scheme.largest_clip`` is above 1 the search begins there, with the same
            step.
        negative_scales: try each candidate with a scale below 0 too, if the scheme allows it.
        residual: share of the input's error that the target makes up for; 0: the target is W. All
            of it (1) is best with 16-bit activations and much calibration text.
        stream: share of what the residual stream lacks that the target makes up for too, if
            ``residual`` is above 0. Weights' errors depend on the input and can be made up for; the
            errors of activations do not, and fitting them adds noise.
        rounds: number of rounds of least-squares scales and coordinate descent after the GPTQ pass.
        largest_token: for linears that write to the residual stream, a token larger in it than so
            many times the median of its batch counts as the median
            (:mod:`qtool.calibration.outliers`); 0: all as they are.
        output_hessian: let the rows of a weight make up for each other's errors, by how the model's
            logits depend on the linear's outputs (:mod:`.output_hessian`, :mod:`.rows`). Linears of
            one input that have more than 8192 rows together, and gate and up of routed experts, are
            rounded without it.
    """

    damping: float = 0.1
    act_order: bool = True
    clip_steps: int = 20
    clip_least: float = 0.6
    negative_scales: bool = False
    residual: float = 0.5
    stream: float = 1.0
    rounds: int = 2
    largest_token: float = OUTLIER_RATIO
    output_hessian: bool = True

    def clip_ratios(self, scheme: Scheme) -> list[float]:
        """The candidates of the clipping search, falling; below 0 for a scale below 0."""
        step = (1 - self.clip_least) / max(1, self.clip_steps - 1)
        above = round((scheme.largest_clip - 1) / step) if self.clip_steps > 1 and step else 0
        ratios = [1 - step * i for i in range(-above, self.clip_steps)]
        both = self.negative_scales and scheme.negative_scales
        return [*ratios, *(-ratio for ratio in ratios)] if both else ratios


@dataclass
class Problem:
    """A weight ``[N, K]`` float32 to round, the moments of its input, and clips chosen before.

    ``lacking`` holds the weight's rows ``[N, K]`` of S, if S itself was summed, and ``outputs`` G
    ``[N, N]`` (:mod:`.output_hessian`).
    """

    scheme: Scheme
    weight: Tensor
    hessian: Hessian
    clip: ClipRatio = 1.0
    group_clip: ClipRatio = 1.0
    lacking: Tensor | None = None
    outputs: Tensor | None = None


@dataclass
class Solution:
    """Codes and parameters of a weight.

    Attributes:
        damping: the share of the mean diagonal that was added to H.
        lost: ``2 ||X e_n||^2 [N]`` of the error ``e_n`` of each output channel.
        power: ``2 ||X w_n||^2 [N]`` of the weight ``w_n``.
    """

    codes: Tensor
    params: Params
    damping: float
    lost: Tensor
    power: Tensor

    @classmethod
    def stacked(cls, parts: Sequence["Solution"], scheme: Scheme) -> "Solution":
        """The solution of all rows from those of some rows each."""
        first = parts[0]
        params = scheme.stacked_params([part.params for part in parts])
        codes, lost, power = (
            torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "lost", "power")
        )
        return cls(codes, params, first.damping, lost, power)


@torch.no_grad()
def gptq(
    weight: Tensor,
    scheme: Scheme,
    *,
    inputs: Tensor | None = None,
    hessian: Tensor | None = None,
    options: GptqOptions | None = None,
) -> tuple[Tensor, Params]:
    """Codes ``[N, K]`` and parameters of ``weight [N, K]`` under ``scheme``.

    Args:
        inputs: ``X [M, K]`` of the linear, before the scheme's activation quantizer.
        hessian: instead of ``inputs``, ``2 X^T X [K, K]`` of inputs that the activation quantizer
            has quantized and dequantized.
        options: the defaults if None.

    Raises:
        QtoolError: neither or both of inputs and hessian; another shape; NaN or Inf in them or in
            the weight, or inputs whose squares are beyond float32's range; a hessian that is not
            positive semi-definite; a K that the scheme's group size does not divide.

    >>> from qtool import schemes
    >>> random = torch.Generator().manual_seed(0)
    >>> weight = torch.randn(32, 128, generator=random)
    >>> inputs = torch.randn(512, 128, generator=random) @ torch.randn(128, 128, generator=random)
    >>> scheme = schemes.get("w4a16", 128)
    >>> codes, params = gptq(weight, scheme, inputs=inputs)
    >>> def error(rounded):
    ...     return (inputs @ (rounded - weight).T).norm() / (inputs @ weight.T).norm()
    >>> nearest = scheme.fake_weight(weight, scheme.fit(weight))
    >>> bool(error(scheme.dequantize(codes, params)) < error(nearest))
    True
    """
    if (inputs is None) == (hessian is None):
        raise QtoolError("gptq: give either inputs or hessian")
    _require_shapes(weight, inputs, hessian)
    weight = weight.float()
    if hessian is not None:
        moments = Hessian.of(hessian.float())
    else:
        assert inputs is not None
        if not torch.isfinite(inputs).all():  # a quantizer would make numbers of them
            raise QtoolError("gptq: the inputs hold NaN or Inf")
        moments = Hessian(weight.shape[1], weight.device)
        moments.add(scheme.fake_activation(inputs, scheme.fit(weight)))
        moments.complete()
    (solution,) = solve([Problem(scheme, weight, moments)], options or GptqOptions())
    return solution.codes, solution.params


def _require_shapes(weight: Tensor, inputs: Tensor | None, hessian: Tensor | None) -> None:
    given = {"weight": weight, "inputs": inputs, "hessian": hessian}
    shapes = {name: list(tensor.shape) for name, tensor in given.items() if tensor is not None}
    k = shapes["weight"][1:]
    alike = all(len(shape) == 2 and shape[1:] == k for shape in shapes.values())
    if not alike or shapes.get("hessian", [*k, *k]) != [*k, *k]:
        found = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise QtoolError(
            f"gptq: {found} are given; a weight [N, K] and inputs [M, K] or a hessian [K, K] are"
            " expected"
        )


def solve(
    problems: Sequence[Problem], options: GptqOptions, *, shared: bool = False
) -> list[Solution]:
    """Solve problems of one scheme, shape and G, each as if it were alone.

    If they are ``shared``, all ranks have them, and share the rows that make up for each other's
    errors.
    """
    states = prepared(problems, options)
    if problems[0].outputs is None:
        round_columns(problems, states, options)
    else:
        round_rows(problems, states, options, shared=shared)
    return [s.solution(problem) for s, problem in zip(states, problems, strict=True)]


def round_rows(
    problems: Sequence[Problem], states: Sequence["State"], options: GptqOptions, *, shared: bool
) -> None:
    """:func:`round_columns` of rows that make up for each other's errors, chunk by chunk.

    If ranks share the problems, each rounds a part of a chunk's rows.
    """
    scheme, g = problems[0].scheme, problems[0].outputs
    assert g is not None
    errors = [torch.zeros_like(s.target) for s in states]
    for s in states:
        s.codes = torch.zeros_like(s.target, dtype=scheme.code_dtype)
    for chunk, targets in row_chunks([s.target for s in states], errors, g):
        own = ranks.local_rows(len(chunk), ROWS) if shared else slice(None)
        rows = chunk[own]
        parts = [
            replace(
                s,
                target=target[own],
                keep=None if s.keep is None else s.keep[rows],
                params=scheme.rows_of(s.params, rows),
            )
            for s, target in zip(states, targets, strict=True)
        ]
        round_columns(problems, parts, options)
        for s, part, error in zip(states, parts, errors, strict=True):
            mine = part.codes, part.params
            found = ranks.all_gather(mine) if shared else [mine]
            params = scheme.stacked_params([params for _, params in found])
            s.codes[chunk] = torch.cat([codes for codes, _ in found])
            for name in params.keys() - scheme.shared_params:
                s.params[name][chunk] = params[name]
            error[chunk] = s.target[chunk] - scheme.dequantize(s.codes[chunk], params)


def round_columns(
    problems: Sequence[Problem], states: Sequence["State"], options: GptqOptions
) -> None:
    """Find the codes of the rows of ``states``, and refit their parameters."""
    scheme = problems[0].scheme
    target = stack([s.target[:, s.order] for s in states])
    feedback = stack([s.feedback for s in states])
    keep = stack([s.keep for s in states if s.keep is not None]) if scheme.sparsity else None
    group = stack([s.order // scheme.groups(s.target).shape[2] for s in states])
    error = torch.zeros_like(target)
    for s in states:
        s.feedback = s.feedback.new_empty(0)  # freed, or from here on only in the stack
    for turn in range(1 + options.rounds):
        if turn:
            del feedback  # the next one takes its memory
            for own, s, problem in zip(error, states, problems, strict=True):
                refit_and_compare(scheme, s, problem.hessian.h, own)
            feedback = stack([descent_feedback(s.damped) for s in states if s.damped is not None])
        grid = stacked_grid(scheme, [s.params for s in states])
        codes = sweep(target, error, feedback, grid, group, causal=not turn, keep=keep)
        for s, found in zip(states, codes, strict=True):
            s.codes = found[:, s.back].to(scheme.code_dtype)


def refit_and_compare(scheme: Scheme, s: "State", hessian: Tensor, error: Tensor) -> None:
    """Refit the parameters of ``s``, and write its errors ``[N, K]``, as visited, to ``error``.

    It takes :data:`REFITTED_ROWS` rows at a time, since it holds several tensors of their size.
    """
    found = []
    for start in range(0, len(s.target), REFITTED_ROWS):
        rows = slice(start, start + REFITTED_ROWS)
        codes, target = s.codes[rows], s.target[rows]
        params = refit(scheme, scheme.rows_of(s.params, rows), codes, target, hessian)
        error[rows] = (target - scheme.dequantize(codes, params))[:, s.order]
        found.append(params)
    s.params = scheme.stacked_params(found)


def stacked_grid(scheme: Scheme, params: Sequence[Params]) -> Grid:
    """The grid of each problem: the fields are ``[E, N, G]``."""
    whole = scheme.grid(scheme.stacked_params(params))
    return Grid(*(getattr(whole, f.name).unflatten(0, (len(params), -1)) for f in fields(Grid)))


@dataclass
class State:
    """A problem while it is solved.

    Attributes:
        order: the columns ``[K]`` in the order in which they are visited.
        back: the inverse of ``order``.
        target: T ``[N, K]``, in the order of the weight.
        codes: those found last ``[N, K]``, in the order of the weight.
        keep: False where pruned ``[N, K]``, bool, as visited; None for a dense scheme.
        damping: the share of the mean diagonal that was added to H.
        damped: the damped H ``[K, K]``, as visited; None where there is no coordinate descent.
        feedback: M ``[K, K]``, as visited.
    """

    order: Tensor
    back: Tensor
    target: Tensor
    keep: Tensor | None
    damping: float
    damped: Tensor | None
    feedback: Tensor
    params: Params = field(default_factory=dict)
    codes: Tensor = field(default_factory=lambda: torch.empty(0))

    def solution(self, problem: Problem) -> Solution:
        """The codes and parameters found, in the order of the weight."""
        weight, power = problem.weight, problem.hessian.power
        lost = power(weight - problem.scheme.dequantize(self.codes, self.params))
        return Solution(self.codes, self.params, self.damping, lost, power(weight))


def prepared(problems: Sequence[Problem], options: GptqOptions) -> list[State]:
    """The states before the first column, with fitted parameters.

    Parameters of the weight itself need no factor and are fitted first: the fit is queued while a
    GPU still sums the Hessian, and the factor waits for that sum.
    """
    moved = problems[0].hessian.d is not None or problems[0].lacking is not None
    fits_weight = not moved and not problems[0].scheme.sparsity
    fitted = fit(problems, [problem.weight for problem in problems], options) if fits_weight else []
    states = [prepare(problem, options) for problem in problems]
    kept = [s.target if s.keep is None else s.target * s.keep[:, s.back] for s in states]
    fitted = fitted or fit(problems, kept, options)
    for s, params in zip(states, fitted, strict=True):
        s.params = params
    return states


def prepare(problem: Problem, options: GptqOptions) -> State:
    """The state before the first column: visiting order, target and feedback."""
    scheme, weight, hessian = problem.scheme, problem.weight, problem.hessian
    order = visiting_order(hessian.h.diagonal(), scheme, options.act_order)
    back = torch.argsort(order)
    factor = Factor(hessian.h, options.damping, order)
    target = weight
    missing = problem.lacking
    if hessian.d is not None:
        missing = options.residual * product(weight, hessian.d)
    if missing is not None:
        target = weight + factor.solve(missing[:, order])[:, back]
        # inputs next to 0 make up for an error only by weights that float16 cannot hold: a row with
        # such a target keeps its weight
        largest = torch.finfo(scheme.scale_dtype).max / HEADROOM
        size = torch.linalg.vector_norm(target, torch.inf, dim=1, keepdim=True)
        torch.where(size > largest, weight, target, out=target)
    damped = factor.h if options.rounds else None
    keep = None
    if scheme.sparsity:
        visited = target[:, order]
        keep = prune(visited, factor.feedback, factor.cost, scheme.sparsity)
    factor.free_damped()
    return State(order, back, target, keep, factor.damping, damped, factor.feedback)


def fit(
    problems: Sequence[Problem], weights: Sequence[Tensor], options: GptqOptions
) -> list[Params]:
    """The parameters of each problem; its clipping search looks at its entry in ``weights``."""
    scheme, (n, k) = problems[0].scheme, weights[0].shape
    size = 1 if scheme.shared_params else at_once(16 * n * k, weights[0].is_cuda)
    groups, device = scheme.groups(weights[0]).shape[1], weights[0].device
    found: list[Params] = []
    for some in in_turn(range(len(problems)), size):
        own, rows = [problems[e] for e in some], [n] * len(some)
        fitted = fit_groups(
            scheme,
            stack([weights[e] for e in some]).flatten(0, 1),
            stack([problem.hessian.h.diagonal() for problem in own]),
            options.clip_ratios(scheme),
            clip=stacked_clips([problem.clip for problem in own], rows, device),
            group_clip=stacked_clips([problem.group_clip for problem in own], rows, device, groups),
        )
        found += scheme.split_params(fitted, len(some))
    return found


def visiting_order(importance: Tensor, scheme: Scheme, act_order: bool) -> Tensor:
    """The columns ``[K]`` by falling ``importance``; columns pruned together stay together."""
    size = scheme.sparsity[1] if scheme.sparsity else 1
    columns = torch.arange(len(importance), device=importance.device).view(-1, size)
    if act_order:
        falling = importance.view(-1, size).sum(1).argsort(descending=True, stable=True)
        columns = columns[falling]
    return columns.flatten()


def descent_feedback(hessian: Tensor) -> Tensor:
    """``H diag(H)^-1 - I [K, K]``: the feedback of coordinate descent."""
    return (hessian / hessian.diagonal()).fill_diagonal_(0)
