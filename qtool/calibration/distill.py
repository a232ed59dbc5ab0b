"""Block distillation: weights and scales of one block learned until it answers as the float block does.

APEX4 section 3.3 (algorithm 1), OmniQuant (arXiv 2308.13137). Block by block, greedy: student and teacher
see the same input, the output of the quantized blocks before; the teacher is the float block after all
transforms. Per token of block output y:

    loss = 1 - cos(y_student, y_teacher)        or        |y_student - y_teacher|^2 / mean |y_teacher|^2

Adam learns every linear's weight and float scale through the straight-through estimator of
:mod:`qtool.calibration.learned_linear`, from the codes of another rounding. A share of the samples is
held out: the block keeps the epoch with the least loss there, epoch 0 (the start) included, so it never ends
worse than it began.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtool.calibration.block import Batch, Block, Rounded
from qtool.calibration.gptq import Gptq
from qtool.calibration.learned_linear import LearnedLinear
from qtool.calibration.method import Rounding
from qtool.calibration.rtn import RoundToNearest
from qtool.errors import QtoolError, suggest

STARTS: dict[str, type[Rounding]] = {"rtn": RoundToNearest, "gptq": Gptq}
LOSSES = ("cosine", "mse")


@dataclass(kw_only=True)
class Distill(Rounding):
    """Options, all of them recipe keys.

    Args:
        start: the rounding whose codes learning starts from, ``rtn`` or ``gptq``. GPTQ's dense codes are
            better than what is learned from RTN's and rarely improve; its 2:4 ones do, by a fifth.
        loss: ``cosine`` is APEX4's. It is blind to the length of y, which drifts: ``mse`` came out ahead
            on every scheme measured.
        epochs: passes over the samples.
        samples: calibration sequences used, the first ones.
        held_out: share of them that only choose the epoch.
        weight_lr: Adam's step for weights, in quantization steps of the linear: free of the model's
            scale (the paper's 1e-5 is about 0.005 of a step of Llama-2-7B).
        scale_lr: Adam's step for the logarithm of the scales.
        seed: of the order of the batches.
    """

    start: str = "rtn"
    loss: str = "mse"
    epochs: int = 10
    samples: int = 256
    held_out: float = 0.125
    weight_lr: float = 0.005
    scale_lr: float = 1e-4
    seed: int = 0

    name = "distill"
    needs_data = True

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise QtoolError(f"distill: unknown start {self.start!r}; {suggest(self.start, STARTS)}")
        if self.loss not in LOSSES:
            raise QtoolError(f"distill: unknown loss {self.loss!r}; {suggest(self.loss, LOSSES)}")

    def round(self, block: Block, batches: Sequence[Batch]) -> dict[str, Rounded]:
        used = first_samples(batches, self.samples)
        targets = [block.run(batch) for batch in used]
        student = self.student(block, batches)
        linears = {n: m for n, m in student.module.named_modules() if isinstance(m, LearnedLinear)}
        held_out = max(1, round(len(used) * self.held_out)) if len(used) > 1 else 0
        taught, judged = range(len(used) - held_out), range(len(used) - held_out if held_out else 0, len(used))

        def loss_of(i: int) -> Tensor:
            with torch.autocast(block.device.type, torch.bfloat16, enabled=block.device.type == "cuda"):
                answer = student.forward(used[i])
            return self.distance(answer.float(), targets[i].to(answer.device).float())

        def judge() -> float:
            with torch.no_grad():
                return sum(float(loss_of(i)) for i in judged) / len(judged)

        optimizer = self.optimizer(linears)
        steps = max(1, self.epochs * len(taught))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        random = torch.Generator().manual_seed(self.seed + block.index)
        curve, best = [judge()], {n: m.rounded() for n, m in linears.items()}
        for _ in range(self.epochs):
            for i in torch.randperm(len(taught), generator=random).tolist():
                optimizer.zero_grad()
                loss_of(taught[i]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            curve.append(judge())
            if curve[-1] < min(curve[:-1]):
                best = {n: m.rounded() for n, m in linears.items()}
        block.notes[self.name] = {"loss": curve, "epoch": curve.index(min(curve))}
        return best

    def student(self, block: Block, batches: Sequence[Batch]) -> Block:
        """A copy of ``block`` whose linears learn, from the codes of the rounding :attr:`start`."""
        student = replace(block, module=copy.deepcopy(block.module))
        start = STARTS[self.start]().round(student, batches)
        for name, rounded in start.items():
            parent, _, attribute = name.rpartition(".")
            linear = LearnedLinear(block.get(name), block.schemes[name], rounded, block.permutations.get(name))  # type: ignore[arg-type]
            setattr(student.get(parent), attribute, linear)
        return student

    def distance(self, answer: Tensor, target: Tensor) -> Tensor:
        """Mean loss over the tokens of block outputs ``[B, S, H]``."""
        if self.loss == "mse":
            return (answer - target).square().mean() / target.square().mean()
        return 1 - torch.cosine_similarity(answer, target, dim=-1).mean()

    def optimizer(self, linears: dict[str, LearnedLinear]) -> torch.optim.Optimizer:
        """Adam with the step sizes of each linear."""
        groups = []
        for linear in linears.values():
            step = float(linear.scheme.grid(linear.params).step.mean())
            groups.append({"params": [linear.weight], "lr": self.weight_lr * step})
            groups.append({"params": [linear.log_ratio], "lr": self.scale_lr})
        return torch.optim.Adam(groups, betas=(0.9, 0.999))


def first_samples(batches: Sequence[Batch], samples: int) -> list[Batch]:
    """The first batches, until they hold ``samples`` sequences."""
    used: list[Batch] = []
    for batch in batches:
        if sum(len(b.hidden) for b in used) >= samples:
            break
        used.append(batch)
    return used
