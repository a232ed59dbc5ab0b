"""Calibration: one file a method; recipes name them by these tables."""

from qtool.calibration.clip import Clip
from qtool.calibration.distill import Distill
from qtool.calibration.gptq import Gptq
from qtool.calibration.method import Rounding, Transform
from qtool.calibration.norm_fusion import NormFusion
from qtool.calibration.reorder import GatherOutliers, Reorder
from qtool.calibration.rotate import Rotate
from qtool.calibration.rtn import RoundToNearest
from qtool.calibration.smooth import Smooth
from qtool.calibration.smooth_attention import SmoothAttention
from qtool.calibration.value_basis import ValueBasis

TRANSFORMS: dict[str, type[Transform]] = {
    t.name: t for t in (NormFusion, Rotate, Smooth, SmoothAttention, ValueBasis, Reorder, GatherOutliers, Clip)
}
ROUNDINGS: dict[str, type[Rounding]] = {r.name: r for r in (RoundToNearest, Gptq, Distill)}
