"""Calibration: one file for each method; these tables have the names by which recipes use them.

Three methods work on plain tensors too: :func:`gptq`, :func:`smooth_factors`, :func:`rotation`.
"""

from qtool.calibration.method import Rounding, Transform
from qtool.calibration.rounding.distill.distill import Distill
from qtool.calibration.rounding.gptq.gptq import GptqOptions, gptq
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.transforms.clip import Clip
from qtool.calibration.transforms.gather_outliers import GatherOutliers
from qtool.calibration.transforms.hadamard import rotation
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.online_hadamard import OnlineHadamard
from qtool.calibration.transforms.reorder import Reorder
from qtool.calibration.transforms.rotate import Rotate
from qtool.calibration.transforms.smooth import Smooth, smooth_factors
from qtool.calibration.transforms.smooth_attention import SmoothAttention
from qtool.calibration.transforms.value_basis import ValueBasis

__all__ = ["ROUNDINGS", "TRANSFORMS", "GptqOptions", "gptq", "rotation", "smooth_factors"]

TRANSFORMS: dict[str, type[Transform]] = {
    t.name: t
    for t in (
        NormFusion,
        Rotate,
        Smooth,
        SmoothAttention,
        ValueBasis,
        Reorder,
        GatherOutliers,
        OnlineHadamard,
        Clip,
    )
}
ROUNDINGS: dict[str, type[Rounding]] = {r.name: r for r in (RoundToNearest, Gptq, Distill)}
