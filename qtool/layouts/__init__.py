"""Packed layouts: one file each. ``get(name)`` returns one."""

from qtool import plugins
from qtool.layouts.apex4 import APEX4
from qtool.layouts.base import Layout
from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.dual_mma import DUAL_MMA
from qtool.layouts.marlin import MARLIN
from qtool.layouts.marlin_24 import MARLIN_24
from qtool.layouts.qqq import QQQ_CHANNEL, QQQ_GROUP
from qtool.layouts.row_major import ROW_MAJOR, ROW_MAJOR_8
from qtool.layouts.w4ax_interleaved import W4AX_INTERLEAVED

_ALL: tuple[Layout, ...] = (
    ROW_MAJOR,
    ROW_MAJOR_8,
    DUAL_MMA,
    COMPUTE_AWARE,
    W4AX_INTERLEAVED,
    APEX4,
    MARLIN,
    MARLIN_24,
    QQQ_CHANNEL,
    QQQ_GROUP,
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _ALL}


def get(name: str) -> Layout:
    """The layout ``name``.

    Raises:
        QtoolError: for an unknown name.
    """
    return plugins.find(LAYOUTS, name, "layout")


__all__ = ["LAYOUTS", "DigitLayout", "Layout", "get"]
