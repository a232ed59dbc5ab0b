"""Calibration: one file a method; recipes name them by these tables."""

from qtool.calibration.method import Rounding, Transform
from qtool.calibration.norm_fusion import NormFusion
from qtool.calibration.rotate import Rotate
from qtool.calibration.rtn import RoundToNearest
from qtool.calibration.smooth import Smooth

TRANSFORMS: dict[str, type[Transform]] = {t.name: t for t in (NormFusion, Rotate, Smooth)}
ROUNDINGS: dict[str, type[Rounding]] = {rounding.name: rounding for rounding in (RoundToNearest,)}
