"""Block distillation: a block's weights and scales learn to give the float block's output.

APEX4 section 3.3 (algorithm 1), OmniQuant (arXiv 2308.13137). One block after another learns. The
student gets the output of the quantized blocks before it; the teacher is the float block after all
transforms. It gets the same input, or the float model's if that runs too (``start: gptq``), so that
the student also makes up for the error of its input. Per token of block output y:

    loss = 1 - cos(y_student, y_teacher)    or    |y_student - y_teacher|^2 / mean |y_teacher|^2

Learning starts from the codes of another rounding. Adam learns every linear's weight, its float
scale and, if the scheme has zero points, both clipping bounds, through the straight-through
estimator of :mod:`qtool.calibration.rounding.distill.learned_linear`. A share of the samples is
held out: the block keeps the epoch with the least loss on these, epoch 0 (the start) included, so
on them it never ends worse than it began.

Each rank takes a share of the sequences of every iteration, and the gradients are added up: the
iterations are those of one rank, up to the last bits of a sum.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import HIDDEN, Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.forwards import entering, leaving, run
from qtool.calibration.method import Rounding
from qtool.calibration.recorded import Recorded
from qtool.calibration.rounding.distill.learned_linear import LearnedLinear
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.rounding.scales import require_float_scale
from qtool.calibration.statistics import batch_shapes, own_subset
from qtool.distributed import ranks
from qtool.errors import QtoolError, suggest
from qtool.schemes import Scheme

STARTS: dict[str, type[Rounding]] = {"rtn": RoundToNearest, "gptq": Gptq}
LOSSES = ("cosine", "mse")
#: tensors that enter a block, its other arguments, the teacher's output ``[b, S, H]``, its size
Given = tuple[dict[str, Tensor], dict[str, Any] | None, Tensor, Tensor]


@dataclass(kw_only=True)
class Distill(Rounding):
    """Options, all of them recipe keys.

    Args:
        start: the rounding whose codes learning starts from, ``rtn`` or ``gptq``. Codes learned
            from RTN's are worse than GPTQ's dense ones, which learning rarely improves; its 2:4
            codes improve by a fifth.
        loss: ``cosine`` is APEX4's, blind to the length of y; ``mse`` is OmniQuant's.
        epochs: passes over the samples.
        samples: calibration sequences used, the first ones.
        batch: sequences per iteration. With fewer, as many epochs learn more and take longer on a
            GPU. OmniQuant's 1 is best from 2:4 codes; from RTN with 4-bit activations it may be
            worse than a larger one.
        held_out: share of the samples that only choose the epoch; 0: all learn, and choose too.
        weight_lr: Adam's learning rate for weights, in quantization steps of their group, so that
            it fits models of any scale (the paper's 1e-5 is about 0.005 of a step of Llama-2-7B).
            0: the weights stay, as in OmniQuant's learned clipping.
        scale_lr: Adam's learning rate for the logarithm of the scales and for clipping bounds, in
            shares of a group's width.
        decay: let both learning rates fall linearly to 0 at the last iteration; APEX4's stay.
        seed: seed of the order of the batches.
    """

    start: str = "rtn"
    loss: str = "mse"
    epochs: int = 10
    samples: int = 256
    batch: int = 8
    held_out: float = 0.125
    weight_lr: float = 0.005
    scale_lr: float = 1e-4
    decay: bool = True
    seed: int = 0

    name = "distill"
    needs_data = True
    positive = ("samples", "batch")
    most: ClassVar[dict[str, float]] = {"held_out": 0.5, "scale_lr": 1}

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise QtoolError(
                f"distill: unknown start {self.start!r}; {suggest(self.start, STARTS)}"
            )
        if self.loss not in LOSSES:
            raise QtoolError(f"distill: unknown loss {self.loss!r}; {suggest(self.loss, LOSSES)}")

    @property
    def iteration(self) -> int:
        return self.batch

    @property
    def compares(self) -> bool:
        return STARTS[self.start]().compares

    @property
    def weighs_outputs(self) -> bool:
        return STARTS[self.start]().weighs_outputs

    def require_scheme(self, scheme: Scheme) -> None:
        require_float_scale(scheme)

    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        if not block.schemes:
            return {}
        distillation = Distillation(self, block, batches)
        for start in STARTS:  # these codes are not written; gptq rounds starved experts by rtn
            block.notes.pop(start, None)
        # Adam's steps do not depend on a factor of all gradients: this one lifts them above Adam's
        # epsilon and into the range of float16
        gradient_scale = self.batch * batch_shapes(batches)[0][1] * block.config.hidden_size
        optimizer = self.optimizer(distillation.linears)
        steps, last = max(1, self.epochs * len(distillation.train)), 0.0 if self.decay else 1.0
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, total_iters=steps)
        random = torch.Generator().manual_seed(self.seed + block.index)
        curve, best = [distillation.validate()], distillation.rounded()
        learn = distillation.learner(optimizer, gradient_scale)
        for _ in range(self.epochs):
            for i in torch.randperm(len(distillation.train), generator=random).tolist():
                learn(distillation.given(distillation.train[i]))
                schedule.step()
            curve.append(distillation.validate())
            if curve[-1] < min(curve[:-1]):
                best = distillation.rounded()
        block.notes[self.name] = {"loss": curve, "epoch": curve.index(min(curve))}
        return best

    def work(self, block: BlockShape) -> Work:
        """The work of the start, the targets, and iterations of three forwards each."""
        share = min(1.0, self.samples / block.samples)
        once, passes = share * block.forward_flops(), self.epochs * (1 - self.held_out)
        steps = passes * share * block.samples / self.batch
        return STARTS[self.start]().work(block) + Work(
            forward_flops=once,
            learning_flops=(3 * passes + self.epochs * self.held_out) * once,
            learning_weights=steps * block.weights,
        )

    def held_bytes(self, block: BlockShape) -> int:
        """Device bytes at the worst moment: learning, or the rounding it starts from.

        Learning holds a copy of the block, its gradient and Adam's two moments, weights, codes and
        values. It also holds the float block's outputs for all tokens, and what an iteration keeps
        for its gradients: inputs and outputs of all linears, and the block's output three times in
        float32.
        """
        weights = max(STARTS[self.start]().held_bytes(block), 7 * block.exact_bytes)
        seen = sum(sum(shape) * block.share(name) for name, shape in block.linears.items())
        tokens = self.batch * block.seqlen
        iteration = int(tokens * (block.itemsize * seen + 12 * block.config.hidden_size))
        return weights + block.tokens * block.config.hidden_size * block.itemsize + iteration

    def spare_bytes(self, block: BlockShape) -> int:
        """What the rounding it starts from takes beyond :meth:`held_bytes`."""
        start = STARTS[self.start]()
        most = start.held_bytes(block) + start.spare_bytes(block)
        return max(0, most - self.held_bytes(block))

    def sizes(self, targets: Sequence[Tensor | None]) -> list[float]:
        """What :meth:`distance` is divided by in each batch to give the mean loss of all ranks.

        ``targets`` are this rank's shares ``[b, S, H]`` of the batches, None if it has no share.
        """

        def size(target: Tensor | None) -> float:
            if target is None:
                return 0.0
            if self.loss == "mse":
                return float(target.double().square().sum())
            return target.numel() / target.shape[-1]

        of_ranks = ranks.all_gather([size(target) for target in targets])
        return [sum(of_batch) for of_batch in zip(*of_ranks, strict=True)]

    def student(self, block: Block, batches: Sequence[Batch]) -> Block:
        """A copy of ``block`` whose linears learn, from the codes of the rounding :attr:`start`."""
        block.update_module()
        student = replace(block, module=copy.deepcopy(block.module), exact=dict(block.exact))
        start = STARTS[self.start]().round(student, batches)
        student.exact = {}  # from here on its module follows nobody
        student.module.requires_grad_(False)
        for name, rounded in start.items():
            learned = LearnedLinear(
                block.get(name),  # type: ignore[arg-type]
                block.schemes[name],
                rounded,
                block.weight(name),
                block.permutations.get(name),
                name in block.rotated,
            )
            student.module.set_submodule(name, learned)
        return student

    def distance(self, answer: Tensor, target: Tensor) -> Tensor:
        """The loss of block outputs ``[B, S, H]``, summed over the tokens."""
        if self.loss == "mse":
            return torch.nn.functional.mse_loss(answer, target, reduction="sum")
        return (1 - torch.cosine_similarity(answer, target, dim=-1)).sum()

    def optimizer(self, linears: dict[str, LearnedLinear]) -> torch.optim.Optimizer:
        """Adam with a learning rate for the weights and one for their groups' bounds."""
        weights, bounds = [], []
        for linear in linears.values():
            weights.append(linear.steps)
            bounds += [linear.log_ratio] + ([] if linear.shift is None else [linear.shift])
        device = weights[0].device
        # the fused Adam passes over the weights once instead of ten times; a CUDA graph knows
        # tensors by their place, so that a rate that falls is one
        on_gpu = device.type == "cuda"
        groups = [
            {"params": params, "lr": torch.tensor(float(rate), device=device) if on_gpu else rate}
            for params, rate in ((weights, self.weight_lr), (bounds, self.scale_lr))
        ]
        return torch.optim.Adam(
            groups, betas=(0.9, 0.999), eps=1e-12, fused=on_gpu or None, capturable=on_gpu
        )


class Distillation:
    """A student block, and the float block's outputs that it learns to give.

    Attributes:
        batches: this rank's sequences in each iteration; None if it has none.
        targets: the teacher's outputs ``[b, S, H]`` for each of ``batches``, or None.
        linears: the learning linears of the student, by name.
        train: the iterations that learn.
        validation: the iterations that choose the epoch.
    """

    def __init__(self, method: Distill, block: Block, batches: Sequence[Batch]) -> None:
        few, reference = own_subset(batches, method.samples), block.reference
        self.batches = teacher_batches = iterations(few, method.batch, method.samples)
        if reference:
            floats = [reference.batches.get(id(batch), batch) for batch in few]
            teacher_batches = iterations(floats, method.batch, method.samples)
        self.targets = [
            None if b is None else run(block, b, **block.full_kv) for b in teacher_batches
        ]
        self.method, self.device, self.sizes = method, block.device, method.sizes(self.targets)
        self.student = method.student(block, batches)
        modules = self.student.module.named_modules()
        self.linears = {n: m for n, m in modules if isinstance(m, LearnedLinear)}
        # only a float32 module gains by it; a 16-bit module (with exact weights) is as fast without
        self.autocast = block.device.type == "cuda" and not block.exact
        count = len(self.batches)
        held_out = max(1, round(count * method.held_out)) if method.held_out and count > 1 else 0
        self.train = range(count - held_out)
        self.validation = range(count - held_out, count) if held_out else self.train

    def given(self, i: int) -> Given | None:
        """What :meth:`loss` takes of iteration ``i``, on the device; None if this rank has none."""
        batch, target = self.batches[i], self.targets[i]
        if batch is None or target is None:
            return None
        tensors, arguments = entering(self.student, batch)
        size = torch.full((), self.sizes[i], device=self.device)
        return tensors, arguments, target.to(self.device), size

    def loss(self, given: Given | None) -> Tensor:
        """This rank's share of the mean loss ``[]`` of an iteration."""
        if given is None:
            return torch.zeros((), device=self.device, requires_grad=True)
        tensors, arguments, target, size = given
        # a copy, since some blocks add to their input in place
        tensors = tensors | {HIDDEN: tensors[HIDDEN].clone()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            answer = leaving(self.student, tensors, arguments)[HIDDEN]
        return self.method.distance(answer.float(), target.float()) / size

    def learner(self, optimizer: torch.optim.Optimizer, scale: float) -> Callable[..., None]:
        """A step of ``optimizer`` down the gradients of an iteration over all ranks, times scale.

        It takes what :meth:`given` returns. Where it can, a GPU alone replays it.
        """

        half = any(target is not None and target.dtype == torch.float16 for target in self.targets)

        def learn(given: Given | None) -> None:
            optimizer.zero_grad()
            (self.loss(given) * scale).backward()
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                # this rank has no sequence of the iteration, or the expert saw no token
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif half:  # a gradient beyond float16 moves nothing
                    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
                ranks.all_reduce(parameter.grad)
            optimizer.step()

        return Recorded(learn) if self.device.type == "cuda" and ranks.size() == 1 else learn

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the iterations that choose the epoch, of all ranks."""
        losses = sum(float(self.loss(self.given(i))) for i in self.validation)
        return sum(ranks.all_gather(losses)) / len(self.validation)

    def rounded(self) -> dict[str, Rounded]:
        """The codes and parameters that the student has learned so far."""
        return {name: linear.rounded() for name, linear in self.linears.items()}


def iterations(batches: Sequence[Batch], size: int, samples: int) -> list[Batch | None]:
    """This rank's sequences in each iteration, in order; None if an iteration has none for it.

    An iteration has ``size`` sequences, the last one of a batch may have fewer. All iterations
    together have at most ``samples``.
    """
    own: list[Batch | None] = []
    for batch in ranks.lockstep(batches):
        for whole in filter(None, ranks.all_gather(batch and batch.plain())):
            wanted = min(whole.shape[0], samples)
            samples -= wanted
            for first in range(0, wanted, size):
                part = whole.part(slice(first, min(first + size, wanted)))
                rows = ranks.local_rows(part.shape[0])
                own.append(part.part(rows) if rows.start < rows.stop else None)
    return own
