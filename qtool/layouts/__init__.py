"""Where the numbers lie: one file a packed layout. ``get(name)`` returns it."""

from qtool.errors import QtoolError, suggest
from qtool.layouts.base import DigitLayout, Layout
from qtool.layouts.dual_mma import DUAL_MMA
from qtool.layouts.row_major import ROW_MAJOR, ROW_MAJOR_8

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (ROW_MAJOR, ROW_MAJOR_8, DUAL_MMA)}


def get(name: str) -> Layout:
    """The layout ``name``.

    Raises:
        QtoolError: for an unknown name.
    """
    if name not in LAYOUTS:
        raise QtoolError(f"unknown layout {name!r}: {suggest(name, LAYOUTS)}")
    return LAYOUTS[name]


__all__ = ["LAYOUTS", "DigitLayout", "Layout", "get"]
