"""How much a calibrated run has to do, stage by stage, from config.json and recipe alone.

Counts, no times: :mod:`qtool.pipeline.estimate` turns them into seconds, ``bench quantize`` into floors. A stage is
what :class:`qtool.calibration.stages.Stages` records under the same name.

Legend: M calibration tokens in sequences of S, N x K a linear's weight.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from qtool.calibration.clip import Clip
from qtool.calibration.distill import Distill
from qtool.calibration.gptq import Gptq
from qtool.calibration.hessian import panels
from qtool.calibration.method import Rounding, Transform
from qtool.calibration.rtn import RoundToNearest
from qtool.calibration.smooth import Smooth
from qtool.models.parts import Heads
from qtool.pipeline.job import Job


@dataclass
class Work:
    """Of one block or of a whole run.

    Attributes:
        read_bytes, write_bytes: from and to files.
        forward_flops: of forwards on tensor cores; two a multiplication and addition.
        hessian_flops, learning_flops: likewise, of Hessians and of steps that learn.
        search_weights: weights quantized and dequantized, over all candidates of all searches.
        search_flops: of the outputs that the candidates are judged by.
        search_tries: linears that a candidate was tried on: each takes some fifty launches, whatever its size.
        rounding_flops: of factors, sweeps and errors, float32.
        rounding_weights: weights looked at by the rounding's own search.
        rounding_steps: blocks of columns swept one after another, launches again.
        packed_weights: weights packed, and unpacked again to compute the next block's inputs.
    """

    read_bytes: float = 0
    write_bytes: float = 0
    forward_flops: float = 0
    hessian_flops: float = 0
    learning_flops: float = 0
    search_weights: float = 0
    search_flops: float = 0
    search_tries: float = 0
    rounding_flops: float = 0
    rounding_weights: float = 0
    rounding_steps: float = 0
    packed_weights: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> "Work":
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(self)})


class BlockWork:
    """What one block of ``job`` costs with ``samples`` sequences of ``seqlen`` tokens."""

    def __init__(self, job: Job, block: int, samples: int, seqlen: int) -> None:
        self.job, self.block, self.samples, self.seqlen = job, block, samples, seqlen
        self.family = job.block_family(block)
        self.shapes = job.linears(block)
        self.tokens = samples * seqlen
        self.quantized = {name for name in self.shapes if job.format.of(job.full(block, name))}

    def total(self) -> Work:
        """Everything, the forward that makes the next block's inputs included."""
        work = Work(
            read_bytes=sum(map(prod, self.job.block_shapes(self.block).values())) * self.job.dtype.itemsize,
            write_bytes=self.job.block_bytes(self.block),
            forward_flops=self.forward(),
            packed_weights=2 * self.weights(self.quantized),
        )
        if self.job.rounding.compares:
            work = work + Work(forward_flops=self.forward())  # the float model beside
        methods: list[Transform | Rounding] = [*self.job.transforms, self.job.rounding]
        for method in methods:
            work = work + self.of(method)
        return work

    def of(self, method: Transform | Rounding) -> Work:
        """What ``method`` costs; those without a count of their own are taken for one look at all inputs."""
        if isinstance(method, Smooth):
            candidates = (method.steps + 1) ** 2 + 1
            flops = 2 * method.tokens * self.weights(self.quantized) * candidates
            return Work(forward_flops=self.look(), search_weights=candidates * self.weights(self.quantized),
                        search_flops=flops, search_tries=candidates * len(self.quantized))  # fmt: skip
        if isinstance(method, Clip):
            ratios = len(method.ratios)
            candidates = 2 * ratios + 1
            flops = 2 * method.tokens * self.weights(self.quantized) * (ratios + 1)
            blocks = (ratios + 2) * min(1.0, method.sequences / self.samples) * self.forward()
            return Work(forward_flops=self.look() + blocks, search_weights=candidates * self.weights(self.quantized),
                        search_flops=flops, search_tries=candidates * len(self.quantized))  # fmt: skip
        if isinstance(method, Gptq):
            return self.gptq(method)
        if isinstance(method, Distill):
            start = self.gptq(Gptq()) if method.start == "gptq" else Work()
            seen = min(1.0, method.samples / self.samples)
            passes = method.epochs * (3 * (1 - method.held_out) + method.held_out)
            once = seen * self.forward()
            return start + Work(forward_flops=once, learning_flops=passes * once)
        if isinstance(method, RoundToNearest):
            return Work(rounding_weights=self.weights(self.quantized))
        return Work(forward_flops=self.look() if method.needs_data else 0)

    def gptq(self, method: Gptq) -> Work:
        """Each group's inputs come from a forward that ends there; with ``residual`` the float block runs too."""
        work, before = Work(), 0.0
        inputs = 2 if method.residual else 1
        for number, group in enumerate(self.family.groups):
            names = [name for name in group.linears if name in self.quantized]
            if names:
                k, seen = self.shapes[names[0]][1], self.tokens * self.share(names[0])
                grams = 2 * seen * (sum(rows.stop * (columns.stop - columns.start) for rows, columns in panels(k))
                                    + (k * k if method.residual else 0))  # fmt: skip
                n = sum(self.shapes[name][0] for name in names)
                sweeps = n * k * k * (5 + 6 * method.rounds)
                work += Work(
                    forward_flops=inputs * before * (0 if group.routed and number else 1),
                    hessian_flops=grams,
                    rounding_flops=k**3 / 3 + sweeps,
                    rounding_weights=n * k * (method.clip_steps * (1 + method.negative_scales) + 4),
                    rounding_steps=-(-k // method.block) * (1 + method.rounds),
                )
            before += 2 * self.tokens * sum(prod(self.shapes[n]) * self.share(n) for n in group.linears)
            before += self.attention() if number == 0 else 0
        return work

    def forward(self) -> float:
        """Operations of one pass of all tokens through the block."""
        linears = sum(prod(shape) * self.share(name) for name, shape in self.shapes.items())
        return 2 * self.tokens * linears + self.attention()

    def look(self) -> float:
        """A pass that ends at the input of the last linears."""
        last = self.family.groups[-1]
        if last.routed:
            return self.forward()
        return self.forward() - 2 * self.tokens * sum(prod(self.shapes[name]) for name in last.linears)

    def attention(self) -> float:
        """Scores and values of causal attention: half of each ``S x S`` matrix."""
        heads = Heads.of(self.job.namespace)
        return 2 * self.tokens * self.seqlen * heads.query * heads.dim

    def share(self, name: str) -> float:
        """The share of the tokens that linear ``name`` sees."""
        if not self.family.group_of(name).routed:
            return 1.0
        config: Any = self.job.namespace
        return float(config.num_experts_per_tok / self.family.sizes["experts"](config))

    def weights(self, names: Iterable[str]) -> float:
        """Elements of the weights of ``names``."""
        return float(sum(prod(self.shapes[name]) for name in names))


def work_of(job: Job, samples: int, seqlen: int) -> Work:
    """The whole run: all blocks (the last one's outputs are not needed) and the ends, which are read and written."""
    kinds = Counter(job.kinds)
    total = Work()
    for block in job.first_of_kinds():
        total = total + BlockWork(job, block, samples, seqlen).total() * kinds[block]
    last = BlockWork(job, job.blocks - 1, samples, seqlen)
    ends = sum(prod(shape) for end in job.ends() for shape in end.values()) * job.dtype.itemsize
    spared = Work(forward_flops=-last.forward(), packed_weights=-last.weights(last.quantized))
    return total + spared + Work(read_bytes=2 * ends if job.needs_data else ends, write_bytes=ends)
