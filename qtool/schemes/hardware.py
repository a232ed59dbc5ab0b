"""Chooses the granularity that a GPU can afford, by its tensor-core to CUDA-core ratio.

Group scales are applied on CUDA cores inside the main loop. APEX4 section 2.2, equation 2: the cost
is governed by ``rho = INT4 tensor-core ops / FP32 CUDA-core ops`` of one SM in one cycle. Up to rho
= 16 a group-128 W4A4 kernel beats FP16; at 64 its speed falls to 0.43-0.47 of FP16's (section 5.3),
and per-channel scales with G = 32 for two layers only (``mix``) recover it. QServe section 5.3 uses
W4A8 per channel on A100 and groups of 128 on L40S, "because L40S has stronger CUDA cores": INT8
ratios 32 and 8. No paper has a point between 16 and 32; both choices change above 16.
"""

from dataclasses import dataclass

from qtool.errors import QtoolError, suggest

#: the largest ratio at which dequantizing groups of 128 in the main loop pays off
GROUP_RATIO = 16

#: GPUs with wgmma
HOPPER = ("h100", "h800", "h200")


@dataclass(frozen=True)
class Gpu:
    """A GPU's arithmetic per SM and clock cycle, dense, a multiply-add counting as two.

    Args:
        int4: tensor-core ops; None if the instruction is emulated.
        int8: tensor-core ops.
        fp32: CUDA-core ops.
        source: where the numbers come from.
    """

    name: str
    int4: int | None
    int8: int
    fp32: int
    source: str

    @property
    def w4a8_layout(self) -> str:
        """The layout that its W4A8 kernel reads."""
        return "dual-mma" if self.name in HOPPER else "compute-aware"

    @property
    def rho(self) -> float:
        """INT4 to FP32 ratio; without INT4 tensor cores W4A4 runs on INT8 ones."""
        return (self.int4 or self.int8) / self.fp32

    @property
    def rho_int8(self) -> float:
        """INT8 to FP32 ratio, which governs W4A8."""
        return self.int8 / self.fp32


_NO_INT4 = (
    "no native s4 mma from sm_90 on: the compiler emulates it (51 TOPS against 1217 in s8 on H200, "
    "measured)"
)

_ALL = (
    # APEX4's "OPs/cycle" is per tensor core, 4 in an SM; FP32 is 2 x 64 or 2 x 128 CUDA cores
    Gpu("a100", 8192, 4096, 128, "APEX4 table 1: 1248 TOPS, 19.5 TFLOPS; QServe 2.1: INT8 624"),
    Gpu("rtx3090", 4096, 2048, 256, "APEX4 table 1: 568 TOPS, 35.6 TFLOPS; INT8 half, as a40"),
    Gpu("a40", 4096, 2048, 256, "APEX4 table 1: 599 TOPS, 37.4 TFLOPS; A40 datasheet: INT8 299"),
    Gpu("a10", 4096, 2048, 256, "the SM of a40 (sm_86)"),
    # APEX4 gives L40S INT4 at INT8's rate, NVIDIA's whitepaper gives the same SM twice that on
    # GeForce
    Gpu("l40s", 2048, 2048, 256, "APEX4 table 1: 733 TOPS, 91.6 TFLOPS; INT8 per SM as rtx4090"),
    Gpu("rtx4090", 4096, 2048, 256, "NVIDIA Ada whitepaper: INT4 1321, INT8 661 TOPS, 82.6 TFLOPS"),
    Gpu(
        "h100", None, 8192, 256, "NVIDIA H100 SXM datasheet: INT8 1979 TOPS, 67 TFLOPS; " + _NO_INT4
    ),
    Gpu("h800", None, 8192, 256, "the SM of h100; " + _NO_INT4),
    Gpu(
        "h200", None, 8192, 256, "NVIDIA H200 SXM datasheet: INT8 1979 TOPS, 67 TFLOPS; " + _NO_INT4
    ),
    Gpu(
        "b200",
        None,
        16384,
        256,
        "HGX B200 datasheet: INT8 4500 TOPS dense, 75-80 TFLOPS; " + _NO_INT4,
    ),
    Gpu(
        "rtx5090",
        None,
        2048,
        256,
        "NVIDIA RTX Blackwell whitepaper: INT8 838 TOPS, 104.8 TFLOPS; no s4 mma in its code",
    ),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _ALL}


def gpu(name: str) -> Gpu:
    """The GPU called ``name``.

    Raises:
        QtoolError: for a GPU that the table does not have.
    """
    if name not in GPUS:
        raise QtoolError(f"unknown GPU {name!r}: {suggest(name, GPUS)}")
    return GPUS[name]


def choose_w4a4(target: Gpu) -> tuple[str, str]:
    """``g128`` or ``mix`` for W4A4 on ``target``, and why (APEX4 section 3.2.2)."""
    kind, advice = "INT4", ""
    if target.int4 is None:
        kind = "INT8"
        advice = (
            f"; {target.name} has no INT4 tensor cores: W4A8 runs on the same ones and loses less"
        )
    fact = f"{kind} tensor cores : FP32 CUDA cores = {target.rho:g} on {target.name}"
    if target.rho <= GROUP_RATIO:
        why = f"at most {GROUP_RATIO}: scaling groups of 128 hides behind the mma"
        return "g128", f"{fact}, {why}{advice}"
    why = f"above {GROUP_RATIO}: scaling every group of 128 would bound the kernel"
    return "mix", f"{fact}, {why}{advice}"


def choose_qoq(target: Gpu) -> tuple[str, str]:
    """``w4a8-qoq`` (per channel) or ``w4a8-qoq-g128``, and why (QServe section 5.3)."""
    fact = f"INT8 tensor cores : FP32 CUDA cores = {target.rho_int8:g} on {target.name}"
    if target.rho_int8 <= GROUP_RATIO:
        why = f"at most {GROUP_RATIO}: it can afford level 2, as L40S in QServe"
        return "w4a8-qoq-g128", f"{fact}, {why}"
    why = f"above {GROUP_RATIO}: level 2 would bound the kernel, as on A100 in QServe"
    return "w4a8-qoq", f"{fact}, {why}"
